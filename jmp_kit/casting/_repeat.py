"""Segments computed again in a backward pass that is part of the program, as of a whole train step.

Where only the loss is wrapped, `jax.checkpoint` does that when the gradient is taken. A program
that holds its backward pass already stores for it what its forward pass made; instead, the parts
of the backward pass are given equations that make it again, of what is stored anyway.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

import jax
from jax import lax
from jax.extend.core import JaxprEqn, Var

from jmp_kit.casting._again import Value, kept
from jmp_kit.casting._parts import acts
from jmp_kit.casting._worth import is_kept, reduces
from jmp_kit.programs._flow import Flow
from jmp_kit.programs._jaxpr import (
    Atom,
    copied,
    in_place,
    is_along_rows,
    is_float32,
    is_small,
    is_var,
    names_within,
    opened,
    shape_of,
    size_of,
    taking,
    traced_back,
)
from jmp_kit.programs._marks import is_backward, stack_of

Part = list[JaxprEqn]

# What is this much smaller than what is made of it is the same for much of that.
_SMALL = 16


class Rounded(NamedTuple):
    """A value as products take it."""

    var: Var


def repeating(
    parts: Sequence[Part],
    flow: Flow,
    depending: Set[Var],
    reaching: Set[Var],
    uses: Mapping[Var, Sequence[JaxprEqn | None]],
    results: Set[Var],
    price: float,
) -> Iterator[Part]:
    """The parts, those of the backward pass after what they make again.

    That is what only its own segment and the backward pass take; what others take is stored anyway.

    Args:
      depending: the variables that depend on a product.
      reaching: those from which a product can be reached.
      uses: the equations that take each variable; None for a result of the program.
      results: what may be computed with as it is stored for products, that is rounded.
      price: of a byte that is kept, in bytes moved.
    """
    eqns = [e for part in parts for e in part]
    backward = {id(e) for e in eqns if is_backward(stack_of(e))}
    early = depending - {v for e in eqns if id(e) in backward for v in e.outvars}
    order = {id(e): i for i, e in enumerate(eqns)}
    part_of = {id(e): i for i, part in enumerate(parts) for e in part}
    made_in = {v: i for i, part in enumerate(parts) for e in part for v in e.outvars}

    def is_spared(use: JaxprEqn | None, part: int) -> bool:
        beside = use is not None and part_of[id(use)] == part
        return beside or (id(use) in backward and (flow.closes(use) or not _is_whole(use, flow)))

    def is_made_again(v: Var, part: int) -> bool:
        return v in early and all(is_spared(use, part) for use in uses[v])

    maker = makers(parts, flow, is_made_again)
    normed = {v for part in parts for v in _normed(part)}

    def from_memory(eqn: JaxprEqn) -> bool:
        return _is_whole(eqn, flow) or (_is_kept(eqn, flow) and not reduces(eqn))

    def values_of(v: Var) -> Iterator[tuple[Hashable, Value]]:
        """A value to compute with, and where they differ the same as products take it, rounded."""
        takers = [e for e in uses[v] if e is None or part_of[id(e)] != made_in[v]]
        late = [e for e in takers if e is not None and id(e) in backward]
        is_multiplied = any(map(from_memory, late))
        is_read = not all(map(from_memory, late))
        closing = any(e is not None and flow.closes(e) for e in uses[v])
        is_stored = v not in maker or len(late) < len(takers)
        is_half = is_float32(v) and (
            closing or flow.is_product(eqn_of[v]) or not is_small(v, parts[made_in[v]])
        )
        # Of symbolic dimensions each is as good as one.
        size = math.prod(n for n in shape_of(v) if isinstance(n, int))
        nbytes = size * (2 if is_half else v.aval.dtype.itemsize)
        # A norm is made again in a pass of its own, which reads what it is a norm of.
        again = nbytes * (2 if v in normed else 1) if is_multiplied else 0
        operands = [a for a in maker[v].invars if is_var(a)] if v in maker else None
        if closing and is_half and not is_stored and v not in results:
            yield v, Value(operands, nbytes, False, True, is_read, False, 0)
            yield Rounded(v), Value([v], nbytes, True, False, False, is_multiplied, again)
        else:
            stored = is_stored or closing
            is_rounded = is_half and not stored
            yield v, Value(operands, nbytes, stored, is_rounded, is_read, is_multiplied, again)

    eqn_of = {v: e for e in eqns for v in e.outvars}
    values: dict[Hashable, Value] = {}
    late = ((i, e) for i, part in enumerate(parts) for e in part if id(e) in backward)
    waiting = [a for i, e in late for a in e.invars if is_var(a) and made_in.get(a, i) != i]
    while waiting:
        v = waiting.pop()
        if v in early and v in made_in and v not in values:
            found = dict(values_of(v))
            values |= found
            waiting += found[v].operands or ()
    keep = kept(values, price)
    maker = {v: e for v, e in maker.items() if v not in keep}

    rounded = {v.var for v in keep if isinstance(v, Rounded)}

    def is_there(v: Var, eqn: JaxprEqn) -> bool:
        return v in rounded and from_memory(eqn)

    def with_copies(eqn: JaxprEqn, made_again: Mapping[Var, Atom]) -> JaxprEqn:
        taken = [a for a in eqn.invars if is_var(a) and a in made_again and not is_there(a, eqn)]
        return taking(eqn, {a: made_again[a] for a in taken})

    [barrier] = opened(jax.make_jaxpr(lax.optimization_barrier)(0.0))[0].eqns
    ends = {v for e in eqns if flow.closes(e) and id(e) in backward for v in e.outvars} & reaching
    behind: dict[Var, Atom] = {}  # the barrier, where XLA cannot tell what it was before
    computing = [e for e in eqns if id(e) in backward and not from_memory(e)]
    read = {a for e in [*computing, *maker.values()] for a in e.invars if is_var(a)} & early

    for i, part in enumerate(parts):
        pairs = [(a, e) for e in part if id(e) in backward for a in e.invars if is_var(a)]
        before = [(a, e) for a, e in pairs if made_in.get(a, -1) < i]
        wanted = [a for a, e in before if a in maker and not is_there(a, e)]
        again, sources = traced_back(wanted, maker)
        there = [a for a, _ in before if a in read and a not in maker]
        taking_part = [(a, e) for e in again.values() for a in e.invars if is_var(a)] + before
        spread = [a for a, e in taking_part if a not in depending and _is_spread(a, e)]
        arrived = [a for a, _ in before if a in ends and a not in behind]
        last = sorted(arrived, key=made_in.__getitem__)[-1:]
        # XLA makes early, and keeps, what it can, on CPUs what is broadcast as well: so nothing is
        # before what comes from the products behind is there.
        moving = [v for v in [*sources, *there] if v in depending]
        for several in (moving, spread):
            fresh = [v for v in dict.fromkeys(several) if is_float32(v) and v not in behind]
            if fresh:
                taken = [*fresh, *in_place(last, behind)]
                made = [Var(v.aval) for v in taken]
                behind.update(zip([*fresh, *last], made, strict=True))
                yield [barrier.replace(invars=taken, outvars=made)]
        made_again = dict(behind)
        copies = [copied(again[n], made_again) for n in sorted(again, key=order.__getitem__)]

        yield copies + [with_copies(e, made_again) if id(e) in backward else e for e in part]


def _is_spread(atom: Var, eqn: JaxprEqn) -> bool:
    return any(size_of(atom) * _SMALL <= size_of(v) for v in eqn.outvars)


def _normed(part: Part) -> set[Var]:
    """What is made with sums along rows."""
    found: set[Var] = set()
    for eqn in part:
        is_made_of_sums = not reduces(eqn) and any(is_var(a) and a in found for a in eqn.invars)
        if is_made_of_sums or (reduces(eqn) and is_along_rows(eqn)):
            found.update(eqn.outvars)
    return found


def makers(
    parts: Sequence[Part], flow: Flow, is_made_again: Callable[[Var, int], bool]
) -> dict[Var, JaxprEqn]:
    """What may be made again, and the equation that does so."""
    return {
        v: e
        for i, part in enumerate(parts)
        for e in part
        if not _is_whole(e, flow) and not _is_kept(e, flow)
        for v in e.outvars
        if is_made_again(v, i)
    }


def _is_whole(eqn: JaxprEqn, flow: Flow) -> bool:
    return flow.closes(eqn) or flow.holds_product(eqn) or acts(eqn)


def _is_kept(eqn: JaxprEqn, flow: Flow) -> bool:
    # A product that is no end of a segment is one of a full-precision region.
    return any(name in flow.products or is_kept(name) for name in names_within(eqn))
