"""What the docstrings recommend, held against float32: several losses, optimizers, penalties."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_kit
from jmp_kit import DynamicLossScale, NoOpLossScale, StaticLossScale, mixed_precision
from tests.compiling import quick_or_slow

# optax itself promotes: see the fixture.
pytestmark = pytest.mark.usefixtures("standard_promotion")


def make_critic(seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    params = {
        "w": jax.random.normal(keys[0], (16, 32)) / 4,
        "u": jax.random.normal(keys[1], (32, 32)) / 6,
        "v": jax.random.normal(keys[2], (32,)) / 6,
    }
    return params, jax.random.normal(keys[3], (8, 16))


def critic(params, x):
    return jnp.tanh(jnp.tanh(x @ params["w"]) @ params["u"]) @ params["v"]


def penalty(critic, loss_scale, size):
    """Gradients of gradients: how far the slopes of `size * critic` are from `size`."""

    def loss_fn(params, x):
        slope = jmp_kit.grad(lambda x: size * critic(params, x).sum(), loss_scale)(x)
        norm = jnp.sqrt((slope**2).sum(-1) + 1e-20)
        return ((norm / size - 1) ** 2).mean()

    return loss_fn


def relative_error(a, b):
    return float(optax.tree.norm(jax.tree.map(jnp.subtract, a, b)) / optax.tree.norm(b))


@pytest.mark.parametrize("size", quick_or_slow([1.0, 1e-6, 1e-8], [1e-6]))
@pytest.mark.parametrize(
    ("policy", "limit"), [("mixed_float16", 2e-3), ("mixed_bfloat16", 1e-2)], ids=["f16", "bf16"]
)
def test_gradients_of_gradients_with_loss_scaling(policy, limit, size):
    """As in float32, though the slopes themselves are too small for float16."""
    params, x = make_critic()
    full = jax.grad(penalty(critic, NoOpLossScale(), size))(params, x)
    half = jmp_kit.autocast(critic, policy)
    inner = NoOpLossScale() if policy == "mixed_bfloat16" else StaticLossScale(2.0**15 / size)
    outer = NoOpLossScale() if policy == "mixed_bfloat16" else DynamicLossScale(2.0**15)
    grads = jax.jit(jmp_kit.grad(penalty(half, inner, size), outer))(params, x)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    assert relative_error(grads, full) < limit
    if size < 1 and policy == "mixed_float16":
        lost = jmp_kit.grad(penalty(half, NoOpLossScale(), size), outer)(params, x)
        assert not relative_error(lost, full) < 0.5


def test_a_scale_for_every_loss():
    """A tiny loss and a huge one in float16: no single scale would do for both."""
    x = jnp.float16(1)
    tiny = lambda w: (w * jnp.float16(2.0**-13)).astype(jnp.float32) * 2.0**-13  # noqa: E731
    huge = lambda w: (w * jnp.float16(2.0**12)).astype(jnp.float32) * 2.0**3  # noqa: E731
    scales = [DynamicLossScale(2.0**14), DynamicLossScale(1.0)]
    grads = [jmp_kit.grad(f, s)(x) for f, s in zip((tiny, huge), scales, strict=True)]
    np.testing.assert_array_equal(jnp.asarray(grads), [2.0**-26, 2.0**15])
    assert float(jmp_kit.grad(tiny, scales[1])(x)) == 0
    assert float(jmp_kit.grad(huge, scales[0])(x)) == jnp.inf


@pytest.mark.parametrize("shared", [True, False])
def test_two_optimizers_in_one_step(shared):
    """Each skips on its own overflow; a shared scale sees them all, own scales only their own."""
    scale = DynamicLossScale(2.0**10)
    optimizers = [mixed_precision(optax.adam(0.1), *([] if shared else [scale])) for _ in "ab"]

    @jax.jit
    def step(weights, states, scale, spoil):
        new_weights, new_states, all_grads = [], [], []
        for i, optimizer in enumerate(optimizers):
            used = scale if shared else jmp_kit.loss_scale_of(states[i])
            grads = jmp_kit.grad(lambda w: jnp.sum(w.astype(jnp.float32) ** 2), used)(weights[i])
            grads = grads * spoil[i]
            updates, state = optimizer.update(grads, states[i], weights[i])
            new_weights.append(optax.apply_updates(weights[i], updates))
            new_states.append(state)
            all_grads.append(grads)
        return new_weights, new_states, scale.adjust(jmp_kit.all_finite(all_grads))

    weights = [jnp.ones(3, jnp.float16), jnp.ones(3, jnp.float16)]
    states = [o.init(w) for o, w in zip(optimizers, weights, strict=True)]
    weights, states, scale = step(weights, states, scale, jnp.asarray([1.0, jnp.inf]))
    assert [bool((w == 1).all()) for w in weights] == [False, True]
    if shared:
        assert float(scale.loss_scale) == 2.0**9
    else:
        assert [float(s.loss_scale.loss_scale) for s in states] == [2.0**10, 2.0**9]
    weights, states, scale = step(weights, states, scale, jnp.ones(2))
    assert all((w < 1).all() for w in weights)
    assert [int(s.skipped) for s in states] == [0, 1]
    assert step._cache_size() == 1


@pytest.mark.parametrize("master", ["remainder", "kahan", "stochastic"])
def test_accumulation_is_one_step_of_the_mean(master):
    inner = optax.sgd(0.5)
    whole = mixed_precision(inner, DynamicLossScale(), master=master, seed=2)
    parts = mixed_precision(optax.MultiSteps(inner, 4), DynamicLossScale(), master=master, seed=2)
    params = jnp.linspace(-1, 1, 64).astype(jnp.bfloat16)
    grads = jax.random.normal(jax.random.key(0), (4, 64))
    updates, state = whole.update(grads.mean(0), whole.init(params), params)
    want = jmp_kit.master_params(state, optax.apply_updates(params, updates))
    got, state = params, parts.init(params)
    for i in (0, 1, 2, None, 3):
        one = jnp.full(64, jnp.nan) if i is None else grads[i]
        updates, state = parts.update(one, state, got)
        got = optax.apply_updates(got, updates)
    full = jmp_kit.master_params(state, got)
    # Rounding at random differs, for the key has moved on; by no more than a step.
    np.testing.assert_allclose(full, want, rtol=2.0**-6 if master == "stochastic" else 2.0**-15)
    assert int(state.skipped) == 1


def test_an_average_in_float32_moves_where_one_of_half_weights_stands_still():
    optimizer = mixed_precision(optax.sgd(1e-5), master="remainder")
    ema = optax.ema(0.99, debias=False)
    params = jnp.ones(4, jnp.bfloat16)
    state = optimizer.init(params)
    full_ema, half_ema = ema.init(jmp_kit.master_params(state, params)), ema.init(params)
    full_ema, half_ema = full_ema._replace(ema=jnp.ones(4)), half_ema._replace(ema=params)
    for _ in range(300):
        updates, state = optimizer.update(jnp.ones(4), state, params)
        params = optax.apply_updates(params, updates)
        _, full_ema = ema.update(jmp_kit.master_params(state, params), full_ema)
        _, half_ema = ema.update(params, half_ema)
    expected = 1 - 1e-5 * (300 - 99 * (1 - 0.99**300))
    np.testing.assert_allclose(full_ema.ema, expected, rtol=1e-5)
    assert full_ema.ema.dtype == jnp.float32
    assert half_ema.ema.dtype == jnp.bfloat16
    assert (half_ema.ema == 1).all()


def test_half_weights_for_inference_are_the_parameters():
    optimizer = mixed_precision(optax.adam(1e-3))
    params = {"w": jnp.linspace(-1, 1, 64).astype(jnp.bfloat16)}
    state = optimizer.init(params)
    for _ in range(5):
        updates, state = optimizer.update({"w": jnp.ones(64)}, state, params)
        params = optax.apply_updates(params, updates)
    exported = jmp_kit.get_policy("bfloat16").cast_to_param(jmp_kit.master_params(state, params))
    assert (exported["w"] == params["w"]).all()
