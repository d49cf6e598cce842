"""How near does a step that is all matrix products come to what the device can multiply?

Four dense layers 8,192 wide, 32,768 rows at a time, plain SGD.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.measuring import matrix_rate, measure
from benchmarks.results import Column, Options, Row, number
from benchmarks.training import Task, contenders, in_float8

COLUMNS = [
    Column("contender", lambda row: row["contender"]),
    Column("step, ms", number("step_ms", ",.2f")),
    Column("TFLOP/s", number("operations_per_s", ",.1f", 1e-12)),
    Column("of the matrix rate", number("share", ".1%")),
    Column("compiled, GiB", number("program_mib", ",.2f", 1 / 1024)),
]


class Wide(nn.Module):
    """Four dense layers."""

    width: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, width] to the same."""
        for _ in range(3):
            x = nn.relu(nn.Dense(self.width, dtype=self.dtype)(x))
        return nn.Dense(self.width, dtype=self.dtype)(x)


def run(options: Options) -> list[Row]:
    """In bfloat16, by jmp_kit and by hand, and in float8; inputs need no gradient."""
    width, batch = (64, 128) if options.tiny else (8192, 32768)
    rate = matrix_rate(width, jnp.bfloat16)
    x = jax.random.normal(jax.random.key(0), (batch, width))
    labels = jnp.arange(batch) % width
    task = Task(lambda dtype: Wide(width, dtype), x[:1], optax.sgd(0.1))
    halves = [c for c in contenders(task) if "bfloat16" in c.name]
    field = [c for c in (*halves, *in_float8(task)) if options.takes(c.name)]
    rows = measure(field, [(x, labels)], steps=options.steps, title="mlp")
    operations = (6 * 4 - 2) * batch * width**2
    for row in rows:
        if "step_ms" in row:
            speed = operations / (row["step_ms"] / 1e3)
            row |= {"operations_per_s": speed, "share": speed / rate, "bfloat16_rate": rate}
    return rows
