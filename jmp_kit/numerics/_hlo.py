"""XLA's programs, read from their text: what JAX gives the compiler, and what comes out of it.

The syntax: https://openxla.org/xla/hlo_dumps and https://openxla.org/xla/operation_semantics.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from jmp_kit.numerics._sources import Source, innermost, is_added


class Array(NamedTuple):
    """What an instruction takes or gives: "bf16[8,64]" is Array("bfloat16", (8, 64))."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes in memory."""
        bits = re.search(r"\d+", self.dtype)
        return self.size * int(bits[0] if bits else 8) // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """`name = results opcode(operands), attributes`."""

    name: str
    opcode: str
    results: tuple[Array, ...]  # several of a tuple
    operands: tuple[str, ...]  # names; of a constant, its text
    attributes: str
    is_root: bool

    @functools.cached_property
    def op_name(self) -> str:
        """JAX's name scopes and primitive: "jit(loss)/transpose(jvp(Decoder))/dot_general"."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return found[1] if found else ""

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """The names of the computations that it runs."""
        found = re.findall(
            rf"\b({'|'.join(_CALLED)})=\{{?([^{{}}]*?)\}}?(?=, [\w\-]+=|$)", self._plain
        )
        return tuple(name.strip().lstrip("%") for _, names in found for name in names.split(","))

    @functools.cached_property
    def _plain(self) -> str:
        return re.split(r",? ?(?:metadata|backend_config)=", self.attributes)[0]


Computation = dict[str, Instruction]

_CALLED = (
    "calls",
    "to_apply",
    "body",
    "condition",
    "branch_computations",
    "true_computation",
    "false_computation",
    "called_computations",
)


@dataclasses.dataclass(frozen=True)
class Program:
    """The computations of a program by their names."""

    computations: dict[str, Computation]
    entry: str
    frames: dict[int, tuple[int, Source]]  # of the lines that called: the caller's, and the line

    def runs(self) -> Iterator["Run"]:
        """Every instruction that is run, of loops and calls as often as they are."""
        yield from self._runs(self.entry, 1, "", ())

    def source_of(self, run: "Run", fused: Iterable[Instruction] = ()) -> Source:
        """The innermost line around an instruction that is the user's own.

        Args:
          fused: what it is made of. If autocast added the instruction, a cast say, theirs holds.
        """
        outside = [line for call in reversed(run.calls) for line in self._lines(call)]
        every = [self._lines(instruction) for instruction in (run.instruction, *fused)]
        written = (lines for lines in every if lines and not is_added(lines))
        return innermost([*next(written, every[0]), *outside])

    def _lines(self, instruction: Instruction) -> list[Source]:
        """The lines that it comes from, the innermost first."""
        found = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        frame, lines = int(found[1]) if found else 0, []
        while frame in self.frames:
            frame, line = self.frames[frame]
            lines.append(line)
        return lines

    def _runs(
        self, name: str, times: int, stack: str, calls: tuple[Instruction, ...]
    ) -> Iterator["Run"]:
        computation = self.computations[name]
        for instruction in computation.values():
            own = instruction.op_name
            # A function that is called has names of its own.
            inner = own if own.startswith("jit(") or not stack else f"{stack}/{own}"
            yield Run(instruction, computation, times, inner or stack, calls)
            repeated = times
            if instruction.opcode == "while":
                repeated *= self._trip_count(instruction, computation)
            for callee in instruction.called:
                inside = (*calls, instruction)
                yield from self._runs(callee, repeated, inner or stack, inside)

    def _trip_count(self, loop: Instruction, computation: Computation) -> int:
        """How often a loop is known to run; one if it is not known."""
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes):
            return int(known[1])
        # Before it is compiled: JAX counts by one from a constant, while less than a constant.
        condition, body = (
            self.computations[re.findall(rf"\b{name}=%?([\w.\-]+)", loop.attributes)[0]]
            for name in ("condition", "body")
        )
        test, carried, start = root_of(condition), root_of(body), computation[loop.operands[0]]
        if test.opcode == "compare" and "direction=LT" in test.attributes:
            counter, limit = (condition[name] for name in test.operands)
            index = re.search(r"index=(\d+)", counter.attributes)
            if index and carried.opcode == start.opcode == "tuple":
                i = int(index[1])
                first, step = computation[start.operands[i]], body[carried.operands[i]]
                by = [body[name].operands for name in step.operands]
                is_known = limit.opcode == first.opcode == "constant" and step.opcode == "add"
                if is_known and ("1",) in by and counter.results[0].dtype.startswith("int"):
                    return max(int(limit.operands[0]) - int(first.operands[0]), 0)
        return 1


def root_of(computation: Computation) -> Instruction:
    """What gives a computation's result."""
    [root] = [i for i in computation.values() if i.is_root]
    return root


def first_name(computation: Computation, name: str) -> str:
    """What a value is called where it is made: what was behind a barrier is in a tuple."""
    instruction = computation[name]
    if instruction.opcode == "bitcast":
        return first_name(computation, instruction.operands[0])
    if instruction.opcode == "get-tuple-element":
        several = computation[instruction.operands[0]]
        index = re.search(r"index=(\d+)", instruction.attributes)
        if several.opcode == "tuple" and index:
            return first_name(computation, several.operands[int(index[1])])
    return name


class Run(NamedTuple):
    """An instruction, and where it stands."""

    instruction: Instruction
    computation: Computation  # that it is in
    times: int
    stack: str  # names, its own and those of what calls it
    calls: tuple[Instruction, ...]  # that it is inside of

    @property
    def operands(self) -> list[Array]:
        """What it takes."""
        return [self.computation[n].results[0] for n in self.instruction.operands]


_INSTRUCTION = re.compile(
    r"\s*(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = (?P<results>\((?:[^()]|\([^()]*\))*\)|\S+) "
    r"(?P<opcode>[\w\-]+)\((?P<operands>.*?)\)(?:, (?P<attributes>.*)|$)"
)
_COMPUTATION = re.compile(r"(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) (?:\(.*\) -> .*)?\{$")
_ARRAY = re.compile(r"\b(pred|token|[a-z]+\d+\w*)\[([\d,]*)\]")
_TABLE = re.compile(r"^(FileNames|FileLocations|StackFrames)\n((?:\d+ .*\n)*)", re.MULTILINE)


def parse(text: str) -> Program:
    """A program from `lowered.as_text("hlo", debug_info=True)` or `compiled.as_text()`."""
    computations: dict[str, Computation] = {}
    entry, current = "", {}
    for line in text.splitlines():
        if match := _INSTRUCTION.match(line):
            operands = match["operands"].split(", ") if match["operands"] else []
            names = (re.sub(r"/\*.*?\*/", "", o).split(" ")[-1].lstrip("%") for o in operands)
            arrays = tuple(_array(*found) for found in _ARRAY.findall(match["results"]))
            current[match["name"]] = Instruction(
                match["name"],
                match["opcode"],
                arrays,
                tuple(names),
                match["attributes"] or "",
                bool(match["root"]),
            )
        elif match := _COMPUTATION.match(line):
            current = computations[match["name"]] = {}
            entry = match["name"] if match["entry"] else entry
    return Program(computations, entry, _frames(text))


_KINDS = {"f": "float", "bf": "bfloat", "s": "int", "u": "uint", "c": "complex"}


def _array(dtype: str, dimensions: str) -> Array:
    shape = tuple(int(n) for n in dimensions.split(",") if n)
    if dtype == "pred":
        return Array("bool", shape)
    kind, bits, variant = re.fullmatch(r"([a-z]+)(\d+)?(\w*)", dtype).groups()  # type: ignore[union-attr]
    name = f"{_KINDS.get(kind, kind)}{bits or ''}"
    return Array(f"{name}_{variant}" if variant else name, shape)


def _frames(text: str) -> dict[int, tuple[int, Source]]:
    """The lines that called, as tables of numbers say."""
    tables = {
        name: dict(line.split(" ", 1) for line in lines.splitlines())
        for name, lines in _TABLE.findall(text)
    }

    def numbers(row: str) -> dict[str, int]:
        return {name: int(n) for name, n in re.findall(r"(\w+)=(\d+)", row)}

    lines = {}
    for key, row in tables.get("FileLocations", {}).items():
        place = numbers(row)
        file = tables["FileNames"][str(place["file_name_id"])].strip('"')
        lines[int(key)] = Source(file, place["line"])
    frames = {int(key): numbers(row) for key, row in tables.get("StackFrames", {}).items()}
    # The first has no caller: some versions write 0, and others are one too high throughout.
    zero = frames[1].get("parent_frame_id", 0) if frames else 0
    return {
        key: (row.get("parent_frame_id", zero) - zero, lines[row["file_location_id"]])
        for key, row in frames.items()
    }
