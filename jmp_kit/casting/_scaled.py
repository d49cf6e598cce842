"""Values moved before they are scaled: `(s a)ᵀ = s aᵀ`.

What a product gives is moved in half. If it were scaled first, by attention's square root say, then
it would be moved in float32.
"""

from collections.abc import Callable

from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit.programs._jaxpr import (
    Atom,
    constants_of,
    is_float32,
    is_var,
    is_zero,
    shape_of,
    size_of,
    uses_of,
)
from jmp_kit.programs._marks import is_backward, stack_of

_MOVES = {"reshape", "transpose", "squeeze"}


def scaled_last(jaxpr: Jaxpr) -> Jaxpr:
    """The program, of a value that is multiplied by a number and then moved the moves first."""
    uses = uses_of(jaxpr)
    eqns: list[JaxprEqn] = []
    waiting: dict[Var, JaxprEqn] = {}  # what scales, by what it gives
    constants = constants_of(jaxpr)

    def is_constant(atom: Atom) -> bool:
        return not is_var(atom) or atom in constants

    for eqn in jaxpr.eqns:
        last = eqn
        if scaling := next(
            (waiting.pop(a) for a in eqn.invars if is_var(a) and a in waiting), None
        ):
            [whole], moved = _scaled(scaling), Var(eqn.outvars[0].aval)
            eqns.append(eqn.replace(invars=[whole, *eqn.invars[1:]], outvars=[moved]))
            factors = [moved if a is whole else a for a in scaling.invars]
            last = scaling.replace(invars=factors, outvars=eqn.outvars)
        takers = [use for v in last.outvars for use in uses[v]]
        if _scaled(last) and len(takers) == 1 and _is_moved(last, takers[0], is_constant):
            waiting[last.outvars[0]] = last
        else:
            eqns.append(last)
    return jaxpr.replace(eqns=eqns)


def _scaled(eqn: JaxprEqn) -> list[Var]:
    """What is multiplied or divided by one number, if something is."""
    whole = [a for a in eqn.invars if is_var(a) and shape_of(a)]
    is_scaling = eqn.primitive.name == "mul" or (
        eqn.primitive.name == "div" and whole == eqn.invars[:1]
    )
    return whole if is_scaling and len(whole) == 1 and is_float32(whole[0]) else []


def _is_moved(scaling: JaxprEqn, eqn: JaxprEqn | None, is_constant: Callable[[Atom], bool]) -> bool:
    """Whether the equation only moves what was scaled, in the same pass."""
    if eqn is None or is_backward(stack_of(eqn)) != is_backward(stack_of(scaling)):
        return False
    match eqn.primitive.name:
        case "pad":  # zeros stay zeros, if they are not scaled by what overflowed
            numbers = (a for a in scaling.invars if not shape_of(a))
            return is_zero(eqn.invars[1]) and all(map(is_constant, numbers))
        case "broadcast_in_dim":
            return size_of(eqn.invars[0]) == size_of(eqn.outvars[0])
        case name:
            return name in _MOVES
