"""Gradients of weights that a loop adds up, over micro-batches: no round of it may lose digits."""

from collections.abc import Mapping, Sequence

from jax.extend.core import JaxprEqn, Var

from jmp_kit.casting._joined import MOVES
from jmp_kit.casting._state import STATE, Origins
from jmp_kit.programs._flow import SUMS
from jmp_kit.programs._jaxpr import is_var, shape_of


def is_accumulated(
    gradient: Var,
    uses: Mapping[Var, Sequence[JaxprEqn | None]],
    origins: Mapping[Var, Origins],
) -> bool:
    """Whether all that takes it adds it to state."""
    return all(
        eqn is not None and (_adds(eqn, gradient, origins) or _goes_on(eqn, uses, origins))
        for eqn in uses[gradient]
    )


def _adds(eqn: JaxprEqn, gradient: Var, origins: Mapping[Var, Origins]) -> bool:
    others = (a for a in eqn.invars if is_var(a) and a is not gradient)
    return eqn.primitive.name in SUMS and any(origins.get(a, 0) & STATE for a in others)


def _goes_on(
    eqn: JaxprEqn,
    uses: Mapping[Var, Sequence[JaxprEqn | None]],
    origins: Mapping[Var, Origins],
) -> bool:
    first, *factors = eqn.invars
    is_scaled = eqn.primitive.name in ("mul", "div") and not any(map(shape_of, factors))
    is_same = is_scaled or eqn.primitive.name in MOVES
    return is_var(first) and is_same and is_accumulated(eqn.outvars[0], uses, origins)
