"""Deviations from a mean, which nothing sums up: the same gradients, and fewer sums."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_kit.casting.rewriting import _rewritten
from jmp_kit.casting.rewriting._deviations import without_their_sums
from jmp_kit.casting.rewriting._inline import inlined
from tests.casting.planning.test_shapes import (
    ACTIVATION,
    H200,
    network,
    parameters,
    traffic_for_an_h200,
)
from tests.casting.rewritten import gradient_error, rewritten

X = jax.random.normal(jax.random.key(0), (3, 5, 8)) + 1
GIVEN = X[:, :1]

without_sums = functools.partial(
    rewritten, rewriting=lambda jaxpr: without_their_sums(jaxpr, lambda _: True)
)


def normed(axes, keepdims=True):
    """With variances as `jnp.var` takes them, and as they are written."""

    def norm(x):
        mean = jnp.mean(x, axes, keepdims=keepdims)
        variance = jnp.var(x, axes, keepdims=keepdims)
        if not keepdims:
            mean, variance = (jnp.expand_dims(v, axes) for v in (mean, variance))
        return (x - mean) * jax.lax.rsqrt(variance + 1e-6)

    return norm


def squares(x):
    return jnp.mean((x - jnp.mean(x, 1, keepdims=True)) ** 2, 1)


SUMMED = {
    "rows": normed(-1),
    "columns": normed(0),
    "several axes": normed((0, 2)),
    "all": normed((0, 1, 2)),
    "no axes kept": normed((1,), keepdims=False),
    "squares": squares,
    "of each": jax.vmap(normed(1)),
    "with an axis of one": lambda x: normed((1, 2))(x[:, None]),
    "a variance alone": lambda x: jnp.var(x, 0),
    "a deviation": lambda x: jnp.std(x, (1, 2)),
    "scaled": lambda x: squares(2 * x) * jnp.arange(1.0, 9.0),
}
OTHERS = {
    "no variance": lambda x: jax.nn.softmax(x),
    "of the first alone": lambda x: squares_about(x, jnp.mean(x[:, :1], 1, keepdims=True)),
    "of another": lambda x: squares_about(x, jnp.mean(jnp.sin(x), 1, keepdims=True)),
    "of other axes": lambda x: squares_about(x, jnp.mean(x, 2, keepdims=True)),
    "a sum": lambda x: squares_about(x, jnp.sum(x, 1, keepdims=True)),
    "another count": lambda x: squares_about(x, jnp.sum(x, 1, keepdims=True) / 4),
    "twice the mean": lambda x: squares_about(x, 2 * jnp.mean(x, 1, keepdims=True)),
    "a function of it": lambda x: squares_about(x, jnp.sin(jnp.mean(x, 1, keepdims=True))),
    "misplaced": lambda x: jnp.sum(x[0, :5, :5] - jnp.mean(x[0, :5, :5], 1)[None], 1),
    "given": lambda x: jnp.sum(x - GIVEN, 1),
    "the other way round": lambda x: squares_about(x, jnp.mean(x, (0, 1), keepdims=True)[:, ::-1]),
}


def squares_about(x, mean):
    return jnp.mean((x - mean) ** 2, 1)


def gradient_of(fun):
    return jax.grad(lambda x: jnp.sum(jnp.sin(fun(x))))


def sums(fun, *args):
    eqns = inlined(jax.make_jaxpr(fun)(*args).jaxpr).eqns
    return sum(e.primitive.name == "reduce_sum" for e in eqns)


@pytest.mark.parametrize("fun", SUMMED.values(), ids=SUMMED)
def test_gradients_are_the_same_with_fewer_sums(fun):
    gradient = gradient_of(fun)
    [found] = without_sums(gradient)(X)
    assert sums(without_sums(gradient), X) < sums(gradient, X)
    np.testing.assert_allclose(found, gradient(X), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fun", OTHERS.values(), ids=OTHERS)
def test_others_are_summed_up(fun):
    gradient = gradient_of(fun)
    [found] = without_sums(gradient)(X)
    assert sums(without_sums(gradient), X) == sums(gradient, X)
    np.testing.assert_array_equal(found, gradient(X))


def deviations(x):
    return x - jnp.mean(x, 1, keepdims=True)


TAKEN = {
    "a result": lambda x: jnp.sum(deviations(x), 1),
    "added": lambda x: x[:, 0] + jnp.sum(2 * deviations(x), 1),
    "added to a row": lambda x: x + jnp.sum(deviations(x), 1, keepdims=True),
    "two": lambda x: jnp.sum(deviations(x), 1) + -jnp.sum(3 * deviations(x), 1),
    "a function": lambda x: jnp.cos(jnp.sum(deviations(x), 1) / 2),
    "a product": lambda x: jnp.sum(deviations(x), 1) * x[:, 0],
    "in a function": lambda x: jax.lax.cond(
        x[0, 0, 0] > 0, jnp.sin, jnp.cos, jnp.sum(deviations(x), 1)
    ),
}


@pytest.mark.parametrize("fun", TAKEN.values(), ids=TAKEN)
def test_zeros_are_there_for_what_takes_them(fun):
    [found] = without_sums(fun)(X)
    np.testing.assert_allclose(found, fun(X), rtol=1e-5, atol=1e-5)
    assert sums(without_sums(fun), X) < sums(fun, X)


@pytest.mark.parametrize("shape", [(0, 5, 8), (3, 0, 8), (3, 1, 8)])
def test_none_and_one(shape):
    gradient = gradient_of(normed(1))
    [found] = without_sums(gradient)(jnp.ones(shape))
    np.testing.assert_array_equal(found, gradient(jnp.ones(shape)))


def test_of_any_number_they_are_summed_up():
    [n] = jax.export.symbolic_shape("n")
    x = jax.ShapeDtypeStruct((n, 8), jnp.float32)
    gradient = gradient_of(normed(0))
    assert sums(without_sums(gradient), x) == sums(gradient, x)


def test_gradients_of_a_network_are_as_good(monkeypatch):
    params, x = parameters(8), jax.random.normal(jax.random.key(2), (16, 16, 16, 8))
    found = gradient_error(network, params, x)
    monkeypatch.setattr(_rewritten, "without_their_sums", lambda jaxpr, _: jaxpr)
    assert found <= 1.05 * gradient_error(network, params, x)


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_nothing_is_read_for_them_by_an_h200(monkeypatch):
    found = traffic_for_an_h200().nbytes
    monkeypatch.setattr(_rewritten, "without_their_sums", lambda jaxpr, _: jaxpr)
    assert found <= traffic_for_an_h200().nbytes - 2 * 2 * ACTIVATION * 0.9
