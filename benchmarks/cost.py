"""What does autocast cost to trace and to compile, and what does `watch` cost to run?

Train steps beside the same written by hand, on the device there is; a step that collects histograms
every hundredth time beside one that does not; and how tracing grows with the layers. Ratios of
times that were measured in turns: a CPU's seconds are those of whatever else it does.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_kit
from benchmarks import corpus, gpt, resnet
from benchmarks.gpt_size import Size
from benchmarks.measuring import Contender, measure
from benchmarks.models import causal_attention
from benchmarks.results import Column, Options, Row, number
from benchmarks.training import Task, plain_state, plain_step, with_jmp_kit
from jmp_kit.programs import every_equation

COLUMNS = [
    Column("contender", lambda row: row["contender"]),
    Column("equations", number("equations", ",.0f")),
    Column("trace, ms", number("trace_ms", ",.1f"), timed=True),
    Column("ratio", number("trace_ratio", ",.2f")),
    Column("compile, s", number("compile_s", ",.2f"), timed=True),
    Column("ratio", number("compile_ratio", ",.2f")),
    Column("step, ms", number("step_ms", ",.2f"), timed=True),
    Column("ratio", number("step_ratio", ",.3f")),
]

TURNS = 5


def run(options: Options) -> list[Row]:
    """Steps, tracing by the number of layers, and watching."""
    groups = {
        "gpt, 4 layers": _gpt(options.tiny),
        "resnet, 8 blocks": _resnet(options.tiny),
        "adamw, every 100 steps watched": _watched(options.tiny),
    }
    rows: list[Row] = []
    for group, (contenders, batches) in groups.items():
        taken = [c for c in contenders if options.takes(c.name)]
        found = measure(taken, batches, steps=options.steps, title=group)
        traces = _traces({c.name: c.flat() for c in taken}, batches[0], options)
        rows += _with_ratios([{"group": group, **row, **traces[row["contender"]]} for row in found])
    layers = (2, 20) if options.tiny else (10, 100, 1000)
    return rows + _with_ratios(list(_grown(layers, options)))


def _gpt(tiny: bool) -> tuple[list[Contender], Sequence[Any]]:
    size = gpt.TINY["gpt 124M"] if tiny else Size(4, 4, 128, batch=4, time=128, vocabulary=512)
    batches = corpus.batches(2, size.batch, size.time, size.vocabulary, 20)
    return _contenders(gpt.task(size, causal_attention)), batches


def _resnet(tiny: bool) -> tuple[list[Contender], Sequence[Any]]:
    stages, width, pixels = ((1,), 8, 16) if tiny else ((2, 2, 2, 2), 16, 32)
    images = np.random.default_rng(0).normal(size=(8, pixels, pixels, 3)).astype(np.float32)
    task = resnet.task(stages, width, pixels, classes=10)
    return _contenders(task), [(images, np.arange(8, dtype=np.int32))]


def _contenders(task: Task) -> list[Contender]:
    by_hand = plain_step(task.loss(jnp.bfloat16), task.optimizer)
    loss, whole, *_ = with_jmp_kit(task)
    return [Contender("by hand, bfloat16", by_hand, plain_state(task)), loss, whole]


def _watched(tiny: bool) -> tuple[list[Contender], Sequence[Any]]:
    """A hundred steps at once, one of which collects."""
    width = 16 if tiny else 128
    params = {name: jnp.ones((width, width)) / width for name in "ab"}
    x = np.random.default_rng(0).normal(size=(8 * width, width)).astype(np.float32)

    def contender(name: str, inner: optax.GradientTransformation) -> Contender:
        optimizer = jmp_kit.mixed_precision(inner, jmp_kit.DynamicLossScale())

        def loss_fn(params: Any, x: jax.Array) -> jax.Array:
            return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - x) ** 2)

        half = jmp_kit.autocast(loss_fn, "mixed_bfloat16")

        def once(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
            params, opt_state = state
            scale = jmp_kit.loss_scale_of(opt_state)
            loss, grads = jmp_kit.value_and_grad(half, scale)(params, x)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), loss

        def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
            state, losses = jax.lax.scan(lambda s, _: once(s, x), state, None, length=100)
            return state, losses[-1]

        return Contender(name, step, lambda: (params, optimizer.init(params)))

    watched = optax.chain(jmp_kit.numerics.watch(every=100), optax.adamw(1e-3))
    return [contender("as it is", optax.adamw(1e-3)), contender("watched", watched)], [(x,)]


def _grown(counts: Sequence[int], options: Options) -> Iterator[Row]:
    """A row for each number of layers; the time is that of ten layers."""

    def fun(weights: Sequence[jax.Array], x: jax.Array) -> tuple[Any, jax.Array]:
        for w in weights:
            x = jnp.tanh(x @ w)
        return (), x

    half = jmp_kit.autocast(fun, "mixed_bfloat16")
    x = jnp.ones((4, 4))
    programs = {f"{n:,} layers": (half, [jnp.ones((4, 4))] * n) for n in counts}
    for (name, row), n in zip(_traces(programs, (x,), options).items(), counts, strict=True):
        group = "tracing, milliseconds for ten layers"
        yield {"group": group, "contender": name, **row, "trace_ms": row["trace_ms"] * 10 / n}


def _traces(
    programs: dict[str, tuple[Callable[..., Any], Any]], batch: Sequence[Any], options: Options
) -> dict[str, Row]:
    """The least of several traces each, in turns, and how many equations came of it."""
    rows: dict[str, Row] = {name: {"trace_ms": float("inf")} for name in programs}
    for _ in range(1 if options.tiny else TURNS):
        for name, (step, state) in programs.items():
            start = time.perf_counter()
            # A function of its own each time, for JAX keeps what it has traced.
            traced = jax.make_jaxpr(lambda *args, step=step: step(*args))(state, *batch)
            row = rows[name]
            row["trace_ms"] = min(row["trace_ms"], (time.perf_counter() - start) * 1e3)
            row["equations"] = equations(traced)
    return rows


def equations(jaxpr: Any) -> int:
    """How many a jaxpr has, however deep."""
    return sum(1 for _ in every_equation(jaxpr))


def _with_ratios(rows: list[Row]) -> list[Row]:
    """Each beside the first of its group."""
    first = rows[0]
    for row in rows:
        for key, ratio in (
            ("trace_ms", "trace_ratio"),
            ("compile_s", "compile_ratio"),
            ("step_ms", "step_ratio"),
        ):
            if key in row and key in first:
                row[ratio] = row[key] / first[key]
    return rows
