"""What a backward pass takes of the forward pass, made of what comes after it and is stored anyway.

Softmax weights are exponentials divided by their sum. Its backward pass takes the exponentials, and
a product takes the weights; made again from the scores, both would be computed, and written, twice.
But the weights times the sum are the exponentials. And where the scale of both makes no difference,
as in the derivative of softmax, the weights are as good as the exponentials, and 1 as their sum.
"""

from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit.casting.rewriting._signs import is_multiplied
from jmp_kit.programs._flow import SUMS, Flow
from jmp_kit.programs._jaxpr import (
    Atom,
    copied,
    equations_of,
    is_small,
    is_var,
    largest_size,
    taking,
    uses_of,
)

# What is linear in the only value that it takes.
_LINEAR = {"neg", "reduce_sum", "broadcast_in_dim", "reshape", "transpose", "squeeze"}


def undone(jaxpr: Jaxpr, flow: Flow, is_late: Callable[[JaxprEqn], bool]) -> tuple[Jaxpr, set[Var]]:
    """The program, its backward pass taking what is made of results rather than of operands.

        dividend -> quotient * divisor      where a product takes the quotient, the divisor is small
        dividend, divisor -> quotient, 1    of these, where the scale of both makes no difference

    Returns:
      The program, and these results, as good as ever where they are stored in half.
    """
    uses, place = uses_of(jaxpr), {id(eqn): i for i, eqn in enumerate(jaxpr.eqns)}
    eqns: list[JaxprEqn] = []
    results: set[Var] = set()
    instead: dict[Var, Atom] = {}

    for eqn in jaxpr.eqns:
        eqns.append(taking(eqn, instead) if is_late(eqn) else eqn)
        if eqn.primitive.name != "div" or is_late(eqn) or not all(map(is_var, eqn.invars)):
            continue
        [dividend, divisor], [quotient] = eqn.invars, eqn.outvars
        is_taken = any(e and is_late(e) for e in uses[dividend])
        is_stored = is_multiplied(quotient, uses, flow, is_late)
        if is_stored and is_taken and is_small(divisor, largest_size([eqn])):
            results.add(quotient)
            scaled = _scaled_alike(eqn, uses, place, is_late)
            if scaled is None:
                instead[dividend] = made = Var(dividend.aval)
                eqns += equations_of(lax.mul, [quotient, divisor], [made], eqn.source_info)
            else:
                one = Var(divisor.aval)
                instead |= {dividend: quotient, divisor: one}
                eqns += equations_of(jnp.ones_like, [divisor], [one], eqn.source_info)
                eqns += [copied(e, instead) for e in scaled]
    return jaxpr.replace(eqns=eqns), results


def _scaled_alike(
    division: JaxprEqn,
    uses: Mapping[Var, Sequence[JaxprEqn | None]],
    place: Mapping[int, int],
    is_late: Callable[[JaxprEqn], bool],
) -> list[JaxprEqn] | None:
    """What the forward pass makes of the operands of a division alone, for the backward pass.

    None if it makes a difference there that both operands are larger by the same factor.

    Args:
      uses: the equations that take each variable; None for a result.
      place: of each equation, by its id, among all.
    """
    # As what power of that factor each value grows; others do not.
    degrees: dict[Var, int] = dict.fromkeys(division.invars, 1)
    early: list[JaxprEqn] = []
    after = {place[id(e)]: e for v in degrees for e in uses[v] if e}
    after = {i: e for i, e in after.items() if i > place[id(division)]}
    while after:
        eqn = after.pop(min(after))
        variables = [a for a in eqn.invars if is_var(a)]
        degree = _degree(eqn, [degrees.get(a, 0) if is_var(a) else 0 for a in eqn.invars])
        is_known = degree is not None and (is_late(eqn) or all(a in degrees for a in variables))
        is_result = any(None in uses[v] for v in eqn.outvars)
        if is_late(eqn) and (not is_known or (degree and is_result)):
            return None
        if degree and is_known:
            [result] = eqn.outvars
            degrees[result] = degree
            early += [] if is_late(eqn) else [eqn]
            after |= {place[id(e)]: e for e in uses[result] if e}
    return early


def _degree(eqn: JaxprEqn, operands: Sequence[int]) -> int | None:
    """As what power of a factor its result grows if its operands do so, where that is known."""
    match eqn.primitive.name:
        case "mul":
            return sum(operands)
        case "div":
            return operands[0] - operands[1]
        case "integer_pow":
            return int(eqn.params["y"]) * operands[0]
        case name if name in SUMS:
            return operands[0] if operands[0] == operands[1] else None
        case name if name in _LINEAR:
            return operands[0]
    return None
