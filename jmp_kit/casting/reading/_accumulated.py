"""Gradients of weights that are added to others in float32: they lose no digits before.

A loop adds up those of micro-batches; what is scattered, the gradient of a table that is looked up
in, is added to what the same table multiplies, and XLA scatters into that.
"""

from collections.abc import Callable, Mapping, Sequence, Set

from jax.extend.core import JaxprEqn, Var

from jmp_kit.programs._flow import ADDS, MOVES, SUMS
from jmp_kit.programs._jaxpr import is_var, scatters, shape_of

# The gradient of joined weights is cut apart.
_CUTS = {"split", "slice"}

Uses = Mapping[Var, Sequence[JaxprEqn | None]]


def is_accumulated(gradient: Var, uses: Uses, collects: Callable[[Var], bool]) -> bool:
    """Whether all that takes it adds it to what collects gradients."""
    return all(
        eqn is not None and (_adds(eqn, gradient, collects) or _goes_on(eqn, uses, collects))
        for eqn in uses[gradient]
    )


def begun(eqns: Sequence[JaxprEqn], constant: Set[Var], reaching: Set[Var], uses: Uses) -> set[Var]:
    """What is made of numbers, zeros say, and scattered into, but for gradients that are added."""

    def is_added(v: Var) -> bool:
        return any(eqn is not None and eqn.primitive.name in ADDS for eqn in uses[v])

    results = ((e.invars[0], e.outvars[0]) for e in eqns if scatters(e))
    starts = (a for a, v in results if v in reaching or not is_added(v))
    return {a for a in starts if is_var(a) and a in constant}


def _adds(eqn: JaxprEqn, gradient: Var, collects: Callable[[Var], bool]) -> bool:
    others = (a for a in eqn.invars if is_var(a) and a is not gradient)
    return eqn.primitive.name in SUMS and any(map(collects, others))


def _goes_on(eqn: JaxprEqn, uses: Uses, collects: Callable[[Var], bool]) -> bool:
    first, *factors = eqn.invars
    is_scaled = eqn.primitive.name in ("mul", "div") and not any(map(shape_of, factors))
    is_same = is_scaled or eqn.primitive.name in MOVES | _CUTS
    return is_var(first) and is_same and all(is_accumulated(v, uses, collects) for v in eqn.outvars)
