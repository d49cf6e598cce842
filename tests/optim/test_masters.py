"""Every way of keeping the precision of a 16-bit parameter, held against a float32 run."""

import functools
import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jmp_kit
from jmp_kit import DynamicLossScale, mixed_precision
from tests.compiling import OPTIMISED

# optax itself promotes: see the fixture.
pytestmark = pytest.mark.usefixtures("standard_promotion")

MASTERS = ["float32", "remainder", "kahan", "stochastic", "none"]
WAYS = [
    pytest.param(master, dtype, id=f"{master}-{jnp.dtype(dtype).name}")
    for master in MASTERS
    for dtype in (jnp.bfloat16, jnp.float16)
    if not (master == "remainder" and dtype == jnp.float16)
]
ways = pytest.mark.parametrize(("master", "dtype"), WAYS)
# All of them in one half, in the other the slow tests try them.
some_ways = pytest.mark.parametrize(
    ("master", "dtype"),
    [
        pytest.param(*way.values, marks=[] if way.values[1] == jnp.bfloat16 else [pytest.mark.slow])
        for way in WAYS
    ],
)


def bits(tree):
    return [(np.asarray(x).dtype, np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


def one_step(optimizer):
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def make_params(dtype):
    key = jax.random.key(0)
    return {
        "w": jax.random.normal(key, (17, 5)).astype(dtype),
        "b": jnp.zeros(3, dtype),
        "scalar": jnp.asarray(0.5, dtype),
        "full": jnp.ones(2),
        "none": None,
    }


def make_grads(params, step, size=1.0):
    key = jax.random.fold_in(jax.random.key(7), step)
    return jax.tree.map(lambda p: size * jax.random.normal(key, p.shape), params)


def rounded(master, full, dtype):
    """The parameter that belongs to a master."""
    if master == "remainder" and dtype == jnp.bfloat16:
        return jmp_kit.split_float32(full)[0]
    return full.astype(dtype)


@some_ways
def test_an_overflow_changes_not_a_bit(master, dtype):
    optimizer = mixed_precision(
        optax.adamw(1e-2), DynamicLossScale(), master=master, moment_dtype="bfloat16"
    )
    step = jax.jit(one_step(optimizer))
    params = make_params(dtype)
    state = optimizer.init(params)
    for i in range(3):
        grads = make_grads(params, i)
        params, state = step(params, state, grads)
        bad = {**grads, "b": grads["b"].at[1].set((jnp.inf, -jnp.inf, jnp.nan)[i])}
        same, skipped = step(params, state, bad)
        assert bits(same) == bits(params)
        for field in ("inner_state", "master", "key"):
            assert bits(getattr(skipped, field)) == bits(getattr(state, field))
        assert not skipped.finite
        state = skipped
    assert step._cache_size() == 1


@ways
def test_the_parameter_and_what_is_kept_are_the_master(master, dtype):
    optimizer = mixed_precision(optax.sgd(1e-2), master=master)
    # Without LLVM's optimisations JAX 0.10 gives a float16 Kahan master that is off.
    step = jax.jit(one_step(optimizer), compiler_options=OPTIMISED)
    params = make_params(dtype)
    state = optimizer.init(params)
    assert bits(jmp_kit.master_params(state, params)) == bits(
        jax.tree.map(lambda p: p.astype(jnp.float32), params)
    )
    for i in range(30):
        params, state = step(params, state, make_grads(params, i))
        full = jmp_kit.master_params(state, params)
        assert {x.dtype for x in jax.tree.leaves(full)} == {jnp.dtype("float32")}
        again = jax.tree.map(lambda f, p: rounded(master, f, p.dtype), full, params)
        assert bits(again) == bits(params)


@pytest.mark.slow
def test_remainders_are_the_masters_of_a_float32_run_bit_for_bit():
    """A thousand AdamW steps, with overflows in between that the float32 run never sees."""
    # The same compiled inner update in both runs, and the rest operation by operation: fused, XLA
    # would contract multiplications and additions differently in two different programs.
    inner = optax.adamw(1e-3, weight_decay=0.1)
    inner = optax.GradientTransformation(inner.init, jax.jit(inner.update))
    optimizer = mixed_precision(inner, DynamicLossScale(), master="remainder")
    step, full_step = one_step(optimizer), one_step(inner)
    params = {name: p for name, p in make_params(jnp.bfloat16).items() if name in ("w", "scalar")}
    full = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    state, full_state = optimizer.init(params), inner.init(full)
    overflows = np.random.default_rng(0).random(1000) < 0.05
    random_grads = jax.jit(lambda i: make_grads(full, i, 1e-2))
    for i in range(1000):
        grads = random_grads(i)
        if overflows[i]:
            bad = {**grads, "w": grads["w"].at[3, 2].set(jnp.inf)}
            params, state = step(params, state, bad)
        params, state = step(params, state, grads)
        full, full_state = full_step(full, full_state, grads)
        assert bits(jmp_kit.master_params(state, params)) == bits(full)
    assert int(state.skipped) == overflows.sum() > 30
    assert {m.dtype for m in jax.tree.leaves(state.master)} == {jnp.dtype("int16")}


@pytest.mark.parametrize(
    ("master", "moment_dtype", "expected"),
    [
        ("float32", None, 14),
        ("remainder", None, 12),
        ("kahan", None, 12),
        ("stochastic", None, 10),
        ("none", None, 10),
        ("float32", "bfloat16", 10),
        ("remainder", "bfloat16", 8),
        ("stochastic", "bfloat16", 6),
    ],
)
def test_bytes_a_parameter_with_adamw(master, moment_dtype, expected):
    """Of the state as it stands, and of what the compiled step takes in and gives out."""
    optimizer = mixed_precision(optax.adamw(1e-3), master=master, moment_dtype=moment_dtype)
    params = {"w": jnp.ones((256, 256), jnp.bfloat16)}
    state = optimizer.init(params)
    count = params["w"].size
    nbytes = sum(x.nbytes for x in jax.tree.leaves((params, state)))
    assert count * expected <= nbytes < count * expected + 100
    step = jax.jit(one_step(optimizer), donate_argnums=(0, 1))
    memory = step.lower(params, state, {"w": jnp.ones((256, 256))}).compile().memory_analysis()
    assert memory.output_size_in_bytes < count * expected + 300
    _, after = step(params, state, {"w": jnp.ones((256, 256))})
    assert sum(x.nbytes for x in jax.tree.leaves(after)) == nbytes - 2 * count


@some_ways
def test_steps_in_one_program_are_steps_one_by_one(master, dtype):
    """XLA may leave out the cast of a parameter between two steps of one program."""
    optimizer = mixed_precision(optax.sgd(1e-3), master=master)
    step = one_step(optimizer)

    def four(params, state, grads):
        for _ in range(4):
            params, state = step(params, state, grads)
        return params, state

    params = make_params(dtype)
    grads = make_grads(params, 0)
    params_one, state_one = params, optimizer.init(params)
    for _ in range(4):
        params_one, state_one = jax.jit(step)(params_one, state_one, grads)
    params_all, state_all = jax.jit(four)(params, optimizer.init(params), grads)
    assert bits(params_all) == bits(params_one)
    assert bits(state_all) == bits(state_one)


@pytest.mark.parametrize(("dtype", "bits"), [(jnp.bfloat16, 17), (jnp.float16, 20)])
def test_how_much_kahan_keeps(dtype, bits):
    """Half a step of the parameter and 9 bits of the bfloat16 beside it; a tie costs one more."""
    full = jnp.asarray(np.random.default_rng(0).uniform(0.1, 4, 100_000), jnp.float32)
    state = {"params": full, "opt_state": mixed_precision(optax.identity()).init(full)}
    like = full.astype(dtype)
    half = {
        "params": like,
        "opt_state": mixed_precision(optax.identity(), master="kahan").init(like),
    }
    half = jmp_kit.convert_precision(state, half, exact=False)
    kept = jmp_kit.master_params(half["opt_state"], half["params"])
    errors = np.sort(np.abs(np.asarray(kept / full - 1)))
    assert errors[-1] <= 2.0 ** (1 - bits)
    assert errors[99_000] <= 2.0**-bits


def distance(a, b):
    return float(optax.tree.norm(jax.tree.map(jnp.subtract, a, b)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_nearer_than_plain_rounding_on_a_quadratic(dtype):
    """Gradient descent on a quadratic: at most half of plain rounding's distance from float32."""
    curvature = jnp.logspace(-3, 0, 1000)
    params = jax.random.normal(jax.random.key(0), (1000,)).astype(dtype)

    def end(params, **kwargs):
        optimizer = mixed_precision(optax.sgd(1e-2, momentum=0.9), **kwargs)

        @jax.jit
        def run(params, state):
            def step(_, carry):
                params, state = carry
                grads = curvature * jmp_kit.cast_to_full(params)
                return one_step(optimizer)(params, state, grads)

            return jax.lax.fori_loop(0, 500, step, (params, state))

        params, state = run(params, optimizer.init(params))
        return jmp_kit.master_params(state, params)

    reference = end(params.astype(jnp.float32))
    plain = distance(end(params, master="none"), reference)
    for way in ("kahan", "stochastic"):
        assert distance(end(params, master=way), reference) <= plain / 2, way


@pytest.mark.slow
def test_nearer_than_plain_rounding_on_digits(tmp_path):
    """100 steps of the digits network: at most half of plain rounding's distance from float32."""
    picture = runpy.run_path(str(pathlib.Path(__file__).parents[2] / "docs" / "masters.py"))
    found = picture["distances"](
        optax.adamw(1e-4), "bfloat16", 100, ("none", "kahan", "stochastic")
    )
    for way in ("kahan", "stochastic"):
        assert found[way][-1] <= found["none"][-1] / 2, way
    picture["draw"](found, tmp_path / "masters.png")


def test_a_run_is_repeated_by_its_seed():
    ends = []
    for seed in (0, 0, 1, np.int64(1)):
        optimizer = mixed_precision(optax.sgd(1e-3), master="stochastic", seed=seed)
        step = jax.jit(one_step(optimizer))
        params = make_params(jnp.bfloat16)
        state = optimizer.init(params)
        for i in range(5):
            params, state = step(params, state, make_grads(params, i))
        ends.append(bits((params, state)))
    assert ends[0] == ends[1] != ends[2] == ends[3]


def test_the_seed_does_not_depend_on_the_generator_in_use():
    optimizer = mixed_precision(optax.sgd(1e-3), master="stochastic", seed=3)
    params = make_params(jnp.bfloat16)
    one = one_step(optimizer)(params, optimizer.init(params), make_grads(params, 0))
    with jax.default_prng_impl("rbg"):
        other = one_step(optimizer)(params, optimizer.init(params), make_grads(full(params), 0))
    assert other[1].key.shape == one[1].key.shape
    assert bits(other[1].key) == bits(one[1].key)


def full(params):
    return jax.tree.map(lambda p: p.astype(jnp.float32), params)


def test_every_leaf_is_rounded_with_draws_of_its_own():
    optimizer = mixed_precision(optax.sgd(1.0), master="stochastic")
    params = {name: jnp.ones(4000, jnp.bfloat16) for name in "ab"}
    grads = {name: jnp.full(4000, -(2.0**-8)) for name in "ab"}
    params, state = one_step(optimizer)(params, optimizer.init(params), grads)
    assert (params["a"] != params["b"]).mean() > 0.4
    again, _ = one_step(optimizer)({n: jnp.ones(4000, jnp.bfloat16) for n in "ab"}, state, grads)
    assert (params["a"] != again["a"]).mean() > 0.4


def test_replicated_parameters_are_rounded_alike_on_every_device():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    optimizer = mixed_precision(optax.sgd(1e-3), master="stochastic", axis_name="x")
    params = jnp.ones(1000, jnp.bfloat16)
    state = optimizer.init(params)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("x")), out_specs=P("x"), check_vma=False
    )
    def step(params, state, grads):
        params, _ = one_step(optimizer)(params, state, jax.lax.pmean(grads[0], "x"))
        return params[None]

    ends = np.asarray(step(params, state, jnp.ones((8, 1000))), np.float32)
    assert (ends == ends[0]).all()
    assert len(np.unique(ends[0])) == 2


def test_sharded_parameters_are_rounded_as_on_one_device():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    optimizer = mixed_precision(
        optax.adamw(1e-3), master="stochastic", moment_dtype="bfloat16", seed=5
    )
    params = jnp.linspace(-1, 1, 64).astype(jnp.bfloat16).reshape(16, 4)
    grads = jnp.sin(jnp.arange(64.0)).reshape(16, 4)
    step = jax.jit(one_step(optimizer))
    one = step(params, optimizer.init(params), grads)
    sharding = jax.NamedSharding(mesh, P("x"))
    params, grads = jax.device_put((params, grads), sharding)
    many = step(params, jax.jit(optimizer.init)(params), grads)
    assert bits(many) == bits(one)
    assert many[0].sharding.is_equivalent_to(sharding, 2)


def test_float16_has_no_remainder():
    optimizer = mixed_precision(optax.sgd(1e-3), master="remainder")
    params = {"ok": jnp.ones(2, jnp.bfloat16), "w": {"k": jnp.ones(2, jnp.float16)}}
    with pytest.raises(ValueError, match=r"\['w'\]\['k'\] is float16.*\"float32\".*\"kahan\""):
        optimizer.init(params)


@pytest.mark.parametrize(
    ("then", "now", "words"),
    [
        (jnp.ones(3), jnp.ones(3, jnp.bfloat16), r"\['w'\] is bfloat16\[3\], .* is nothing"),
        (jnp.ones(3, jnp.bfloat16), jnp.ones(3), r"\['w'\] is float32\[3\], .* int16\[3\]"),
        (jnp.ones(3, jnp.bfloat16), jnp.ones(2, jnp.bfloat16), r".* bfloat16\[2\], .* int16\[3\]"),
    ],
)
def test_a_state_made_before_the_cast_is_noticed(then, now, words):
    optimizer = mixed_precision(optax.sgd(0.1), master="remainder")
    state = optimizer.init({"w": then})
    with pytest.raises(ValueError, match=f"made for other parameters: {words}.*cast_to_param"):
        optimizer.update({"w": jnp.ones_like(now)}, state, {"w": now})


def test_a_weight_that_outgrew_float16_can_still_be_had():
    """The parameter stays infinite, which the next loss will show, but the master is a number."""
    optimizer = mixed_precision(optax.sgd(1.0))
    step = jax.jit(one_step(optimizer))
    params = jnp.float16(65000)
    state = optimizer.init(params)
    for grad, master in ((-5000, 69992), (20000, 49992), (100, 49892)):
        params, state = step(params, state, jnp.float32(grad))
        assert float(params) == jnp.inf
        assert float(jmp_kit.master_params(state, params)) == master


def test_gradients_that_float32_cannot_hold_are_not_finite():
    with jax.enable_x64(True):
        optimizer = mixed_precision(optax.sgd(1.0))
        params = jnp.ones(2)
        params = params.astype(jnp.float32)
        _, state = optimizer.update(jnp.full(2, 1e300), optimizer.init(params), params)
        assert not state.finite


def test_remainders_round_exact_ties_the_other_way_and_nothing_else():
    """So their forward pass reads another parameter there, and runs part."""
    low = np.concatenate([np.arange(-5, 6) + (1 << 15), np.arange(0, 1 << 16, 257)])
    bits_of = (np.arange(0x3F7E, 0x3F83)[:, None] << 16) + low
    full = {"w": jnp.asarray(bits_of.astype(np.uint32).view(np.float32))}
    masters = {
        name: mixed_precision(optax.identity(), master=name) for name in ("float32", "remainder")
    }
    inits = {}
    for name, optimizer in masters.items():
        like = {"params": {"w": full["w"].astype(jnp.bfloat16)}}
        like["opt_state"] = optimizer.init(like["params"])
        exact = {"params": full, "opt_state": mixed_precision(optax.identity()).init(full)}
        inits[name] = jmp_kit.convert_precision(exact, like)
        kept = jmp_kit.master_params(inits[name]["opt_state"], inits[name]["params"])
        assert bits(kept) == bits(full)
    differs = np.asarray(inits["float32"]["params"]["w"] != inits["remainder"]["params"]["w"])
    is_tie = bits_of & 0xFFFF == 1 << 15
    is_even = bits_of >> 16 & 1 == 0
    np.testing.assert_array_equal(differs, is_tie & is_even)


def test_a_weight_that_nearly_cancels_takes_its_master_along():
    """No float32 update leads from 1 to the float16 nearest to -9e-7."""
    identity = optax.GradientTransformation(lambda p: (), lambda u, s, p: (u, s))
    optimizer = mixed_precision(identity)
    params = jnp.float16(1)
    state = optimizer.init(params)
    for update in (-9e-7, -1.0):
        updates, state = optimizer.update(jnp.float32(update), state, params)
        params = optax.apply_updates(params, updates)
    master = float(jmp_kit.master_params(state, params))
    assert float(params) == np.float16(master)
    assert abs(master + 9e-7) <= 2.0**-24  # float32's rounding of 1
    assert master != np.float32(np.float32(1 - 9e-7) - 1)


def test_a_skipped_step_flushes_subnormal_numbers_and_nothing_else():
    """On a CPU any sum does, and `apply_updates` is one."""
    tiny = np.array([1e-40, -1e-45, 1.2e-38, -0.0, 0.0, 1.0, 3e-39], np.float32)
    optimizer = mixed_precision(optax.adamw(0.1), DynamicLossScale())
    params = jnp.asarray(tiny)
    state = optimizer.init(params)
    updates, _ = optimizer.update(jnp.full(7, jnp.nan), state, params)
    assert np.asarray(updates).tobytes() == np.full(7, -0.0, np.float32).tobytes()
    after = np.asarray(jax.jit(optax.apply_updates)(params, updates))
    is_normal = (np.abs(tiny) >= np.finfo(np.float32).tiny) | (tiny == 0)
    assert after[is_normal].tobytes() == tiny[is_normal].tobytes()


@some_ways
def test_a_parameter_that_was_changed_outside_is_what_is_meant(master, dtype):
    """Weights loaded after init, tied, averaged: the master follows, within half a step of them."""
    optimizer = mixed_precision(optax.sgd(1e-3), master=master)
    state = optimizer.init({"w": jnp.full(2, 700.3, dtype)})
    params = {"w": jnp.array([3.0, 700.3], dtype)}
    full = jmp_kit.master_params(state, params)["w"]
    assert abs(float(full[0]) - 3) <= float(jnp.finfo(dtype).eps)
    updates, state = jax.jit(optimizer.update)({"w": jnp.ones(2)}, state, params)
    params = optax.apply_updates(params, updates)
    full = jmp_kit.master_params(state, params)["w"]
    half_a_step = 3 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(full[0], 3 - 1e-3, atol=half_a_step)
    if master == "float32":  # and is exact again from there
        assert float(full[0]) == np.float32(3) - np.float32(1e-3)


@some_ways
def test_clipped_weights_stay_within_their_limits(master, dtype):
    """As in WGAN: a master that went on outside would come back late."""
    optimizer = mixed_precision(optax.sgd(0.1), master=master)
    params = jnp.zeros((), dtype)
    state = optimizer.init(params)
    step = jax.jit(one_step(optimizer))
    for gradient, limit in [(1, -0.01)] * 10 + [(-1, 0.01)] * 2:
        params, state = step(params, state, jnp.float32(gradient))
        params = jnp.clip(params, -0.01, 0.01).astype(dtype)
        assert abs(float(params) - limit) < 1e-4


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("master", ["float32", "remainder", "kahan"])
def test_what_transforms_updates_afterwards_is_followed(master, dtype):
    def end(optimizer, params, steps, fast=lambda params: params):
        state = optimizer.init(params)
        for _ in range(steps):
            updates, state = optimizer.update(jnp.ones(()), state, params)
            params = optax.apply_updates(params, updates)
        return params

    optimizer = mixed_precision(optax.sgd(1.0), master=master)
    zero = jnp.zeros((), dtype)
    assert float(end(optax.chain(optimizer, optax.scale(0.5)), zero, 4)) == -2
    synced = optax.LookaheadParams.init_synced(zero)
    assert float(end(optax.lookahead(optimizer, 2, 0.5), synced, 6).slow) == -3


def test_lookahead_inside_says_what_to_write():
    params = optax.LookaheadParams.init_synced({"w": jnp.zeros(2)})
    with pytest.raises(ValueError, match=r"optax.lookahead\(mixed_precision\("):
        mixed_precision(optax.lookahead(optax.sgd(1.0), 2, 0.5)).init(params)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float4_e2m1fn])
@pytest.mark.parametrize("master", MASTERS)
def test_parameters_of_fewer_than_16_bits_are_refused(master, dtype):
    with pytest.raises(ValueError, match=rf"\['w'\] is {jnp.dtype(dtype)}, to which no update"):
        mixed_precision(optax.sgd(1e-3), master=master).init({"w": jnp.ones(2, dtype)})


@pytest.mark.parametrize("seed", [True, 0.5, "0", None])
def test_a_seed_is_an_integer(seed):
    with pytest.raises(ValueError, match="must be an integer: write seed=0"):
        mixed_precision(optax.sgd(0.1), master="stochastic", seed=seed)


STEPS = 10_000
PER_EXAMPLE = 400
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(1e-2, momentum=0.9),
    "adamw": lambda: optax.adamw(optax.cosine_decay_schedule(1e-2, 300), weight_decay=0.1),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3)),
    "lion": lambda: optax.lion(1e-3),
}


@st.composite
def runs(draw):
    """An optimizer, parameters, and which of its steps overflow."""
    master = draw(st.sampled_from(MASTERS))
    dtypes = [jnp.bfloat16, jnp.float32, *([] if master == "remainder" else [jnp.float16])]
    shapes = draw(
        st.lists(st.sampled_from([(), (1,), (5,), (3, 4), (0, 2)]), min_size=1, max_size=3)
    )
    tree = [(shape, draw(st.sampled_from(dtypes))) for shape in shapes]
    name = draw(st.sampled_from(sorted(OPTIMIZERS)))
    return {
        "master": master,
        "tree": tree,
        "name": name,
        "accumulate": draw(st.sampled_from([1, 1, 3])),
        "moment_dtype": draw(st.sampled_from([None, "bfloat16"])),
        "scale": {
            "loss_scale": 2.0 ** draw(st.integers(0, 20)),
            "period": draw(st.integers(1, 20)),
            "max_loss_scale": 2.0**22,
            "hysteresis": draw(st.integers(1, 3)),
        },
        "overflow_rate": draw(st.sampled_from([0.0, 0.05, 0.5, 0.9])),
        "seed": draw(st.integers(0, 2**31 - 1)),
    }


@pytest.mark.slow
@settings(
    max_examples=STEPS // PER_EXAMPLE,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(runs())
def test_ten_thousand_random_steps_keep_the_invariants(run):
    """Parameter equals rounded master, scale within its bounds, counts add up, one program."""
    inner = OPTIMIZERS[run["name"]]()
    if run["accumulate"] > 1:
        inner = optax.MultiSteps(inner, run["accumulate"])
    loss_scale = DynamicLossScale(**run["scale"])
    optimizer = mixed_precision(
        inner, loss_scale, master=run["master"], seed=run["seed"], moment_dtype=run["moment_dtype"]
    )
    random = np.random.default_rng(run["seed"])
    params = [jnp.asarray(random.normal(size=shape), dtype) for shape, dtype in run["tree"]]
    state = optimizer.init(params)
    types = jax.tree.map(lambda x: (x.shape, x.dtype), (params, state))
    step = jax.jit(one_step(optimizer))
    read = jax.jit(jmp_kit.master_params)
    adjust = jax.jit(lambda loss_scale, finite: loss_scale.adjust(finite))
    expected, skipped, in_a_row = loss_scale, 0, 0
    has_elements = any(np.prod(shape) for shape, _ in run["tree"])
    for _ in range(PER_EXAMPLE):
        overflow = has_elements and random.random() < run["overflow_rate"]
        grads = [random.normal(size=shape).astype(np.float32) for shape, _ in run["tree"]]
        if overflow:
            where = random.choice([i for i, (shape, _) in enumerate(run["tree"]) if np.prod(shape)])
            grads[where].reshape(-1)[0] = random.choice([np.inf, -np.inf, np.nan])
        before = (params, state.inner_state, state.master, state.key)
        params, state = step(params, state, grads)
        expected = adjust(expected, not overflow)
        skipped, in_a_row = skipped + overflow, in_a_row + 1 if overflow else 0
        assert bits(state.loss_scale) == bits(expected)
        assert 1 <= float(state.loss_scale.loss_scale) <= 2.0**22
        assert (int(state.skipped), int(state.consecutive_skipped)) == (skipped, in_a_row)
        assert bool(state.finite) is not overflow
        if overflow:
            assert bits((params, state.inner_state, state.master, state.key)) == bits(before)
        for param, full in zip(params, read(state, params), strict=True):
            assert bits(rounded(run["master"], full, param.dtype)) == bits(param)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), (params, state)) == types
    assert step._cache_size() == 1
