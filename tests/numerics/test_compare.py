"""compare: a row for each policy, with errors that are those of NumPy's."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_kit
from jmp_kit.numerics import compare

KEYS = jax.random.split(jax.random.key(0), 3)
PARAMS = {"body": jax.random.normal(KEYS[0], (16, 32)), "head": jax.random.normal(KEYS[1], (32, 4))}
X = jax.random.normal(KEYS[2], (8, 16))


def loss_fn(params, x):
    return jnp.mean(jnp.square(jnp.tanh(x @ params["body"]) @ params["head"])) * 1e-6


@pytest.fixture(scope="module")
def compared():
    told = []
    policies = ("float32", "mixed_float16", jmp_kit.Policy("float32", "bfloat16", "float32"))
    found = compare(loss_fn, PARAMS, X, policies=policies, steps=2, on_progress=told.append)
    return found, told


def test_a_row_for_each_policy(compared):
    found, _ = compared
    names = ["float32, highest", "float32", "mixed_float16", "p=f32,c=bf16,o=f32"]
    assert [row.policy for row in found.rows] == names
    for row in found.rows:
        assert row.step_ms > 0
        assert row.memory_mib > 0
        assert row.worst_leaf in PARAMS
    first, full, float16, bfloat16 = found.rows
    assert (first.gradient_error, first.loss_error, first.cosine) == (0, 0, pytest.approx(1))
    assert full.gradient_error < 1e-6
    assert 1e-5 < float16.gradient_error < 2e-3 < bfloat16.gradient_error < 2e-2
    # Gradients this small need one.
    assert float16.loss_scale > 2**10
    assert bfloat16.loss_scale == 1


def test_the_errors_are_those_of_the_gradient(compared):
    found, _ = compared
    half = jmp_kit.autocast(loss_fn, "mixed_bfloat16")
    loss, grads = jax.jit(jax.value_and_grad(half))(PARAMS, X)
    with jax.default_matmul_precision("highest"):
        full_loss, full = jax.jit(jax.value_and_grad(loss_fn))(PARAMS, X)
    flat, full_flat = (
        np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)]) for t in (grads, full)
    )
    error = np.linalg.norm(flat - full_flat) / np.linalg.norm(full_flat)
    row = found.rows[-1]
    assert row.gradient_error == pytest.approx(error, rel=1e-3)
    loss_error = float(abs(loss - full_loss) / full_loss)
    assert row.loss_error == pytest.approx(loss_error, rel=1e-3, abs=1e-9)
    worst = max(np.linalg.norm(grads[k] - full[k]) / np.linalg.norm(full[k]) for k in PARAMS)
    assert row.worst_error == pytest.approx(worst, rel=1e-3)
    cosine = flat @ full_flat / np.linalg.norm(flat) / np.linalg.norm(full_flat)
    assert row.cosine == pytest.approx(cosine, abs=1e-6)


def test_it_prints_as_a_table_and_is_json(compared):
    found, told = compared
    first, head, *rows = str(found).splitlines()
    assert first == f"on {jax.devices()[0].device_kind}"
    assert head.startswith("policy")
    assert len(rows) == 4
    assert "1.00×" in rows[0]
    assert json.loads(json.dumps(found.to_dict()))["rows"][0]["policy"] == "float32, highest"
    assert told[0] == "compiling float32, highest"
    assert "timing, 1 of 2" in told


def test_a_gradient_of_zeros_has_no_error():
    found = compare(lambda p, x: jnp.sum(0 * p * x), jnp.ones(3), jnp.ones(3), steps=1)
    assert [row.gradient_error for row in found.rows] == [0] * 4


@pytest.mark.parametrize(
    ("keywords", "words"), [({"steps": 0}, "steps is 0"), ({"policies": ["c=f17"]}, "f17")]
)
def test_bad_input_teaches(keywords, words):
    with pytest.raises(ValueError, match=words):
        compare(loss_fn, PARAMS, X, **keywords)
