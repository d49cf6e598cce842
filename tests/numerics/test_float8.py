"""What float8 costs each product, on numbers that are known to be hard and easy for it."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jmp_kit
from jmp_kit import numerics

KEYS = jax.random.split(jax.random.key(0), 4)
X = jax.random.normal(KEYS[0], (32, 64))
PARAMS = {"up": jax.random.normal(KEYS[1], (64, 48)), "down": jax.random.normal(KEYS[2], (48, 64))}


def loss_fn(params, x):
    with jax.named_scope("mlp"):
        return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)


def test_every_product_forward_and_backward():
    found = numerics.float8_errors(jax.grad(loss_fn), PARAMS, X)
    assert [row.path for row in found.rows] == ["mlp"] * 5
    assert sum(row.backward for row in found.rows) == 3
    for row in found.rows:
        assert 0.01 < row.error < 0.06
        assert row.bfloat16_error < 0.005
        assert row.flushed < 0.05
    assert found.rows[0].error == max(row.error for row in found.rows)
    assert found.rules() == {}
    assert found.rules(limit=0.001) == {"^mlp$": "bfloat16"}
    assert json.loads(json.dumps(found.to_dict()))["rows"][0]["path"] == "mlp"
    for words in ("float8", "flushed", "backward", "32×48", "test_float8.py:"):
        assert words in str(found)


def test_what_is_hard_for_it_comes_first_and_its_rule_keeps_it_in_bfloat16():
    def loss(params, x):
        with jax.named_scope("easy"):
            x = jnp.tanh(x @ params["up"])
        with jax.named_scope("hard"):  # sums that cancel
            return jnp.sum(((100 + x) @ (params["down"] - params["down"].mean(0))) ** 2)

    found = numerics.float8_errors(loss, PARAMS, X)
    assert [row.path for row in found.rows] == ["hard", "easy"]
    assert found.rows[0].error > 0.2
    rules = found.rules()
    assert rules == {"^hard$": "bfloat16"}
    half = jmp_kit.autocast(loss, "mixed_bfloat16", rules={**rules, "easy": "float8"})
    dtypes = {(p.path, p.lhs_dtype) for p in numerics.audit(half, PARAMS, X).products}
    assert dtypes == {("easy", "float8_e4m3fn"), ("hard", "bfloat16")}


def test_loops_calls_and_branches():
    def loss(params, x):
        @jax.checkpoint
        def round_(x, _):
            y = jax.jit(jnp.tanh)(x @ params["up"]) @ params["down"]
            return lax.cond(x[0, 0] > 99, lambda y: y, lambda y: 0.1 * y, y), None

        return jnp.mean(lax.scan(round_, x, None, length=3)[0] ** 2)

    found = numerics.float8_errors(jax.value_and_grad(loss), PARAMS, X)
    products = numerics.audit(jax.value_and_grad(loss), PARAMS, X).products
    assert len(found.rows) == len(products) > 5
    assert all(0 < row.error < 0.1 for row in found.rows)


def test_zeros_flushed_values_and_numbers_that_are_not_finite():
    def product(x, y):
        return x @ y

    [row] = numerics.float8_errors(product, jnp.zeros((4, 8)), jnp.ones((8, 2))).rows
    assert (row.error, row.bfloat16_error, row.flushed) == (0, 0, 0)
    small = jnp.ones((4, 8)).at[:, 1:].set(1e-7)
    [row] = numerics.float8_errors(product, small, jnp.ones((8, 2))).rows
    assert row.flushed == pytest.approx(28 / (32 + 16))
    found = numerics.float8_errors(product, small.at[0, 0].set(jnp.inf), jnp.ones((8, 2)))
    assert not found.rows[0].error <= 1
    [row] = numerics.float8_errors(lambda x: x @ x.T, X).rows
    assert 0.01 < row.error < 0.06


def test_it_needs_numbers():
    with pytest.raises(ValueError, match="call it outside jit"):
        jax.jit(lambda x: numerics.float8_errors(loss_fn, PARAMS, x).rows[0].error)(X)
    assert numerics.float8_errors(lambda x: jnp.sum(x), X).rows == ()
    assert numerics.float8_errors(lambda i: i @ i.T, jnp.ones((2, 2), jnp.int32)).rows[0].error == 0


def test_a_product_that_is_empty():
    [row] = numerics.float8_errors(jnp.matmul, jnp.ones((0, 4)), jnp.ones((4, 3))).rows
    assert (row.shape, row.error, row.flushed) == ((0, 3), 0.0, 0.0)
