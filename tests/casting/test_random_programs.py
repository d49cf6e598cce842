"""Random programs of lax operations and control flow."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jmp_kit import autocast, full_precision
from tests.compiling import POLICIES

SHAPE = 4, 4
X = jax.random.normal(jax.random.key(0), SHAPE)
KEY = jax.random.key(3)
WEIGHTS = jax.random.normal(jax.random.key(1), SHAPE) / 2

# Each makes bounded values of bounded ones and stretches differences little: what is left of an
# error at the end is the error of half precision. `inner` is a smaller program.
UNARY = {
    "tanh": jnp.tanh,
    "softmax": jax.nn.softmax,
    "normalise": lambda x: x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 0.1),
    "logsumexp": lambda x: jnp.broadcast_to(jax.nn.logsumexp(x, -1, keepdims=True), SHAPE),
    "sort": lambda x: lax.sort(x, dimension=0),
    "cumsum": lambda x: jnp.cumsum(x, axis=1) / 4,
    "transpose": jnp.transpose,
    "window": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (1, 1), "SAME"),
    "rows": lambda x: x[jnp.array([3, 1, 0, 2])],
    "mask": lambda x: jnp.where(jnp.tri(4) > 0, x, 0.0),
    "half": lambda x: x.astype(jnp.bfloat16).astype(jnp.float32),
    "select": lambda x: jnp.select([x > 0.5, x < -0.5], [0.5 * x, -0.5 * x], x),
    "dropout": lambda x: jnp.where(jax.random.bernoulli(jax.random.key(2), 0.5, SHAPE), x, 0.0),
    "key_outside": lambda x: x + jax.random.uniform(KEY, SHAPE),
    "stop": lax.stop_gradient,
    "barrier": lax.optimization_barrier,
    "product": lambda x: x @ WEIGHTS,
    "rows_by_vmap": jax.vmap(lambda row: jnp.tanh(row @ WEIGHTS)),
}
BINARY = {
    "add": lambda x, y: (x + y) / 2,
    "multiply": lambda x, y: jnp.tanh(x) * jnp.tanh(y),
    "product_of_two": lambda x, y: jnp.tanh(x) @ jnp.tanh(y) / 2,
    "either": lambda x, y: jnp.maximum(x, y),
}
AROUND = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "full_precision": full_precision,
    "scan": lambda inner: lambda x: lax.scan(lambda c, _: (inner(c), None), x, None, length=2)[0],
    "scan_over": lambda inner: (
        lambda x: lax.scan(
            lambda c, row: (c + inner(row * jnp.ones(SHAPE)) / 4, row), jnp.zeros(SHAPE), x
        )[0]
    ),
    "map": lambda inner: lambda x: lax.map(inner, jnp.stack([x, -x]))[1],
    "branch": lambda inner: lambda x: lax.cond(jnp.arange(3)[1] > 0, inner, jnp.tanh, x),
    "loop": lambda inner: lambda x: lax.fori_loop(0, 2, lambda _, c: inner(c), x),
    "nested": lambda inner: autocast(inner, "mixed_float16"),
    "own_rule": lambda inner: _with_a_rule(inner),
}


def _with_a_rule(inner):
    call = jax.custom_vjp(inner)
    call.defvjp(lambda x: jax.vjp(inner, x), lambda pullback, cotangent: pullback(cotangent))
    return call


# A program is a list of operations, each on values made before, given by how long ago.
AGO = st.integers(0, 3)
SIMPLE = st.tuples(st.sampled_from([*UNARY, *BINARY]), AGO, AGO)


def programs_around(inner, most):
    around = st.tuples(st.sampled_from(list(AROUND)), AGO, inner)
    return st.lists(SIMPLE | around, min_size=1, max_size=most)


PROGRAMS = programs_around(programs_around(st.lists(SIMPLE, min_size=1, max_size=3), 2), 6)


def run(program, x):
    values = [x]
    for name, ago, other in program:
        operand = values[-1 - ago % len(values)]
        if name in AROUND:
            made = AROUND[name](functools.partial(run, other))(operand)
        elif name in BINARY:
            made = BINARY[name](operand, values[-1 - other % len(values)])
        else:
            made = UNARY[name](operand)
        values.append(made)
    return values[-1]


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=28, deadline=None, derandomize=True)
@given(PROGRAMS)
def test_autocast_never_fails_and_is_close(policy, program):
    tolerance = {"mixed_bfloat16": 0.08, "mixed_float16": 0.01}[policy]

    def fun(x):
        y = run(program, x)
        return {"value": y, "sum": jnp.sum(y), "row": jnp.argmax(y[0]), "shape": y.shape}

    want = jax.jit(fun)(X)
    got = jax.jit(autocast(fun, policy))(X)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    types = [(x.shape, x.dtype) for x in jax.tree.leaves(want)]
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(got)] == types
    np.testing.assert_allclose(got["value"], want["value"], atol=tolerance)

    if "loop" not in str(program):  # which has no reverse mode
        gradient = jax.jit(jax.grad(lambda x: autocast(fun, policy)(x)["sum"]))(X)
        assert gradient.dtype == jnp.float32
        assert jnp.isfinite(gradient).all()
