"""Moments in bfloat16: they decay, they keep their dtype, and the update is float32."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_kit
from jmp_kit import DynamicLossScale, mixed_precision

# optax itself promotes: see the fixture.
pytestmark = pytest.mark.usefixtures("standard_promotion")

OPTIMIZERS = {
    "adamw": (optax.adamw(1e-3), {"mu", "nu"}),
    "lion": (optax.lion(1e-3), {"mu"}),
    "sgd": (optax.sgd(1e-3, momentum=0.9), {"trace"}),
    "rmsprop": (optax.rmsprop(1e-3, momentum=0.9), {"nu", "trace"}),
    "adafactor": (optax.adafactor(1e-3, min_dim_size_to_factor=2), {"v_row", "v_col"}),
    "ademamix": (optax.contrib.ademamix(1e-3), {"m1", "m2", "nu"}),
    "hyperparams": (optax.inject_hyperparams(optax.adam)(learning_rate=1e-3), {"mu", "nu"}),
    "accumulated": (optax.MultiSteps(optax.adam(1e-3), 2), {"mu", "nu"}),
}


def half_fields(tree):
    """The names of the fields that hold bfloat16."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    names = [[k.name for k in path if hasattr(k, "name")] for path, _ in leaves]
    halves = [x.dtype == jnp.bfloat16 for _, x in leaves]
    return {path[-1] for path, half in zip(names, halves, strict=True) if half}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_moments_and_nothing_else_are_narrow_and_stay_so(name, dtype):
    inner, moments = OPTIMIZERS[name]
    optimizer = mixed_precision(inner, DynamicLossScale(), moment_dtype=jnp.bfloat16)
    params = {"w": jnp.ones((4, 8), dtype)}
    state = optimizer.init(params)
    assert half_fields(state.inner_state) == moments
    types = jax.tree.map(lambda x: x.dtype, state)
    traces = []

    @jax.jit
    def step(params, state, grads):
        traces.append(None)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for grad in (1.0, 2.0, jnp.inf, 3.0):
        params, state = step(params, state, {"w": jnp.full((4, 8), grad)})
        assert jax.tree.map(lambda x: x.dtype, state) == types
    assert len(traces) == 1


def test_a_second_moment_in_bfloat16_decays():
    """Rounded to nearest, 0.999 times it is it again, and it would stay where it is for good."""
    assert (jnp.float32(0.999) * jnp.bfloat16(1)).astype(jnp.bfloat16) == 1
    optimizer = mixed_precision(optax.scale_by_adam(), moment_dtype="bfloat16")
    params = jnp.ones(1000)
    state = optimizer.init(params)
    step = jax.jit(lambda grads, state: optimizer.update(grads, state, params)[1])
    state = step(jnp.ones(1000), state)
    start = float(jnp.mean(state.inner_state.nu.astype(jnp.float32)))
    np.testing.assert_allclose(start, 1e-3, rtol=1e-2)
    for _ in range(1000):
        state = step(jnp.zeros(1000), state)
    end = float(jnp.mean(state.inner_state.nu.astype(jnp.float32)))
    np.testing.assert_allclose(end / start, 0.999**1000, rtol=0.05)


def test_the_update_itself_is_float32():
    """The first step of Adam is as without `moment_dtype`: what it reads is zero in both."""
    params, grads = jnp.ones(100), jnp.linspace(-1, 1, 100)
    updates = []
    for moment_dtype in (None, "bfloat16"):
        optimizer = mixed_precision(optax.adam(1e-3), moment_dtype=moment_dtype)
        updates.append(optimizer.update(grads, optimizer.init(params), params)[0])
    assert updates[0].dtype == jnp.float32
    assert (updates[0] == updates[1]).all()


def test_close_to_moments_in_float32():
    """A noisy regression: loss and weights are near those of float32 moments."""
    features = jax.random.normal(jax.random.key(0), (4096, 32))
    truth = jax.random.normal(jax.random.key(1), (32,))
    targets = features @ truth + 0.1 * jax.random.normal(jax.random.key(2), (4096,))

    def end(moment_dtype):
        optimizer = mixed_precision(optax.adam(3e-3), moment_dtype=moment_dtype)

        def step(i, carry):
            params, state = carry
            rows = (jnp.arange(32) + 32 * i) % 4096
            grads = jax.grad(lambda p: jnp.mean((features[rows] @ p - targets[rows]) ** 2))(params)
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        start = jnp.zeros(32), optimizer.init(jnp.zeros(32))
        params, _ = jax.jit(lambda: jax.lax.fori_loop(0, 1500, step, start))()
        return params, float(jnp.mean((features @ params - targets) ** 2))

    (params, loss), (full, full_loss) = end("bfloat16"), end(None)
    assert loss <= 1.01 * full_loss
    assert optax.tree.norm(params - full) <= 0.01 * optax.tree.norm(full)


def test_the_sum_of_gradients_is_no_moment():
    optimizer = mixed_precision(optax.MultiSteps(optax.adam(1e-3), 4), moment_dtype="bfloat16")
    state = optimizer.init(jnp.ones(3, jnp.bfloat16))
    assert state.inner_state.acc_grads.dtype == jnp.float32


def test_widening_a_half_moment():
    optimizer = mixed_precision(optax.adam(1e-3, mu_dtype=jnp.bfloat16), moment_dtype="float32")
    state = optimizer.init(jnp.ones(3))
    assert half_fields(state) == set()
    assert state.key is None
    _, after = optimizer.update(jnp.ones(3), state, jnp.ones(3))
    assert half_fields(after) == set()


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        (jnp.float16, "square of a gradient below 2e-4 is zero in float16"),
        ("int8", "'int8', in which moments cannot be kept.*\"bfloat16\""),
        ("bf17", "'bf17', in which"),
    ],
)
def test_a_dtype_that_keeps_no_moment(dtype, words):
    with pytest.raises(ValueError, match=words):
        mixed_precision(optax.adam(1e-3), moment_dtype=dtype)


def test_an_optimizer_without_moments_says_what_it_has():
    lookahead = optax.contrib.dowg(1.0)
    optimizer = mixed_precision(lookahead, moment_dtype="bfloat16")
    with pytest.raises(
        ValueError, match=r"no fields known as moments.*init_params.*Leave moment_dtype out"
    ):
        optimizer.init({"w": jnp.ones(3)})
    with pytest.raises(ValueError, match="Its float arrays are none"):
        mixed_precision(optax.sgd(0.1), moment_dtype="bfloat16").init(jnp.ones(3))


def test_metrics_and_export_read_such_a_state():
    optimizer = mixed_precision(optax.adam(1e-3), master="remainder", moment_dtype="bfloat16")
    params = jnp.ones(3, jnp.bfloat16)
    state = optimizer.init(params)
    assert jmp_kit.master_params(state, params).dtype == jnp.float32
    assert set(jmp_kit.metrics(state)) == {"loss_scale", "finite", "skipped", "consecutive_skipped"}


class Gauss(typing.NamedTuple):
    """Variational parameters, called as moments are."""

    mu: jax.Array
    nu: jax.Array


@pytest.mark.parametrize(
    ("inner", "weights"),
    [
        (optax.contrib.schedule_free(optax.adam(1e-3), 1e-3), lambda state: state.z),
        (optax.MultiSteps(optax.adam(1e-3), 4), lambda state: state.acc_grads),
    ],
)
@pytest.mark.parametrize("wrap", [lambda p: p, lambda p: {"layer": [p]}])
def test_containers_of_parameters_are_no_moments(inner, weights, wrap):
    params = wrap(Gauss(jnp.full(4, 0.1), jnp.full(4, 0.1)))
    state = mixed_precision(inner, moment_dtype="bfloat16").init(params).inner_state
    assert {x.dtype for x in jax.tree.leaves(weights(state))} == {jnp.dtype("float32")}
    assert jnp.dtype(jnp.bfloat16) in {x.dtype for x in jax.tree.leaves(state)}
