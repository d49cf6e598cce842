"""What the kernels of a compiled program read and write: where the time between products goes."""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jmp_kit.numerics._hlo import (
    Array,
    Computation,
    Instruction,
    Program,
    Run,
    first_name,
    parse,
    root_of,
)
from jmp_kit.numerics._lowered import AROUND, device_of, path_of
from jmp_kit.numerics._tables import Cells, count, of_layers, pass_of, percent, table
from jmp_kit.numerics._targets import compiled
from jmp_kit.programs import is_backward


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What is launched as one."""

    name: str  # in the compiled program
    source: str  # "model.py:41"
    path: str  # name scopes
    dtype: str  # of the largest array that it writes
    read: int  # bytes, every time
    written: int
    wide: int  # of these, what float32 activations take
    backward: bool
    times: int = 1  # how often the loops around it run it

    @property
    def nbytes(self) -> int:
        """What it moves."""
        return self.read + self.written


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The kernels of a compiled program. Print it for a table."""

    device: str
    kernels: tuple[Kernel, ...]

    @property
    def nbytes(self) -> int:
        """What all of them move."""
        return _bytes_of(self.kernels)

    @property
    def wide(self) -> int:
        """The bytes of float32 activations that are written."""
        return sum(kernel.wide for kernel in self.kernels)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return {"nbytes": self.nbytes, "wide": self.wide, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        head = (
            f"{len(self.kernels)} kernels move {count(self.nbytes)}B on {self.device}; "
            f"float32 activations are {count(self.wide)}B of what they write:"
        )
        kinds = of_layers(
            ((k.source, pass_of(k.backward), k.dtype), k.path, k) for k in self.kernels
        )
        kinds.sort(key=lambda kind: -_bytes_of(kind[-1]))
        rows: list[Cells] = [
            ("bytes", "share", "kernels", "float32", "source", "pass", "writes", "path")
        ]
        for cells, path, kernels in kinds[:_MOST]:
            nbytes, wide = _bytes_of(kernels), sum(k.wide for k in kernels)
            share, shown = percent(nbytes / max(self.nbytes, 1)), f"{count(wide)}B" if wide else ""
            rows.append((count(nbytes), share, str(len(kernels)), shown, *cells, path))
        lines = [head, table(rows)]
        if rest := kinds[_MOST:]:
            moved = sum(_bytes_of(kernels) for *_, kernels in rest)
            lines.append(f"and {len(rest)} more, which move {count(moved)}B")
        return "\n".join(lines)


_MOST = 30  # rows of the table


def _bytes_of(kernels: Iterable[Kernel]) -> int:
    return sum(kernel.nbytes for kernel in kernels)


def traffic(
    fun: Any,
    *args: Any,
    target: str | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Traffic:
    """The bytes that each kernel of a compiled program reads and writes.

        nbytes = sum over kernels of (operands + results) * rounds of the loops around

    Between matrix products, memory decides how long a GPU takes. This tells where the time goes,
    and which activations are still written in float32. If a kernel only gathers or slices from an
    array, then only what it takes is counted. If it updates an array in place, then only what it
    puts there is counted.

    Args:
      fun: any JAX function, jitted or not, or what is lowered or compiled already.
      args, kwargs: what it is called with; arrays may be abstract. Nothing is computed.
      target: what to compile for on a machine without one, a name of `TARGETS`: "a100", "a6000",
        "h100", "h200" or "b200". This takes JAX's CUDA plugin, `pip install "jmp-kit[cuda12]"`, and
        no GPU; where there is none, start Python with `JAX_PLATFORMS=cpu`. XLA then takes kernels
        of its own for products, since it cannot time others;
        `{"xla_gpu_enable_triton_gemm": False}` has it take the libraries'.
      compiler_options: XLA's flags for this program.

    Returns:
      A `Traffic`, which prints as a table, what moves most first.

    Raises:
      TypeError: if anything is given with a program that is lowered or compiled already.
      ValueError: if there is no such target, or `fun` is jitted for other devices.
      ImportError: if the target's plugin is not installed.
      RuntimeError: if JAX has started without it.

    Example:
      >>> import jax, jax.numpy as jnp, jmp_kit
      >>> def layer(x, w):
      ...     return jnp.sum(jnp.tanh(x @ w))
      >>> x, w = jnp.ones((64, 32)), jnp.ones((32, 16))
      >>> found = jmp_kit.numerics.traffic(layer, x, w)
      >>> found.nbytes >= 4 * (64 * 32 + 32 * 16)
      True
      >>> found = jmp_kit.numerics.traffic(layer, x, w, target="h200")  # doctest: +SKIP
      >>> found.device  # doctest: +SKIP
      'NVIDIA H200'
    """
    if not isinstance(fun, jax.stages.Compiled | jax.stages.Lowered):
        return traffic(compiled(fun, args, kwargs, target, compiler_options))
    if args or kwargs or target or compiler_options:
        raise TypeError(
            f"A {type(fun).__name__} program has its arguments and its device already: "
            "write traffic(program)."
        )
    program = fun.compile() if isinstance(fun, jax.stages.Lowered) else fun
    return traffic_of(program.as_text() or "", device_of(program).device_kind)


def traffic_of(text: str, device: str) -> Traffic:
    """The kernels of a program in XLA's text."""
    program = parse(text)
    known = set(_known_sizes(program.computations[program.entry]))
    return Traffic(device, tuple(_kernels(program, known)))


# Which name values, or stand for those that are done elsewhere.
_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota")


def _kernels(program: Program, known: set[int]) -> Iterator[Kernel]:
    for run in program.runs():
        instruction = run.instruction
        is_inside = any(call.opcode not in AROUND for call in run.calls)
        if is_inside or instruction.opcode in (*_FREE, *AROUND) or _is_done(instruction):
            continue
        read, written = _moved(run, program)
        wide = sum(
            array.nbytes
            for array, whole in written
            if array.dtype == "float32" and array.size > 1 and whole.size not in known
        )
        arrays = [array for array, _ in written]
        largest = max(arrays, key=lambda array: array.nbytes, default=Array("", ()))
        named = _named(run, program)
        yield Kernel(
            name=instruction.name,
            source=str(program.source_of(named, _fused(run, program))),
            path=path_of(named.stack),
            dtype=largest.dtype,
            read=run.times * sum(array.nbytes for array in read),
            written=run.times * sum(array.nbytes for array in arrays),
            wide=run.times * wide,
            backward=is_backward(named.stack),
            times=run.times,
        )


def _named(run: Run, program: Program) -> Run:
    """The kernel, or of one that tells no path what is fused in it: its end, or else the rest."""
    inside = [i for i in _fused(run, program) if i.op_name]
    if path_of(run.instruction.op_name) or not inside:
        return run
    told = next((i for i in inside if path_of(i.op_name)), None)
    found = told or next((i for i in inside if not run.instruction.op_name), None)
    return run._replace(instruction=found, stack=found.op_name) if found else run


def _fused(run: Run, program: Program) -> list[Instruction]:
    """What is fused in a kernel, its end first."""
    called = run.instruction.called
    fused = program.computations[called[0]] if called else {}
    return [root_of(fused), *reversed(fused.values())] if fused else []


def _is_done(instruction: Instruction) -> bool:
    """Whether it only waits for what was begun before."""
    return instruction.opcode.endswith(("-done", "-update")) and "scatter" not in instruction.opcode


def _known_sizes(entry: Computation) -> Iterator[int]:
    """Of the program's arguments and results, and of their rows, which loops over layers take."""
    root = root_of(entry)
    ends = [i for i in entry.values() if i.opcode == "parameter"] + [root]
    for array in (array for instruction in ends for array in instruction.results):
        yield array.size
        yield math.prod(array.shape[1:])


# What is written, and what it is written into.
_Written = tuple[Array, Array]


def _moved(run: Run, program: Program) -> tuple[list[Array], list[_Written]]:
    """What a kernel reads and writes."""
    instruction = run.instruction
    if instruction.opcode.removesuffix("-start") == "fusion":
        names = [first_name(run.computation, name) for name in instruction.operands]
        return _moved_by_fusion(program.computations[instruction.called[0]], names)
    read, results = run.operands, _results(instruction)
    if instruction.opcode in _PUTS:
        again, put = _put(instruction, run.computation)
        return [*read[1:], *again], [put]
    picks = instruction.opcode in _PICKS
    return [*results, *read[1:]] if picks else read, [(array, array) for array in results]


def _results(instruction: Instruction) -> list[Array]:
    """What it gives, without the room that a library's kernel works in."""
    results = list(instruction.results)
    is_library = 'custom_call_target="__cu' in instruction.attributes
    return results[:-1] if is_library and results[-1].dtype in ("int8", "uint8") else results


_PICKS = ("gather", "dynamic-slice", "slice")  # from the first operand
# Of these only what is picked of their results is computed.
_PASSES = {
    *("bitcast", "convert", "copy", "reshape", "transpose", "pad", "concatenate", "reverse"),
    *("add", "subtract", "multiply", "divide", "power", "maximum", "minimum", "clamp"),
    *("negate", "abs", "sign", "sqrt", "rsqrt", "exponential", "exponential-minus-one", "log"),
    *("log-plus-one", "logistic", "tanh", "erf", "sine", "cosine", "tan"),
    *("select", "compare", "and", "or", "xor", "not", "is-finite"),
}
_PUTS = {"dynamic-update-slice": 1, "scatter": 2}  # into the first operand, what this one is


def _put(instruction: Instruction, computation: Computation) -> tuple[list[Array], _Written]:
    """What is read of an array in place, to be added to, and what is written."""
    whole, update = (
        computation[instruction.operands[i]].results[0] for i in (0, _PUTS[instruction.opcode])
    )
    put = Array(whole.dtype, min(whole, update, key=lambda array: array.size).shape)
    return [put] if instruction.opcode == "scatter" else [], (put, whole)


def _moved_by_fusion(
    fused: Computation, names: Sequence[str]
) -> tuple[list[Array], list[_Written]]:
    """What it reads and writes.

    Args:
      names: of its operands. What it takes twice it reads once.
    """
    uses: dict[str, list[tuple[Instruction, int]]] = collections.defaultdict(list)
    for instruction in fused.values():
        for i, name in enumerate(instruction.operands):
            uses[name].append((instruction, i))

    @functools.cache  # or what is added to itself is looked at twice each time
    def taken(name: str) -> dict[str, Array]:
        """What is picked of a value, or all of it, by its name there."""
        whole = {name: fused[name].results[0]}
        picked: dict[str, Array] = {}
        for user, i in uses[name]:
            if user.opcode in _PASSES and not user.is_root:
                picked |= taken(user.name)
            elif user.opcode == "reduce" and i == 0 and not user.is_root:
                times = whole[name].size // max(user.results[0].size, 1)
                parts = taken(user.name).items()
                picked |= {n: Array(part.dtype, (*part.shape, times)) for n, part in parts}
            elif user.opcode in _PICKS and i == 0:
                picked |= {user.name: user.results[0]} if user.is_root else taken(user.name)
            elif not (user.opcode in _PUTS and i == 0):  # which is written in place
                return whole
        size = sum(array.size for array in picked.values())
        return picked if size < whole[name].size else whole

    read, read_whole = [], set()
    for instruction in fused.values():
        if instruction.opcode == "parameter":
            [array], name = instruction.results[:1], names[int(instruction.operands[0])]
            picked = [Array(array.dtype, part.shape) for part in taken(instruction.name).values()]
            if name not in read_whole:
                read += picked
            if picked == [array]:
                read_whole.add(name)
    root = root_of(fused)
    outputs = [fused[name] for name in root.operands] if root.opcode == "tuple" else [root]
    written: list[_Written] = []
    for output in outputs:
        if output.opcode == "get-tuple-element":
            call = fused[output.operands[0]]
            if output.results[0] not in _results(call):
                continue
        while output.opcode == "bitcast":
            output = fused[output.operands[0]]
        if output.opcode in _PUTS:
            again, put = _put(output, fused)
            read += again
            written.append(put)
        else:
            written.append((output.results[0], output.results[0]))
    return read, written
