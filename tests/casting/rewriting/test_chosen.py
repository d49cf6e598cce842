"""Cotangents of what is chosen from each row: the same as JAX's, and how they are made."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jmp_kit
from jmp_kit import autocast
from jmp_kit.casting.rewriting import _rewritten
from jmp_kit.casting.rewriting._chosen import asked
from tests.casting.rewritten import (
    assert_devices_learn_the_same,
    gradient_error,
    holds,
    rewritten,
)
from tests.casting.stream import step_of

ROWS, COLUMNS, SIZE = 5, 4, 7

scatters = functools.partial(holds, "scatter-add")
without_scatter = functools.partial(rewritten, rewriting=lambda jaxpr: asked(jaxpr, {}))


def each(choose):
    return lambda x, i: jax.vmap(choose)(x[0], i[0])


# Of x[ROWS, COLUMNS, SIZE] at i[ROWS, COLUMNS].
CHOSEN = {
    "along an axis": lambda x, i: jnp.take_along_axis(x, i[..., None], -1),
    "along another": lambda x, i: jnp.take_along_axis(x, i[:, None, :1], 1),
    "of each row": lambda x, i: x[0][jnp.arange(COLUMNS), i[0]],
    "of rows of rows": lambda x, i: x[jnp.arange(ROWS)[:, None], jnp.arange(COLUMNS), i],
    "from the end": lambda x, i: x[0][jnp.arange(COLUMNS), -1 - i[0]],
    "whole rows of each column": lambda x, i: x.swapaxes(0, 2)[i[0], jnp.arange(COLUMNS)],
    "a diagonal": lambda x, _: x[0][jnp.arange(COLUMNS), jnp.arange(COLUMNS)],
    "of each, vmapped": each(lambda row, i: row[i]),
    "taken of each": each(jnp.take),
    "of each, twice": lambda x, i: jax.vmap(each(lambda row, i: row[i]))(x[None], i[None]),
    "slices of one": each(lambda row, i: lax.dynamic_slice_in_dim(row, i, 1)),
    "of all": lambda x, i: x[:, i[0, :1]],
    "whole rows": lambda x, i: x[jnp.arange(ROWS), i[:, 0]],
    "whole columns": lambda x, i: jax.vmap(lambda x, i: x[:, i])(x, i[:, 0]),
    "three of each": lambda x, i: jnp.take_along_axis(x, i[..., :3, None] % 2, 1),
    "the two best": lambda x, _: lax.top_k(x, 2)[0],
    "a loss": lambda x, i: optax.softmax_cross_entropy_with_integer_labels(x, i),
}
CHOSEN |= {
    f"{mode} of {kind}": functools.partial(
        lambda x, i, mode, kind: (
            x[0].at[jnp.arange(COLUMNS), (2 * i[0] - 3).astype(kind)].get(mode=mode)
        ),
        mode=mode,
        kind=kind,
    )
    for mode in ("clip", "fill")
    for kind in ("int8", "uint8", "int32", "uint32")
}

CHOSEN["of more than an index can tell"] = lambda x, i: (
    jnp.tile(x[0], 50)
    .at[jnp.arange(COLUMNS), (50 * i[0] - 30).astype(jnp.int8)]
    .get(mode="clip", wrap_negative_indices=False)
)
CHOSEN["far outside"] = lambda x, i: (
    x[0].at[jnp.arange(COLUMNS), i[0].astype(jnp.uint32) - 2].get(mode="clip")
)

# At places that are not one or a few of each row in turn.
OTHERS = {
    "of a diagonal": lambda x, i: x[jnp.arange(COLUMNS), jnp.arange(COLUMNS), i[0]],
    "of a table": lambda x, i: x.reshape(-1, SIZE)[i[0]],
    "many": lambda x, i: x[0, 0][i.reshape(-1)],
    "unknown rows": lambda x, i: x[0][i[1] % COLUMNS, i[0]],
    "some rows": lambda x, i: x[0][jnp.arange(3), i[0, :3]],
    "slices": each(lambda row, i: lax.dynamic_slice_in_dim(row, i, 2)),
    "a part of rows": lambda x, i: jax.vmap(lambda x, i: lax.dynamic_slice(x, (0, i), (2, 1)))(
        x, i[:, 0]
    ),
    "a part of each row": lambda x, i: x.swapaxes(0, 2)[i[0], jnp.arange(COLUMNS), 1:3],
    "rows backwards": lambda x, i: x[0][jnp.arange(COLUMNS)[::-1], i[0]],
}


def example():
    x = jax.random.normal(jax.random.key(0), (ROWS, COLUMNS, SIZE))
    return x, jax.random.randint(jax.random.key(1), (ROWS, COLUMNS), 0, COLUMNS)


def gradient_of(choose):
    def loss_fn(x, i):
        chosen = jnp.nan_to_num(choose(x, i))
        return jnp.sum(jnp.sin(chosen) * jnp.arange(1.0, 1 + chosen.size).reshape(chosen.shape))

    return jax.grad(loss_fn)


@pytest.mark.parametrize("choose", CHOSEN.values(), ids=CHOSEN)
def test_gradients_are_those_that_are_scattered(choose):
    x, i = example()
    [found] = without_scatter(gradient_of(choose))(x, i)
    assert scatters(gradient_of(choose), x, i)
    assert not scatters(without_scatter(gradient_of(choose)), x, i)
    np.testing.assert_allclose(found, gradient_of(choose)(x, i), rtol=1e-6)


@pytest.mark.parametrize("choose", OTHERS.values(), ids=OTHERS)
def test_others_are_scattered(choose):
    x, i = example()
    [found] = without_scatter(gradient_of(choose))(x, i)
    assert scatters(without_scatter(gradient_of(choose)), x, i)
    np.testing.assert_array_equal(found, gradient_of(choose)(x, i))


@pytest.mark.parametrize("shape", [(0, COLUMNS, SIZE), (ROWS, COLUMNS, 1), (1, 1, 1)])
@pytest.mark.parametrize("name", ["along an axis", "of rows of rows", "a loss"])
def test_none_and_one(name, shape):
    def choose(x, i):
        if name == "of rows of rows":
            return x[jnp.arange(shape[0])[:, None], jnp.arange(shape[1]), i]
        return CHOSEN[name](x, i)

    x, i = jnp.ones(shape), jnp.zeros(shape[:2], int)
    [found] = without_scatter(gradient_of(choose))(x, i)
    np.testing.assert_allclose(found, gradient_of(choose)(x, i), rtol=1e-6)


def test_of_any_number_it_is_scattered():
    [n] = jax.export.symbolic_shape("n")
    x, i = jax.ShapeDtypeStruct((n, SIZE), jnp.float32), jax.ShapeDtypeStruct((n,), jnp.int32)
    gradient = jax.grad(lambda x, i: jnp.sum(CHOSEN["a loss"](x, i)))
    assert scatters(without_scatter(gradient), x, i)


def parameters(width, words):
    first, second = jax.random.split(jax.random.key(0))
    weights = {"in": (first, width), "out": (second, words)}
    return {name: jax.random.normal(key, (width, n)) / 4 for name, (key, n) in weights.items()}


def language(params, x):
    """A loss of words, whose labels are in the first column."""
    logits = jnp.tanh(x @ params["in"]) @ params["out"]
    labels = jnp.abs(x[..., 0] * 1e3).astype(jnp.int32) % logits.shape[-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def test_what_is_sure_of_its_labels_learns_as_with_float32_sums(monkeypatch):
    """The softmax's p and the label's 1 nearly cancel: neither is rounded before."""
    params, x = parameters(16, 32), jax.random.normal(jax.random.key(1), (24, 16))
    labels = jnp.arange(24)

    def sure(params, x):
        logits = jnp.tanh(x @ params["in"]) @ params["out"] + 12 * jax.nn.one_hot(labels, 32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    found = gradient_error(sure, params, x)
    monkeypatch.setattr(_rewritten, "asked", lambda jaxpr, _: jaxpr)
    assert found <= min(0.05, 1.02 * gradient_error(sure, params, x))


def test_devices_that_share_rows_learn_the_same():
    x = jax.random.normal(jax.random.key(3), (8, 16, 16))
    assert_devices_learn_the_same(language, parameters(16, 32), x)


H200 = jmp_kit.numerics.TARGETS["h200"]


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_no_logit_is_written_in_float32_for_an_h200(monkeypatch):
    params = jax.eval_shape(lambda: parameters(512, 8192))
    x = jax.ShapeDtypeStruct((4096, 512), jnp.float32)

    def traffic():
        step = autocast(step_of(language), "mixed_bfloat16")
        return jmp_kit.numerics.traffic(step, params, x, target="h200")

    found, logits = traffic(), 4 * 4096 * 8192
    assert found.wide <= 0.2 * logits
    monkeypatch.setattr(_rewritten, "asked", lambda jaxpr, _: jaxpr)
    before = traffic()
    assert before.wide >= logits
    assert found.nbytes <= before.nbytes - 2 * logits
