"""Extrema, and what is compared with them: that, too, has to be the value that they are of.

    x̄ = m̄ · (x == m) / sum(x == m)      the derivative of m = max(x)

XLA may compute x in two kernels, to another last bit in each, or round it in one of them and not in
the other. Then no x is the maximum, its derivative is lost, or is 0 / 0.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jax.extend.core import JaxprEqn, Var

from jmp_kit.programs._flow import is_exact
from jmp_kit.programs._jaxpr import Atom, is_float32, is_var

_EXTREMA = ("reduce_max", "reduce_min", "reduce_window_m", "scatter-m", "cummax", "cummin")
_COMPARES = {"eq", "ne", "lt", "le", "gt", "ge"}


class Compared(NamedTuple):
    """The values that extrema are of and that are compared with these, and the extrema."""

    values: set[Var]
    extrema: set[Var]


def compared(eqns: Sequence[JaxprEqn]) -> Compared:
    """What these equations compare with extrema of it."""
    maker = {v: e for e in eqns for v in e.outvars}
    found = Compared(set(), set())
    for eqn in (e for e in eqns if e.primitive.name in _COMPARES):
        one, other = (list(_moved_from(a, maker)) for a in eqn.invars)
        for values, extrema in ((one, other), (other, one)):
            for v in (v for v in extrema if v in maker and _is_extremum(maker[v])):
                of = {u for a in maker[v].invars for u in _moved_from(a, maker)}
                shared = [u for u in values if u in of]
                found.values.update(shared[-1:])  # what was moved is there already
                found.extrema.update([v] if shared else [])
    return found


def _is_extremum(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name.startswith(_EXTREMA)


def _moved_from(atom: Atom, maker: Mapping[Var, JaxprEqn]) -> Iterator[Var]:
    """The float32 variable, and what only has to be moved to make it."""
    moved = [atom] if is_var(atom) and is_float32(atom) else []
    while len(moved) == 1:  # of what is joined, each is a part
        yield moved[0]
        eqn = maker.get(moved[0])
        operands = eqn.invars if eqn is not None and is_exact(eqn) else []
        moved = [a for a in operands if is_var(a) and is_float32(a)]
