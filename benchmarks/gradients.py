"""How close are gradients to those of float32?

The zoo in sizes that a CPU runs, at random points with random batches: how far the gradient is from
float32's, relative to its length, as the geometric mean over the points.
"""

import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.progress import track

import jmp_kit
from benchmarks.results import Column, Options, Row, number
from benchmarks.training import Loss, Task
from benchmarks.zoo import ZOO, decoders
from benchmarks.zoo.held_out import HELD_OUT
from benchmarks.zoo.sized import Model

# In place of a toy's.
_SIZES = {"layers": 3, "width": 64, "time": 64, "stages": (2, 2), "batch": 4}

_CLASSES = 64  # words that every toy knows, or classes

# Products add up in float32, as on GPUs: a kernel that XLA has for CPUs adds up in half.
_OPTIONS = {"xla_cpu_experimental_ynn_fusion_type": ""}

_WAYS = {
    "by_hand": "by hand, bfloat16",
    "by_jax": "autocast of the loss, jax.grad",
    "one_line": "jmp_kit, bfloat16, one line",
}


def _beside(key: str) -> Callable[[Row], str]:
    """The error, and its ratio to by hand."""
    value = number(key, ".1e")
    return lambda row: f"{value(row)} ({row[key] / row['by_hand']:.2f})"


COLUMNS = [
    Column("model (ratio to by hand)", lambda row: row["contender"]),
    *(Column(heading, _beside(key)) for key, heading in _WAYS.items()),
]


def run(options: Options) -> list[Row]:
    """A row for each model."""
    names = filter(options.takes, ZOO)
    points = 2 if options.tiny else 40
    rows = []
    for name in track(list(names), "gradients"):
        sizes = {} if options.tiny else {k: n for k, n in _SIZES.items() if k in ZOO[name].toy}
        rows.append({"contender": name, **_errors(runnable(name, **sizes), points)})
    return rows


def runnable(name: str, **sizes: Any) -> Model:
    """A toy of either zoo, in other sizes if any, with attention that every device has."""
    sized = (ZOO | HELD_OUT)[name]
    if sized.make in (decoders.gpt, decoders.llama):
        sizes["attention"] = sized.full.get("attention", _attention)
    return sized.at(tiny=True, **sizes)


def _attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def _errors(model: Model, points: int) -> dict[str, float]:
    params, rest = model.task.variables
    on_cpu = jax.default_backend() == "cpu"
    compiled = functools.partial(jax.jit, compiler_options=_OPTIONS if on_cpu else None)
    exact, *others = map(compiled, _gradients(model.task, rest))
    found: dict[str, list[float]] = {way: [] for way in _WAYS}
    for key in jax.random.split(jax.random.key(0), points):
        beside, of_batch = jax.random.split(key)
        point = near(params, beside)
        batch = drawn(model.batch, of_batch)
        with jax.default_matmul_precision("highest"):
            expected = exact(point, *batch)
        length = optax.tree.norm(expected)
        for errors, gradient in zip(found.values(), others, strict=True):
            distance = optax.tree.norm(optax.tree.sub(gradient(point, *batch), expected))
            errors.append(float(distance / length))
    return {way: statistics.geometric_mean(errors) for way, errors in found.items()}


def _gradients(task: Task, rest: Any) -> Iterator[Callable[..., Any]]:
    """In float32, and then in each way."""

    def gradient(loss_fn: Loss) -> Callable[..., Any]:
        return lambda params, *batch: jax.grad(loss_fn, has_aux=True)(params, rest, *batch)[0]

    yield gradient(task.loss())
    yield gradient(task.loss(jnp.bfloat16))
    yield gradient(jmp_kit.autocast(task.loss(), "mixed_bfloat16"))
    yield jmp_kit.autocast(gradient(task.loss()), "mixed_bfloat16")


def near(params: Any, key: jax.Array) -> Any:
    """Values beside the first ones, some of which are zeros that hide others."""
    return optax.tree.add_scale(params, 0.02, optax.tree.random_like(key, params))


def drawn(batch: Any, key: jax.Array) -> Any:
    """Normal values, and integers that every model knows."""

    def like(key: jax.Array, x: jax.ShapeDtypeStruct) -> jax.Array:
        if np.issubdtype(x.dtype, np.integer):
            return jax.random.randint(key, x.shape, 0, _CLASSES, x.dtype)
        return jax.random.normal(key, x.shape, x.dtype)

    return jax.tree.map(like, optax.tree.split_key_like(key, batch), batch)
