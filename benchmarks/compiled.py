"""What a compiled program says of itself."""

import collections
import math
import re
from typing import Any

# Matrix products and convolutions, as XLA writes them for CPUs and GPUs.
_PRODUCT = re.compile(
    r"(?:ROOT )?%?(?P<name>[\w.\-]+) = .*? (?:dot|convolution|custom-call)\((?P<operands>[^)]*)\)"
)
_LIBRARY = re.compile(r'custom_call_target="(?:__cublas|__cudnn|__onednn\$(?:matmul|conv))')
_DEFINED = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = \(?(\w+)\[", re.MULTILINE)


def product_dtypes(text: str) -> dict[str, int]:
    """How many products of a compiled program take operands of each dtype, by its text."""
    dtypes = dict(_DEFINED.findall(text))
    found: collections.Counter[str] = collections.Counter()
    for line in text.splitlines():
        match = _PRODUCT.match(line.strip())
        if match and ("custom-call(" not in line or _LIBRARY.search(line)):
            first = re.findall(r"%?([\w.\-]+)(?:,|$)", match["operands"])[0]
            found[dtypes.get(first, "unknown")] += 1
    return dict(found)


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
