"""The parts of a plan: which products, in how many passes, and what their backward pass keeps."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jax.extend.core import JaxprEqn, Var

from jmp_kit._dtypes import FLOAT8
from jmp_kit.casting import Barrier, Call, Part, Plan, why_half
from jmp_kit.numerics._sources import source_of
from jmp_kit.programs import (
    every_equation,
    is_backward,
    is_float32,
    is_var,
    names_in,
    stack_of,
)


@dataclasses.dataclass(frozen=True)
class PlannedPart:
    """A run of operations, and the products after it."""

    source: str  # "model.py:41", the line of its first product, or of what it ends with
    path: str  # name scopes, in Flax linen the module
    products: tuple[str, ...]  # "dot_general bfloat16"; beside float8, "…: K is 64"
    passes: int  # over memory, of the operations before the products
    kept: int  # bytes of its results that a backward pass takes from memory
    again: int  # operations of the forward pass that it, of a backward pass, computes once more
    backward: bool


def parts_of(plan: Plan, in_float8: bool) -> Iterator[PlannedPart]:
    """Every part, however deep, in order.

    Args:
      in_float8: whether large products are in float8, so that the others have a reason.
    """
    return _parts(plan, in_float8, (), set(), _holds_backward_pass(plan))


def _holds_backward_pass(plan: Plan) -> bool:
    return any(is_backward(stack_of(e, calls)) for e, calls in every_equation(plan.jaxpr))


def _parts(
    plan: Plan,
    in_float8: bool,
    calls: tuple[JaxprEqn, ...],
    given: set[Var],
    is_gradient: bool,
) -> Iterator[PlannedPart]:
    """Every part inside these calls.

    Args:
      given: of what the calls give, what the backward pass takes.
      is_gradient: whether the backward pass is there, and not yet to be made by JAX.
    """
    taken = given | _taken_late(plan, calls, is_gradient)
    for step in plan.steps:
        match step:
            case Part():
                yield _row(step, calls, taken, in_float8)
            case Call(eqn, bodies):
                for body, inside in bodies:
                    results = zip(inside.jaxpr.outvars, body.outputs, strict=False)
                    wanted = {v for v, i in results if is_var(v) and eqn.outvars[i] in taken}
                    yield from _parts(inside, in_float8, (*calls, eqn), wanted, is_gradient)


def _row(part: Part, calls: tuple[JaxprEqn, ...], taken: set[Var], in_float8: bool) -> PlannedPart:
    segment = [e for piece in part.segment for e in piece.eqns]
    products = [e for e, _ in part.products]
    last = products[:1] or segment[-1:]
    stacks = [stack_of(e, calls) for e in (*segment, *products)]
    backward = any(map(is_backward, stacks))
    halves = {v for v, s in part.stored.items() if s.form}
    halves.update(v for e, dtype in part.products if dtype for v in e.outvars if is_float32(v))
    return PlannedPart(
        source=next((str(source_of(e, calls)) for e in last), ""),
        path=next((names_in(stack_of(e, calls)) for e in last), ""),
        products=tuple(_named(e, dtype, in_float8) for e, dtype in part.products),
        passes=len(part.segment),
        kept=0 if backward else sum(_nbytes(v, v in halves) for v in part.results if v in taken),
        again=sum(not is_backward(stack) for stack in stacks) if backward else 0,
        backward=backward,
    )


def _named(eqn: JaxprEqn, dtype: np.dtype | None, in_float8: bool) -> str:
    taken = {a.aval.dtype for a in eqn.invars}
    name = f"{eqn.primitive.name} {FLOAT8 if FLOAT8 in taken else dtype or 'as traced'}"
    why = why_half(eqn, by_size=True) if in_float8 and FLOAT8 not in taken else ""
    return f"{name}: {why}" if why else name


def _nbytes(v: Var, is_half: bool) -> int:
    return int(v.aval.size) * (2 if is_half else v.aval.dtype.itemsize)


def _taken_late(plan: Plan, calls: tuple[JaxprEqn, ...], is_gradient: bool) -> set[Var]:
    """What the backward pass takes; of a program without one, what it would."""
    late: set[Var] = set()
    for step in plan.steps:
        match step:
            case Barrier(eqn):
                late.update(filter(is_var, eqn.invars))
            case Part():
                eqns = [e for piece in step.segment for e in piece.eqns]
                eqns += [e for e, _ in step.products]
                is_late = any(is_backward(stack_of(e, calls)) for e in eqns)
                would_be = step.saveable and not is_gradient
                late |= _operands(eqns) if is_late or would_be else set()
            case Call(eqn):
                late |= _operands([eqn]) if is_backward(stack_of(eqn, calls)) else set()
    return late


def _operands(eqns: Sequence[JaxprEqn]) -> set[Var]:
    made = {v for e in eqns for v in e.outvars}
    return {a for e in eqns for a in e.invars if is_var(a)} - made
