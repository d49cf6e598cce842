"""What a backward pass takes of what comes later, and that it is the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jmp_kit import autocast
from jmp_kit.casting.rewriting._inline import inlined
from jmp_kit.casting.rewriting._undone import undone
from jmp_kit.programs._flow import PRODUCTS, Flow
from jmp_kit.programs._jaxpr import is_var, opened
from jmp_kit.programs._marks import is_backward, stack_of
from tests.casting.zoo import mean_square

RNG = np.random.default_rng(0)
X, W = (jnp.asarray(RNG.normal(size=size), jnp.float32) for size in ((32, 48), (48, 64)))
PARAMS = [W, jnp.eye(64, 16)]


def is_late(eqn):
    return is_backward(stack_of(eqn))


def weighted(weights):
    """The gradients of what two products make, these weights between them."""

    def loss_fn(params, x):
        found = weights(x @ params[0])
        weighted, *others = found if isinstance(found, tuple) else (found,)
        return mean_square(weighted @ params[1]) + sum(map(jnp.mean, others))

    return jax.grad(loss_fn)


def rewritten(fun, rewrite=undone):
    """The program, after and before it was rewritten."""
    jaxpr, consts = opened(jax.make_jaxpr(fun)(PARAMS, X))
    before = inlined(jaxpr)
    after, _ = rewrite(before, Flow(PRODUCTS), is_late)
    return [ClosedJaxpr(found, consts) for found in (after, before)]


def taken_late(closed):
    """The division of the forward pass, and what the backward pass takes that was there before."""
    jaxpr, _ = opened(closed)
    early = [e for e in jaxpr.eqns if not is_late(e)]
    division = next(e for e in early if e.primitive.name == "div" and all(map(is_var, e.invars)))
    before = early[: early.index(division)]
    made = {v for e in before for v in e.outvars}
    late = (a for e in jaxpr.eqns if is_late(e) for a in e.invars if is_var(a))
    return division, made.intersection(late)


def by_sum(z, axis=-1):
    e = jnp.exp(z)
    return e / e.sum(axis, keepdims=True)


def with_logarithm(z):
    e = jnp.exp(z)
    return e / (total := e.sum(-1, keepdims=True)), jnp.log(total) ** 2


def with_themselves(z):
    e = jnp.exp(z)
    return e / e.sum(-1, keepdims=True), e


def sigmoids(z):
    s = jax.nn.sigmoid(z)
    return s / s.sum(-1, keepdims=True)


def with_mask(z):
    e = jnp.where(z > -1.0, jnp.exp(z - 1.0), 0.0)
    return e / e.sum(-1, keepdims=True)


SCALED_ALIKE = {
    "softmax": jax.nn.softmax,
    "by their sum": by_sum,
    "along columns": lambda z: by_sum(z, 0),
    "a sum of squares": lambda z: (e := jnp.exp(z)) / (e**2).sum(-1, keepdims=True),
    "a share of more": lambda z: (e := jnp.exp(z)) / (1.0 + e.sum(-1, keepdims=True)),
    "a logarithm of the sum beside it": with_logarithm,
}


def assert_same(after, before):
    for a, b in zip(*(jaxpr_as_fun(found)(*PARAMS, X) for found in (after, before)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(abs(b).max()))


@pytest.mark.parametrize("name", SCALED_ALIKE)
def test_the_derivative_of_weights_needs_no_sum(name):
    fun = weighted(SCALED_ALIKE[name])
    after, before = rewritten(fun)
    division, late = taken_late(after)
    assert late.isdisjoint(division.invars)
    assert_same(after, before)


SCALED_APART = {
    "a norm": lambda z: z / jnp.sqrt((z**2).mean(-1, keepdims=True) + 1e-6),
    "the exponentials beside it": with_themselves,
    "shares of sigmoids": sigmoids,
    "some of them": with_mask,
}


@pytest.mark.parametrize("name", SCALED_APART)
def test_where_the_scale_matters_the_sum_is_taken(name):
    after, before = rewritten(weighted(SCALED_APART[name]))
    division, late = taken_late(after)
    assert division.invars[1] in late
    assert_same(after, before)


@pytest.mark.parametrize("function", [jnp.tanh, jax.nn.sigmoid])
def test_what_is_saturated_has_a_derivative(function):
    """That of what a product takes, rounded, would be that of 1: none."""

    def loss_fn(w, x):
        return mean_square(function(x @ w + 6) @ w)

    w, x = jnp.eye(16), jnp.ones((4, 16)) / 8
    found = autocast(jax.grad(loss_fn, argnums=1), "mixed_bfloat16")(w, x)
    np.testing.assert_allclose(found, jax.grad(loss_fn, argnums=1)(w, x), rtol=0.05)
