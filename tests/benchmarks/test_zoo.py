"""The zoo: every model is the same by hand and in float32, but for digits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.zoo import ZOO
from benchmarks.zoo.experts import Experts
from tests.compiling import quick_or_slow

pytestmark = pytest.mark.usefixtures("standard_promotion")


def drawn(like):
    if like.dtype == jnp.int32:
        return jax.random.randint(jax.random.key(0), like.shape, 0, 64)
    return jax.random.uniform(jax.random.key(1), like.shape, like.dtype)


@pytest.mark.parametrize("tiny", quick_or_slow([True, False], [True]))
@pytest.mark.parametrize("name", ZOO)
def test_losses_and_gradients_are_float32_by_hand_too(name, tiny):
    model = ZOO[name].at(tiny)
    params, rest = jax.eval_shape(lambda: model.task.variables)
    assert {x.dtype for x in jax.tree.leaves((params, rest))} == {jnp.dtype("float32")}
    step = jax.value_and_grad(model.task.loss(jnp.bfloat16), has_aux=True)
    (loss, rest_after), grads = jax.eval_shape(step, params, rest, *model.batch)
    assert (loss.shape, loss.dtype) == ((), jnp.float32)
    for before, after in ((params, grads), (rest, rest_after)):
        assert jax.tree.map(jnp.shape, before) == jax.tree.map(jnp.shape, after)


# Those whose attention is no kernel, which is only there to be compiled.
RUN = [name for name in ZOO if not name.startswith(("llama", "experts")) and name != "gpt"]


@pytest.mark.parametrize("name", quick_or_slow(RUN, {"mamba"}))
def test_by_hand_the_loss_is_that_of_float32(name):
    model = ZOO[name].at(tiny=True)
    batch = jax.tree.map(drawn, model.batch)
    exact, half = (
        jax.jit(model.task.loss(dtype))(*model.task.variables, *batch)[0]
        for dtype in (None, jnp.bfloat16)
    )
    assert float(half) == pytest.approx(float(exact), rel=2e-2)


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
