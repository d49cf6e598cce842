"""What a compiled program says of itself."""

import collections
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
