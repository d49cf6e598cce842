"""A program rewritten before it is planned: for float8, and for what its backward pass takes."""

from collections.abc import Mapping, Sequence

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit.casting.reading._parts import fixed_scans_first, living, parts_of, without_the_dead
from jmp_kit.casting.recomputing._repeat import repeating
from jmp_kit.casting.rewriting._across import over_axes
from jmp_kit.casting.rewriting._algebra import with_exact_algebra
from jmp_kit.casting.rewriting._apiece import apiece
from jmp_kit.casting.rewriting._chosen import asked
from jmp_kit.casting.rewriting._deviations import without_their_sums
from jmp_kit.casting.rewriting._float8 import in_float8
from jmp_kit.casting.rewriting._hoisted import hoisted
from jmp_kit.casting.rewriting._inline import inlined
from jmp_kit.casting.rewriting._multiples import summed_as_stored
from jmp_kit.casting.rewriting._pools import pooled
from jmp_kit.casting.rewriting._scans import repeating_scans
from jmp_kit.casting.rewriting._scattered import added_up
from jmp_kit.casting.rewriting._signs import signs_of_results
from jmp_kit.casting.rewriting._summed_first import summed_first
from jmp_kit.casting.rewriting._sums import of_one, shared
from jmp_kit.casting.rewriting._sunk import sunk
from jmp_kit.casting.rewriting._turned import fronted, turned, with_filters_in_half
from jmp_kit.casting.rewriting._undone import undone
from jmp_kit.casting.rewriting._unmoved import without_round_trips
from jmp_kit.programs._algebra import is_algebra
from jmp_kit.programs._flow import Flow
from jmp_kit.programs._jaxpr import uses_of
from jmp_kit.programs._marks import as_backward, is_backward, is_rematerialised, stack_of


def is_gradient(jaxpr: Jaxpr) -> bool:
    """Whether the program holds its backward pass."""
    return any(map(_is_late, jaxpr.eqns))


def with_float8(jaxpr: Jaxpr, flow: Flow, by_size: bool | None, half: np.dtype) -> Jaxpr:
    """The program, its large products written in float8, if they are to be."""
    if by_size is None:
        return jaxpr
    if is_gradient(jaxpr):  # where a product is found beside those of its derivatives
        jaxpr = turned(inlined(jaxpr), flow)
    return in_float8(jaxpr, flow, by_size, half)


def repeated(
    jaxpr: Jaxpr,
    flow: Flow,
    price: float | None,
    depends: Sequence[bool],
    reaches: Sequence[bool],
    is_summed_wide: bool,
    half: np.dtype,
    closed: Mapping[Var, np.ndarray],
) -> tuple[Jaxpr, list[list[JaxprEqn]]]:
    """The program and its parts, its backward pass with equations that make again what it takes.

    Args:
      price: see `Planner`.
      depends: of each argument, whether it depends on a product.
      reaches: of each result, whether a product can be reached from it.
      is_summed_wide: whether gradients of weights are, or sums over all rounds would be rounded.
      half: the dtype of products without a mark.
      closed: the integers that it closes over.
    """
    if (price is not None and is_gradient(jaxpr)) or any(map(is_algebra, jaxpr.eqns)):
        jaxpr = without_the_dead(inlined(jaxpr))
    jaxpr = with_exact_algebra(jaxpr, flow)
    if price is None or not is_gradient(jaxpr):
        jaxpr = fixed_scans_first(jaxpr, flow, depends)
        return jaxpr, parts_of(jaxpr.eqns, flow)
    jaxpr = without_round_trips(over_axes(jaxpr), flow)
    jaxpr = repeating_scans(fixed_scans_first(jaxpr, flow, depends), flow, depends, half)
    jaxpr = turned(hoisted(jaxpr, flow, price) if is_summed_wide else jaxpr, flow)
    jaxpr = with_filters_in_half(fronted(jaxpr, flow), flow, half)
    jaxpr = asked(added_up(pooled(jaxpr), closed), closed)
    jaxpr, signed = signs_of_results(jaxpr, flow, _is_late)
    jaxpr, divided = undone(jaxpr, flow, _is_late)
    jaxpr = shared(of_one(without_their_sums(jaxpr, _is_late), _is_late), _is_late)
    jaxpr = summed_as_stored(jaxpr, flow, _is_late)
    depending = flow.depending(jaxpr, depends)
    uses = uses_of(jaxpr)
    parts = sunk(parts_of(jaxpr.eqns, flow), flow, depending, uses, _is_late)
    parts = apiece(parts, flow, depending, uses, _is_late)
    jaxpr = jaxpr.replace(eqns=[eqn for part in parts for eqn in part])
    depending, uses = flow.depending(jaxpr, depends), uses_of(jaxpr)
    parts = list(filter(None, summed_first(parts, flow, uses, _is_late)))
    reaching = flow.reaching(jaxpr, reaches)
    parts = list(repeating(parts, flow, depending, reaching, uses, signed | divided, price))
    parts = living(parts, jaxpr.outvars)  # what is made again was made for others alone
    return jaxpr.replace(eqns=[eqn for part in parts for eqn in part]), parts


def with_its_backward_pass(jaxpr: Jaxpr) -> Jaxpr:
    """What `jax.checkpoint` holds in a backward pass: it names the forward pass in it alone."""
    eqns = [e if is_rematerialised(e) else as_backward(e) for e in jaxpr.eqns]
    return jaxpr.replace(eqns=eqns)


def _is_late(eqn: JaxprEqn) -> bool:
    return is_backward(stack_of(eqn))
