"""What a backward pass takes of the forward pass, made of what comes after it and is stored anyway.

Softmax weights are exponentials divided by their sum. Its backward pass takes the exponentials, and
a product takes the weights; made again from the scores, both would be computed, and written, twice.
But the weights times the sum are the exponentials.

The backward pass of a ReLU asks where its operand is positive: where its result is.
"""

from collections.abc import Callable

import jax
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit.programs._flow import Flow
from jmp_kit.programs._jaxpr import (
    Atom,
    is_float32,
    is_small,
    is_var,
    is_zero,
    opened,
    subjaxprs,
    taking,
    uses_of,
)

# What is a name around others.
_CALLS = {"jit", "pjit", "custom_jvp_call"}


def undone(jaxpr: Jaxpr, flow: Flow, is_late: Callable[[JaxprEqn], bool]) -> tuple[Jaxpr, set[Var]]:
    """The program, its backward pass taking what is made of results rather than of operands.

        dividend -> quotient * divisor      where a product takes the quotient, the divisor is small
        x > 0    -> max(x, 0) > 0           where a product takes the maximum

    Returns:
      The program, and these results, as good as ever where they are stored in half.
    """
    uses = uses_of(jaxpr)
    eqns: list[JaxprEqn] = []
    results: set[Var] = set()
    positive: dict[Var, Var] = {}  # the positive part of each
    instead: dict[Var, Atom] = {}

    def is_multiplied(v: Var) -> bool:
        return is_float32(v) and any(e and flow.closes(e) and not is_late(e) for e in uses[v])

    for eqn in jaxpr.eqns:
        if _is_mask(eqn) and all(e and is_late(e) for e in uses[eqn.outvars[0]]):
            results.update(positive[a] for a in eqn.invars[:1] if a in positive)
            eqns.append(taking(eqn, positive))
            continue
        eqns.append(taking(eqn, instead) if is_late(eqn) else eqn)
        if _is_positive_part(eqn) and is_multiplied(eqn.outvars[0]):
            positive[eqn.invars[0]] = eqn.outvars[0]
        if eqn.primitive.name != "div" or is_late(eqn) or not all(map(is_var, eqn.invars)):
            continue
        [dividend, divisor], [quotient] = eqn.invars, eqn.outvars
        is_taken = any(e and is_late(e) for e in uses[dividend])
        if is_multiplied(quotient) and is_taken and is_small(divisor, [eqn]):
            [undone] = opened(jax.make_jaxpr(lax.mul)(quotient.aval, divisor.aval))[0].eqns
            [instead[dividend]] = made = [Var(dividend.aval)]
            eqns.append(undone.replace(invars=[quotient, divisor], outvars=made))
            eqns[-1] = eqns[-1].replace(source_info=eqn.source_info)
            results.add(quotient)
    return jaxpr.replace(eqns=eqns), results


def _is_mask(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "gt" and is_var(eqn.invars[0]) and is_zero(eqn.invars[1])


def _is_positive_part(eqn: JaxprEqn) -> bool:
    """Whether it is `max(x, 0)`, under whatever names."""
    inner = eqn
    while inner.primitive.name in _CALLS:
        [body] = subjaxprs(inner)
        if len(body.eqns) != 1:
            return False
        [inner] = body.eqns
    is_of_one = [is_var(a) for a in eqn.invars] == [True, False][: len(eqn.invars)]
    return inner.primitive.name == "max" and is_of_one and is_zero(inner.invars[1])
