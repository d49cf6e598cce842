"""Derivatives of extrema over windows: the same as JAX's, and how they are made."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_kit
from jmp_kit import autocast
from jmp_kit.casting.rewriting._pools import pooled
from tests.casting.rewritten import assert_devices_learn_the_same, farthest, holds, rewritten
from tests.casting.stream import step_of
from tests.casting.zoo import mean_square

EXTREMA = {"max": (lax.max, -jnp.inf), "min": (lax.min, jnp.inf)}


def pool(x, window, strides, padding="SAME", extremum="max"):
    compute, outside = EXTREMA[extremum]
    around = [(1, *sizes, 1) for sizes in (window, strides)]
    return lax.reduce_window(x, outside, compute, *around, padding)


scatters = functools.partial(holds, "select_and_scatter_add")
without_scatter = functools.partial(rewritten, rewriting=pooled)


@pytest.mark.parametrize("extremum", EXTREMA)
@pytest.mark.parametrize(
    ("shape", "window", "strides", "padding"),
    [
        ((2, 8, 6, 4), (2, 2), (2, 2), "VALID"),
        ((2, 9, 7, 4), (4, 2), (4, 2), "VALID"),  # with a rest
        ((2, 9, 7, 4), (3, 3), (2, 2), "SAME"),  # overlapping
        ((2, 8, 8, 4), (3, 3), (1, 1), "SAME"),
        ((2, 9, 7, 4), (2, 2), (3, 3), "VALID"),  # with gaps
        ((2, 9, 4), (5,), (3,), "SAME"),
        ((1, 4, 4, 4, 2), (2, 2, 2), (2, 2, 2), "VALID"),
        ((0, 4, 4, 2), (2, 2), (2, 2), "VALID"),
    ],
)
def test_gradients_are_those_that_are_scattered(shape, window, strides, padding, extremum):
    """Also where values are the same, and where there is none of the window."""

    def loss_fn(x):
        found = pool(x, window, strides, padding, extremum)
        return jnp.sum(jnp.sin(found) * jnp.arange(1.0, 1 + shape[-1]))

    x = jnp.round(2 * jax.random.normal(jax.random.key(0), shape)) / 2
    gradient = jax.grad(loss_fn)
    [found] = without_scatter(gradient)(x)
    assert scatters(gradient, x)
    assert not scatters(without_scatter(gradient), x)
    np.testing.assert_allclose(found, gradient(x), rtol=1e-6)


def test_what_is_no_number_gets_its_gradient():
    x = jnp.arange(16.0).reshape(1, 4, 4, 1).at[0, 1, 0, 0].set(jnp.nan)
    [found] = without_scatter(jax.grad(lambda x: jnp.sum(3 * pool(x, (2, 2), (2, 2)))))(x)
    assert found[0, :2, :2, 0].sum() == 3


@pytest.mark.parametrize("x", [jnp.ones((1, 8, 8, 1)), np.ones((1, 4, 4, 1))], ids=str)
def test_large_windows_and_other_dtypes_stay_as_they_are(x):
    size = 5 if x.shape[1] == 8 else 2
    with jax.enable_x64(x.dtype == np.float64):
        gradient = jax.grad(lambda x: jnp.sum(pool(x, (size, size), (size, size))))
        assert scatters(without_scatter(gradient), jnp.asarray(x))


def network(params, x):
    x = lax.conv_general_dilated(
        x, params["in"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    x = pool(jax.nn.relu(x * params["scale"]), (3, 3), (2, 2))
    return mean_square(x.reshape(len(x), -1) @ params["out"])


def parameters(pixels, width):
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "in": jax.random.normal(keys[0], (3, 3, 3, width)) / 5,
        "scale": jnp.ones(width),
        "out": jax.random.normal(keys[1], (width * (pixels // 2) ** 2, 8)) / 50,
    }


def test_a_network_learns_as_well_as_with_what_is_scattered():
    params, x = parameters(16, 8), jax.random.normal(jax.random.key(3), (4, 16, 16, 3))
    gradient = jax.grad(network)

    def error(found):
        return farthest(*(jax.jit(f)(params, x) for f in (found, gradient)))

    found = autocast(gradient, "mixed_bfloat16")
    scattering = autocast(gradient, "mixed_bfloat16", recompute=False)
    assert scatters(scattering, params, x)
    assert not scatters(found, params, x)
    assert error(found) <= 1.1 * error(scattering)


def test_a_network_trains_in_less_memory_on_this_device_too(monkeypatch):
    params = jax.eval_shape(lambda: parameters(32, 32))
    x = jax.ShapeDtypeStruct((64, 32, 32, 3), jnp.float32)

    def temporary():
        step = jax.jit(autocast(step_of(network), "mixed_bfloat16"))
        return step.lower(params, x).compile().memory_analysis().temp_size_in_bytes

    asking = temporary()
    monkeypatch.setattr("jmp_kit.casting.rewriting._rewritten.pooled", lambda jaxpr: jaxpr)
    assert asking <= 0.8 * temporary()


def test_devices_that_share_a_batch_learn_the_same():
    params, x = parameters(16, 8), jax.random.normal(jax.random.key(3), (8, 16, 16, 3))
    assert_devices_learn_the_same(network, params, x)


H200 = jmp_kit.numerics.TARGETS["h200"]


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_no_pool_is_written_in_float32_for_an_h200():
    shape = jax.ShapeDtypeStruct
    params = jax.eval_shape(lambda: parameters(128, 64))
    step = autocast(step_of(network), "mixed_bfloat16")
    x = shape((16, 128, 128, 3), jnp.float32)
    found = jmp_kit.numerics.traffic(step, params, x, target="h200")
    assert found.wide <= 0.1 * 4 * 16 * 128 * 128 * 64
