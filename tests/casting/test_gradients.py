"""`jmp_kit.value_and_grad` of what autocast gave: forward and backward pass planned as one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_kit
from jmp_kit import autocast
from tests.casting.stream import WEIGHTS, X, block, loss_through, loss_through_scan, step_of
from tests.casting.test_zoo import distance, products_of
from tests.casting.zoo import SQUARE, mean_square

NONE = jmp_kit.NoOpLossScale()
LOSS = loss_through(block)


def lowered(fun, *args):
    return jax.jit(fun).lower(*args).as_text()


@pytest.mark.parametrize("loss_fn", [LOSS, loss_through_scan(block)])
def test_four_lines_and_one_line_are_one_program(loss_fn):
    def step(weights, x):
        half = autocast(loss_fn, "mixed_bfloat16")
        loss, grads = jmp_kit.value_and_grad(half, NONE)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss

    one_line = autocast(step_of(loss_fn), "mixed_bfloat16")
    found, expected = (jax.jit(f)(WEIGHTS, X) for f in (step, one_line))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_rule_decides_of_the_backward_products_too():
    def loss_fn(params, x):
        return mean_square(jnp.tanh(x @ params["first"]) @ params["last"])

    params = {"first": SQUARE[0], "last": SQUARE[1]}
    half = autocast(loss_fn, "mixed_bfloat16", rules={"last": "float32"}, reduce_dtype="bfloat16")
    found = products_of(jmp_kit.grad(half, NONE), params, X)
    assert sorted(str(*dtypes) for dtypes in found) == ["bfloat16"] * 2 + ["float32"] * 3


def test_a_half_loss_and_a_rule_that_matches_nothing_are_refused():
    half = autocast(LOSS, jmp_kit.get_policy("p=f32,c=bf16,o=bf16"))
    with pytest.raises(TypeError, match="The loss is bfloat16"):
        jmp_kit.value_and_grad(half, NONE)(WEIGHTS, X)
    with pytest.raises(ValueError, match="lm_head"):
        jmp_kit.grad(autocast(LOSS, "bfloat16", rules={"lm_head": "float32"}), NONE)(WEIGHTS, X)


def test_it_is_called_and_answered_like_the_function():
    """Keywords, several arguments, integers, auxiliary results that are no arrays."""

    def loss_fn(w, x, *, labels, name="sum"):
        logits = jnp.tanh(x @ w[0]) @ w[1]
        chosen = jnp.take_along_axis(logits, labels[:, None], axis=-1)
        return -chosen.mean(), {"name": name, "logits": logits, "labels": labels}

    labels = jnp.arange(len(X))
    half = autocast(loss_fn, "mixed_bfloat16")
    found = jmp_kit.value_and_grad(half, NONE, (0, 1), has_aux=True)(SQUARE, X, labels=labels)
    expected = jax.value_and_grad(half, (0, 1), has_aux=True)(SQUARE, X, labels=labels)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert found[0][1]["name"] == "sum"
    assert found[0][1]["labels"].dtype == labels.dtype
    assert distance(found[1], expected[1]) < 0.01
    integers = autocast(lambda n, w: mean_square(w @ w) + n.astype(jnp.float32), "bfloat16")
    grads = jmp_kit.grad(integers, NONE, (0, 1), allow_int=True)(jnp.int32(3), SQUARE[0])
    assert grads[0].dtype == jax.dtypes.float0


def test_it_can_be_mapped_and_differentiated_again():
    half = autocast(LOSS, "mixed_bfloat16")
    grads, expected = (
        jax.jit(jax.vmap(grad, (None, 0)))(WEIGHTS, X[:, None])
        for grad in (jmp_kit.grad(half, NONE), jax.grad(half))
    )
    assert distance(grads, expected) < 0.02

    def slope(grad):
        return lambda w: sum(map(mean_square, grad(w, X)))

    slopes = slope(jmp_kit.grad(half, NONE)), slope(jax.grad(LOSS))
    found, expected = (jax.jit(jax.grad(f))(WEIGHTS) for f in slopes)
    assert distance(found, expected) < 0.05
    found, expected = (jax.jit(lambda w, f=f: jax.jvp(f, (w,), (w,))[1])(WEIGHTS) for f in slopes)
    assert abs(found - expected) < 0.05 * abs(expected)


def test_no_scale_for_float16_was_a_choice():
    """`NoOpLossScale()` was written down, so nobody is warned."""
    loss, _ = jmp_kit.value_and_grad(autocast(LOSS, "mixed_float16"), NONE)(WEIGHTS, X)
    assert loss.dtype == jnp.float32


def test_a_float32_policy_changes_nothing():
    found = jmp_kit.grad(autocast(LOSS, "float32"), NONE)(WEIGHTS, X)
    expected = jax.grad(LOSS)(WEIGHTS, X)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
