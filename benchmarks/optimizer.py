"""How near is an AdamW update to the bytes that its state has to move?

1.3 billion parameters. The floor reads and writes each parameter, master and moment once, reads
each gradient once, and goes by the copy bandwidth of the same device.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jmp_kit
from benchmarks.measuring import Contender, measure, timed
from benchmarks.results import Column, Options, Row, number

COLUMNS = [
    Column("optimizer", lambda row: row["contender"]),
    Column("bytes a parameter kept", number("kept", ",.1f")),
    Column("moved, at least", number("floor", ",.1f")),
    Column("moved, by the compiler", number("moved", ",.1f")),
    Column("step, ms", number("step_ms", ",.2f")),
    Column("of the floor's speed", number("share", ".0%")),
]

ADAMW = {"learning_rate": 1e-4}


def optimizers() -> dict[str, tuple[Any, Callable[[], optax.GradientTransformation]]]:
    """The dtype of the parameters, and the optimizer."""
    adamw = optax.adamw(**ADAMW)
    scale = jmp_kit.DynamicLossScale()
    return {
        "optax, float32": (jnp.float32, lambda: adamw),
        "mixed_precision, float32": (jnp.float32, lambda: jmp_kit.mixed_precision(adamw, scale)),
        "optax, bfloat16": (jnp.bfloat16, lambda: adamw),
        "mixed_precision, bfloat16, float32 masters": (
            jnp.bfloat16,
            lambda: jmp_kit.mixed_precision(adamw, scale, master="float32"),
        ),
        "mixed_precision, bfloat16, remainders": (
            jnp.bfloat16,
            lambda: jmp_kit.mixed_precision(adamw, scale, master="remainder"),
        ),
        "mixed_precision, bfloat16, stochastic": (
            jnp.bfloat16,
            lambda: jmp_kit.mixed_precision(adamw, scale, master="stochastic"),
        ),
        "mixed_precision, bfloat16, remainders, bfloat16 moments": (
            jnp.bfloat16,
            lambda: jmp_kit.mixed_precision(
                adamw, scale, master="remainder", moment_dtype="bfloat16"
            ),
        ),
    }


def contender(name: str, count: int) -> tuple[Contender, list[Any]]:
    """One of the optimizers on `count` parameters in sixteen arrays, and its gradients' shapes."""
    dtype, make = optimizers()[name]
    optimizer = make()

    def state() -> Any:
        params = [jnp.ones(count // 16, dtype) for _ in range(16)]
        return params, optimizer.init(params)

    def step(state: Any, *grads: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        updates, opt_state = optimizer.update(list(grads), opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state), params[0][0]

    return Contender(name, step, state), [jax.ShapeDtypeStruct((count // 16,), dtype)] * 16


def count(tiny: bool) -> int:
    """How many parameters."""
    return 2**16 if tiny else 1_300_000_000 // 2**16 * 2**16


def run(options: Options) -> list[Row]:
    """Every optimizer on the same number of parameters."""
    copied = jnp.ones(2**16 if options.tiny else 2**28, jnp.float32)
    bandwidth = 2 * copied.nbytes / timed(jax.jit(jnp.negative), copied)
    # One after the other: the state of all at once would not fit.
    return [
        _measured(name, count(options.tiny), bandwidth, options.steps)
        for name in optimizers()
        if options.takes(name)
    ]


def _measured(name: str, count: int, bandwidth: float, steps: int) -> Row:
    contestant, shapes = contender(name, count)
    grads = tuple(jnp.full(x.shape, 1e-3, x.dtype) for x in shapes)
    state = jax.eval_shape(contestant.state)
    kept = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) / count
    floor = 2 * kept + shapes[0].dtype.itemsize
    [row] = measure([contestant], [grads], steps=steps, title=name)
    if "step_ms" not in row:
        return row
    share = floor * count / bandwidth / (row["step_ms"] / 1e3)
    moved = row["bytes_accessed"] / count
    return {
        **row,
        "kept": kept,
        "floor": floor,
        "moved": moved,
        "share": share,
        "bandwidth": bandwidth,
    }
