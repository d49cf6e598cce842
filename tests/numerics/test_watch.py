"""Histograms over a run: what they hold, and that nothing else changes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, PartitionSpec

import jmp_kit
import jmp_kit.checkpoint
from jmp_kit.numerics import exponent_histogram, total_histogram, watch, watched

PARAMS = {"w": jnp.ones((3, 4)), "b": jnp.ones(4, jnp.bfloat16), "n": None}


def gradients(step):
    random = np.random.default_rng(step)
    return {
        "w": jnp.asarray(random.normal(size=(3, 4)) * 2.0**-step, jnp.float32),
        "b": jnp.asarray(random.normal(size=4), jnp.bfloat16),
        "n": None,
    }


@pytest.mark.parametrize("every", [1, 3, 100])
def test_it_sums_the_histograms_of_every_nth_step(every):
    optimizer, traces = watch(every), []

    @jax.jit
    def update(grads, state):
        traces.append(None)
        return optimizer.update(grads, state)

    state = optimizer.init(PARAMS)
    for step in range(7):
        updates, state = update(gradients(step), state)
        for a, b in zip(jax.tree.leaves(updates), jax.tree.leaves(gradients(step)), strict=True):
            assert a.tobytes() == b.tobytes()
    expected = [exponent_histogram(gradients(step)) for step in range(0, 7, every)]
    found = watched(state)
    assert found["n"] is None
    for name in ("w", "b"):
        total = sum((h[name].counts for h in expected), jnp.zeros(277, jnp.int32))
        np.testing.assert_array_equal(found[name].counts, total)
    assert (int(state.steps), int(state.collected)) == (7, len(expected))
    assert len(traces) == 1
    assert total_histogram(found).nonzero == 16 * len(expected)


def test_parts_of_an_array_on_several_devices_are_counted_together():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    grads = {"w": jnp.arange(48.0).reshape(16, 3), "b": jnp.ones(3)}
    optimizer = watch(every=2)
    specs = {"w": PartitionSpec("data"), "b": PartitionSpec()}, PartitionSpec()
    step = jax.shard_map(
        lambda grads, state: optimizer.update(grads, state)[1],
        mesh=mesh,
        in_specs=specs,
        out_specs=PartitionSpec(),
    )
    state = optimizer.init(grads)
    for _ in range(2):
        state = jax.jit(step)(grads, state)
    jax.tree.map(np.testing.assert_array_equal, watched(state), exponent_histogram(grads))


def test_a_skipped_step_is_left_out():
    inner = optax.chain(watch(1), optax.sgd(0.1))
    optimizer = jmp_kit.mixed_precision(inner, jmp_kit.DynamicLossScale())
    params = {"w": jnp.ones(2)}
    state = optimizer.init(params)
    for value in (1.0, jnp.inf, 2.0):
        _, state = optimizer.update({"w": jnp.full(2, value)}, state, params)
    found = watched(state)["w"]
    assert (found[0], found[1], int(found.nonfinite)) == (2, 2, 0)


def test_nothing_to_watch():
    optimizer = watch(1)
    state = optimizer.init({"n": None})
    _, state = optimizer.update({"n": None}, state)
    assert watched(state) == {"n": None}
    assert total_histogram(watched(state)).nonzero == 0


def test_it_is_saved_and_restored(tmp_path):
    optimizer = optax.chain(watch(1), optax.sgd(0.1))
    _, opt_state = optimizer.update(gradients(0), optimizer.init(PARAMS))
    state = {"params": PARAMS, "opt_state": opt_state}
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave(state))
    like = {"params": PARAMS, "opt_state": optimizer.init(PARAMS)}
    restored = jmp_kit.checkpoint.restore(tmp_path, like)["opt_state"]
    assert total_histogram(watched(restored)).nonzero == 16


def test_the_steps_between_do_nothing_but_count(standard_promotion):
    """How many seconds that is, `python -m benchmarks cost` measures."""
    params = {"w": jnp.ones((30, 40)), "b": jnp.ones(40)}

    def compiled(optimizer):
        state = optimizer.init(params)
        return jax.jit(optimizer.update).lower(params, state, params).compile().as_text()

    plain, text = compiled(optax.adamw(1e-3)), compiled(optax.chain(watch(100), optax.adamw(1e-3)))
    [names] = re.findall(r"branch_computations=\{(.*?)\}", text)
    bodies = dict(re.findall(r"^(%?[\w.-]+) \(.*?\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL))
    between, collecting = (bodies[name] for name in names.split(", "))
    operations = re.compile(r"[\])}] ([a-z-]+)\(")
    assert set(operations.findall(between)) <= {"parameter", "get-tuple-element", "tuple", "copy"}
    assert "fusion" in operations.findall(collecting)
    # Outside, no kernel reads or writes a gradient that none did before.
    entry, entry_before = (t[t.index("ENTRY") :] for t in (text, plain))
    assert entry.count("= f32[30,40]") == entry_before.count("= f32[30,40]")


def test_nothing_waits_for_the_host():
    optimizer = watch(5)
    state = optimizer.init(PARAMS)
    text = jax.jit(optimizer.update).lower(gradients(0), state).as_text()
    assert not re.search("callback|outfeed|infeed|send|recv", text)
    assert "stablehlo.case" in text or "stablehlo.if" in text  # The steps between count nothing.


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: watch(0), "every is 0"),
        (lambda: watch(True), "every is True"),
        (lambda: watch(2.5), "every is 2.5"),
        (lambda: watched({"a": jnp.ones(2)}), "There are 0 WatchStates"),
        (lambda: watched([watch().init(PARAMS)] * 2), "There are 2 WatchStates"),
    ],
)
def test_bad_input_teaches(call, words):
    with pytest.raises(ValueError, match=words):
        call()
