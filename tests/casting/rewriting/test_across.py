"""Rows that are part of an axis and all of those behind, as axes of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_kit
from jmp_kit import autocast
from jmp_kit.casting.rewriting._across import over_axes
from jmp_kit.casting.rewriting._inline import inlined
from jmp_kit.programs import every_equation, pruned
from tests.casting.rewritten import gradient_error, rewritten
from tests.casting.states import normals
from tests.casting.stream import step_of
from tests.casting.zoo import mean_square

H200 = jmp_kit.numerics.TARGETS["h200"]

normal = normals(np.random.default_rng(0))
X = normal(2, 16, 4, 6)  # of an image, channels first


def normed(x):
    """Each group of channels as a row."""
    rows = x.reshape(*x.shape[:-3], 4, -1)
    mean, variance = (f(-1, keepdims=True) for f in (rows.mean, rows.var))
    return ((rows - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape)


def scaled(x):
    """By what others make of the same rows, and with what stays."""
    rows = x.reshape(2, 4, -1)
    most = jnp.max(rows, -1)
    both = rows / jnp.exp(most)[..., None] + jnp.arange(96.0) + most.sum()
    both += jnp.broadcast_to(most[..., None], rows.shape)
    return jnp.sort(both, -1), both.T, both.reshape(X.shape), jnp.where(both > 1, both, rows)


def pieces(x):
    """Of an axis alone, several axes as one, what fits no axis, and what is no float32."""
    rows = (x > 0).astype(jnp.int32).reshape(2, 8, -1)
    others = (x.reshape(shape).sum(-1) for shape in ((2, -1, 3), (2, -1), (2, -1, 16)))
    return *others, rows.sum(-1)


def sums(jaxpr):
    """Over how many axes of how large values, of all sums and extrema."""
    eqns = (e for e, _ in every_equation(jaxpr) if e.primitive.name.startswith("reduce_"))
    return {(len(e.params["axes"]), e.invars[0].aval.shape) for e in eqns}


@pytest.mark.parametrize("fun", [normed, jax.vmap(normed), scaled, pieces])
def test_it_computes_the_same(fun):
    for found, wanted in zip(rewritten(fun, over_axes)(X), jax.tree.leaves(fun(X)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)

    def loss_fn(x):
        return sum(mean_square(y) for y in jax.tree.leaves(fun(x)) if y.dtype == jnp.float32)

    [found] = rewritten(jax.grad(loss_fn), over_axes)(X)
    np.testing.assert_allclose(found, jax.grad(loss_fn)(X), rtol=1e-4, atol=1e-6)


def test_rows_across_axes_are_summed_up_over_axes():
    jaxpr = inlined(jax.make_jaxpr(jax.grad(lambda x: mean_square(normed(x))))(X).jaxpr)
    assert (1, (2, 4, 96)) in sums(jaxpr)
    found = sums(over_axes(jaxpr))
    assert (3, (2, 4, 4, 4, 6)) in found
    assert (1, (2, 4, 96)) not in found


def test_other_rows_stay_as_they_are():
    """Of an axis, or of whole axes: these lie in memory one value after the other."""
    jaxpr = pruned(inlined(jax.make_jaxpr(lambda x: pieces(x)[:3])(X).jaxpr))
    assert over_axes(jaxpr) is jaxpr


def of_images(params, x):
    for w in params:
        x = x + jax.lax.conv(jax.nn.silu(normed(x)), w, (1, 1), "SAME")
    return mean_square(x)


def by_hand(params, x):
    """The norm in float32."""
    x = x.astype(jnp.bfloat16)
    for w in params:
        y = jax.nn.silu(normed(x.astype(jnp.float32)).astype(x.dtype))
        x = x + jax.lax.conv(y, w.astype(x.dtype), (1, 1), "SAME")
    return mean_square(x.astype(jnp.float32))


def test_the_gradient_is_nearer_to_float32_than_by_hand():
    params = [normal(16, 16, 3, 3, scale=0.1) for _ in range(3)]
    exact, hand = (jax.grad(f)(params, X) for f in (of_images, by_hand))
    errors = [jnp.linalg.norm(a - b) / jnp.linalg.norm(b) for a, b in zip(hand, exact, strict=True)]
    assert gradient_error(of_images, params, X) <= max(errors)


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_an_h200_writes_no_such_rows_in_float32(monkeypatch):
    params = [jax.ShapeDtypeStruct((64, 64, 3, 3), jnp.float32)] * 3
    x = jax.ShapeDtypeStruct((32, 64, 32, 32), jnp.float32)

    def moved(step):
        return jmp_kit.numerics.traffic(step, params, x, target="h200")

    found, hand = moved(autocast(step_of(of_images), "mixed_bfloat16")), moved(step_of(by_hand))
    monkeypatch.setattr("jmp_kit.casting.rewriting._rewritten.over_axes", lambda jaxpr: jaxpr)
    before = moved(autocast(step_of(of_images), "mixed_bfloat16"))
    assert found.nbytes <= 0.9 * min(hand.nbytes, before.nbytes)
