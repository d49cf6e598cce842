"""What a backward pass takes of the forward pass, made of what comes after it and is stored anyway.

Softmax weights are exponentials divided by their sum. Its backward pass takes the exponentials, and
a product takes the weights; made again from the scores, both would be computed, and written, twice.
But the weights times the sum are the exponentials. And where the scale of both makes no difference,
as in the derivative of softmax, the weights are as good as the exponentials, and 1 as their sum.

The backward pass of a ReLU asks where its operand is positive: where its result is. So does that of
a leaky one.
"""

from collections.abc import Callable, Mapping, Sequence

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit.casting._worth import reduces
from jmp_kit.programs._flow import SUMS, Flow
from jmp_kit.programs._jaxpr import (
    Atom,
    copied,
    equations_of,
    is_float32,
    is_small,
    is_var,
    is_zero,
    subjaxprs,
    taking,
    uses_of,
)

# What is a name around others.
_CALLS = {"jit", "pjit", "custom_jvp_call"}

# What is linear in the only value that it takes.
_LINEAR = {"neg", "reduce_sum", "broadcast_in_dim", "reshape", "transpose", "squeeze"}


def undone(jaxpr: Jaxpr, flow: Flow, is_late: Callable[[JaxprEqn], bool]) -> tuple[Jaxpr, set[Var]]:
    """The program, its backward pass taking what is made of results rather than of operands.

        dividend -> quotient * divisor      where a product takes the quotient, the divisor is small
        dividend, divisor -> quotient, 1    of these, where the scale of both makes no difference
        x > 0    -> max(x, 0) > 0           where a product takes the maximum
        x > 0    -> y > 0                   where a product takes y, x where that holds, or else a·x,
                                            and x is no norm

    Returns:
      The program, and these results, as good as ever where they are stored in half.
    """
    uses, place = uses_of(jaxpr), {id(eqn): i for i, eqn in enumerate(jaxpr.eqns)}
    maker = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    normed = _normed(jaxpr, flow)
    eqns: list[JaxprEqn] = []
    results: set[Var] = set()
    positive: dict[Var, Var] = {}  # the positive part of each
    instead: dict[Var, Atom] = {}

    def is_late_use(eqn: JaxprEqn | None) -> bool:
        return eqn is not None and is_late(eqn)

    def is_multiplied(v: Var) -> bool:
        return is_float32(v) and any(e and flow.closes(e) and not is_late(e) for e in uses[v])

    for eqn in jaxpr.eqns:
        if _is_mask(eqn) and all(map(is_late_use, uses[eqn.outvars[0]])):
            results.update(positive[a] for a in eqn.invars[:1] if a in positive)
            eqns.append(taking(eqn, positive))
            continue
        eqns.append(taking(eqn, instead) if is_late(eqn) else eqn)
        if is_positive_part(eqn) and is_multiplied(eqn.outvars[0]):
            positive[eqn.invars[0]] = eqn.outvars[0]
        mask = _leaky_mask(eqn, maker)
        is_read = mask is not None and any(map(is_late_use, uses[mask]))
        # A norm's backward pass reads what it is a norm of, and makes the operand again.
        if mask and is_read and eqn.invars[2] not in normed and is_multiplied(eqn.outvars[0]):
            results.update(eqn.outvars)
            instead[mask] = made = Var(mask.aval)
            of_result = {maker[mask].invars[0]: eqn.outvars[0]}
            eqns.append(taking(maker[mask], of_result).replace(outvars=[made]))
        if eqn.primitive.name != "div" or is_late(eqn) or not all(map(is_var, eqn.invars)):
            continue
        [dividend, divisor], [quotient] = eqn.invars, eqn.outvars
        is_taken = any(map(is_late_use, uses[dividend]))
        if is_multiplied(quotient) and is_taken and is_small(divisor, [eqn]):
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


def _normed(jaxpr: Jaxpr, flow: Flow) -> set[Var]:
    """What is made with sums of what the last products gave."""
    found: set[Var] = set()
    for eqn in jaxpr.eqns:
        if not flow.closes(eqn) and (
            reduces(eqn) or not found.isdisjoint(filter(is_var, eqn.invars))
        ):
            found.update(eqn.outvars)
    return found


def _leaky_mask(eqn: JaxprEqn, maker: Mapping[Var, JaxprEqn]) -> Var | None:
    """Where the operand of a leaky ReLU is positive, if it is one. Its result is of that sign."""
    if eqn.primitive.name != "select_n" or not all(map(is_var, eqn.invars)):
        return None
    mask, negative, x = eqn.invars
    scale, test = maker.get(negative), maker.get(mask)
    if scale is None or test is None or scale.primitive.name != "mul" or test.invars[0] is not x:
        return None
    slopes = [_number(a, maker) for a in scale.invars if a is not x]
    is_leaky = len(slopes) == 1 and slopes[0] is not None and slopes[0] > 0
    return mask if is_leaky and _is_mask(test, ("gt", "ge")) else None


def _number(atom: Atom, maker: Mapping[Var, JaxprEqn]) -> float | None:
    """A number in the program, of whatever dtype."""
    if not is_var(atom):
        return float(atom.val) if atom.aval.shape == () else None
    eqn = maker.get(atom)
    is_cast = eqn is not None and eqn.primitive.name == "convert_element_type"
    return _number(eqn.invars[0], maker) if eqn is not None and is_cast else None


def _is_mask(eqn: JaxprEqn, names: Sequence[str] = ("gt",)) -> bool:
    return eqn.primitive.name in names and is_var(eqn.invars[0]) and is_zero(eqn.invars[1])


def is_positive_part(eqn: JaxprEqn) -> bool:
    """Whether it is `max(x, 0)`, under whatever names."""
    inner = eqn
    while inner.primitive.name in _CALLS:
        [body] = subjaxprs(inner)
        if len(body.eqns) != 1:
            return False
        [inner] = body.eqns
    is_of_one = [is_var(a) for a in eqn.invars] == [True, False][: len(eqn.invars)]
    return inner.primitive.name == "max" and is_of_one and is_zero(inner.invars[1])
