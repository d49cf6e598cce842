"""Loops: what they carry in which dtype, and what is cast once for all rounds."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from jax.extend.core import JaxprEqn

from jmp_kit.casting.planning import _plan
from jmp_kit.casting.planning._plan import Known, Stored
from jmp_kit.casting.reading._parts import parts_of
from jmp_kit.casting.reading._state import STATE
from jmp_kit.programs._flow import Body, Flow, bodies_of
from jmp_kit.programs._jaxpr import (
    every_equation,
    is_float32,
    is_small,
    largest_size,
    scan_counts,
    uses_of,
)
from jmp_kit.programs._marks import marked_dtype


class Inside(Protocol):
    """The planner of what is inside a loop."""

    @property
    def half(self) -> np.dtype:
        """The compute dtype."""

    @property
    def flow(self) -> Flow:
        """What is a product, and where products lead."""

    @property
    def calls(self) -> tuple[JaxprEqn, ...]:
        """The loop last."""


def carried(
    inside: Inside, eqn: JaxprEqn, body: Body, known: Known
) -> Iterator[tuple[np.dtype, Stored | None]]:
    """Half what depends on a product, feeds one in the body itself, is large and made anew."""
    flow = inside.flow
    within = flow.body_outputs(body, [False] * len(eqn.outvars))
    feeds = flow.reaching(body.jaxpr, within)
    segments = [
        [e for e in part if not flow.is_product(e) and not flow.is_call(e)]
        for part in parts_of(body.jaxpr.eqns, flow)
    ]
    for result, variable in body.carried:
        var, made = body.jaxpr.invars[variable], body.jaxpr.outvars[result]
        if not (is_float32(var) and known.depends[variable] and var in feeds):
            yield var.aval.dtype, None
            continue
        beside = [e for s in segments if _takes_part(s, (var, made)) for e in s]
        dtype = np.dtype(np.float32)
        if known.whole[result]:
            why = _plan.UPDATED if known.origins[variable] & STATE else _plan.LEADS
        elif is_small(var, largest_size(beside)):
            why = _plan.SMALL
        else:
            dtype, why = inside.half, _plan.ANEW
        yield dtype, Stored(eqn, inside.calls[:-1], var, dtype, f"{_plan.CARRIED}, {why}")


def constant(flow: Flow, eqn: JaxprEqn) -> list[bool]:
    """Of each operand, whether products take it, and nothing else, in every round of a loop.

    It may be cast once for all rounds, but where the derivative is taken from outside: there it is
    summed up over the rounds in its dtype.
    """
    bodies = bodies_of(eqn) if eqn.primitive.name in ("scan", "while") else []
    if any(marked_dtype(e) for body in bodies for e, _ in every_equation(body.jaxpr)):
        bodies = []
    taken: set[int] = set()
    multiplied: set[int] = set()
    for body in bodies:
        others, uses = flow.taken_by_others(body.jaxpr), uses_of(body.jaxpr)
        changing = {variable for _, variable in body.carried}
        if eqn.primitive.name == "scan":
            changing.update(range(scan_counts(eqn)[0], len(body.inputs)))
        for i, (v, operand) in enumerate(zip(body.jaxpr.invars, body.inputs, strict=True)):
            if v in others or i in changing:
                taken.add(operand)
            if uses[v]:
                multiplied.add(operand)
    only = multiplied - taken
    return [is_float32(atom) and i in only for i, atom in enumerate(eqn.invars)]


def _takes_part(segment: Sequence[JaxprEqn], atoms: Sequence[object]) -> bool:
    return any(a is b for e in segment for a in (*e.invars, *e.outvars) for b in atoms)
