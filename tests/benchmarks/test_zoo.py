"""The zoo: every model is the same by hand and in float32, but for digits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_kit
from benchmarks.gradients import drawn, near, runnable
from benchmarks.zoo import ZOO
from benchmarks.zoo.experts import Experts
from benchmarks.zoo.held_out import HELD_OUT
from jmp_kit import autocast
from tests.casting.test_zoo import distance
from tests.compiling import OPTIMISED, quick_or_slow

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.mark.parametrize("tiny", quick_or_slow([True, False], [True]))
@pytest.mark.parametrize("name", [*ZOO, *HELD_OUT])
def test_losses_and_gradients_are_float32_by_hand_too(name, tiny):
    model = (ZOO | HELD_OUT)[name].at(tiny)
    params, rest = jax.eval_shape(lambda: model.task.variables)
    assert {x.dtype for x in jax.tree.leaves((params, rest))} == {jnp.dtype("float32")}
    step = jax.value_and_grad(model.task.loss(jnp.bfloat16), has_aux=True)
    (loss, rest_after), grads = jax.eval_shape(step, params, rest, *model.batch)
    assert (loss.shape, loss.dtype) == ((), jnp.float32)
    for before, after in ((params, grads), (rest, rest_after)):
        assert jax.tree.map(jnp.shape, before) == jax.tree.map(jnp.shape, after)


@pytest.mark.parametrize("name", quick_or_slow(ZOO, {"mamba"}))
def test_by_hand_the_loss_is_that_of_float32(name):
    model = runnable(name)
    batch = drawn(model.batch, jax.random.key(0))
    exact, half = (
        jax.jit(model.task.loss(dtype))(*model.task.variables, *batch)[0]
        for dtype in (None, jnp.bfloat16)
    )
    assert float(half) == pytest.approx(float(exact), rel=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ZOO, "gated recurrence", "matrix memory", "points"])
def test_gradients_are_no_farther_from_float32_than_by_hand(name):
    """In four lines and in one. Where words go is decided in float32, as it is by hand."""
    model = runnable(name, batch=8)
    loss = model.task.loss()
    rules = {"Experts_0/Dense_0": "float32"} if name == "experts" else {}
    half = functools.partial(autocast, policy="mixed_bfloat16", rules=rules)
    four_lines = jmp_kit.value_and_grad(half(loss), jmp_kit.NoOpLossScale(), has_aux=True)
    ways = {
        "exact": jax.grad(loss, has_aux=True),
        "by hand": jax.grad(model.task.loss(jnp.bfloat16), has_aux=True),
        "four lines": lambda *args: four_lines(*args)[::-1],
        "one line": half(jax.grad(loss, has_aux=True)),
    }
    params, rest = model.task.variables

    def compiled(way):
        with jax.default_matmul_precision("highest" if way == "exact" else None):
            return jax.jit(ways[way]).lower(params, rest, *model.batch).compile(OPTIMISED)

    exact, *programs = map(compiled, ways)
    errors = []
    for seed in range(12):
        key, of_batch = jax.random.split(jax.random.key(seed))
        args = near(params, key), rest, *drawn(model.batch, of_batch)
        wanted, _ = exact(*args)
        errors.append([distance(program(*args)[0], wanted) for program in programs])
    # Where a word's two experts are nearly three, any rounding may choose others.
    hand, *ours = np.median(errors, axis=0)
    assert max(ours) <= 1.05 * hand


@pytest.mark.parametrize("room", [4.0, 0.25])
def test_tokens_go_to_their_experts_as_far_as_there_is_room(room):
    layer = Experts(None, experts=4, hidden=8, room=room)
    x = jax.random.normal(jax.random.key(0), (2, 16, 8))
    variables = layer.init(jax.random.key(1), x)
    params = variables["params"]
    routed = jax.nn.softmax(x @ params["Dense_0"]["kernel"])
    weights, chosen = jax.lax.top_k(routed, 2)
    weights /= weights.sum(axis=-1, keepdims=True)
    gate, up = (jnp.einsum("btw,ewh->bteh", x, params[name]) for name in ("gate", "up"))
    found = jnp.einsum("bteh,ehw->btew", jax.nn.silu(gate) * up, params["down"])
    expected, left = np.zeros(x.shape), dict.fromkeys(range(4), int(room * 2 * 32 / 4))
    for at in np.ndindex(2, 16, 2):
        expert = int(chosen[at])
        if left[expert]:
            left[expert] -= 1
            expected[at[:2]] += weights[at] * found[(*at[:2], expert)]
    np.testing.assert_allclose(layer.apply(variables, x), expected, atol=1e-5)
