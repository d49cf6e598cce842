"""Segments computed again in a backward pass that is part of the program, as of a whole train step.

Where only the loss is wrapped, `jax.checkpoint` does that when the gradient is taken. A program
that holds its backward pass already stores for it what its forward pass made; instead, the parts
of the backward pass are given equations that make it again, of what is stored anyway.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set

import jax
from jax import lax
from jax.extend.core import JaxprEqn, Var

from jmp_kit.casting._parts import acts
from jmp_kit.casting._worth import is_kept, is_linear
from jmp_kit.programs._flow import Flow
from jmp_kit.programs._jaxpr import Atom, copied, is_float32, is_var, names_within, opened, taking
from jmp_kit.programs._marks import is_backward, stack_of

Part = list[JaxprEqn]


def repeating(
    parts: Sequence[Part],
    flow: Flow,
    depending: Set[Var],
    uses: Mapping[Var, Sequence[JaxprEqn | None]],
) -> Iterator[Part]:
    """The parts, those of the backward pass after what they make again.

    That is what only its own segment and the backward pass take; what others take is stored anyway.

    Args:
      depending: the variables that depend on a product.
      uses: the equations that take each variable; None for a result of the program.
    """
    eqns = [e for part in parts for e in part]
    backward = {id(e) for e in eqns if is_backward(stack_of(e))}
    early = depending - {v for e in eqns if id(e) in backward for v in e.outvars}
    order = {id(e): i for i, e in enumerate(eqns)}
    part_of = {id(e): i for i, part in enumerate(parts) for e in part}

    def is_spared(use: JaxprEqn | None, part: int) -> bool:
        beside = use is not None and part_of[id(use)] == part
        return beside or (id(use) in backward and (flow.closes(use) or not _is_whole(use, flow)))

    def is_made_again(v: Var, part: int) -> bool:
        return v in early and all(is_spared(use, part) for use in uses[v])

    maker = makers(parts, flow, is_made_again)
    [barrier] = opened(jax.make_jaxpr(lax.optimization_barrier)(0.0))[0].eqns
    ends = {v for e in eqns if flow.closes(e) and id(e) in backward for v in e.outvars}
    behind: dict[Var, Var] = {}  # the barrier, where XLA cannot tell what it was before
    made_in = {v: i for i, part in enumerate(parts) for e in part for v in e.outvars}
    for i, part in enumerate(parts):
        taken = [a for e in part if id(e) in backward for a in e.invars if is_var(a)]
        wanted = [a for a in taken if a in maker and made_in[a] != i]
        if not wanted:
            yield part
            continue
        again, sources = traced_back(wanted, maker)
        fresh = [v for v in sources if v in depending and is_float32(v) and v not in behind]
        if fresh:
            # Nothing is made again before what comes from the products behind is there.
            arrived = [a for a in taken if a in ends and made_in[a] < i and a not in behind]
            fresh += sorted(arrived, key=made_in.__getitem__, reverse=True)[:1]
            behind.update((v, Var(v.aval)) for v in fresh)
            yield [barrier.replace(invars=fresh, outvars=[behind[v] for v in fresh])]
        renamed: dict[Var, Atom] = dict(behind)
        copies = [copied(again[n], renamed) for n in sorted(again, key=order.__getitem__)]
        yield copies + [taking(e, renamed) if id(e) in backward else e for e in part]


def makers(
    parts: Sequence[Part], flow: Flow, is_made_again: Callable[[Var, int], bool]
) -> dict[Var, JaxprEqn]:
    """What may be made again, and the equation that does so, where that is worth it."""
    return {
        v: e
        for i, part in enumerate(parts)
        if not is_linear([e for e in part if not flow.closes(e)])
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


def traced_back(
    wanted: Sequence[Var], maker: Mapping[Var, JaxprEqn]
) -> tuple[dict[int, JaxprEqn], dict[Var, None]]:
    """The equations that make these variables, by id, and the variables that they start from."""
    eqns: dict[int, JaxprEqn] = {}
    sources: dict[Var, None] = {}
    waiting = list(wanted)
    while waiting:
        var = waiting.pop()
        if var not in maker:
            sources[var] = None
        elif id(maker[var]) not in eqns:
            eqns[id(maker[var])] = maker[var]
            waiting += filter(is_var, maker[var].invars)
    return eqns, sources
