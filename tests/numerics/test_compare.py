"""compare: a row for each policy, with errors that are those of NumPy's."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_kit
from jmp_kit import autocast
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
    loss, grads = jax.jit(jmp_kit.value_and_grad(half, jmp_kit.NoOpLossScale()))(PARAMS, X)
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


def test_complex_parameters():
    """Their gradients differ in the imaginary part alone."""

    def loss_fn(params, x):
        return jnp.sum(jnp.real(1j * params["w"]) * jnp.sin(x @ x))

    x = jax.random.normal(KEYS[0], (8, 8))
    w = jnp.ones((8, 8), jnp.complex64)
    [_, row] = compare(loss_fn, {"w": w}, x, policies="mixed_bfloat16", steps=1).rows
    step = jmp_kit.value_and_grad(autocast(loss_fn, row.policy), jmp_kit.NoOpLossScale())
    _, half = jax.jit(step)({"w": w}, x)  # as compare has it
    exact = jax.grad(loss_fn)({"w": w}, x)
    error = np.linalg.norm(half["w"] - exact["w"]) / np.linalg.norm(exact["w"])
    assert row.gradient_error == pytest.approx(error, rel=1e-2)
    assert row.gradient_error > 1e-4


def test_one_policy_a_dtype_and_keys_with_a_slash():
    params = {"a/b": jnp.eye(4), "a": {"b": 2 * jnp.eye(4)}}

    def loss_fn(params, x):
        return jnp.sum((x @ params["a/b"] @ params["a"]["b"])[0] ** 2)

    found = compare(loss_fn, params, jnp.eye(4), policies=[jnp.bfloat16], steps=1)
    assert [row.policy for row in found.rows] == ["float32, highest", "bfloat16"]
    assert found.rows[0].loss == 4
    assert [row.cosine for row in found.rows] == [1, 1]


def test_what_is_no_array_is_constant():
    def fun(params, x, train, name):
        assert params["activation"] == "tanh"
        return loss_fn(params["arrays"], x) if train and name == "a" else 0.0

    params = {"arrays": PARAMS, "activation": "tanh", "count": jnp.int32(3)}
    found = compare(fun, params, X, True, "a", steps=1)
    plain = compare(loss_fn, PARAMS, X, steps=1)
    for row, same in zip(found.rows, plain.rows, strict=True):
        assert row.gradient_error == pytest.approx(same.gradient_error, abs=1e-9)
    assert found.rows[-1].worst_leaf.startswith("arrays/")


def test_a_scalar_of_parameters():
    found = compare(lambda w, x: jnp.sum((x * w) @ x.T), jnp.float32(2), X, steps=1)
    assert found.rows[1].gradient_error < 1e-3


@pytest.mark.parametrize(
    ("fun", "params", "keywords", "error", "words"),
    [
        (loss_fn, PARAMS, {"steps": 0}, ValueError, "steps is 0"),
        (loss_fn, PARAMS, {"policies": ["c=f17"]}, ValueError, "f17"),
        (autocast(loss_fn, "half"), PARAMS, {}, ValueError, "under autocast already.*in float16"),
        (
            jax.jit(autocast(loss_fn, "mixed_bfloat16")),
            PARAMS,
            {},
            ValueError,
            "multiplies in bfloat16, whatever the policy",
        ),
        (lambda p, x: jnp.sum(x), {}, {}, ValueError, "a dict, hold no floating-point array"),
        (lambda p, x: jnp.sum(x), jnp.int32(3), {}, ValueError, "hold no floating-point array"),
        (
            lambda p, x: jnp.log(loss_fn(p, x) * 0 - 1),
            PARAMS,
            {},
            ValueError,
            "In float32 the loss is not finite.*locate_nonfinite",
        ),
        (
            lambda p, x: jnp.sqrt(jnp.sum(0 * p["body"])) + loss_fn(p, x),
            PARAMS,
            {},
            ValueError,
            "In float32 the gradient of body is not finite",
        ),
        (
            lambda p, x: jnp.sqrt(jnp.sum(0 * p)),
            jnp.ones(3),
            {},
            ValueError,
            "In float32 the gradient of params is not finite",
        ),
        (lambda p, x: (p, loss_fn(p, x)), PARAMS, {}, TypeError, "gives a tuple. Pass the loss"),
        (lambda p, x: x, PARAMS, {}, TypeError, r"gives float32\["),
    ],
)
def test_bad_input_teaches(fun, params, keywords, error, words):
    with pytest.raises(error, match=words):
        compare(fun, params, X, **keywords)
