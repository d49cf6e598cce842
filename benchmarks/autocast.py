"""Is autocast as fast and as lean as a model written by hand?

`python -m benchmarks.autocast [--out FILE]` trains a GPT and a ResNet for a few steps in float32,
with `dtype=` by hand, and through autocast around the loss, with and without recomputation, and
around the whole train step. Contenders alternate, step by step, in one process.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jmp_kit
from benchmarks.compiled import product_dtypes
from benchmarks.models import GPT, ResNet

Step = Callable[..., tuple[Any, Any, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Task:
    """A model in any dtype, and a batch."""

    module: Callable[[Any], Any]
    inputs: np.ndarray
    labels: np.ndarray

    def loss(self, dtype: Any = None) -> Callable[..., jax.Array]:
        """The loss of (variables, inputs, labels), written by hand in `dtype`."""

        def loss_fn(variables: Any, inputs: jax.Array, labels: jax.Array) -> jax.Array:
            logits, _ = self.module(dtype).apply(variables, inputs, mutable=["batch_stats"])
            logits = logits.astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        return loss_fn


@dataclasses.dataclass(frozen=True)
class Row:
    """What one contender cost."""

    task: str
    contender: str
    step_ms: float  # median
    temporary_mib: float  # of the compiled step
    products: dict[str, int]  # in the compiled program, by the dtype of their operands
    losses: list[float]  # of the first steps
    trace_s: float
    compile_s: float


def tasks(tiny: bool) -> dict[str, Task]:
    """GPT-2's 124M at sequence length 1024 and ResNet-50 at 224 pixels, or toys."""
    generator = np.random.default_rng(0)
    batch, time_, vocabulary, pixels = (2, 16, 64, 32) if tiny else (16, 1024, 50304, 224)
    layers, heads, width = (2, 2, 32) if tiny else (12, 12, 768)
    stages, features = ((1, 1), 8) if tiny else ((3, 4, 6, 3), 64)
    tokens = generator.integers(vocabulary, size=(batch, time_ + 1), dtype=np.int32)
    images = generator.normal(size=(4 * batch, pixels, pixels, 3)).astype(np.float32)
    return {
        "gpt": Task(
            lambda dtype: GPT(vocabulary, layers, heads, width, dtype),
            tokens[:, :-1],
            tokens[:, 1:],
        ),
        "resnet": Task(
            lambda dtype: ResNet(stages, features, 1000, dtype),
            images,
            generator.integers(1000, size=4 * batch, dtype=np.int32),
        ),
    }


def contenders(task: Task, optimizer: optax.GradientTransformation) -> dict[str, Step]:
    """The same train step in every way."""

    def step_of(loss_fn: Callable[..., jax.Array]) -> Step:
        def step(variables: Any, opt_state: Any, *batch: jax.Array) -> tuple[Any, Any, jax.Array]:
            loss, grads = jax.value_and_grad(loss_fn)(variables, *batch)
            updates, opt_state = optimizer.update(grads, opt_state, variables)
            return optax.apply_updates(variables, updates), opt_state, loss

        return step

    full = task.loss()
    policy = "mixed_bfloat16"
    return {
        "float32": step_of(full),
        "by hand": step_of(task.loss(jnp.bfloat16)),
        "autocast": step_of(jmp_kit.autocast(full, policy)),
        "autocast, kept": step_of(jmp_kit.autocast(full, policy, recompute=False)),
        "whole step": jmp_kit.autocast(step_of(full), policy),
    }


def measure(name: str, task: Task, steps: int) -> list[Row]:
    """Every contender on one task."""
    optimizer = optax.adamw(1e-4)
    initialise = jax.jit(lambda key: task.module(None).init(key, task.inputs))
    variables = initialise(jax.random.key(0))
    batch = jnp.asarray(task.inputs), jnp.asarray(task.labels)
    programs, states, rows = {}, {}, {}
    for contender, step in contenders(task, optimizer).items():
        start = time.perf_counter()
        traced = jax.jit(step, donate_argnums=(0, 1)).trace(
            variables, optimizer.init(variables), *batch
        )
        middle = time.perf_counter()
        programs[contender] = program = traced.lower().compile()
        rows[contender] = {
            "products": product_dtypes(program.as_text()),
            "temporary_mib": program.memory_analysis().temp_size_in_bytes / 2**20,
            "trace_s": middle - start,
            "compile_s": time.perf_counter() - middle,
        }
        fresh = jax.tree.map(jnp.copy, variables)
        states[contender] = fresh, optimizer.init(fresh)
    seconds: dict[str, list[float]] = {contender: [] for contender in programs}
    losses: dict[str, list[float]] = {contender: [] for contender in programs}
    for _ in track(range(steps + 2), f"{name}: steps"):  # the first two warm up
        for contender, program in programs.items():
            start = time.perf_counter()
            *state, loss = jax.block_until_ready(program(*states[contender], *batch))
            seconds[contender].append(time.perf_counter() - start)
            states[contender] = tuple(state)
            losses[contender].append(float(loss))
    return [
        Row(
            task=name,
            contender=contender,
            step_ms=statistics.median(seconds[contender][2:]) * 1e3,
            losses=losses[contender],
            **rows[contender],
        )
        for contender in programs
    ]


def table_of(rows: list[Row]) -> Table:
    """A row per contender."""
    device = jax.devices()[0]
    table = Table(title=f"bfloat16 on {device.device_kind}, JAX {jax.__version__}")
    for heading in ("task", "contender", "step, ms", "temp., MiB", "products", "last loss"):
        table.add_column(heading)
    for row in rows:
        products = ", ".join(f"{n} {dtype}" for dtype, n in sorted(row.products.items()))
        step, memory = f"{row.step_ms:.1f}", f"{row.temporary_mib:.0f}"
        table.add_row(row.task, row.contender, step, memory, products, f"{row.losses[-1]:.4f}")
    return table


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the table, write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="toys, as the tests run them on a CPU")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=pathlib.Path, help="a JSON file for the results")
    options = parser.parse_args(arguments)
    rows = [
        row
        for name, task in tasks(options.tiny).items()
        for row in measure(name, task, options.steps)
    ]
    Console().print(table_of(rows))
    if options.out:
        device = jax.devices()[0]
        versions = {"jax": jax.__version__, "jmp_kit": jmp_kit.__version__}
        results = {"device": device.device_kind, "versions": versions, "tiny": options.tiny}
        results["rows"] = [dataclasses.asdict(row) for row in rows]
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
