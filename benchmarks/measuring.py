"""Programs measured side by side: they take turns, block by block of steps, in one process."""

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from rich.progress import track

from benchmarks.compiled import product_dtypes, program_bytes

# A block of steps is at least this long, so that starting it is not what is measured.
BLOCK_SECONDS = 0.05

Step = Callable[..., tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way of doing the work: step(state, *batch) -> (state, loss)."""

    name: str
    step: Step
    state: Callable[[], Any]
    precision: str | None = None  # of float32 products: jax_default_matmul_precision

    def flat(self, make: bool = True) -> tuple[Step, list[Any]]:
        """The step of a list of arrays, and the first list, or the shapes of what it would be.

        For jmp's loss scale cannot be rebuilt around what only describes arrays.
        """
        structures = []

        def first() -> list[jax.Array]:
            leaves, structure = jax.tree.flatten(self.state())
            structures.append(structure)
            return [jnp.array(leaf) for leaf in leaves]  # steps overwrite theirs

        arrays = first() if make else jax.eval_shape(first)
        [structure] = structures

        def step(leaves: list[Any], *batch: Any) -> tuple[list[Any], Any]:
            state, loss = self.step(jax.tree.unflatten(structure, leaves), *batch)
            return jax.tree.leaves(state), loss

        return step, arrays


@dataclasses.dataclass
class Running:
    """A compiled contender, where it has got to, and what it took."""

    program: Any
    state: Any
    row: dict[str, Any]
    seconds: list[float] = dataclasses.field(default_factory=list)
    losses: list[Any] = dataclasses.field(default_factory=list)

    def advance(self, steps: int, batches: Sequence[tuple[Any, ...]]) -> float:
        """Seconds of this many steps."""
        start = time.perf_counter()
        for _ in range(steps):
            self.state, loss = self.program(self.state, *batches[len(self.losses) % len(batches)])
            self.losses.append(loss)
        jax.block_until_ready((self.state, loss))
        return time.perf_counter() - start


def measure(
    contenders: Sequence[Contender],
    batches: Sequence[tuple[Any, ...]],
    *,
    steps: int,
    title: str,
) -> list[dict[str, Any]]:
    """A row per contender; one that cannot run has a row that says why.

    Every contender takes the same batches in the same order, `steps` blocks after two that warm up.
    """
    batches = jax.device_put(batches)  # or every step would wait for its own
    rows: dict[str, dict[str, Any]] = {c.name: {"contender": c.name} for c in contenders}
    running: dict[str, Running] = {}
    for contender in track(contenders, f"{title}: compiling"):
        with told(rows[contender.name]):
            running[contender.name] = _compiled(contender, batches[0], rows[contender.name])
    # From small to large: the device tells only the largest peak so far.
    for name, run in sorted(running.items(), key=lambda item: item[1].row["program_mib"]):
        with told(run.row):
            _warm_up(run, batches)
        if "failed" in run.row:
            del running[name]
    block = steps_in_a_block(min((run.row["warm_s"] for run in running.values()), default=1.0))
    for _ in track(range(steps), f"{title}: steps"):
        for run in running.values():
            run.seconds.append(run.advance(block, batches) / block)
    for run in running.values():
        run.row |= step_times(run.seconds)
        run.row["losses"] = [float(loss) for loss in run.losses]
    return list(rows.values())


def _compiled(contender: Contender, batch: tuple[Any, ...], row: dict[str, Any]) -> Running:
    step, state = contender.flat()
    start = time.perf_counter()
    with jax.default_matmul_precision(contender.precision):
        traced = jax.jit(step, donate_argnums=0).trace(state, *batch)
    row["trace_s"] = time.perf_counter() - start
    program = traced.lower().compile()
    row["compile_s"] = time.perf_counter() - start - row["trace_s"]
    row["temporary_mib"] = program.memory_analysis().temp_size_in_bytes / 2**20
    row["program_mib"] = program_bytes(program) / 2**20
    row["bytes_accessed"] = (program.cost_analysis() or {}).get("bytes accessed")
    row["products"] = product_dtypes(program)
    return Running(program, state, row)


def _warm_up(run: Running, batches: Sequence[tuple[Any, ...]]) -> None:
    before = jax.devices()[0].memory_stats() or {}
    own = sum(x.nbytes for x in run.state)
    run.advance(1, batches)
    after = jax.devices()[0].memory_stats() or {}
    if after.get("peak_bytes_in_use", 0) > before.get("peak_bytes_in_use", 0):
        others = before["bytes_in_use"] - own
        run.row["peak_mib"] = (after["peak_bytes_in_use"] - others) / 2**20
    run.row["warm_s"] = run.advance(1, batches)


def steps_in_a_block(seconds: float) -> int:
    """How many steps, of which the fastest takes this long, are timed as one."""
    return max(1, math.ceil(BLOCK_SECONDS / seconds))


def step_times(seconds: Sequence[float]) -> dict[str, Any]:
    """What a row says of them: the median and the quartiles, in milliseconds."""
    lower, upper = seconds[0], seconds[0]
    if len(seconds) > 1:
        lower, _, upper = statistics.quantiles(seconds, n=4)
    median = statistics.median(seconds)
    return {"step_ms": median * 1e3, "step_ms_quartiles": [lower * 1e3, upper * 1e3]}


@contextlib.contextmanager
def told(row: dict[str, Any]) -> Iterator[None]:
    """What the device or a peer refuses becomes part of the result, and the other rows are kept."""
    try:
        yield
    except Exception as error:  # whatever it is, hours of other rows are not lost for it
        row["failed"] = f"{type(error).__name__}: {error}".strip().split("\n")[0][:200]


def timed(function: Callable[..., Any], *args: Any, repeats: int = 20) -> float:
    """Median seconds of a compiled function, after two calls that warm up."""
    found = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        found.append(time.perf_counter() - start)
    return statistics.median(found[2:])


def matrix_rate(size: int, dtype: Any, *, precision: str | None = None, repeats: int = 20) -> float:
    """Operations a second of a product of two square matrices of random numbers."""
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(k, (size, size), jnp.float32).astype(dtype) for k in keys)
    result = jnp.float32 if jnp.finfo(dtype).bits == 8 else dtype
    with jax.default_matmul_precision(precision):
        product = jax.jit(lambda a, b: jax.lax.dot(a, b, preferred_element_type=result))
        return 2.0 * size**3 / timed(product, a, b, repeats=repeats)
