"""Float32 weights out of every state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jmp_kit
from jmp_kit import mixed_precision

# optax itself promotes: see the fixture.
pytestmark = pytest.mark.usefixtures("standard_promotion")


def test_leaves_that_are_their_own_masters_and_leaves_that_are_none():
    with jax.enable_x64(True):
        params = {"d": jnp.ones(2, jnp.float64), "i": jnp.arange(2), "f": jnp.ones(2), "n": None}
        state = mixed_precision(optax.identity()).init(params)
        full = jmp_kit.master_params(state, params)
    assert jax.tree.map(lambda x: x.dtype, full) == jax.tree.map(lambda x: x.dtype, params)
    assert full["n"] is None


def test_several_optimizers_and_parameters_of_none():
    params = {
        "a": jnp.full(2, 0.1, jnp.bfloat16),
        "b": {"c": jnp.full(2, 0.1, jnp.float16), "d": jnp.full(2, 0.1)},
        "frozen": jnp.full(2, 0.1, jnp.bfloat16),
        "n": None,
    }
    parts = {
        "exact": mixed_precision(optax.sgd(1e-3), master="remainder"),
        "kahan": mixed_precision(optax.sgd(1e-3), master="kahan"),
        "frozen": optax.set_to_zero(),
    }
    labels = {"a": "exact", "b": {"c": "kahan", "d": "kahan"}, "frozen": "frozen", "n": None}
    optimizer = optax.multi_transform(parts, labels)
    state = optimizer.init(params)
    start = jmp_kit.master_params(state, params)
    updates, state = optimizer.update(jax.tree.map(jnp.ones_like, params), state, params)
    params = optax.apply_updates(params, updates)
    full = jax.jit(jmp_kit.master_params)(state, params)
    moved = jax.tree.map(lambda a, b: float((a - b)[0]), full, start)
    np.testing.assert_allclose(moved["a"], -1e-3, rtol=1e-4)
    np.testing.assert_allclose(moved["b"]["c"], -1e-3, rtol=1e-2)
    np.testing.assert_allclose(moved["b"]["d"], -1e-3, rtol=1e-4)
    assert moved["frozen"] == 0
    assert full["frozen"].dtype == jnp.float32


def test_a_train_state_is_a_state():
    params = {"w": jnp.full(2, 0.1, jnp.bfloat16)}
    state = TrainState.create(
        apply_fn=None, params=params, tx=mixed_precision(optax.sgd(1e-3), master="remainder")
    )
    state = state.apply_gradients(grads={"w": jnp.ones(2)})
    full = jmp_kit.master_params(state, state.params)
    np.testing.assert_allclose(full["w"], float(params["w"][0]) - 1e-3, rtol=1e-6)


def test_other_parameters_and_no_state():
    state = mixed_precision(optax.sgd(0.1)).init({"w": jnp.ones(2, jnp.bfloat16)})
    with pytest.raises(ValueError, match="not those that the state at the root was made for"):
        jmp_kit.master_params(state, {"v": jnp.ones(2, jnp.bfloat16)})
    with pytest.raises(ValueError, match=r"one is \[5\], and its master \[2\]"):
        jmp_kit.master_params(state, {"w": jnp.ones(5, jnp.bfloat16)})
    with pytest.raises(ValueError, match="no mixed_precision state"):
        jmp_kit.master_params(optax.adam(0.1).init(jnp.ones(2)), jnp.ones(2))
