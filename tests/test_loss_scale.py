"""Loss scales: their walk, their leaves, and what they refuse."""

import copy
import dataclasses
import math
import pickle

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st

from jmp_kit import DynamicLossScale, NoOpLossScale, StaticLossScale, mixed_precision

ALL = [
    NoOpLossScale(),
    StaticLossScale(2.0**12),
    DynamicLossScale(),
    DynamicLossScale(8.0, 1, 3, 4, 0.25, backoff_factor=0.125, max_loss_scale=64.0, hysteresis=2),
]


@jax.jit
def walk(loss_scale, history):
    """The scales after every step of a history of finite (True) and overflowing steps."""

    def step(loss_scale, finite):
        loss_scale = loss_scale.adjust(finite)
        return loss_scale, (loss_scale.loss_scale, loss_scale.counter)

    return jax.lax.scan(step, loss_scale, history)[1]


def rule(history, *, start, period, factor, least, backoff, most, hysteresis):
    """The docstring's pseudocode, in plain Python."""
    loss_scale, counter, overflows, scales, counters = start, 0, 0, [], []
    for finite in history:
        if finite:
            overflows = 0
            counter += 1
            if counter == period:
                counter = 0
                grown = min(loss_scale * factor, most)
                loss_scale = grown if grown <= float(np.finfo(np.float32).max) else loss_scale
        else:
            counter = 0
            overflows = min(overflows + 1, hysteresis)
            if overflows == hysteresis:
                loss_scale = max(loss_scale * backoff, least)
        scales.append(loss_scale)
        counters.append(counter)
    return scales, counters


HISTORIES = st.lists(st.booleans(), min_size=40, max_size=40)
POWERS = st.integers(-10, 10).map(lambda e: 2.0**e)


def test_a_state_of_other_settings_goes_on_by_these():
    """As after a restart with a shorter period and a lower maximum."""
    settings = DynamicLossScale(2.0**8, period=3, max_loss_scale=2.0**10)
    leaves = [jnp.float32(2.0**16), jnp.int32(1500)]
    restored = jax.tree.unflatten(jax.tree.structure(settings), leaves)
    assert [float(x) for x in jax.tree.leaves(restored.adjust(jnp.asarray(True)))] == [2.0**10, 0]
    leaves = [jnp.float32(2.0**8), jnp.int32(1500)]
    restored = jax.tree.unflatten(jax.tree.structure(settings), leaves)
    assert [float(x) for x in jax.tree.leaves(restored.adjust(jnp.asarray(True)))] == [2.0**9, 0]


@settings(max_examples=100, deadline=None)
@given(
    history=HISTORIES | st.just([True] * 40) | st.just([False] * 40),
    start=st.integers(-20, 120),
    period=st.integers(1, 5),
    factor=st.sampled_from([2, 4.0, 2.0**20]),
    below=st.integers(0, 5),
    backoff=st.sampled_from([None, 0.5, 0.125]),
    above=st.none() | st.integers(0, 5),
    hysteresis=st.integers(1, 4),
)
def test_the_walk_is_the_rule(history, start, period, factor, below, backoff, above, hysteresis):
    # Powers of two, so that float32 and Python's float64 agree to the last bit.
    least, most = 2.0 ** (start - below), None if above is None else 2.0 ** (start + above)
    loss_scale = DynamicLossScale(
        2.0**start,
        0,
        period,
        factor,
        least,
        backoff_factor=backoff,
        max_loss_scale=most,
        hysteresis=hysteresis,
    )
    scales, counters = walk(loss_scale, jnp.asarray(history))
    want_scales, want_counters = rule(
        history,
        start=2.0**start,
        period=period,
        factor=factor,
        least=least,
        backoff=1 / factor if backoff is None else backoff,
        most=math.inf if most is None else most,
        hysteresis=hysteresis,
    )
    assert scales.tolist() == want_scales
    assert counters.tolist() == want_counters


def grad_scaler_rule(history, *, start, growth, backoff, interval):
    """PyTorch's, in plain Python: torch.amp.GradScaler's documentation."""
    scale, tracker, scales = start, 0, []
    for finite in history:
        if not finite:
            scale, tracker = scale * backoff, 0
        else:
            tracker += 1
            if tracker == interval:
                scale, tracker = scale * growth, 0
        scales.append(scale)
    return scales


@settings(max_examples=50, deadline=None)
@given(HISTORIES, st.integers(1, 6), st.sampled_from([2.0, 4.0]), st.sampled_from([0.5, 0.25]))
def test_the_walk_is_that_of_grad_scaler(history, interval, growth, backoff):
    loss_scale = DynamicLossScale(2.0**16, 0, interval, growth, 2.0**-120, backoff_factor=backoff)
    want = grad_scaler_rule(
        history, start=2.0**16, growth=growth, backoff=backoff, interval=interval
    )
    assert walk(loss_scale, jnp.asarray(history))[0].tolist() == want


@pytest.mark.parametrize("seed", range(5))
def test_the_walk_is_that_of_grad_scaler_itself(seed):
    torch = pytest.importorskip("torch", reason='torch is an extra: pip install ".[torch]"')
    history = np.random.default_rng(seed).random(40) < 0.8
    scaler = torch.amp.GradScaler("cpu", 2.0**16, 2.0, 0.5, 3)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], 0.1)
    scales = []
    for finite in history:
        scaler.scale(parameter.sum())
        parameter.grad = torch.full((1,), 1.0 if finite else math.inf)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    loss_scale = DynamicLossScale(2.0**16, period=3, min_loss_scale=2.0**-120)
    assert walk(loss_scale, jnp.asarray(history))[0].tolist() == scales


def test_growth_stops_where_float32_does():
    top = 2.0**127
    loss_scale = DynamicLossScale(top, period=1)
    assert float(loss_scale.adjust(True).loss_scale) == top
    assert float(DynamicLossScale(3.0, period=1, max_loss_scale=5.0).adjust(True).loss_scale) == 5.0


def test_jmp_s_leaves_in_the_default_configuration():
    loss_scale = DynamicLossScale(jnp.float32(2.0**15), jnp.int32(3))
    leaves = jax.tree.leaves(loss_scale)
    assert [leaf.item() for leaf in leaves] == [2.0**15, 3]
    assert [leaf.dtype for leaf in leaves] == [jnp.float32, jnp.int32]
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(DynamicLossScale(8, 1)))
    assert len(jax.tree.leaves(DynamicLossScale(hysteresis=2))) == 3
    assert jax.tree.leaves([NoOpLossScale(), StaticLossScale(2.0)]) == []
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(ALL[3])]
    assert paths == [".loss_scale", ".counter", ".overflows"]


def same(a, b):
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        np.array_equal(x, y) and x.dtype == y.dtype
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.mark.parametrize("loss_scale", ALL, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize(
    "trip",
    [
        jax.jit(lambda x: x),
        lambda x: jax.tree.map(lambda leaf: leaf, x),
        lambda x: pickle.loads(pickle.dumps(x)),
        copy.deepcopy,
        lambda x: jax.tree.unflatten(jax.tree.structure(x), jax.tree.leaves(x)),
        lambda x: jax.tree.map(lambda leaf: leaf[0], jax.vmap(lambda _: x)(jnp.arange(2))),
        lambda x: jax.lax.cond(True, lambda: x, lambda: x),
    ],
    ids=["jit", "tree.map", "pickle", "deepcopy", "unflatten", "vmap", "cond"],
)
def test_nothing_is_lost_on_a_round_trip(loss_scale, trip):
    returned = trip(loss_scale)
    assert same(returned, loss_scale)
    assert same(returned.adjust(jnp.asarray(False)), loss_scale.adjust(jnp.asarray(False)))
    for field in dataclasses.fields(loss_scale):
        assert getattr(returned, field.name) == getattr(loss_scale, field.name)


def test_a_tree_of_anything_but_numbers_may_have_its_structure():
    # Masks, shardings, shapes and in_axes are made so; none of them is a loss scale's value.
    for value in (None, False, 0, "replicated", object()):
        mapped = jax.tree.map(lambda _, value=value: value, ALL[3])
        assert mapped.loss_scale is value
    shapes = jax.eval_shape(lambda x: x.adjust(jnp.asarray(True)), ALL[3])
    assert shapes.counter.dtype == jnp.int32


@pytest.mark.parametrize("loss_scale", ALL, ids=lambda x: type(x).__name__)
def test_adjusting_traces_once_and_keeps_dtypes(loss_scale):
    traces = []

    @jax.jit
    def adjust(loss_scale, finite):
        traces.append(None)
        return loss_scale.adjust(finite)

    structure = jax.tree.structure(loss_scale)
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(loss_scale)]
    for finite in (True, True, True, True, False, False, True):
        loss_scale = adjust(loss_scale, jnp.asarray(finite))
        assert jax.tree.structure(loss_scale) == structure
        assert [leaf.dtype for leaf in jax.tree.leaves(loss_scale)] == dtypes
    assert len(traces) == 1
    assert adjust._cache_size() == 1


def test_replace_checks_and_converts():
    loss_scale = dataclasses.replace(DynamicLossScale(), loss_scale=1024)
    assert loss_scale.loss_scale.dtype == jnp.float32
    with pytest.raises(ValueError, match="loss_scale is -1"):
        dataclasses.replace(loss_scale, loss_scale=-1)


def test_it_can_be_built_while_tracing():
    built = jax.jit(lambda s, c: DynamicLossScale(s, c).adjust(True))(jnp.float32(4), jnp.int32(1))
    assert float(built.loss_scale) == 4.0
    assert int(built.counter) == 2


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("loss_scale", ALL[1:], ids=lambda x: type(x).__name__)
def test_scaling_is_in_float32_and_exact(loss_scale, dtype):
    x = jnp.asarray([1.5, -3.0, 0.0, -0.0, 6e-8, 60000.0], dtype)
    scaled = loss_scale.scale({"x": x, "n": jnp.arange(2), "key": jax.random.key(0), "s": "s"})
    assert scaled["x"].dtype == jnp.float32
    assert np.array_equal(scaled["x"], np.float32(x) * np.float32(loss_scale.loss_scale))
    assert scaled["n"].dtype == jnp.int32
    back = loss_scale.unscale(scaled)["x"]
    assert np.asarray(back).tobytes() == np.asarray(x).astype(np.float32).tobytes()


def test_unscaling_by_the_largest_scale_flushes_nothing():
    # 1 / 2**127 is subnormal in float32.
    loss_scale = StaticLossScale(2.0**127)
    assert float(loss_scale.unscale(jnp.float32(2.0**100))) == 2.0**-27


def test_scaling_keeps_what_is_wider_and_what_is_not_finite():
    loss_scale = StaticLossScale(4.0)
    with jax.enable_x64(True):
        assert loss_scale.unscale(jnp.ones((), jnp.float64)).dtype == jnp.float64
    assert loss_scale.unscale(jnp.ones((), jnp.complex64)).dtype == jnp.complex64
    assert float(loss_scale.scale(2.0)) == 8.0
    unscaled = loss_scale.unscale(jnp.asarray([jnp.inf, -jnp.inf, jnp.nan], jnp.float16))
    assert not jnp.isfinite(unscaled).any()


def test_no_op_gives_back_what_it_was_given():
    tree = {"x": jnp.ones(2, jnp.float16)}
    loss_scale = NoOpLossScale()
    assert loss_scale.scale(tree) is tree
    assert loss_scale.unscale(tree) is tree
    assert loss_scale.adjust(jnp.asarray(False)) is loss_scale
    assert loss_scale.loss_scale == 1
    assert ALL[1].adjust(jnp.asarray(False)) is ALL[1]


NUMBERS = [0, 0.0, -1.0, math.nan, math.inf, True]
NONSENSE = [*NUMBERS, np.bool_(False), "two", None, [2.0], 1e39, 1e-50, *map(jnp.asarray, NUMBERS)]


@pytest.mark.parametrize("value", NONSENSE, ids=repr)
@pytest.mark.parametrize("make", [StaticLossScale, DynamicLossScale])
def test_a_scale_that_makes_no_sense_is_refused(make, value):
    with pytest.raises(ValueError, match="loss_scale is .* but it must be"):
        make(value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"period": 0}, "period is 0.0, but it counts steps: write an integer >= 1"),
        ({"period": 1.5}, "period is 1.5"),
        ({"period": True}, "period is True, but it must be a number"),
        ({"hysteresis": 0}, "hysteresis is 0.0"),
        ({"counter": -1}, "counter is -1.0"),
        ({"counter": 5, "period": 5}, "counter is 5, but .* period, which is 5.* write 0"),
        ({"factor": 1}, "factor is 1.0, but the scale grows by it: write a number over 1"),
        ({"factor": 0.5}, "factor is 0.5"),
        ({"factor": math.nan}, "factor is nan, but it must be positive and finite"),
        ({"backoff_factor": 1.0}, "backoff_factor is 1.0, but the scale shrinks by it.*say 0.5"),
        ({"backoff_factor": 0}, "backoff_factor is 0.0, but it must be positive"),
        ({"min_loss_scale": -1}, "min_loss_scale is -1.0, but it must be positive"),
        ({"counter": 2**40, "period": 2**41}, "counter is .*, but it counts .* <= 2147483647"),
        ({"hysteresis": 2**31}, "hysteresis is .*an integer >= 1 and <= 2147483647"),
        ({"period": math.inf}, "period is inf, but it counts steps"),
        ({"min_loss_scale": 8, "max_loss_scale": 4}, "min_loss_scale is 8.0 and max_loss_scale"),
        ({"loss_scale": 0.5}, "loss_scale is 0.5, but min_loss_scale is 1.0.* start between"),
        ({"max_loss_scale": 4.0}, "loss_scale is 65536.0.*max_loss_scale is 4.0"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        DynamicLossScale(**arguments)


def test_structure_must_be_known_when_tracing():
    with pytest.raises(ValueError, match="period is a traced value.*outside jit"):
        jax.jit(lambda period: DynamicLossScale(period=period))(3)


@pytest.mark.parametrize("finite", [jnp.ones(2, bool), jnp.float32(1)])
def test_adjust_takes_a_boolean_scalar(finite):
    with pytest.raises(ValueError, match="grads_finite must be one boolean .*all_finite"):
        DynamicLossScale().adjust(finite)


def test_a_period_that_never_ends():
    loss_scale = DynamicLossScale(8.0, counter=2**31 - 2, period=2**31)
    for _ in range(3):
        loss_scale = loss_scale.adjust(jnp.asarray(True))
        assert (float(loss_scale.loss_scale), int(loss_scale.counter)) == (8.0, 2**31 - 1)
    longest = DynamicLossScale(8.0, counter=2**31 - 2, period=2**31 - 1)
    assert float(longest.adjust(jnp.asarray(True)).loss_scale) == 16.0


def test_no_floor_is_float32_s_own():
    """Below it, gradients could not be divided by the scale."""
    loss_scale = DynamicLossScale(2.0**-120, factor=2.0**4, min_loss_scale=0)
    assert loss_scale.min_loss_scale == 0
    for _ in range(4):
        loss_scale = loss_scale.adjust(jnp.asarray(False))
    assert float(loss_scale.loss_scale) == 2.0**-126
    assert float(loss_scale.unscale(loss_scale.scale(jnp.float32(1.5)))) == 1.5


@pytest.mark.usefixtures("standard_promotion")  # for optax.adam
@pytest.mark.parametrize("loss_scale", ALL, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("steps", [0, 3])
def test_flax_serializes_a_state_with_it(loss_scale, steps):
    optimizer = mixed_precision(optax.adam(1e-3), loss_scale, master="kahan")
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    start = TrainState.create(apply_fn=None, params=params, tx=optimizer)
    state = start
    for _ in range(steps):
        _, opt_state = optimizer.update({"w": jnp.full(3, jnp.inf)}, state.opt_state, params)
        state = state.replace(opt_state=opt_state)
    back = flax.serialization.from_bytes(start, flax.serialization.to_bytes(state))
    assert jax.tree.structure(back) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, back, state)


def test_flax_restores_no_other_loss_scale():
    saved = flax.serialization.to_bytes(DynamicLossScale(hysteresis=2))
    with pytest.raises(ValueError, match="has the leaves loss_scale, counter, but .* overflows"):
        flax.serialization.from_bytes(DynamicLossScale(), saved)
    with pytest.raises(ValueError, match="NoOpLossScale of these settings has the leaves none"):
        flax.serialization.from_bytes(NoOpLossScale(), saved)
