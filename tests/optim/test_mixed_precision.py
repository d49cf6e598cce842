"""One atomic step: the skip, the masters, and how it composes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jmp_kit
from jmp_kit import DynamicLossScale, NoOpLossScale, mixed_precision

# optax itself promotes: see the fixture.
pytestmark = pytest.mark.usefixtures("standard_promotion")

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(optax.linear_schedule(0.1, 0.0, 50), momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(1e-2),
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "adamw_half_mu": lambda: optax.adamw(1e-2, mu_dtype=jnp.bfloat16),
    "lion": lambda: optax.lion(1e-3, weight_decay=0.1),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2),
}

QUICK = ("lion", jnp.bfloat16), ("adafactor", jnp.float16)  # of the longest runs

optimizers = pytest.mark.parametrize("name", OPTIMIZERS)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: jnp.dtype(d).name)


def make_params(dtype):
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "w": jax.random.normal(keys[0], (4, 3), dtype),
        "zeros": jnp.asarray([0.0, -0.0, 1.0], dtype),
        "scalar": jnp.asarray(0.5, dtype),
        "none": None,
    }


def make_grads(params, step):
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(100 + step), len(leaves))
    return treedef.unflatten(
        [jax.random.normal(k, p.shape, jnp.float32) for k, p in zip(keys, leaves, strict=True)]
    )


def spoil(grads, leaf, value):
    leaves, treedef = jax.tree.flatten(grads)
    leaves[leaf] = leaves[leaf].at[(0,) * leaves[leaf].ndim].set(value)
    return treedef.unflatten(leaves)


def bits(tree):
    return [(np.asarray(x).dtype, np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


def make_step(optimizer):
    return jax.jit(one_step(optimizer))


def one_step(optimizer):
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


@optimizers
@dtypes
def test_an_overflow_changes_nothing_but_the_scale_and_the_counts(name, dtype):
    optimizer = mixed_precision(OPTIMIZERS[name](), DynamicLossScale(2.0**10))
    step = make_step(optimizer)
    params = make_params(dtype)
    state = optimizer.init(params)
    bad = [(leaf, value) for leaf in range(3) for value in (jnp.inf, -jnp.inf, jnp.nan)]
    skipped, scale = 0, 2.0**10
    for i in range(4):
        for leaf, value in bad if i in (0, 2) else ():
            before, old = (params, state.inner_state, state.master), state
            params, state = step(params, state, spoil(make_grads(params, i), leaf, value))
            skipped, scale = skipped + 1, max(scale / 2, 1)
            assert bits((params, state.inner_state, state.master)) == bits(before)
            assert not state.finite
            assert int(state.skipped) == skipped
            assert int(state.consecutive_skipped) == int(old.consecutive_skipped) + 1
            assert float(state.loss_scale.loss_scale) == scale
        before = bits(params)
        params, state = step(params, state, make_grads(params, i))
        assert state.finite
        assert int(state.consecutive_skipped) == 0
        assert bits(params) != before
        masters = jax.tree.map(lambda m: m.astype(dtype), state.master)
        assert dtype == jnp.float32 or bits(params) == bits(masters)
    assert step._cache_size() == 1


@optimizers
def test_what_was_skipped_leaves_no_trace(name):
    """A run with overflows ends where the run without them does."""
    optimizer = mixed_precision(OPTIMIZERS[name](), DynamicLossScale(2.0**10))
    step = make_step(optimizer)
    ends = []
    for overflow in (False, True):
        params = make_params(jnp.bfloat16)
        state = optimizer.init(params)
        for i in range(6):
            grads = make_grads(params, i)
            if overflow:
                params, state = step(params, state, spoil(grads, i % 3, jnp.nan))
            params, state = step(params, state, grads)
        ends.append(bits((params, state.inner_state, state.master)))
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(n, d, marks=[] if (n, d) in QUICK else [pytest.mark.slow])
        for n in OPTIMIZERS
        for d in DTYPES[1:]
    ],
)
def test_half_parameters_are_the_rounded_parameters_of_a_float32_run(name, dtype):
    """A thousand small steps of AdamW, fewer of others, each landing on the rounded master."""
    # The same compiled program in both runs, and what follows it operation by operation: fused,
    # the two would round differently, for XLA contracts a multiplication and an addition to one.
    inner = OPTIMIZERS[name]()
    inner = optax.GradientTransformation(inner.init, jax.jit(inner.update))
    optimizer = mixed_precision(inner, DynamicLossScale())
    step, full_step = one_step(optimizer), one_step(inner)
    params = make_params(dtype)
    full = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    state, full_state = optimizer.init(params), inner.init(full)
    many_grads = jax.jit(lambda i: jax.tree.map(lambda g: 1e-2 * g, make_grads(params, i)))
    for i in range(1000 if (name, dtype) == ("adamw", jnp.bfloat16) else 200):
        grads = many_grads(i)
        params, state = step(params, state, grads)
        full, full_state = full_step(full, full_state, grads)
        assert bits(state.master) == bits(full)
        assert bits(params) == bits(jax.tree.map(lambda f: f.astype(dtype), full))


@pytest.mark.parametrize(("dtype", "step"), [(jnp.bfloat16, 1e-3), (jnp.float16, 1e-4)])
def test_why_masters_exist(dtype, step):
    """A thousand steps of a thousandth move a parameter by one, or not at all."""
    ends = {}
    for master in ("float32", "none"):
        optimizer = mixed_precision(optax.sgd(step), master=master)
        params = jnp.ones((), dtype)
        state = optimizer.init(params)
        run = make_step(optimizer)
        for _ in range(1000):
            params, state = run(params, state, jnp.float32(-1))
        ends[master] = float(params)
    assert ends["none"] == 1.0
    np.testing.assert_allclose(ends["float32"], 1 + 1000 * step, rtol=1e-3)


def test_none_keeps_no_master_but_steps_in_float32():
    optimizer = mixed_precision(optax.adam(0.1), master="none")
    params = make_params(jnp.bfloat16)
    state = optimizer.init(params)
    assert jax.tree.leaves(state.master) == []
    assert {m.dtype for m in jax.tree.leaves(state.inner_state[0].mu)} == {jnp.dtype("float32")}
    params, state = make_step(optimizer)(params, state, make_grads(params, 0))
    assert params["w"].dtype == jnp.bfloat16


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([jnp.bfloat16, jnp.float16]),
    st.floats(-4.0, 4.0, width=32),
    st.floats(-4.0, 4.0, width=32),
    st.integers(-30, 0),
)
def test_the_parameter_is_the_rounded_master_wherever_it_lands(dtype, master, target, exponent):
    """Even where no float32 update leads from the one to the other, many binades down."""
    update = optax.stateless(lambda u, p: jax.tree.map(lambda u, p: u - p, u, p))
    optimizer = mixed_precision(update)
    full = jnp.float32(master)
    param = full.astype(dtype)
    state = optimizer.init(param)._replace(master=full)
    target = jnp.float32(target * 2.0**exponent)
    updates, state = optimizer.update(target, state, param)
    landed = optax.apply_updates(param, updates)
    assert landed == state.master.astype(dtype)
    np.testing.assert_allclose(state.master, target, atol=2.0**-22 * max(1, abs(master)))


def test_a_landing_that_float32_cannot_reach_moves_the_master():
    """float16 1.0 with its master just below, sent to -2**-24: -1 - 2**-24 is no float32."""
    param, full = jnp.float16(1), jnp.float32(1 - 2.0**-13)
    optimizer = mixed_precision(optax.stateless(lambda u, p: u))
    state = optimizer.init(param)._replace(master=full)
    updates, state = optimizer.update(jnp.float32(-(2.0**-24)) - full, state, param)
    landed = optax.apply_updates(param, updates)
    assert landed == state.master.astype(jnp.float16)
    assert abs(float(state.master) + 2.0**-24) <= 2.0**-24


def test_a_parameter_that_outgrew_float16_leaves_its_master_alone():
    optimizer = mixed_precision(optax.sgd(1.0))
    step = make_step(optimizer)
    params = {"w": jnp.float16(65024), "v": jnp.float16(1)}
    state = optimizer.init(params)
    for _ in range(2):
        params, state = step(params, state, {"w": jnp.float32(-5000), "v": jnp.float32(0)})
    assert float(params["w"]) == jnp.inf
    assert float(state.master["w"]) == 75024.0
    assert float(params["v"]) == 1.0


def test_one_tree_of_three_dtypes():
    params = {
        "full": jnp.ones(2),
        "half": jnp.ones(2, jnp.float16),
        "brain": jnp.ones(2, jnp.bfloat16),
    }
    optimizer = mixed_precision(optax.adamw(1e-3), DynamicLossScale())
    state = optimizer.init(params)
    assert state.master["full"] is None
    assert {state.master[k].dtype for k in ("half", "brain")} == {jnp.dtype(jnp.float32)}
    new, state = make_step(optimizer)(params, state, jax.tree.map(jnp.ones_like, params))
    assert jax.tree.map(lambda p: p.dtype, new) == jax.tree.map(lambda p: p.dtype, params)


@pytest.mark.parametrize("params", [{}, [], None, {"none": None}], ids=repr)
def test_an_empty_tree(params):
    optimizer = mixed_precision(optax.adam(1e-3), DynamicLossScale())
    state = optimizer.init(params)
    if params is not None:
        updates, state = optimizer.update(params, state, params)
        assert updates == params
        assert state.finite


def test_float64_and_complex_parameters_are_their_own_masters():
    with jax.enable_x64(True):
        params = {"d": jnp.ones(2, jnp.float64), "z": jnp.ones(2, jnp.complex64)}
        optimizer = mixed_precision(optax.sgd(0.1), DynamicLossScale())
        state = optimizer.init(params)
        new, state = make_step(optimizer)(params, state, params)
        assert jax.tree.leaves(state.master) == []
        assert new["d"].dtype == jnp.float64
        np.testing.assert_allclose(new["d"], 0.9, rtol=1e-15)
        same, state = make_step(optimizer)(new, state, spoil(params, 1, jnp.nan))
        assert bits(same) == bits(new)


@dtypes
@pytest.mark.parametrize("hysteresis", [1, 2])
def test_five_steps_with_an_overflow_and_a_growth_compile_once(dtype, hysteresis):
    optimizer = mixed_precision(
        optax.adamw(optax.cosine_decay_schedule(1e-3, 10)),
        DynamicLossScale(2.0**8, period=2, hysteresis=hysteresis),
    )
    traces = []

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, state, x):
        traces.append(None)

        def loss_fn(params):
            return jnp.sum(params["w"].astype(jnp.float32) * x) ** 2

        loss, grads = jmp_kit.value_and_grad(loss_fn, jmp_kit.loss_scale_of(state))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    params = {"w": jnp.ones((4, 3), dtype)}
    state = optimizer.init(params)
    dtypes = jax.tree.map(lambda x: x.dtype, state)
    scales = []
    for x in (1.0, 1.0, jnp.inf, jnp.inf, 1.0):
        params, state, _ = train_step(params, state, jnp.float32(x))
        scales.append(float(state.loss_scale.loss_scale))
        assert jax.tree.map(lambda x: x.dtype, state) == dtypes
    assert scales == ([256, 512, 256, 128, 128] if hysteresis == 1 else [256, 512, 512, 256, 256])
    assert len(traces) == 1
    assert train_step._cache_size() == 1
    assert jmp_kit.metrics(state)["skipped"] == 2


def test_a_donated_state_does_not_delete_the_loss_scale_it_began_with():
    loss_scale = DynamicLossScale()
    optimizer = mixed_precision(optax.sgd(0.1), loss_scale)
    step = jax.jit(optimizer.update, donate_argnums=1)
    for _ in range(2):
        params = jnp.ones(2)
        step(params, optimizer.init(params), params)
    assert float(loss_scale.loss_scale) == 2.0**16


@pytest.mark.parametrize("start", [1.0, jnp.asarray(1.0), np.float32(1)], ids=repr)
def test_a_weakly_typed_state_is_made_strong(start):
    weak = optax.GradientTransformation(lambda params: start, lambda u, s, p=None: (u, s * 2.0))
    optimizer = mixed_precision(weak)
    step = make_step(optimizer)
    params = jnp.ones(2)
    state = optimizer.init(params)
    for _ in range(3):
        params, state = step(params, state, jnp.ones(2))
    assert step._cache_size() == 1
    assert float(state.inner_state) == 8.0


def test_a_state_keeps_the_dtypes_it_began_with():
    """Moments that an optimizer widens, as optax's do, would compile a second program."""
    drifting = optax.GradientTransformation(
        lambda params: jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.bfloat16), params),
        lambda u, s, p=None: (u, jax.tree.map(lambda s, u: s.astype(jnp.float32) + u, s, u)),
    )
    optimizer = mixed_precision(drifting)
    step = make_step(optimizer)
    params = jnp.ones(2)
    state = optimizer.init(params)
    for _ in range(3):
        params, state = step(params, state, jnp.ones(2))
    assert state.inner_state.dtype == jnp.bfloat16
    assert float(state.inner_state[0]) == 3.0
    assert step._cache_size() == 1


@dtypes
def test_clipping_sees_true_gradients(dtype):
    """On either side of mixed_precision, whatever the loss scale."""
    params = make_params(dtype)
    ends = []
    for optimizer in (
        optax.chain(optax.clip_by_global_norm(0.1), mixed_precision(optax.sgd(0.5))),
        mixed_precision(optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5))),
        optax.chain(
            optax.clip_by_global_norm(0.1),
            mixed_precision(optax.sgd(0.5), DynamicLossScale(2.0**12)),
        ),
    ):
        state = optimizer.init(params)

        @jax.jit
        def step(params, state, optimizer=optimizer):
            def loss_fn(params):
                return sum(jnp.sum(p.astype(jnp.float32) ** 2) for p in jax.tree.leaves(params))

            scale = jmp_kit.loss_scale_of(state)
            grads = jmp_kit.grad(loss_fn, scale)(params)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates)

        ends.append(bits(step(params, state)))
    assert ends[0] == ends[1] == ends[2]


def test_a_skipped_step_does_not_advance_the_schedule():
    optimizer = mixed_precision(optax.sgd(optax.linear_schedule(1.0, 0.0, 4)))
    step = make_step(optimizer)
    params, state = jnp.float32(0), optimizer.init(jnp.float32(0))
    moves = []
    for grad in (-1, jnp.nan, jnp.nan, -1, -1):
        new, state = step(params, state, jnp.float32(grad))
        moves.append(float(new - params))
        params = new
    assert moves == [1.0, 0.0, 0.0, 0.75, 0.5]


def test_accumulation_leaves_an_overflowing_micro_batch_out():
    optimizer = mixed_precision(optax.MultiSteps(optax.sgd(1.0), 2), DynamicLossScale())
    step = make_step(optimizer)
    params = jnp.zeros((), jnp.bfloat16)
    state = optimizer.init(params)
    values = []
    for grad in (-1, jnp.inf, -3, -5, jnp.nan, -7):
        params, state = step(params, state, jnp.float32(grad))
        values.append(float(params))
    assert values == [0, 0, 2, 2, 2, 8]
    assert int(state.skipped) == 2
    assert step._cache_size() == 1


@pytest.mark.parametrize(
    "wrap",
    [
        lambda o: optax.MultiSteps(o, 2),
        lambda o: optax.MultiSteps(optax.chain(optax.clip(1.0), o), lambda step: step + 1),
        lambda o: optax.masked(optax.MultiSteps(o, 4).gradient_transformation(), {"w": True}),
    ],
)
@pytest.mark.parametrize("how", [lambda f: f, jax.jit, lambda f: lambda p: jax.eval_shape(f, p)])
def test_accumulation_around_it_is_refused(wrap, how):
    """One overflow would stay in the accumulator."""
    optimizer = wrap(mixed_precision(optax.sgd(1.0)))
    with pytest.raises(ValueError, match=r"other way round: mixed_precision\(optax.MultiSteps"):
        how(optimizer.init)({"w": jnp.zeros(2)})


def test_accumulation_of_one_step_around_it_is_warned_of():
    optimizer = optax.MultiSteps(mixed_precision(optax.sgd(1.0), DynamicLossScale()), 1)
    with pytest.warns(UserWarning, match="would stay in its accumulator") as warned:
        optimizer.init({"w": jnp.zeros(2)})
    assert {warning.filename for warning in warned} == {__file__}


def test_what_puts_the_loss_scale_back_is_refused():
    """`optax.apply_if_finite` around it; inside, it sees gradients that are finite."""
    params = {"w": jnp.zeros(2)}
    optimizer = optax.apply_if_finite(mixed_precision(optax.sgd(1.0), DynamicLossScale()), 5)
    with pytest.raises(ValueError, match="the loss scale would never fall"):
        optimizer.init(params)
    optimizer = mixed_precision(optax.apply_if_finite(optax.sgd(1.0), 5), DynamicLossScale(8.0))
    state = optimizer.init(params)
    _, state = optimizer.update({"w": jnp.full(2, jnp.inf)}, state, params)
    assert float(jmp_kit.loss_scale_of(state).loss_scale) == 4
    updates, _ = optimizer.update({"w": jnp.ones(2)}, state, params)
    assert np.asarray(updates["w"]).tolist() == [-1, -1]


def test_one_within_another_is_refused():
    inner = optax.chain(optax.clip(1.0), mixed_precision(optax.sgd(1.0)))
    with pytest.raises(ValueError, match="wraps a mixed_precision.*Wrap the optimizer once"):
        mixed_precision(inner, DynamicLossScale()).init({"w": jnp.zeros(2)})


def test_the_state_of_another_optimizer_is_refused():
    params = {"w": jnp.zeros(2)}
    state = optax.adam(1e-3).init(params)
    with pytest.raises(
        TypeError, match=r"type tuple, which another optimizer made.*init\(params\)"
    ):
        mixed_precision(optax.adam(1e-3)).update(params, state, params)


@pytest.mark.parametrize("inside", [True, False])
def test_injected_hyperparameters(inside):
    def make(learning_rate):
        return mixed_precision(optax.adam(learning_rate), DynamicLossScale())

    if inside:
        optimizer = mixed_precision(
            optax.inject_hyperparams(optax.adam)(learning_rate=1.0), DynamicLossScale()
        )
    else:
        optimizer = optax.inject_hyperparams(make)(learning_rate=1.0)
    step = make_step(optimizer)
    params = jnp.zeros(2, jnp.bfloat16)
    state = optimizer.init(params)
    params, state = step(params, state, jnp.ones(2))
    np.testing.assert_allclose(np.float32(params), -1.0, rtol=1e-2)
    (state.inner_state if inside else state).hyperparams["learning_rate"] = jnp.float32(0)
    still, state = step(params, state, jnp.ones(2))
    assert bits(still) == bits(params)
    assert float(jmp_kit.loss_scale_of(state).loss_scale) == 2.0**16


@pytest.mark.parametrize("outside", [True, False])
def test_several_optimizers_by_label(outside):
    params = {"a": jnp.ones(2, jnp.float16), "b": jnp.ones(2)}
    labels = {"a": "fast", "b": "slow"}
    inner = {"fast": optax.sgd(0.5), "slow": optax.adam(0.25)}
    if outside:
        optimizer = mixed_precision(optax.multi_transform(inner, labels), DynamicLossScale())
    else:
        optimizer = optax.multi_transform(
            {k: mixed_precision(o, DynamicLossScale()) for k, o in inner.items()}, labels
        )
    step = make_step(optimizer)
    state = optimizer.init(params)
    params, state = step(params, state, {"a": jnp.ones(2), "b": jnp.ones(2)})
    np.testing.assert_allclose(params["a"], 0.5)
    np.testing.assert_allclose(params["b"], 0.75, rtol=1e-5)
    params, state = step(params, state, {"a": jnp.ones(2), "b": jnp.full(2, jnp.nan)})
    # Together they skip together; apart each skips on its own overflow.
    np.testing.assert_allclose(params["a"], 0.5 if outside else 0.0)
    np.testing.assert_allclose(params["b"], 0.75, rtol=1e-5)


def test_a_frozen_part_stays_frozen():
    params = {"a": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(2, jnp.bfloat16)}
    optimizer = optax.masked(mixed_precision(optax.sgd(0.5)), {"a": True, "b": False})
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    assert bits(updates["b"]) == bits(params["b"])
    np.testing.assert_allclose(updates["a"], -0.5)


def test_flax_s_train_state():
    params = make_params(jnp.bfloat16)
    state = TrainState.create(
        apply_fn=None,
        params=params,
        tx=mixed_precision(optax.adam(1e-2), DynamicLossScale(2.0**10)),
    )
    apply = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))
    skipped = apply(state, spoil(make_grads(params, 0), 0, jnp.inf))
    assert bits(skipped.params) == bits(params)
    assert float(jmp_kit.loss_scale_of(skipped).loss_scale) == 2.0**9
    stepped = apply(skipped, make_grads(params, 0))
    assert bits(stepped.params) != bits(params)


def test_extra_arguments_reach_the_inner_optimizer():
    def update(updates, state, params=None, *, value, **_):
        return jax.tree.map(lambda u: u * value, updates), state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    optimizer = mixed_precision(inner)
    params = jnp.ones(2)
    updates, _ = optimizer.update(params, optimizer.init(params), params, value=3.0)
    np.testing.assert_array_equal(updates, 3.0)
    accumulating = mixed_precision(optax.MultiSteps(inner, 1))
    updates, _ = accumulating.update(params, accumulating.init(params), params, value=3.0)
    np.testing.assert_array_equal(updates, 3.0)


@pytest.mark.parametrize("axes", ["x", ("x", "y")])
def test_every_device_takes_the_same_decision(axes):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = P(axes)
    optimizer = mixed_precision(optax.sgd(0.5), DynamicLossScale(2.0**8), axis_name=axes)

    def shard_step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = jnp.ones((8,), jnp.bfloat16)
    state = optimizer.init(params)
    specs = jax.tree.map(lambda x: spec if x.shape == (8,) else P(), state)
    step = jax.jit(
        jax.shard_map(shard_step, mesh=mesh, in_specs=(spec, specs, spec), out_specs=(spec, specs))
    )
    skipped, after = step(params, state, jnp.ones(8).at[5].set(jnp.inf))
    assert bits(skipped) == bits(params)
    assert float(after.loss_scale.loss_scale) == 2.0**7
    stepped, after = step(skipped, after, jnp.ones(8))
    np.testing.assert_array_equal(np.float32(stepped), 0.5)
    assert int(after.skipped) == 1


def test_pmap():
    optimizer = mixed_precision(optax.sgd(0.5), DynamicLossScale(2.0**8), axis_name="i")

    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state.finite

    params = jnp.ones(3)
    update = jax.pmap(step, axis_name="i", in_axes=(None, None, 0))
    new, finite = update(params, optimizer.init(params), jnp.ones((8, 3)).at[2, 1].set(jnp.nan))
    assert not finite.any()
    np.testing.assert_array_equal(new, 1.0)


def test_sharded_parameters_under_jit_need_nothing():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, P("x"))
    params = jax.device_put(jnp.ones((16, 4), jnp.bfloat16), sharding)
    optimizer = mixed_precision(optax.adam(0.5), DynamicLossScale(2.0**8))
    state = jax.jit(optimizer.init)(params)
    assert state.master.sharding.is_equivalent_to(sharding, 2)
    step = make_step(optimizer)
    params, state = step(params, state, jnp.ones((16, 4)).at[9].set(jnp.nan))
    assert not state.finite
    assert state.master.sharding.is_equivalent_to(sharding, 2)


def test_the_step_has_no_branch_and_no_callback():
    optimizer = mixed_precision(optax.adamw(1e-3), DynamicLossScale(hysteresis=2))
    params = make_params(jnp.float16)
    text = str(jax.make_jaxpr(optimizer.update)(params, optimizer.init(params), params))
    for primitive in ("cond[", "while[", "callback", "infeed"):
        assert primitive not in text


@pytest.mark.parametrize("master", ["float32", "none"])
def test_the_program_holds_no_cast_that_excess_precision_could_leave_out(master):
    """Nothing is rounded by a cast down, and what a cast widens is rounded once more."""
    optimizer = mixed_precision(optax.sgd(1e-3), master=master)
    params = jnp.ones(4, jnp.bfloat16)
    jaxpr = jax.make_jaxpr(optimizer.update)(jnp.ones(4), optimizer.init(params), params).jaxpr
    casts = [e for e in jaxpr.eqns if e.primitive.name == "convert_element_type"]
    assert not [e for e in casts if e.outvars[0].aval.dtype == jnp.bfloat16]
    widened = [e.outvars[0] for e in casts if e.invars[0].aval.dtype == jnp.bfloat16]
    assert widened
    for cast in widened:
        consumers = [e.primitive.name for e in jaxpr.eqns if cast in e.invars]
        assert consumers == ["reduce_precision"]


def test_abstract_initialisation():
    optimizer = mixed_precision(optax.adam(1e-3), DynamicLossScale(hysteresis=3))
    params = make_params(jnp.float16)
    shapes = jax.eval_shape(optimizer.init, params)
    state = optimizer.init(params)
    assert jax.tree.structure(shapes) == jax.tree.structure(state)


def test_under_strict_promotion():
    optimizer = mixed_precision(optax.sgd(0.5, momentum=0.9), DynamicLossScale())
    params = {"w": jnp.ones(2), "b": jnp.ones(2, jnp.bfloat16)}
    with jax.numpy_dtype_promotion("strict"):
        updates, state = optimizer.update(params, optimizer.init(params), params)
    assert updates["b"].dtype == jnp.float32
    assert state.finite
    half = mixed_precision(optax.stateless(lambda u, p: jmp_kit.cast_to_half(u)))
    with jax.numpy_dtype_promotion("strict"):
        updates, _ = half.update(params, half.init(params), params)
        optax.apply_updates(params["w"], updates["w"])
    assert {u.dtype for u in jax.tree.leaves(updates)} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: mixed_precision(3e-4), TypeError, "wraps an optimizer, but got 0.0003.*adamw"),
        (
            lambda: mixed_precision(optax.sgd(0.1), 2.0**15),
            TypeError,
            "loss scale is 32768.0, which cannot adjust itself.*StaticLossScale",
        ),
        (
            lambda: mixed_precision(optax.sgd(0.1), master="fp32"),
            ValueError,
            "master is 'fp32', which is no way .* one of 'float32', 'remainder', 'kahan', 'sto",
        ),
        (
            lambda: (o := mixed_precision(optax.sgd(0.1))).update(jnp.ones(2), o.init(jnp.ones(2))),
            ValueError,
            r"needs the parameters.*optimizer.update\(grads, opt_state, params\)",
        ),
    ],
)
def test_bad_input_teaches(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_no_loss_scale_is_the_default():
    state = mixed_precision(optax.sgd(0.1)).init(jnp.ones(2))
    assert state.loss_scale == NoOpLossScale()
