"""One precision made into another: exact where it can be, refused where it cannot."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jmp_kit
from jmp_kit import DynamicLossScale, convert_precision, mixed_precision

# optax itself promotes: see the fixture.
pytestmark = pytest.mark.usefixtures("standard_promotion")

FORMS = {
    "float32": (jnp.float32, "float32"),
    "bfloat16+float32": (jnp.bfloat16, "float32"),
    "bfloat16+remainder": (jnp.bfloat16, "remainder"),
    "float16+float32": (jnp.float16, "float32"),
    "bfloat16+kahan": (jnp.bfloat16, "kahan"),
    "float16+kahan": (jnp.float16, "kahan"),
    "bfloat16+stochastic": (jnp.bfloat16, "stochastic"),
    "float16+none": (jnp.float16, "none"),
}
EXACT = list(FORMS)[:4]


def make_optimizer(master, **kwargs):
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    return mixed_precision(inner, DynamicLossScale(2.0**10, period=3), master=master, **kwargs)


def trained(form, steps=5, **kwargs):
    """A state of that form after a few steps, one of which was skipped."""
    dtype, master = FORMS[form]
    optimizer = make_optimizer(master, **kwargs)
    params = {
        "w": jax.random.normal(jax.random.key(0), (4, 3)).astype(dtype),
        "nested": [jnp.zeros((), dtype), jnp.ones(2, jnp.float32)],
        "none": None,
    }
    opt_state = optimizer.init(params)
    for i in range(steps):
        value = jnp.nan if i == 2 else 0.37 * (i + 1)
        grads = jax.tree.map(lambda p, v=value: jnp.full(p.shape, v), params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    return {"params": params, "opt_state": opt_state, "step": steps}


def bits(tree):
    return [(np.asarray(x).dtype, np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


def weights(state):
    return bits(jmp_kit.master_params(state["opt_state"], state["params"]))


@pytest.mark.parametrize("target", EXACT)
@pytest.mark.parametrize("source", EXACT)
def test_what_is_exact_goes_there_and_back_bit_for_bit(source, target):
    state, like = trained(source), trained(target, steps=0)
    there = convert_precision(state, like)
    assert jax.tree.structure(there) == jax.tree.structure(like)
    assert jax.tree.map(jnp.result_type, there) == jax.tree.map(jnp.result_type, like)
    assert weights(there) == weights(state)
    assert bits(there["opt_state"].inner_state) == bits(state["opt_state"].inner_state)
    assert bits(there["opt_state"].loss_scale) == bits(state["opt_state"].loss_scale)
    assert int(there["opt_state"].skipped) == 1
    assert there["step"] == 5
    assert bits(convert_precision(there, trained(source, steps=0))) == bits(state)


@pytest.mark.parametrize("target", ["bfloat16+kahan", "bfloat16+stochastic", "float16+none"])
def test_what_is_not_exact_is_refused_or_rounded(target):
    state, like = trained("float32"), trained(target, steps=0, moment_dtype="bfloat16")
    with pytest.raises(ValueError, match=r"arrays cannot be kept exactly: .*/.* exact=False"):
        convert_precision(state, like)
    rounded = convert_precision(state, like, exact=False)
    dtype, _ = FORMS[target]
    assert bits(rounded["params"]["w"]) == bits(state["params"]["w"].astype(dtype))
    nu = rounded["opt_state"].inner_state[1][0].nu["w"]
    assert bits(nu) == bits(state["opt_state"].inner_state[1][0].nu["w"].astype(jnp.bfloat16))
    full = jmp_kit.master_params(rounded["opt_state"], rounded["params"])["w"]
    digits = 2.0**-16 if "kahan" in target else 2.0**-8
    np.testing.assert_allclose(full, state["params"]["w"], rtol=digits)


@pytest.mark.parametrize("form", FORMS)
def test_the_same_form_is_the_same_bits(form):
    state = trained(form, moment_dtype="bfloat16")
    assert bits(convert_precision(state, trained(form, 0, moment_dtype="bfloat16"))) == bits(state)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_opens_into_float32(form):
    state = trained(form, moment_dtype="bfloat16")
    full = convert_precision(state, trained("float32", steps=0))
    assert bits(full["params"]) == weights(state)
    assert full["params"]["w"].dtype == jnp.float32


def test_plain_optax_goes_on_with_mixed_precision_and_back():
    inner = optax.adamw(1e-2)
    params = {"w": jnp.linspace(-1, 1, 7)}
    plain_state = inner.init(params)
    for _ in range(3):
        updates, plain_state = inner.update(params, plain_state, params)
        params = optax.apply_updates(params, updates)
    plain = {"params": params, "opt_state": plain_state}
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    optimizer = mixed_precision(inner, DynamicLossScale(2.0**12), master="remainder")
    like = {"params": half, "opt_state": optimizer.init(half)}
    mixed = convert_precision(plain, like)
    assert weights(mixed) == bits(params)
    assert float(mixed["opt_state"].loss_scale.loss_scale) == 2.0**12
    assert bits(mixed["opt_state"].inner_state) == bits(plain_state)
    assert bits(convert_precision(mixed, plain)) == bits(plain)


def test_the_seed_starts_as_in_like_if_there_was_none_and_goes_on_if_there_was():
    like = trained("bfloat16+stochastic", steps=0, seed=5)
    fresh = convert_precision(trained("bfloat16+float32"), like, exact=False)
    assert bits(fresh["opt_state"].key) == bits(like["opt_state"].key)
    state = trained("bfloat16+stochastic", seed=9)
    assert bits(convert_precision(state, like)["opt_state"].key) == bits(state["opt_state"].key)


def test_train_states_and_other_places_for_the_parameters():
    def train_state(dtype, master):
        params = {"w": jnp.full(3, 0.3, dtype)}
        return TrainState.create(apply_fn=None, params=params, tx=make_optimizer(master))

    converted = convert_precision(
        train_state(jnp.float32, "float32").replace(step=4), train_state(jnp.bfloat16, "remainder")
    )
    assert converted.step == 4
    assert converted.params["w"].dtype == jnp.bfloat16
    a, b = (
        {"variables": {"params": s.params, "batch_stats": {"w": jnp.ones(3)}}, "opt": s.opt_state}
        for s in (train_state(jnp.float32, "float32"), train_state(jnp.bfloat16, "remainder"))
    )
    there = convert_precision(a, b, params=("variables", "params"))
    assert bits(there["variables"]["params"]) == bits(converted.params)


def test_several_optimizers_in_one_state():
    def state(dtype, master):
        params = {"a": jnp.full(3, 0.3, dtype), "b": jnp.full(3, 0.7, dtype)}
        parts = {name: mixed_precision(optax.adam(1e-3), master=master) for name in "ab"}
        optimizer = optax.multi_transform(parts, {"a": "a", "b": "b"})
        return {"params": params, "opt_state": optimizer.init(params)}

    full, half = state(jnp.float32, "float32"), state(jnp.bfloat16, "remainder")
    there = convert_precision(full, half)
    assert weights(there) == bits(full["params"])
    assert bits(convert_precision(there, full)) == bits(full)


def test_two_sets_of_parameters_are_converted_one_by_one():
    """As in a GAN. At the same precision nothing has to be told apart."""

    def part(dtype, master, value):
        optimizer = mixed_precision(optax.sgd(1e-3, momentum=0.9), master=master)
        params = {"w": jnp.full(3, value, dtype)}
        return {"params": params, "opt_state": optimizer.init(params)}

    def both(dtype, master):
        return {"a": part(dtype, master, 0.3), "b": part(dtype, master, 0.7)}

    half, full = both(jnp.bfloat16, "remainder"), both(jnp.float32, "float32")
    assert bits(convert_precision(half, both(jnp.bfloat16, "remainder"))) == bits(half)
    for params in ("params", ("a", "params")):
        with pytest.raises(ValueError, match=r"masters.*convert them one by one"):
            convert_precision(full, half, params=params)
    there = {name: convert_precision(full[name], half[name]) for name in full}
    assert weights(there["a"]) == bits(full["a"]["params"])
    assert weights(there["b"]) == bits(full["b"]["params"])


def test_64_bits_are_not_cut_off_unseen():
    state = {"params": {"w": np.array([0.1, 0.5])}, "step": np.int64(2**40 + 5)}
    like = {"params": {"w": jnp.zeros(2)}, "step": 0}
    with pytest.raises(ValueError, match=r"params/w \(float64 to float32\)"):
        convert_precision(state, like)
    exact = {"params": {"w": np.array([0.25, 0.5])}, "step": np.int64(2**40 + 5)}
    assert convert_precision(exact, like)["step"] == 2**40 + 5
    with pytest.raises(ValueError, match=r"step \(int64 to int32\)"):
        convert_precision(exact, like | {"step": jnp.zeros((), jnp.int32)})
    half = {"params": {"w": jnp.zeros(2, jnp.bfloat16)}, "step": 0}
    half["opt_state"] = mixed_precision(optax.identity()).init(half["params"])
    state["opt_state"] = ()
    with pytest.raises(ValueError, match=r"params/w \(float64 to bfloat16\)"):
        convert_precision(state, half)
    assert bits(convert_precision(exact | {"opt_state": ()}, half)["opt_state"].master) == bits(
        {"w": jnp.asarray([0.25, 0.5])}
    )


def test_a_weight_that_float16_cannot_hold_is_not_exact():
    full = {"params": {"w": jnp.full(2, 7e4)}, "opt_state": ()}
    half = {"params": {"w": jnp.zeros(2, jnp.float16)}}
    half["opt_state"] = mixed_precision(optax.identity()).init(half["params"])
    with pytest.raises(ValueError, match=r"params/w \(float32 to float16, beyond its range\)"):
        convert_precision(full, half)


def test_numbers_for_a_log_are_no_state_of_an_optimizer():
    state = trained("float32")
    logged = {**state, **jmp_kit.metrics(state["opt_state"])}
    assert bits(convert_precision(logged, logged | {"step": 0})) == bits(logged)
    half = trained("bfloat16+remainder", steps=0)
    there = convert_precision(logged, half | jmp_kit.metrics(half["opt_state"]))
    assert weights(there) == weights(state)


def test_shardings_are_those_of_like():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    optimizer = mixed_precision(optax.adam(1e-3), master="remainder")

    def state(dtype):
        params = {"w": jnp.linspace(0, 1, 16).astype(dtype)}
        return {"params": params, "opt_state": optimizer.init(params)}

    like = jax.tree.map(
        lambda x: jax.device_put(x, sharding) if x.shape else x, state(jnp.bfloat16)
    )
    there = convert_precision(state(jnp.float32), like)
    assert there["params"]["w"].sharding == sharding
    assert there["opt_state"].master["w"].sharding == sharding
    # What nobody placed stays free to go wherever the others are.
    assert not there["opt_state"].skipped.committed
    updates, _ = jax.jit(optimizer.update)(there["params"], there["opt_state"], there["params"])
    assert updates["w"].sharding.is_equivalent_to(sharding, 1)


def test_an_abstract_like():
    like = jax.eval_shape(lambda: trained("bfloat16+remainder", steps=0))
    state = trained("float32")
    assert weights(convert_precision(state, like)) == bits(state["params"])
    seeded = jax.eval_shape(lambda: trained("bfloat16+stochastic", steps=0))
    with pytest.raises(ValueError, match="key is in neither state.*with values"):
        convert_precision(state, seeded, exact=False)


def test_numbers_keep_their_kind():
    optimizer = mixed_precision(optax.sgd(0.1))
    params = {"w": np.ones(2, np.float32)}
    state = {"params": params, "opt_state": optimizer.init(params), "step": 3, "rate": 0.5}
    raw = {**state, "step": np.asarray(3), "rate": np.asarray(0.5)}
    back = convert_precision(raw, state)
    assert (type(back["step"]), back["step"], type(back["rate"])) == (int, 3, float)
    assert isinstance(back["params"]["w"], np.ndarray)


def test_a_whole_state_of_none_and_nothing():
    optimizer = mixed_precision(optax.sgd(0.1))
    state = {"params": {"w": jnp.ones((0, 3)), "i": jnp.arange(3)}, "name": "run"}
    state["opt_state"] = optimizer.init(state["params"])
    assert bits(convert_precision(state, state)["params"]) == bits(state["params"])


@pytest.mark.parametrize(
    ("change", "kwargs", "words"),
    [
        (lambda s: s, {"params": "weights"}, r"not at 'weights': of 0 arrays .*Write params="),
        (lambda s: s, {"params": "step"}, r"not at 'step': of 1 arrays there 0 have one of 2"),
        (
            lambda s: trained("bfloat16+kahan", steps=0),
            {"params": ("params", "nested")},
            r"not at 'params/nested': of 2 arrays there 0 have one of 2 masters",
        ),
        (lambda s: s | {"ema": jnp.ones(2)}, {}, r"missing: ema\. Make `like` with the model"),
        (
            lambda s: s | {"params": s["params"] | {"w": jnp.ones((4, 9))}},
            {},
            r"different: params/w \(float\[4, 3\], not float\[4, 9\]\)",
        ),
        (
            lambda s: s | {"step": jnp.float32(0)},
            {},
            r"different: step \(int\[\], not float\[\]\)",
        ),
    ],
)
def test_states_of_other_trainings_are_refused(change, kwargs, words):
    state = trained("bfloat16+remainder")
    with pytest.raises(ValueError, match=words):
        convert_precision(state, change(trained("float32", steps=0)), **kwargs)


def test_a_state_with_more_in_it_is_refused():
    state = trained("float32")
    sgd = mixed_precision(optax.sgd(0.1))
    like = {"params": state["params"], "opt_state": sgd.init(state["params"]), "step": 0}
    with pytest.raises(ValueError, match=r"unexpected: opt_state/1/0/count, .* and \d+ more"):
        convert_precision(state, like)
