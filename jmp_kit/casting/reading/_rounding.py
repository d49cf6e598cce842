"""Which equations round operands of products to float8, as they are named."""

from collections import defaultdict
from collections.abc import Sequence

from jax.extend.core import JaxprEqn, Var

from jmp_kit.programs._jaxpr import is_var
from jmp_kit.programs._marks import OURS, stack_of

ROUNDED = f"{OURS}float8_by_"
SCALED_AT_ONCE = f"{OURS}scaled_at_once"


def is_rounding(eqn: JaxprEqn) -> bool:
    """Whether it is of those that round an operand."""
    return ROUNDED in stack_of(eqn)


def rounded_twice(segment: Sequence[JaxprEqn]) -> set[Var]:
    """The values that a segment rounds to float8 in two ways, by rows and by columns."""
    ways: dict[Var, set[str]] = defaultdict(set)
    made: set[Var] = set()
    for eqn in segment:
        _, is_named, way = stack_of(eqn).rpartition(ROUNDED)
        if is_named:
            made.update(eqn.outvars)
            for atom in filter(is_var, eqn.invars):
                ways[atom].add(way)
    return {v for v, found in ways.items() if len(found) > 1 and v not in made}


def is_scaled_at_once(eqn: JaxprEqn) -> bool:
    """Whether it is a product that XLA scales where it makes it."""
    return SCALED_AT_ONCE in stack_of(eqn)
