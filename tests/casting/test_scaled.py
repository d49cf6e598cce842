"""What is scaled and then moved is moved first, and is the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jmp_kit import autocast
from jmp_kit.casting import plans_of
from jmp_kit.casting._plan import Part
from jmp_kit.casting._scaled import scaled_last
from jmp_kit.programs._jaxpr import opened
from tests.casting.zoo import mean_square

A = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6)), jnp.float32)


def rewritten(fun, *args):
    """The order of primitives after it, and what the program gives before and after."""
    jaxpr, consts = opened(jax.make_jaxpr(fun)(*args))
    found = scaled_last(jaxpr)
    results = (jaxpr_as_fun(ClosedJaxpr(j, consts))(*args) for j in (jaxpr, found))
    return [e.primitive.name for e in found.eqns], *results


def padded(x):
    return jax.lax.pad(x, 0.0, [(1, 2, 0), (0, 0, 0)])


MOVED = {
    "transposed": lambda a: (a * 3.0).T,
    "divided": lambda a: (a / 3.0).T,
    "a number first": lambda a: (3.0 * a).reshape(24),
    "several moves": lambda a: (a / jnp.sqrt(8.0)).T.reshape(2, 3, 4)[None],
    "padded": lambda a: padded(a / jnp.sqrt(8.0)),
}


@pytest.mark.parametrize("name", MOVED)
def test_moves_come_first(name):
    names, before, after = rewritten(MOVED[name], A)
    scales = [i for i, name in enumerate(names) if name in ("mul", "div")]
    moves = [i for i, name in enumerate(names) if name not in ("mul", "div", "sqrt")]
    assert max(moves) < min(scales)
    np.testing.assert_array_equal(after[0], before[0])


STAYS = {
    "nothing moves it": lambda a: a * 3.0,
    "two take it": lambda a: (b := a * 3.0).T @ b,
    "it is a result": lambda a: [(b := a * 3.0), b.T],
    "a divisor": lambda a: (3.0 / a).T,
    "a product with itself": lambda a: (a * a).T,
    "numbers alone": lambda a: (a[0, 0] * a[1, 1]).reshape(1),
    "spread": lambda a: jnp.broadcast_to((a[0] * 3.0)[None], (5, 6)),
    "integers": lambda a: (jnp.argsort(a) * 3).T,
    "padded with ones": lambda a: jax.lax.pad(a * 3.0, 1.0, [(1, 2, 0), (0, 0, 0)]),
    "padded, and scaled by what may overflow": lambda a: padded(a[1:] * a[0, 0]),
}


@pytest.mark.parametrize("name", STAYS)
def test_else_nothing_changes(name):
    names, before, after = rewritten(STAYS[name], A)
    first = next(i for i, name in enumerate(names) if name in ("mul", "div"))
    assert {"transpose", "pad"}.isdisjoint(names[:first])
    for found, wanted in zip(after, before, strict=True):
        np.testing.assert_array_equal(found, wanted)


def attention(params, x):
    """Queries, keys and values of one projection."""
    found = (x @ params["in"]).reshape(*x.shape[:2], 3, 4, -1)
    q, k, v = (found[:, :, i] for i in range(3))
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q / jnp.sqrt(8.0), k))
    y = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape)
    return mean_square(y @ params["out"])


def test_the_cotangents_of_queries_are_moved_in_half():
    """As those of keys and values, which nothing scales."""
    params = {"in": jnp.ones((32, 96)), "out": jnp.eye(32)}
    [plan] = plans_of(jax.grad(attention), "mixed_bfloat16", params, jnp.ones((2, 64, 32)))
    pieces = [piece for part in plan.steps if isinstance(part, Part) for piece in part.segment]
    pads = [sum(e.primitive.name == "pad" for e in piece.moved) for piece in pieces]
    assert max(pads) == 3


def test_gradients_are_as_near():
    rng = np.random.default_rng(1)
    params = {"in": rng.normal(size=(32, 96)) / 6, "out": rng.normal(size=(32, 32)) / 6}
    params = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), params)
    x = jnp.asarray(rng.normal(size=(2, 64, 32)), jnp.float32)
    full, whole, kept = (
        jnp.concatenate([g.ravel() for g in jax.tree.leaves(jax.jit(fun)(params, x))])
        for fun in (
            jax.grad(attention),
            autocast(jax.grad(attention), "mixed_bfloat16"),
            autocast(jax.grad(attention), "mixed_bfloat16", recompute=False),
        )
    )
    error, wanted = (jnp.linalg.norm(g - full) / jnp.linalg.norm(full) for g in (whole, kept))
    assert error <= 1.1 * wanted
