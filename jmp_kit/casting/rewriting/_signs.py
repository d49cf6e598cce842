"""Where the operand of a ReLU is positive, told by its result, which is stored for a product.

    x > 0   -> max(x, 0) > 0
    x > 0   -> y > 0            y = x where that holds, or else a·x: a leaky ReLU
    x >= 0  -> y has no sign    for a·x may be too small for float16: -0

But where x is a norm: its backward pass reads what that is a norm of, and makes x again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit.programs._axes import reduces
from jmp_kit.programs._flow import Flow
from jmp_kit.programs._jaxpr import (
    Atom,
    equations_of,
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


def signs_of_results(
    jaxpr: Jaxpr, flow: Flow, is_late: Callable[[JaxprEqn], bool]
) -> tuple[Jaxpr, set[Var]]:
    """The program, its backward pass asking results for signs rather than operands.

    Returns:
      The program, and these results, as good as ever where they are stored in half.
    """
    uses, normed = uses_of(jaxpr), _normed(jaxpr, flow)
    maker = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    eqns: list[JaxprEqn] = []
    results: set[Var] = set()
    positive: dict[Var, Var] = {}  # the positive part of each
    instead: dict[Var, Atom] = {}

    for eqn in jaxpr.eqns:
        if _is_mask(eqn) and all(e and is_late(e) for e in uses[eqn.outvars[0]]):
            results.update(positive[a] for a in eqn.invars[:1] if a in positive)
            eqns.append(taking(eqn, positive))
            continue
        eqns.append(taking(eqn, instead) if is_late(eqn) else eqn)
        is_stored = any(is_multiplied(v, uses, flow, is_late) for v in eqn.outvars)
        if not is_stored or not normed.isdisjoint(filter(is_var, eqn.invars)):
            continue
        mask = _leaky_mask(eqn, maker)
        if is_positive_part(eqn):
            positive[eqn.invars[0]] = eqn.outvars[0]
        elif mask and any(e and is_late(e) for e in uses[mask]):
            results.update(eqn.outvars)
            instead[mask] = made = Var(mask.aval)
            of_result = {maker[mask].invars[0]: eqn.outvars[0]}
            test = taking(maker[mask], of_result).replace(outvars=[made])
            eqns += _has_no_sign(test) if test.primitive.name == "ge" else [test]
    return jaxpr.replace(eqns=eqns), results


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


def _leaky_mask(eqn: JaxprEqn, maker: Mapping[Var, JaxprEqn]) -> Var | None:
    """Where the operand of a leaky ReLU is positive, if it is one. Its result is of that sign."""
    is_of_two = eqn.primitive.name == "select_n" and len(eqn.invars) == 3
    if not is_of_two or not all(map(is_var, eqn.invars)):
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
