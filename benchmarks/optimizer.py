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
    }


def run(options: Options) -> list[Row]:
    """Every optimizer on the same number of parameters, in sixteen arrays."""
    count = 2**16 if options.tiny else 1_300_000_000 // 2**16 * 2**16
    copied = jnp.ones(2**16 if options.tiny else 2**28, jnp.float32)
    bandwidth = 2 * copied.nbytes / timed(jax.jit(jnp.negative), copied)
    rows: list[Row] = []
    for name, (dtype, make) in optimizers().items():
        if not options.takes(name):
            continue
        try:
            optimizer = make()
        except ValueError as error:
            rows.append({"contender": name, "failed": str(error)[:200]})
            continue
        # One after the other: the state of all at once would not fit.
        rows += _measured(name, optimizer, dtype, count, bandwidth, options.steps)
    return rows


def _measured(
    name: str,
    optimizer: optax.GradientTransformation,
    dtype: Any,
    count: int,
    bandwidth: float,
    steps: int,
) -> list[Row]:
    grads = [jnp.full(count // 16, 1e-3, dtype) for _ in range(16)]

    def state() -> Any:
        params = [jnp.ones(count // 16, dtype) for _ in range(16)]
        return params, optimizer.init(params)

    def step(state: Any, *grads: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        updates, opt_state = optimizer.update(list(grads), opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state), params[0][0]

    kept = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(state))) / count
    floor = 2 * kept + jnp.dtype(dtype).itemsize
    [row] = measure([Contender(name, step, state)], [tuple(grads)], steps=steps, title=name)
    if "step_ms" not in row:
        return [row]
    share = floor * count / bandwidth / (row["step_ms"] / 1e3)
    moved = row["bytes_accessed"] / count
    found = {"kept": kept, "floor": floor, "moved": moved, "share": share, "bandwidth": bandwidth}
    return [{**row, **found}]
