"""Products of one operand that XLA is not to join."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_kit
from jmp_kit import autocast
from jmp_kit.casting import plans_of
from jmp_kit.casting.planning._plan import Call, Part
from tests.casting.stream import norm, step_of
from tests.casting.zoo import mean_square

H200 = jmp_kit.numerics.TARGETS["h200"]

NAMES = ("in", "queries", "keys", "values", "out")


def attention(params, x):
    """Of normed queries and keys, and of values as they are."""
    x = norm(x @ params["in"])
    q, k = (norm(x @ params[name]) for name in ("queries", "keys"))
    weights = jax.nn.softmax(q @ k.swapaxes(-1, -2))
    return mean_square(weights @ (x @ params["values"]) @ params["out"])


def alone(loss_fn, *args, recompute=True):
    """Of each such product, behind how many barriers it takes an operand."""
    gradient = jax.value_and_grad(loss_fn)
    [plan] = plans_of(gradient, "mixed_bfloat16", *args, recompute=recompute)
    parts = [step for step in plan.steps if isinstance(step, Part)]
    return [count for p in parts for counts in p.alone.values() for count in counts.values()]


def test_each_takes_the_operand_behind_one_barrier_more():
    """What is there once for all others, and for the first if there are none."""
    params, x = {name: jnp.ones((64, 64)) for name in NAMES}, jnp.ones((64, 256, 64))
    assert sorted(alone(attention, params, x)) == [1, 2]  # queries, keys; the values' has none

    def without_values(params, x):
        x = norm(x @ params["in"])
        q, k = (norm(x @ params[name]) for name in ("queries", "keys"))
        return mean_square(q * k @ params["out"])

    assert alone(without_values, params, x) == [1]
    assert alone(without_values, params, x[:32]) == []  # a copy is less than a kernel more


def test_what_is_computed_again_from_them_is_taken_behind_a_barrier_too():
    """A gate and what it lets through."""

    def gated(params, x):
        y = norm(x @ params["in"])
        y = jax.nn.silu(y @ params["keys"]) * (y @ params["values"])
        return mean_square(y @ params["out"])

    params, x = {name: jnp.ones((64, 64)) for name in NAMES}, jnp.ones((64, 256, 64))
    assert alone(gated, params, x) == [1]
    assert alone(gated, params, x, recompute=False) == []


def test_weights_that_two_products_share_are_no_such_operand():
    """They are cast where a product takes them: a barrier would store them."""

    def loss_fn(w, x):
        return mean_square(norm(x @ w) @ w) + mean_square(norm(2 * x @ w) @ w)

    assert alone(loss_fn, jnp.eye(64), jnp.ones((64, 256, 64))) == []


def test_norms_of_what_is_looked_up_are_such_operands():
    """They depend on no product, but are stored in any case."""

    def gated(params, words):
        y = norm(params["in"][words])
        y = jax.nn.silu(y @ params["keys"]) * (y @ params["values"])
        return mean_square(y @ params["out"])

    params, words = {name: jnp.ones((64, 64)) for name in NAMES}, jnp.zeros((64, 256), int)
    assert alone(gated, params, words) == [1]


def test_they_compute_what_they_did(monkeypatch):
    monkeypatch.setattr("jmp_kit.casting.planning._alone._LEAST", 0)
    keys = jax.random.split(jax.random.key(0), len(NAMES))
    params = {n: jax.random.normal(k, (32, 32)) / 5 for n, k in zip(NAMES, keys, strict=True)}
    x = jax.random.normal(jax.random.key(1), (2, 64, 32))
    found = autocast(step_of(attention), "mixed_bfloat16")(params, x)
    monkeypatch.setattr(
        "jmp_kit.casting.planning._planner.with_products_alone", lambda steps, _: steps
    )
    wanted = autocast(step_of(attention), "mixed_bfloat16")(params, x)
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_no_piece_of_a_joined_product_is_copied_for_an_h200(monkeypatch):
    shapes = {name: jax.ShapeDtypeStruct((512, 512), jnp.float32) for name in NAMES}
    x = jax.ShapeDtypeStruct((16, 1024, 512), jnp.float32)

    def nbytes():
        step = autocast(step_of(attention), "mixed_bfloat16")
        return jmp_kit.numerics.traffic(step, shapes, x, target="h200").nbytes

    found = nbytes()
    monkeypatch.setattr(
        "jmp_kit.casting.planning._planner.with_products_alone", lambda steps, _: steps
    )
    assert found <= nbytes() - 2 * 2 * 16 * 1024 * 512


def test_what_a_loop_adds_up_is_a_product_of_its_own():
    """XLA adds in its kernel, and not to a piece of what it has joined."""

    def loss_fn(params, x):
        def step(h, x):
            return jnp.tanh(x @ params["in"] + h @ params["again"]), None

        return mean_square(lax.scan(step, jnp.zeros(x.shape[1:]), x)[0])

    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    def counts(width):
        params = {name: shape(width, width) for name in ("in", "again")}
        gradient = jax.value_and_grad(loss_fn)
        [plan] = plans_of(gradient, "mixed_bfloat16", params, shape(8, 2048, width))
        calls = [step for step in plan.steps if isinstance(step, Call)]
        steps = [step for call in calls for _, inside in call.bodies for step in inside.steps]
        alone = [step.alone for step in steps if isinstance(step, Part)]
        return [n for behind in alone for several in behind.values() for n in several.values()]

    assert counts(1024) == [1]
    assert counts(512) == []
