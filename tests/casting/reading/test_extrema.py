"""Derivatives of extrema: no value may be another than the one that its extremum was taken of."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_kit
from jmp_kit import autocast
from jmp_kit.casting import plans_of
from jmp_kit.casting.reading._extrema import compared
from jmp_kit.casting.rewriting._inline import inlined
from jmp_kit.programs import is_backward, stack_of
from tests.casting.zoo import mean_square
from tests.compiling import OPTIMISED

SHAPE = 8, 32, 64
X = jax.random.normal(jax.random.key(0), SHAPE)
W = jax.random.normal(jax.random.key(1), (64, 64)) / 8


def heads(x, w):
    y = (x @ w).reshape(8, 32, 4, 16)
    scores = jnp.einsum("bthd,bshd->bhts", y, y) / 4
    return jnp.einsum("bhts,bshd->bthd", scores, y).reshape(SHAPE)


def in_steps(x, w):
    def step(carry, row):
        y = jnp.tanh(row @ w)
        return carry + y.max(0), y - y.max(0) / 2

    last, y = lax.scan(step, jnp.zeros(64, x.dtype), x)
    return y + last / 8


MADE = {
    "a product": lambda x, w: x @ w,
    "tanh": lambda x, w: jnp.tanh(x @ w),
    "gelu": lambda x, w: jax.nn.gelu(x @ w),
    "moved": heads,
    "residual": lambda x, w: jnp.tanh(x) + jax.nn.gelu(x @ w),
    "checkpoint": jax.checkpoint(lambda x, w: jnp.tanh(x @ w)),
    "scan": in_steps,
}


def maximum_of(axes):
    return lambda y: y - y.max(axes, keepdims=True) / 2


TAKEN = {
    "rows": maximum_of(2),
    "columns": maximum_of(1),
    "images": maximum_of(0),
    "all": maximum_of(None),
    "smallest": lambda y: y - y.min(1, keepdims=True) / 2,
    "alone": lambda y: y.max(1),
    "scaled": lambda y: y / jnp.abs(y).max(-1, keepdims=True),
    "between": lambda y: (y - y.min(1)[:, None]) / (y.max(1) - y.min(1))[:, None],
    "maxout": lambda y: jnp.tile(y.reshape(8, 32, 32, 2).max(-1), (1, 1, 2)),
    "turned": lambda y: y - jnp.swapaxes(y, 1, 2).max(2)[:, None] / 2,
    "joined": lambda y: maximum_of(2)(
        jnp.concatenate([y[..., :32], jnp.tanh(2 * y[..., :32])], -1)
    ),
    "segments": lambda y: jax.ops.segment_max(y.reshape(-1, 64), jnp.arange(256) // 4, 64),
    "pooled": lambda y: lax.reduce_window(y, -jnp.inf, lax.max, (1, 4, 1), (1, 4, 1), "SAME"),
    "where": lambda y: jnp.where(y == y.max(1, keepdims=True), 2 * y, y),
    "given as well": lambda y: (y - y.max(1, keepdims=True) / 2, y),
}


def distance(found, wanted):
    return float(jnp.linalg.norm(found - wanted) / jnp.linalg.norm(wanted))


def case(made, taken):
    is_quick = (made, taken) in {("tanh", "columns"), ("moved", "columns"), ("tanh", "scaled")}
    marks = [] if is_quick else [pytest.mark.slow]
    return pytest.param(MADE[made], TAKEN[taken], marks=marks, id=f"{made}, {taken}")


@pytest.mark.parametrize(("made", "taken"), [case(made, taken) for made in MADE for taken in TAKEN])
def test_gradients_are_no_farther_from_float32_than_by_hand(made, taken):
    def loss_fn(w, x):
        y, *others = jax.tree.leaves(taken(made(x, w)))
        return mean_square(y @ w) + sum(map(mean_square, others))

    def by_hand(w, x):
        return loss_fn(w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)).astype(jnp.float32)

    half = functools.partial(autocast, policy="mixed_bfloat16")
    four_lines = jmp_kit.value_and_grad(half(loss_fn), jmp_kit.NoOpLossScale())
    ways = half(jax.grad(loss_fn)), lambda *args: four_lines(*args)[-1], jax.grad(by_hand)
    *programs, exact = (
        jax.jit(way).lower(W, X).compile(OPTIMISED) for way in (*ways, jax.grad(loss_fn))
    )
    errors = []
    for draw in range(5):  # one value that takes the place of a maximum is all of an error
        x = jax.random.normal(jax.random.key(draw), SHAPE)
        errors.append([distance(program(W, x), exact(W, x)) for program in programs])
    *ours, hand = np.median(errors, axis=0)
    assert max(ours) <= 1.2 * hand + 0.003


@pytest.mark.parametrize("recompute", [True, False, "most"])
def test_what_a_maximum_begins_with_is_made_where_it_is_compared(recompute):
    """JAX compares the maxima of segments with the numbers that they were begun with, too."""

    def loss_fn(w, x):
        return mean_square(jax.ops.segment_max(x @ w, jnp.arange(32) % 5, 5) * 2)

    def by_hand(w, x):
        return loss_fn(w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)).astype(jnp.float32)

    half = autocast(jax.grad(loss_fn), "mixed_bfloat16", recompute=recompute)
    *found, exact = (fun(W, X[0]) for fun in (jax.jit(half), jax.grad(by_hand), jax.grad(loss_fn)))
    ours, hand = (distance(gradient, exact) for gradient in found)
    assert ours <= 2 * hand


def values_and_extrema(fun, *shapes):
    eqns = inlined(jax.make_jaxpr(fun)(*map(jnp.ones, shapes)).jaxpr).eqns
    found = compared(eqns)
    return tuple(sorted(v.aval.shape for v in several) for several in found)


def test_what_is_compared_is_what_the_extremum_is_of():
    x = (4, 8)
    assert values_and_extrema(lambda x: x == x.max(1, keepdims=True), x) == ([x], [(4,)])
    assert values_and_extrema(lambda x: x.max(1) <= x.T, x) == ([x], [(4,)])
    assert values_and_extrema(lambda x: x.reshape(-1) == x.min(), x) == ([x], [()])
    assert values_and_extrema(lambda x, y: x == y.max(), x, x) == ([], [])

    def joined(x, y):
        both = jnp.concatenate([x, y])
        return both == both.max()

    assert values_and_extrema(joined, x, x) == ([(8, 8)], [()])
    assert values_and_extrema(lambda x: x == x.sum(), x) == ([], [])
    assert values_and_extrema(lambda x: x.max() > 0, x) == ([], [])


def test_the_maximum_of_a_softmax_asks_nothing_of_masked_scores():
    """JAX leaves its derivative in the program, though nothing is made of it."""

    def loss_fn(w, x):
        scores = jnp.where(x[..., :1] > 0, x @ w, -1e9)
        return mean_square(jax.nn.softmax(scores) * jnp.sign(x) @ w @ w)  # dropout, say

    [plan] = plans_of(jax.grad(loss_fn), "mixed_bfloat16", W, X)
    forward = (s for s in plan.every_stored() if not is_backward(stack_of(s.eqn, s.calls)))
    assert "select_n" not in {s.eqn.primitive.name for s in forward}
