"""What does a GPU's compiler make of the steps, on a machine without a GPU?

The zoo, compiled for an H200 and not run: no times of steps, but the bytes that kernels read and
write, the memory, and what is launched. XLA takes kernels of its own for products, because it has
no device to time others on; a GPU often takes the libraries', so both are here. Needs JAX's CUDA
plugin: `pip install ".[cuda12]"`.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.progress import track

import jmp_kit
from benchmarks import optimizer
from benchmarks.compiled import product_dtypes, program_bytes
from benchmarks.deviceless import H200, deviceless
from benchmarks.measuring import Contender, told
from benchmarks.results import Column, Options, Row, number
from benchmarks.training import Task, beside_float8, by_hand, float32, peers, with_jmp_kit
from benchmarks.zoo import WIDE, ZOO
from jmp_kit.numerics import TARGETS

DEVICE = "NVIDIA H200, compiled for and not run"

KERNELS: dict[str, dict[str, Any]] = {
    "XLA's own kernels": {},
    "the libraries' kernels": {"xla_gpu_enable_triton_gemm": False},
}
BY_HAND = "by hand, bfloat16"
COMPARED = {"bytes_moved", "temporary_mib", "launches", "estimated_ms"}

# What an H200 is taken to reach: operations and bytes a second. Fused attention's own products are
# not counted, and the bytes of products are counted as if nothing hid them.
RATES = {"bfloat16": 790e12, "float8_e4m3fn": 1500e12}
BYTES = 4.3e12


def _compared(key: str, form: str, scale: float = 1.0) -> Callable[[Row], str]:
    """The value of a key, and its ratio to by hand where the same model is."""
    value, ratio = number(key, form, scale), number(f"{key}_ratio", ".2f")
    return lambda row: f"{value(row)} ({ratio(row)})" if f"{key}_ratio" in row else value(row)


COLUMNS = [
    Column("contender (ratio to by hand)", lambda row: f"{row['model']}: {row['contender']}"),
    Column(
        "products", lambda row: ", ".join(f"{n} {d}" for d, n in row["products"].items()) or "none"
    ),
    Column("read and written, GB", _compared("bytes_moved", ",.1f", 1e-9)),
    Column("float32 activations, GB", number("wide", ",.1f", 1e-9)),
    Column("temporary, GiB", _compared("temporary_mib", ",.2f", 1 / 1024)),
    Column("memory, GiB", number("program_mib", ",.2f", 1 / 1024)),
    Column("launches", _compared("launches", ",.0f")),
    Column("products and bytes, ms", _compared("estimated_ms", ",.1f")),
    Column("trace, s", number("trace_s", ".1f")),
    Column("compile, s", number("compile_s", ".1f")),
]


@dataclasses.dataclass(frozen=True)
class Program:
    """What is compiled, and for which shapes."""

    group: str
    model: str
    contender: Contender
    batch: Sequence[Any]
    compiler_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    target: str = "h200"

    @property
    def name(self) -> str:
        """What --only looks at."""
        return f"{self.group}: {self.model}: {self.contender.name}"


def run(options: Options) -> list[Row]:
    """Every model of the zoo three times, and what else there is of some."""
    return compiled_by("benchmarks.programs", _programs, options)


def compiled_by(
    module: str, programs: Callable[[bool], Iterator[Program]], options: Options
) -> list[Row]:
    """Rows of programs, compiled in a process of this module, whose end is `compile_all`."""
    taken = [program for program in programs(options.tiny) if options.takes(program.name)]
    if H200.missing:
        return [{**_row(program), "failed": H200.missing} for program in taken]
    names = [program.name for program in taken]
    return deviceless(module, {"tiny": options.tiny, "names": names})


def _programs(tiny: bool) -> Iterator[Program]:
    for group, compiler_options in KERNELS.items():
        for name, sized in ZOO.items():
            model = sized.at(tiny)
            for contender in by_hand(model.task)[:1] + with_jmp_kit(model.task)[:2]:
                yield Program(group, name, contender, model.batch, compiler_options)
    for group, compiler_options in KERNELS.items():
        for name, sized in WIDE.items():
            model = sized.at(tiny)
            for contender in beside_float8(model.task):
                yield Program(f"float8, {group}", name, contender, model.batch, compiler_options)
    for name, ways in OTHER_WAYS.items():
        model = ZOO[name].at(tiny)
        for contender in ways(model.task):
            yield Program("other ways", name, contender, model.batch)
    model = ZOO["gpt plain"].at(tiny, batch=1)
    for contender in _serving(model.task):
        yield Program("serving", "gpt plain, one text", contender, model.batch[:1])
    for name in optimizer.optimizers():
        contender, grads = optimizer.contender(name, optimizer.count(tiny))
        yield Program("AdamW", "1.3 billion parameters", contender, grads)


def _others(task: Task) -> list[Contender]:
    """Those that the zoo is not compiled with."""
    return [*float32(task)[1:], *with_jmp_kit(task)[2:], *by_hand(task)[1:], *peers(task)]


def _scattering(task: Task) -> Iterator[Contender]:
    """A loss that scatters into an array like the logits."""
    task = dataclasses.replace(task, error=optax.softmax_cross_entropy_with_integer_labels)
    for contender in by_hand(task)[:1] + with_jmp_kit(task)[:2]:
        yield dataclasses.replace(contender, name=f"{contender.name}, loss of integer labels")


OTHER_WAYS: dict[str, Callable[[Task], Iterable[Contender]]] = {
    "gpt": _scattering,
    "gpt plain": _others,
    "resnet": _others,
}


def _serving(task: Task) -> Iterator[Contender]:
    """The likeliest next words, with float32 weights and with weights cast once."""

    def served(name: str, policy: str, weights: str) -> Contender:
        def words(params: Any, tokens: Any) -> jax.Array:
            return jnp.argmax(task.module(None).apply({"params": params}, tokens), axis=-1)

        run = jmp_kit.autocast(words, policy)
        cast = jmp_kit.get_policy(weights).cast_to_param
        return Contender(name, lambda p, t: (p, run(p, t)), lambda: cast(task.variables[0]))

    yield served("float32", "float32", "float32")
    yield served("jmp_kit, bfloat16, float32 weights", "mixed_bfloat16", "float32")
    yield served("jmp_kit, bfloat16, cast once", "mixed_bfloat16", "bfloat16")


def _row(program: Program) -> Row:
    names = {"group": program.group, "model": program.model}
    return {**names, "contender": program.contender.name}


def _compiled(program: Program) -> Row:
    step, state = program.contender.flat(make=False)
    target = TARGETS[program.target]
    start = time.perf_counter()
    with jax.default_matmul_precision(program.contender.precision):
        jitted = jax.jit(step, donate_argnums=0)
        traced = jitted.trace(target.placed(state), *target.placed(program.batch))
    trace_s = time.perf_counter() - start
    compiled = traced.lower().compile({**target.compiler_options, **program.compiler_options})
    compile_s = time.perf_counter() - start - trace_s
    moved = jmp_kit.numerics.traffic(compiled)
    estimated = {}
    if program.group.startswith("float8"):
        products = jmp_kit.numerics.audit(step, state, *program.batch).products
        seconds = sum(p.flops / RATES[p.lhs_dtype] for p in products) + moved.nbytes / BYTES
        estimated = {"estimated_ms": 1e3 * seconds}
    return {
        **estimated,
        "products": product_dtypes(compiled),
        "bytes_moved": moved.nbytes,
        "wide": moved.wide,
        "launches": sum(kernel.times for kernel in moved.kernels),
        "temporary_mib": compiled.memory_analysis().temp_size_in_bytes / 2**20,
        "program_mib": program_bytes(compiled) / 2**20,
        "trace_s": trace_s,
        "compile_s": compile_s,
    }


def _with_ratios(rows: list[Row]) -> Iterator[Row]:
    """To by hand, where the same model is."""
    hands = {(row["group"], row["model"]): row for row in rows if row["contender"] == BY_HAND}
    for row in rows:
        hand = hands.get((row["group"], row["model"]), {})
        shared = hand.keys() & row.keys() & COMPARED
        yield {**row, **{f"{key}_ratio": row[key] / hand[key] for key in shared}}


def _warm_up() -> None:
    """The first program would be charged the start of the compiler."""
    x = H200.placed(jax.ShapeDtypeStruct((128, 128), jnp.bfloat16))
    jax.jit(jnp.matmul).trace(x, x).lower().compile(H200.compiler_options)


def compile_all(programs: Callable[[bool], Iterator[Program]]) -> None:
    """Takes from the command line what of these to compile; prints the rows as JSON."""
    what = json.loads(sys.argv[1])
    rows = []
    _warm_up()
    taken = [program for program in programs(what["tiny"]) if program.name in what["names"]]
    for program in track(taken, "compiling", console=Console(stderr=True)):
        row = _row(program)
        with told(row):
            row |= _compiled(program)
        rows.append(row)
    print(json.dumps([*_with_ratios(rows)]))


if __name__ == "__main__":
    compile_all(_programs)
