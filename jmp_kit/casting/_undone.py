"""What a backward pass takes of the forward pass, made of what comes after it and is stored anyway.

Softmax weights are exponentials divided by their sum. Its backward pass takes the exponentials, and
a product takes the weights; made again from the scores, both would be computed, and written, twice.
But the weights times the sum are the exponentials.
"""

from collections.abc import Callable

import jax
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit.programs._flow import Flow
from jmp_kit.programs._jaxpr import Atom, is_float32, is_small, is_var, opened, taking, uses_of


def undivided(
    jaxpr: Jaxpr, flow: Flow, is_late: Callable[[JaxprEqn], bool]
) -> tuple[Jaxpr, set[Var]]:
    """The program, its backward pass taking `quotient * divisor` in place of a dividend.

    Where a product takes the quotient, and the divisor is small.

    Returns:
      The program, and the quotients, as good as ever where they are stored in half.
    """
    uses = uses_of(jaxpr)
    eqns: list[JaxprEqn] = []
    quotients: set[Var] = set()
    instead: dict[Var, Atom] = {}
    for eqn in jaxpr.eqns:
        eqns.append(taking(eqn, instead) if is_late(eqn) else eqn)
        if eqn.primitive.name != "div" or is_late(eqn) or not all(map(is_var, eqn.invars)):
            continue
        [dividend, divisor], [quotient] = eqn.invars, eqn.outvars
        is_multiplied = any(e and flow.closes(e) and not is_late(e) for e in uses[quotient])
        is_taken = any(e and is_late(e) for e in uses[dividend])
        if is_multiplied and is_taken and is_small(divisor, [eqn]) and is_float32(quotient):
            [undone] = opened(jax.make_jaxpr(lax.mul)(quotient.aval, divisor.aval))[0].eqns
            [instead[dividend]] = made = [Var(dividend.aval)]
            eqns.append(undone.replace(invars=[quotient, divisor], outvars=made))
            eqns[-1] = eqns[-1].replace(source_info=eqn.source_info)
            quotients.add(quotient)
    return jaxpr.replace(eqns=eqns), quotients
