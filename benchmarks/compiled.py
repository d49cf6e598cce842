"""What a compiled program says of itself."""

import collections
import math
import re
from typing import Any

import jmp_kit


def product_dtypes(program: Any) -> dict[str, int]:
    """How many products of a compiled program take operands of each dtype."""
    products = jmp_kit.numerics.audit(program).products
    return dict(collections.Counter(p.lhs_dtype.replace("float", "f") for p in products))


def program_bytes(program: Any) -> int:
    """What a compiled program needs: its arguments, and what it stores in between."""
    memory = program.memory_analysis()
    return int(memory.argument_size_in_bytes + memory.temp_size_in_bytes)


_INSTRUCTION = re.compile(
    r"\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>\(.*?\)|\S+) (?P<what>[\w\-]+)"
    r"\((?P<operands>.*?)\)(?:,|$)"
)
_ARRAY = re.compile(r"([a-z]+)(\d+)?\w*\[([\d,]*)\]")
_FREE = ("parameter", "tuple", "get-tuple-element", "bitcast", "constant")


def bytes_moved(text: str) -> int:
    """What the kernels of a compiled program read and write, each operand and result once.

    Of the entry computation: what is inside loops counts once.
    """
    sizes: dict[str, int] = {}
    moved = 0
    for line in text[text.index("\nENTRY") :].splitlines():
        if match := _INSTRUCTION.match(line):
            sizes[match["name"]] = _bytes_of(match["shape"])
            if match["what"] not in _FREE:
                operands = re.findall(r"%([\w.\-]+)", match["operands"])
                moved += sizes[match["name"]] + sum(sizes.get(name, 0) for name in operands)
    return moved


def _bytes_of(shape: str) -> int:
    total = 0
    for _, bits, dimensions in _ARRAY.findall(shape):
        count = math.prod(int(n) for n in dimensions.split(",") if n)
        total += count * int(bits or 8) // 8  # pred[] has no number
    return total
