"""Gradients of weights that a loop adds up, over micro-batches: no round of it may lose digits."""

from collections.abc import Mapping, Sequence

from jax.extend.core import JaxprEqn, Var

from jmp_kit.casting._state import STATE, Origins
from jmp_kit.programs._jaxpr import is_var, shape_of

# What a gradient goes through on its way to its sum, beside factors that are scalars.
_MOVES = {"transpose", "reshape", "squeeze", "convert_element_type", "neg", "copy"}
_ADDS = {"add", "sub", "add_any"}


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
    return eqn.primitive.name in _ADDS and any(origins.get(a, 0) & STATE for a in others)


def _goes_on(
    eqn: JaxprEqn,
    uses: Mapping[Var, Sequence[JaxprEqn | None]],
    origins: Mapping[Var, Origins],
) -> bool:
    first, *factors = eqn.invars
    is_scaled = eqn.primitive.name in ("mul", "div") and not any(map(shape_of, factors))
    moves = is_scaled or eqn.primitive.name in _MOVES
    return is_var(first) and moves and is_accumulated(eqn.outvars[0], uses, origins)
