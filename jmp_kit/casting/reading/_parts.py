"""A jaxpr split into the parts that are evaluated, and in the backward pass repeated, as one."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set

import jax
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit.programs._flow import Flow
from jmp_kit.programs._jaxpr import Atom, is_var, opened, traced_back


def fixed_scans_first(jaxpr: Jaxpr, flow: Flow, depends: Sequence[bool]) -> Jaxpr:
    """The jaxpr, its scans that depend on no product first: they would split a segment.

    Args:
      depends: of each argument, whether it depends on a product.
    """
    depending = flow.depending(jaxpr, depends)
    scans = [e for e in jaxpr.eqns if e.primitive.name == "scan" and not acts(e)]
    fixed = [v for e in scans if depending.isdisjoint(e.outvars) for v in e.outvars]
    first, _ = traced_back(fixed, {v: e for e in jaxpr.eqns for v in e.outvars})
    if any(map(acts, first.values())):
        return jaxpr
    return jaxpr.replace(eqns=sorted(jaxpr.eqns, key=lambda e: id(e) not in first))


def parts_of(eqns: Sequence[JaxprEqn], flow: Flow) -> list[list[JaxprEqn]]:
    """Each part is a segment and the products after it, none of which takes another's result.

    Kernels that take half count as products here.

    What follows from a product belongs to the segment of a later part, where it is taken: so the
    results of products are all that has to be kept. Calls that hold products, scans, and equations
    with effects, whose order matters, are parts of their own.
    """
    return list(filter(None, _split(eqns, flow)))


def _split(eqns: Sequence[JaxprEqn], flow: Flow) -> Iterator[list[JaxprEqn]]:
    segment: list[JaxprEqn] = []
    products: list[JaxprEqn] = []
    following: list[JaxprEqn] = []
    followed: set[Var] = set()  # the results of these products, and what was made of them
    for eqn in eqns:
        follows = any(is_var(a) and a in followed for a in eqn.invars)
        closes = flow.closes(eqn)
        is_apart = is_alone(eqn, flow)
        if is_apart or (closes and follows):
            yield [*segment, *products]
            segment, products, following, followed = following, [], [], set()
        if is_apart:
            yield segment
            yield [eqn]
            segment = []
        elif closes or follows:
            (products if closes else following).append(eqn)
            followed.update(eqn.outvars)
        else:
            segment.append(eqn)
    yield [*segment, *products]
    yield following


def is_alone(eqn: JaxprEqn, flow: Flow) -> bool:
    """Whether it is a part of its own."""
    return acts(eqn) or (not flow.closes(eqn) and flow.is_call(eqn))


def split_at(
    segment: Sequence[JaxprEqn], stored: Set[Var]
) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """A segment as what makes the stored values that it takes itself, and the rest.

    All is rest if that takes more of the others' results, which would have to be kept.
    """
    wanted = {a for e in segment for a in e.invars if is_var(a) and a in stored}
    head: list[JaxprEqn] = []
    rest: list[JaxprEqn] = []
    for eqn in reversed(segment):
        if wanted.intersection(eqn.outvars):
            head.append(eqn)
            wanted.update(a for a in eqn.invars if is_var(a))
        else:
            rest.append(eqn)
    crossing = {v for e in head for v in e.outvars} - stored
    if any(is_var(a) and a in crossing for e in rest for a in e.invars):
        return [], list(segment)
    return head[::-1], rest[::-1]


def ahead(
    eqns: Sequence[JaxprEqn],
    flow: Flow,
    uses: Mapping[Var, Sequence[JaxprEqn | None]],
    is_late: Callable[[JaxprEqn], bool],
) -> set[int]:
    """By identity, the equations that the forward pass takes itself, and not for derivatives."""
    wanted: set[Var] = set()
    found: set[int] = set()
    for eqn in reversed(eqns):
        is_wanted = any(v in wanted or None in uses[v] for v in eqn.outvars)
        if not is_late(eqn) and (is_wanted or is_whole(eqn, flow)):
            wanted.update(filter(is_var, eqn.invars))
            found.add(id(eqn))
    return found


def is_whole(eqn: JaxprEqn, flow: Flow) -> bool:
    """Whether it takes its operands from memory: a product, a kernel, a call."""
    return flow.closes(eqn) or flow.is_call(eqn) or acts(eqn)


def without_the_dead(jaxpr: Jaxpr) -> Jaxpr:
    """The program without equations of whose results nothing is made."""
    eqns = [e for part in living([jaxpr.eqns], jaxpr.outvars) for e in part]
    return jaxpr.replace(eqns=eqns)


def living(parts: Sequence[Sequence[JaxprEqn]], results: Sequence[Atom]) -> list[list[JaxprEqn]]:
    """The parts without equations of whose results nothing is made, as XLA runs them."""
    wanted = {a for a in results if is_var(a)}
    found: list[list[JaxprEqn]] = []
    for part in reversed(parts):
        left: list[JaxprEqn] = []
        for eqn in reversed(part):
            if eqn.effects or not wanted.isdisjoint(eqn.outvars):
                left.append(eqn)
                wanted.update(a for a in eqn.invars if is_var(a))
        found.append(left[::-1])
    return [part for part in reversed(found) if part]


def acts(eqn: JaxprEqn) -> bool:
    """Whether running the equation twice would be seen; naming a mesh axis would not."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def barrier_of(taken: Sequence[Var], made: Sequence[Var], on_cpus: bool) -> JaxprEqn:
    """An equation that lets values through as they are stored, if only XLA on CPUs needs it so."""
    [eqn] = opened(jax.make_jaxpr(lax.optimization_barrier)(0.0))[0].eqns
    params = {"on_cpus": True} if on_cpus else {}
    return eqn.replace(invars=list(taken), outvars=list(made), params=params)


def is_barrier(part: Sequence[JaxprEqn]) -> bool:
    """Whether the part lets its values through as they are stored."""
    return [eqn.primitive.name for eqn in part] == ["optimization_barrier"]
