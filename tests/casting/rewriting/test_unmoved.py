"""Axes of one value, put there and taken away."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

import jmp_kit
from jmp_kit import autocast
from jmp_kit.casting.rewriting._inline import inlined
from jmp_kit.casting.rewriting._unmoved import without_round_trips
from jmp_kit.programs._flow import PRODUCTS, Flow
from jmp_kit.programs._jaxpr import opened
from tests.casting.stream import step_of
from tests.casting.zoo import mean_square

H200 = jmp_kit.numerics.TARGETS["h200"]


def normed(x, scale, bias):
    """Images with the channels first, in groups of channels."""
    groups = x.reshape(*x.shape[:-3], 8, -1, *x.shape[-2:])
    mean, std = (f((-3, -2, -1), keepdims=True) for f in (groups.mean, groups.std))
    return ((groups - mean) / std).reshape(x.shape) * scale[:, None, None] + bias[:, None, None]


def network(params, x, convolved):
    for w, scale, bias in params:
        x = convolved(jax.nn.relu(normed(x, scale, bias)), w)
    return x


def of_a_batch(params, x):
    return mean_square(network(params, x, lambda x, w: lax.conv(x, w, (1, 1), "SAME")))


def mapped(params, x):
    def of_one(x):
        return network(params, x, lambda x, w: lax.conv(x[None], w, (1, 1), "SAME")[0])

    return mean_square(jax.vmap(of_one)(x))


def rewritten(fun, *args):
    """The program, after and before it was rewritten."""
    jaxpr, consts = opened(jax.make_jaxpr(fun)(*args))
    before = inlined(jaxpr)
    after = without_round_trips(before, Flow(PRODUCTS))
    return [ClosedJaxpr(found, consts) for found in (after, before)]


def shapes(program):
    return {v.aval.shape for e in program.eqns for v in e.outvars}


def test_a_mapped_convolution_takes_and_gives_what_a_batch_is_made_of():
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((16, 16, 3, 3), (4, 16, 8, 8)))
    params = [(w, jnp.ones(16), jnp.ones(16))] * 2
    after, before = rewritten(jax.grad(mapped), params, x)
    assert (4, 1, 16, 8, 8) in shapes(before)
    assert (4, 1, 16, 8, 8) not in shapes(after)
    args = jax.tree.leaves((params, x))
    results = zip(jaxpr_as_fun(after)(*args), jaxpr_as_fun(before)(*args), strict=True)
    for a, b in results:
        np.testing.assert_array_equal(a, b)


def test_what_no_product_takes_is_left_alone():
    """Sums of rows, say, where axes of one tell what they are a sum of."""

    def row_scaled(w, x):
        total = jnp.sum(x, -1, keepdims=True).squeeze(-1)[..., None]
        return (x / total) @ w

    after, before = rewritten(row_scaled, jnp.eye(16), jnp.ones((8, 16)))
    assert str(after) == str(before)


def test_a_result_that_went_there_and_back_and_an_argument():
    def fun(w, x):
        y = x @ w
        return x[None, :, None][0, :, 0], y[None][0], jnp.sin(y)

    args = jnp.eye(16), jnp.ones((8, 16))
    after, before = rewritten(fun, *args)
    for a, b in zip(jaxpr_as_fun(after)(*args), jaxpr_as_fun(before)(*args), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_a_mapped_network_moves_on_an_h200_what_that_of_a_batch_moves():
    def moved(loss_fn):
        sizes = (64, 64, 3, 3), (64,), (64,), (128, 64, 64, 64)
        *layer, x = [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]
        step = autocast(step_of(loss_fn), "mixed_bfloat16")
        return jmp_kit.numerics.traffic(step, [layer] * 3, x, target="h200").nbytes

    assert moved(mapped) == moved(of_a_batch)
