"""Where the operand of a ReLU is positive, told by its result, which is stored for a product.

    x > 0   -> max(x, 0) > 0
    x > 0   -> y > 0            y = max(x, 0) / p where it is kept, or else 0: with dropout
    x > 0   -> y > 0            y = x where that holds, or else a·x: a leaky ReLU
    x >= 0  -> y has no sign    for a·x may be too small for float16: -0

But where x is a norm: its backward pass reads what that is a norm of, and makes x again.
"""

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit.programs._axes import reduces
from jmp_kit.programs._flow import Flow
from jmp_kit.programs._jaxpr import (
    Atom,
    equations_of,
    is_complex,
    is_float32,
    is_var,
    is_zero,
    subjaxprs,
    taking,
    uses_of,
)

# What is a name around others.
_CALLS = {"jit", "pjit", "custom_jvp_call"}

Uses = Mapping[Var, Sequence[JaxprEqn | None]]
Maker = Mapping[Var, JaxprEqn]


class _Positive(NamedTuple):
    """Where a value is positive, and else zero."""

    operand: Var  # is positive there
    kept: frozenset[Var] = frozenset()  # and all of these hold
    factor: float = 1.0  # of the operand; of a smaller one, half may make zero


def signs_of_results(
    jaxpr: Jaxpr, flow: Flow, is_late: Callable[[JaxprEqn], bool]
) -> tuple[Jaxpr, set[Var]]:
    """The program, its backward pass asking results for signs rather than operands.

    Returns:
      The program, and these results, as good as ever where they are stored in half.
    """
    uses, normed = uses_of(jaxpr), _normed(jaxpr, flow)
    maker = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    masks: dict[Var, list[JaxprEqn]] = collections.defaultdict(list)  # by what is positive there
    for eqn in jaxpr.eqns:
        if _is_mask(eqn) and all(e and is_late(e) for e in uses[eqn.outvars[0]]):
            masks[eqn.invars[0]].append(eqn)
    eqns: list[JaxprEqn] = []
    results: set[Var] = set()
    positive: dict[Var, _Positive] = {}
    instead: dict[Var, Atom] = {}
    in_place: dict[int, JaxprEqn] = {}  # of tests of the backward pass itself

    def asked(test: JaxprEqn, operand: Var, result: Var) -> JaxprEqn:
        """The test, of a result in place of the operand."""
        results.add(result)
        [mask] = test.outvars
        instead[mask] = made = Var(mask.aval)
        return taking(test, {operand: result}).replace(outvars=[made])

    for eqn in jaxpr.eqns:
        eqns.append(taking(in_place.get(id(eqn), eqn), instead) if is_late(eqn) else eqn)
        if is_late(eqn) or not normed.isdisjoint(filter(is_var, eqn.invars)):
            continue
        if found := _positive(eqn, positive, maker):
            positive[eqn.outvars[0]] = found
        if not any(is_multiplied(v, uses, flow, is_late) for v in eqn.outvars):
            continue
        [result, *_] = eqn.outvars
        leaky = _leaky_mask(eqn, maker)
        if found and found.factor >= 1:
            for test in masks.pop(found.operand, ()):
                chains = [_chain(e, test.outvars[0], maker, uses) for e in uses[test.outvars[0]]]
                if not all(found.kept <= chain.keys() for chain in chains):
                    continue
                if is_late(test):
                    results.add(result)
                    in_place[id(test)] = taking(test, {found.operand: result})
                else:
                    eqns.append(asked(test, found.operand, result))
                # Where the result is positive, it was kept: nobody need remember that.
                choices = (chain[kept] for chain in chains for kept in found.kept)
                instead |= {e.outvars[0]: e.invars[2] for e in choices}
        elif leaky and any(e and is_late(e) for e in uses[leaky]):
            test = asked(maker[leaky], maker[leaky].invars[0], result)
            eqns += _has_no_sign(test) if test.primitive.name == "ge" else [test]

    def is_taken(v: Var) -> bool:
        return v not in instead or any(e is None or not is_late(e) for e in uses[v])

    left = [e for e in eqns if not e.outvars or any(map(is_taken, e.outvars))]
    return jaxpr.replace(eqns=left), results


def _positive(eqn: JaxprEqn, known: Mapping[Var, _Positive], maker: Maker) -> _Positive | None:
    """Where what an equation makes is positive, if it is zero elsewhere."""
    if is_positive_part(eqn):
        return _Positive(eqn.invars[0])
    if scaled := _scaled(eqn, maker):
        value, factor = scaled
        found = known.get(value)
        return found._replace(factor=found.factor * factor) if found and factor > 0 else None
    if chosen := _kept(eqn, maker):
        kept, value = chosen
        found = known.get(value)
        return found and found._replace(kept=found.kept | {kept})
    return None


def _chain(eqn: JaxprEqn | None, mask: Var, maker: Maker, uses: Uses) -> Mapping[Var, JaxprEqn]:
    """What a choice by a mask is made of, scaled, for it alone: others, by where they keep it."""
    found: dict[Var, JaxprEqn] = {}
    chosen = _kept(eqn, maker) if eqn else None
    if chosen is None or chosen[0] is not mask:
        return found
    _, v = chosen
    while v in maker and len(uses[v]) == 1:
        made = maker[v]
        if chosen := _kept(made, maker):
            kept, v = chosen
            found[kept] = made
        elif scaled := _scaled(made, maker):
            v, _ = scaled
        else:
            break
    return found


def _kept(eqn: JaxprEqn, maker: Maker) -> tuple[Var, Var] | None:
    """The mask and the value, of a value that is zero where the mask does not hold."""
    if eqn.primitive.name != "select_n" or len(eqn.invars) != 3:
        return None
    mask, other, value = eqn.invars
    is_choice = is_var(mask) and is_var(value) and _number(other, maker) == 0
    return (mask, value) if is_choice else None


def _scaled(eqn: JaxprEqn, maker: Maker) -> tuple[Var, float] | None:
    """What is multiplied or divided by a number in the program, and the factor."""
    if eqn.primitive.name not in ("mul", "div"):
        return None
    [first, second], is_divided = eqn.invars, eqn.primitive.name == "div"
    for value, other in [(first, second)] if is_divided else [(first, second), (second, first)]:
        number = _number(other, maker)
        if is_var(value) and number is not None and (number or not is_divided):
            return value, 1 / number if is_divided else number
    return None


def _has_no_sign(test: JaxprEqn) -> Iterable[JaxprEqn]:
    """In place of a test whether a float32 array is 0 or more: -0 is not."""

    def has_no_sign(x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(x, jnp.int32) >= 0

    return equations_of(has_no_sign, test.invars[:1], test.outvars, test.source_info)


def is_multiplied(v: Var, uses: Uses, flow: Flow, is_late: Callable[[JaxprEqn], bool]) -> bool:
    """Whether a product of the forward pass takes it, so that it is stored."""
    return is_float32(v) and any(e and flow.closes(e) and not is_late(e) for e in uses[v])


def _normed(jaxpr: Jaxpr, flow: Flow) -> set[Var]:
    """What is made with sums of what the last products gave."""
    found: set[Var] = set()
    for eqn in jaxpr.eqns:
        follows = not found.isdisjoint(filter(is_var, eqn.invars))
        if not flow.closes(eqn) and (reduces(eqn) or follows):
            found.update(eqn.outvars)
    return found


def _leaky_mask(eqn: JaxprEqn, maker: Maker) -> Var | None:
    """Where the operand of a leaky ReLU is positive, if it is one. Its result is of that sign."""
    is_of_two = eqn.primitive.name == "select_n" and len(eqn.invars) == 3
    if not is_of_two or not all(map(is_var, eqn.invars)):
        return None
    mask, negative, x = eqn.invars
    scale, test = maker.get(negative), maker.get(mask)
    if scale is None or test is None or test.invars[0] is not x:
        return None
    scaled = _scaled(scale, maker)
    is_leaky = scaled is not None and scaled[0] is x and scaled[1] > 0
    return mask if is_leaky and _is_mask(test, ("gt", "ge")) else None


def _number(atom: Atom, maker: Maker) -> float | None:
    """A real number in the program, of whatever dtype, or many of it."""
    if not is_var(atom):
        return float(atom.val) if atom.aval.shape == () and not is_complex(atom) else None
    eqn = maker.get(atom)
    if eqn is None or eqn.primitive.name not in ("convert_element_type", "broadcast_in_dim"):
        return None
    return _number(eqn.invars[0], maker)


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
