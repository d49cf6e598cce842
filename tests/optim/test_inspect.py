"""Finding the loss scale, the metrics and the alarm."""

import json

import jax
import jax.numpy as jnp
import optax
import pytest

from jmp_kit import (
    DynamicLossScale,
    NoOpLossScale,
    StaticLossScale,
    loss_scale_of,
    metrics,
    mixed_precision,
    raise_if_diverged,
)

# optax.MultiSteps promotes: see the fixture.
pytestmark = pytest.mark.usefixtures("standard_promotion")

PARAMS = {"w": jnp.ones(2)}


def after_overflows(loss_scale, n, wrap=lambda optimizer: optimizer):
    optimizer = wrap(mixed_precision(optax.sgd(0.1), loss_scale))
    state = optimizer.init(PARAMS)
    for _ in range(n):
        _, state = optimizer.update({"w": jnp.full(2, jnp.nan)}, state, PARAMS)
    return state


@pytest.mark.parametrize(
    "wrap",
    [
        lambda o: o,
        lambda o: optax.chain(optax.clip(1.0), optax.chain(o, optax.identity())),
        pytest.param(
            lambda o: optax.MultiSteps(o, 1),
            marks=pytest.mark.filterwarnings("ignore:optax.MultiSteps wraps"),
        ),
        lambda o: optax.inject_hyperparams(lambda scale: optax.chain(o, optax.scale(scale)))(1.0),
        lambda o: optax.masked(o, {"w": True}),
    ],
    ids=["alone", "chain", "MultiSteps", "inject_hyperparams", "masked"],
)
def test_found_however_deep(wrap):
    state = after_overflows(DynamicLossScale(2.0**10), 2, wrap)
    assert float(loss_scale_of(state).loss_scale) == 2.0**8
    assert {name: x.item() for name, x in jax.jit(metrics)(state).items()} == {
        "loss_scale": 2.0**8,
        "finite": False,
        "skipped": 2,
        "consecutive_skipped": 2,
    }


@pytest.mark.parametrize("loss_scale", [NoOpLossScale(), StaticLossScale(8.0)])
def test_metrics_have_one_form_for_every_loss_scale(loss_scale):
    state = after_overflows(loss_scale, 0)
    found = metrics(state)
    assert found["loss_scale"] == loss_scale.loss_scale
    expected = {"loss_scale": float, "finite": bool, "skipped": int, "consecutive_skipped": int}
    assert {name: type(x) for name, x in found.items()} == expected
    assert json.loads(json.dumps(found)) == found
    traced = jax.jit(metrics)(state)
    dtypes = [traced[name].dtype.name for name in found]
    assert dtypes == ["float32", "bool", "int32", "int32"]


def test_metrics_of_several_states_at_once_are_arrays():
    state = after_overflows(DynamicLossScale(), 2)
    found = metrics(jax.tree.map(lambda x: jnp.stack([x, x]), state))
    assert found["skipped"].tolist() == [2, 2]


@pytest.mark.parametrize("read", [loss_scale_of, metrics, raise_if_diverged])
def test_none_and_several_are_refused(read):
    with pytest.raises(ValueError, match=r"no mixed_precision state in this tuple.*its init gave"):
        read(optax.sgd(0.1).init(PARAMS))
    optimizer = optax.multi_transform(
        {"a": mixed_precision(optax.sgd(0.1)), "b": mixed_precision(optax.sgd(0.2))},
        {"w": "a"},
    )
    words = r"holds 2 mixed_precision states.*\['a'\].*\['b'\].*Pass the one you mean"
    with pytest.raises(ValueError, match=words):
        read(optimizer.init(PARAMS))


def test_the_alarm_waits_for_more_than_it_puts_up_with():
    state = after_overflows(DynamicLossScale(2.0**10), 3)
    raise_if_diverged(state)
    raise_if_diverged(state, max_consecutive_skips=3)
    words = "of the last 3 steps were not finite.* loss scale is 128.*may still be too high"
    with pytest.raises(FloatingPointError, match=words):
        raise_if_diverged(state, max_consecutive_skips=2)


@pytest.mark.parametrize(
    ("loss_scale", "words"),
    [
        (DynamicLossScale(2.0), "loss scale is 1. It can fall no further.*bfloat16 has float32"),
        (NoOpLossScale(), "loss scale is 1. It can fall no further"),
        (StaticLossScale(2.0**15), "loss scale is 32768.*use a DynamicLossScale"),
    ],
)
def test_the_alarm_says_what_to_do(loss_scale, words):
    with pytest.raises(FloatingPointError, match=words):
        raise_if_diverged(after_overflows(loss_scale, 2), max_consecutive_skips=1)


def test_the_alarm_is_not_for_traced_code():
    with pytest.raises(ValueError, match="raise_if_diverged reads numbers .* outside jit"):
        jax.jit(raise_if_diverged)(after_overflows(NoOpLossScale(), 0))


def test_a_scale_that_nothing_applies_is_noticed():
    """It only grows: `jax.value_and_grad` was called."""
    optimizer = mixed_precision(optax.sgd(0.1), DynamicLossScale(2.0**39, period=1))
    state = optimizer.init(PARAMS)
    for _ in range(2):
        raise_if_diverged(state)
        _, state = optimizer.update(PARAMS, state, PARAMS)
    with pytest.raises(FloatingPointError, match=r"2\^40.*call jmp_kit.value_and_grad.*NoOpLoss"):
        raise_if_diverged(state)


@pytest.mark.parametrize(
    "loss_scale", [DynamicLossScale(2.0**50, max_loss_scale=2.0**60), StaticLossScale(2.0**50)]
)
def test_a_high_scale_that_is_meant(loss_scale):
    raise_if_diverged(mixed_precision(optax.sgd(0.1), loss_scale).init(PARAMS))


def test_scaled_gradients_are_asked_for():
    with pytest.raises(FloatingPointError, match="did you unscale"):
        raise_if_diverged(after_overflows(DynamicLossScale(2.0**30), 5), 4)
