"""Linear algebra in a loss: float32, with what it takes and gives and the products of both."""

import functools

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from jax import lax
from jax.scipy.linalg import cho_solve, solve_triangular

from jmp_kit import NoOpLossScale, autocast, full_precision, numerics, value_and_grad
from tests.casting.rewritten import farthest

pytestmark = pytest.mark.usefixtures("standard_promotion")  # for Lineax's sake

SIZE = 16
TARGET = np.sin(np.arange(SIZE, dtype=np.float32))


def drawn(seed):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = (8, SIZE), (SIZE, SIZE), (4 * SIZE, 8)
    *params, x = (jax.random.normal(k, s) / 4 for k, s in zip(keys, shapes, strict=True))
    return params, 4 * x


def covariance(params, x, half=lambda x: x):
    """Of what a network gives, with a condition number of some hundreds."""
    for w in params:
        x = jnp.tanh(half(x) @ half(w)).astype(jnp.float32)
    with full_precision():
        return x.T @ x / len(x) + 0.01 * jnp.eye(SIZE)


def conjugate_gradients(k):
    return jax.scipy.sparse.linalg.cg(functools.partial(_multiplied, k), TARGET, tol=1e-6)[0]


def _multiplied(k, v):
    with full_precision():
        return k @ v


def squares(of):
    return lambda k: jnp.mean(of(k) ** 2)


def solved_by_cholesky(k):
    return cho_solve((jnp.linalg.cholesky(k), True), TARGET)


OPERATIONS = {
    "cholesky": lambda k: jnp.sum(jnp.log(jnp.diag(jnp.linalg.cholesky(k)))),
    "cho_solve": squares(solved_by_cholesky),
    "determinant": lambda k: jnp.linalg.slogdet(k)[1],
    "eigenvalues": lambda k: jnp.sum(jnp.log(jnp.linalg.eigh(k)[0])),
    "eigenvectors": lambda k: jnp.sum(jnp.sin(jnp.abs(jnp.linalg.eigh(k)[1][:, -1] * TARGET))),
    "inverse": squares(jnp.linalg.inv),
    "least squares": squares(lambda k: jnp.linalg.lstsq(k, TARGET)[0]),
    "pseudo-inverse": squares(jnp.linalg.pinv),
    "singular values": lambda k: jnp.sum(jnp.log(jnp.linalg.svd(k, compute_uv=False))),
    "solve": squares(lambda k: jnp.linalg.solve(k, TARGET)),
    "triangular": squares(lambda k: solve_triangular(jnp.tril(k), TARGET, lower=True)),
    "conjugate gradients": squares(conjugate_gradients),
    "lineax": squares(lambda k: lx.linear_solve(lx.MatrixLinearOperator(k), TARGET).value),
    "in a checkpoint": jax.checkpoint(squares(solved_by_cholesky)),
    "in a branch": lambda k: lax.cond(k[0, 0] > 0, squares(solved_by_cholesky), jnp.sum, k),
    "in a scan": lambda k: lax.scan(
        lambda total, c: (total + squares(jnp.linalg.inv)(k + c * jnp.eye(SIZE)), None),
        0.0,
        jnp.arange(3.0) / 100,
    )[0],
}

WAYS = {
    "step": lambda f: autocast(jax.value_and_grad(f), "mixed_bfloat16"),
    "loss": lambda f: jax.value_and_grad(autocast(f, "mixed_bfloat16")),
    "kept": lambda f: autocast(jax.value_and_grad(f), "mixed_bfloat16", recompute=False),
    "four lines": lambda f: value_and_grad(autocast(f, "mixed_bfloat16"), NoOpLossScale()),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_an_error_is_multiplied_no_more_than_by_hand(operation, way):
    def loss_fn(params, x, half=lambda x: x):
        return operation(covariance(params, x, half))

    def by_hand(params, x):
        return loss_fn(params, x, lambda x: x.astype(jnp.bfloat16))

    errors = []
    for seed in range(2):
        args = drawn(seed)
        wanted = jax.jit(jax.value_and_grad(loss_fn))(*args)
        found = (jax.value_and_grad(by_hand), way(loss_fn))
        values = [jax.tree.leaves(jax.jit(f)(*args)) for f in found]
        errors.append([farthest([v[0], *v[-2:]], wanted) for v in values])
    hand, ours = np.mean(errors, axis=0)
    assert ours <= 2 * hand


@pytest.mark.parametrize("name", ["solve", "inverse", "cholesky", "eigenvalues"])
def test_what_it_takes_and_gives_is_not_rounded(name):
    """With products before and after, each of which stores half."""

    def loss_fn(params, x):
        k = covariance(params, x)
        return OPERATIONS[name](k), jnp.mean((k @ k) ** 2)

    args = drawn(0)
    k = jax.jit(autocast(covariance, "mixed_bfloat16"))(*args)
    found, _ = jax.jit(autocast(loss_fn, "mixed_bfloat16"))(*args)
    np.testing.assert_allclose(found, jax.jit(OPERATIONS[name])(k), rtol=1e-5)


def test_the_highest_precision_elsewhere_is_none():
    """Who resizes an image asks for it."""

    def resized(params, x):
        image = (x @ params[0]).reshape(4, SIZE, SIZE)
        return jnp.mean(jax.image.resize(image, (4, 2 * SIZE, SIZE), "linear") ** 2)

    found = numerics.audit(autocast(jax.grad(resized), "mixed_bfloat16"), *drawn(0))
    assert found.half_fraction == 1
