"""How fast does ResNet-50 train on images of 224 pixels, and in how much memory?

The images are random numbers; batch statistics, momentum.
"""

import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.measuring import measure
from benchmarks.models import ResNet
from benchmarks.results import Column, Options, Row, number
from benchmarks.training import Task, contenders

COLUMNS = [
    Column("contender", lambda row: row["contender"]),
    Column("images/s", number("images_per_s", ",.0f")),
    Column("step, ms", number("step_ms", ",.2f")),
    Column("peak, GiB", number("peak_mib", ",.2f", 1 / 1024)),
    Column("compiled, GiB", number("program_mib", ",.2f", 1 / 1024)),
    Column("last loss", lambda row: f"{row['losses'][-1]:.4f}" if "losses" in row else ""),
]


def task(stages: tuple[int, ...], width: int, pixels: int, classes: int = 1000) -> Task:
    """A ResNet of this size."""
    return Task(
        lambda dtype: ResNet(stages, width, classes, dtype),
        jnp.zeros((1, pixels, pixels, 3)),
        optax.sgd(0.1, momentum=0.9),
    )


def run(options: Options) -> list[Row]:
    """ResNet-50, or a toy."""
    stages: tuple[int, ...] = (1, 1) if options.tiny else (3, 4, 6, 3)
    width, batch, pixels = (8, 4, 32) if options.tiny else (64, 256, 224)
    generator = np.random.default_rng(0)
    images = generator.normal(size=(batch, pixels, pixels, 3)).astype(np.float32)
    labels = generator.integers(1000, size=batch, dtype=np.int32)
    taken = contenders(task(stages, width, pixels))
    field = [c for c in taken if options.takes(c.name)]
    batches = [(jnp.asarray(images), jnp.asarray(labels))]
    rows = measure(field, batches, steps=options.steps, title="resnet")
    return [
        {**row, "images_per_s": batch / row["step_ms"] * 1e3} if "step_ms" in row else row
        for row in rows
    ]
