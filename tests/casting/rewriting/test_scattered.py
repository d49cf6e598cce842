"""Derivatives of what is looked up at known places: the same as JAX's, and no scatter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_kit
from jmp_kit import autocast
from jmp_kit.casting.rewriting._scattered import added_up
from tests.casting.rewritten import (
    assert_devices_learn_the_same,
    gradient_error,
    holds,
    rewritten,
)
from tests.casting.stream import step_of
from tests.casting.zoo import mean_square

scatters = functools.partial(holds, "scatter-add")
without_scatter = functools.partial(rewritten, rewriting=lambda jaxpr: added_up(jaxpr, {}))

TABLE = jax.random.normal(jax.random.key(0), (9, 4))


def gradient(look_up):
    return jax.grad(lambda x: jnp.sum(jnp.sin(look_up(x)) * jnp.arange(1.0, 5.0)))


def resized(*shape):
    return lambda x: jax.image.resize(x, (2, *shape, 4), "nearest")


def taken(places, mode):
    return lambda x: x.at[places()].get(mode=mode)


@pytest.mark.parametrize("shape", [(12, 10), (18, 5), (3, 5), (2, 1), (6, 5), (48, 5)], ids=str)
def test_gradients_of_resized_images_are_those_that_are_scattered(shape):
    x = jax.random.normal(jax.random.key(0), (2, 6, 5, 4))
    found = without_scatter(gradient(resized(*shape)))
    assert scatters(gradient(resized(*shape)), x) or shape == x.shape[1:3]
    assert not scatters(found, x)
    np.testing.assert_allclose(found(x)[0], gradient(resized(*shape))(x), rtol=1e-6)


PLACES = {
    "the first": lambda: jnp.arange(5),
    "some within": lambda: jnp.arange(3, 9),
    "every third": lambda: jnp.arange(0, 9, 3),
    "round and round": lambda: jnp.arange(20) % 9,
    "from the end": lambda: jnp.arange(5) - 5,
    "out of bounds": lambda: jnp.arange(6, 15),
    "the same": lambda: jnp.zeros(4, jnp.int32),
    "nowhere": lambda: jnp.arange(9, 12),
    "none": lambda: jnp.arange(0),
}


@pytest.mark.parametrize("mode", ["fill", "clip"])
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_gradients_of_tables_are_those_that_are_scattered(places, mode):
    """Whether there is one for each place, several or none."""
    fun = gradient(taken(places, mode))
    np.testing.assert_allclose(without_scatter(fun)(TABLE)[0], fun(TABLE), rtol=1e-6)


OTHERS = {
    "in uneven steps": resized(9, 10),
    "too many for one place": resized(60, 5),
    "not in all of it": lambda x: x[:, :, jnp.arange(8) // 2, :2],
    "at places given": lambda x: x[:, x[0, 0, :, 0].astype(int)],
}


@pytest.mark.parametrize("look_up", OTHERS.values(), ids=OTHERS)
def test_what_is_at_other_places_is_scattered(look_up):
    x = jax.random.normal(jax.random.key(0), (2, 6, 5, 4))
    fun = jax.grad(lambda x: jnp.sum(jnp.sin(look_up(x))))
    assert scatters(without_scatter(fun), x)
    np.testing.assert_allclose(without_scatter(fun)(x)[0], fun(x), rtol=1e-6)


def convolved(x, kernel):
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def decoder(params, x):
    x = jax.nn.silu(convolved(x, params["in"]) * params["scale"])
    n, rows, columns, channels = x.shape
    x = jax.image.resize(x, (n, 2 * rows, 2 * columns, channels), "nearest")
    return mean_square(convolved(x, params["out"]))


def parameters(width):
    keys = jax.random.split(jax.random.key(0))
    return {
        "in": jax.random.normal(keys[0], (3, 3, width, width)) / width,
        "scale": jnp.ones(width),
        "out": jax.random.normal(keys[1], (3, 3, width, 3)) / width,
    }


def test_a_decoder_learns_as_well_as_with_what_is_scattered(monkeypatch):
    params, x = parameters(8), jax.random.normal(jax.random.key(3), (4, 16, 16, 8))

    def error():
        half = autocast(jax.grad(decoder), "mixed_bfloat16")
        return scatters(half, params, x), gradient_error(decoder, params, x)

    is_scattered, found = error()
    monkeypatch.setattr("jmp_kit.casting.rewriting._rewritten.added_up", lambda jaxpr, _: jaxpr)
    was_scattered, before = error()
    assert (is_scattered, was_scattered) == (False, True)
    assert found <= 1.05 * before


def test_devices_that_share_a_batch_learn_the_same():
    params, x = parameters(8), jax.random.normal(jax.random.key(3), (8, 16, 16, 8))
    assert_devices_learn_the_same(decoder, params, x)


H200 = jmp_kit.numerics.TARGETS["h200"]


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_no_cotangent_of_a_larger_image_is_written_in_float32_for_an_h200():
    params = jax.eval_shape(lambda: parameters(128))
    x = jax.ShapeDtypeStruct((16, 64, 64, 128), jnp.float32)
    step = autocast(step_of(decoder), "mixed_bfloat16")
    found = jmp_kit.numerics.traffic(step, params, x, target="h200")
    assert found.wide <= 0.1 * 4 * 16 * 64 * 64 * 128
