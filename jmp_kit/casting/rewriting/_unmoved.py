"""Axes of one value, put there and taken away: `vmap` gives what it maps a convolution over one.

    squeeze(expand_dims(x))    ->    x

So a program that is mapped over a batch reads as one that is written for it.
"""

from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit.casting.reading._parts import without_the_dead
from jmp_kit.programs._axes import REDUCES, only_reshapes
from jmp_kit.programs._flow import Flow
from jmp_kit.programs._jaxpr import Atom, in_place, is_var, shape_of, taking


def without_round_trips(jaxpr: Jaxpr, flow: Flow) -> Jaxpr:
    """The program, its products taking and giving values that never got such axes and lost them."""
    given = {v for e in jaxpr.eqns if flow.is_product(e) for v in e.outvars}
    taken = {a for e in jaxpr.eqns if flow.is_product(e) for a in e.invars if is_var(a)}
    source: dict[Var, Var] = {}  # that a value is, but for such axes
    instead: dict[Var, Atom] = {}
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        eqn = taking(eqn, instead)
        eqns.append(eqn)
        if _moves_ones(eqn):
            [operand], [result] = eqn.invars, eqn.outvars
            source[result] = origin = source.get(operand, operand)
            is_there = origin.aval == result.aval
            if is_there and (origin in given or result in taken):
                instead[result] = origin
    outvars = in_place(jaxpr.outvars, instead)
    jaxpr = jaxpr.replace(eqns=eqns, outvars=outvars)
    return without_the_dead(jaxpr) if instead else jaxpr


def _moves_ones(eqn: JaxprEqn) -> bool:
    """Whether it gives what it takes, but for axes of one value."""
    if len(eqn.invars) != 1 or not is_var(eqn.invars[0]) or len(eqn.outvars) != 1:
        return False
    before, after = ([n for n in shape_of(a) if n != 1] for a in (*eqn.invars, *eqn.outvars))
    return before == after and (only_reshapes(eqn) or eqn.primitive.name in REDUCES)
