"""Scans of a backward pass that make again what the scan of the forward pass would stack for them.

Of scanned layers, forward and backward pass are two scans, and what the second needs of the first
is stacked over all rounds. Here only what the rest can be made of is stacked. The second scan makes
the rest, round by round; where in a round, `_repeat` decides.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from jmp_kit.casting.recomputing._stacked import cheapest, halves_of, makers_within
from jmp_kit.casting.rewriting._inline import inlined
from jmp_kit.programs._flow import Flow, bodies_of
from jmp_kit.programs._jaxpr import (
    Atom,
    copied,
    equations_of,
    in_place,
    is_var,
    pruned,
    retyped,
    scan_counts,
    size_of,
    taking,
    traced_back,
    uses_of,
)
from jmp_kit.programs._marks import called, is_backward, stack_of

Uses = Mapping[Var, Sequence[JaxprEqn | None]]


class Scan(NamedTuple):
    """A scan: its operands, and its results, each beside the variable of its body."""

    eqn: JaxprEqn
    jaxpr: Jaxpr
    consts: list[tuple[Atom, Var]]
    carry: list[tuple[Atom, Var]]
    xs: list[tuple[Atom, Var]]
    carried: list[tuple[Var, Atom]]
    ys: list[tuple[Var, Atom]]

    def rebuilt(self) -> JaxprEqn:
        """The equation; its parameters are those that this library reads."""
        operands, variables = zip(*self.consts, *self.carry, *self.xs, strict=True)
        results, made = zip(*self.carried, *self.ys, strict=True)
        unnamed = self.jaxpr.debug_info.with_unknown_names()
        body = self.jaxpr.replace(invars=variables, outvars=made, debug_info=unnamed)
        kept = {name: self.eqn.params[name] for name in ("length", "reverse", "unroll")}
        counts = {"num_consts": len(self.consts), "num_carry": len(self.carry)}
        params = {"jaxpr": ClosedJaxpr(pruned(body), []), **counts, **kept}
        return self.eqn.replace(invars=list(operands), outvars=list(results), params=params)


def opened_scan(eqn: JaxprEqn) -> Scan:
    [body] = bodies_of(eqn)
    jaxpr = inlined(body.jaxpr)
    n_consts, n_carry = scan_counts(eqn)
    operands = list(zip(eqn.invars, jaxpr.invars, strict=True))
    results = list(zip(eqn.outvars, jaxpr.outvars, strict=True))
    whole = n_consts + n_carry
    consts, carry, xs = operands[:n_consts], operands[n_consts:whole], operands[whole:]
    return Scan(eqn, jaxpr, consts, carry, xs, results[:n_carry], results[n_carry:])


def repeating_scans(jaxpr: Jaxpr, flow: Flow, depends: Sequence[bool], half: np.dtype) -> Jaxpr:
    """The jaxpr, its scans stacking for their backward pass only what it cannot make again.

    Args:
      depends: of each argument, whether it depends on a product.
      half: the dtype of sums of what products give, which the backward pass takes in their place.
    """
    depending, uses = flow.depending(jaxpr, depends), uses_of(jaxpr)
    replaced: dict[int, JaxprEqn] = {}
    for forward, backward in _pairs(jaxpr, flow, uses):
        operands = [is_var(a) and a in depending for a in forward.invars]
        both = _stacking_less(
            opened_scan(forward), opened_scan(backward), flow, operands, uses, half
        )
        replaced.update(zip((id(forward), id(backward)), both, strict=True))
    return jaxpr.replace(eqns=[replaced.get(id(e), e) for e in jaxpr.eqns])


def _pairs(jaxpr: Jaxpr, flow: Flow, uses: Uses) -> Iterator[tuple[JaxprEqn, JaxprEqn]]:
    """The scans of the forward pass, each with the one of the backward pass that takes of it."""
    scans = [
        e
        for e in jaxpr.eqns
        if e.primitive.name == "scan" and flow.is_call(e) and not bodies_of(e)[0].consts
    ]
    backward = {id(e): e for e in scans if is_backward(stack_of(e))}
    single = dict(backward)
    for eqn in scans:
        takers = {id(use) for v in eqn.outvars for use in uses[v]} & backward.keys()
        if id(eqn) not in backward and len(takers) == 1 and takers <= single.keys():
            yield eqn, single.pop(takers.pop())


def _stacking_less(
    forward: Scan,
    backward: Scan,
    flow: Flow,
    depends: Sequence[bool],
    uses: Uses,
    half: np.dtype,
) -> tuple[JaxprEqn, JaxprEqn]:
    """Both scans; as they were, if that stacks as little."""
    slices: dict[Var, Var] = {}  # of what is stacked for the backward scan alone
    made_as: dict[Var, Var] = {}
    for result, made in forward.ys:
        taken = [v for operand, v in backward.xs if operand is result]
        if is_var(made) and 0 < len(taken) == len(uses[result]):
            slices.setdefault(made, taken[0])
            made_as.update((v, made) for v in (result, *taken))

    [body] = bodies_of(forward.eqn)
    inputs = flow.body_inputs(body._replace(jaxpr=forward.jaxpr), depends)
    depending = flow.depending(forward.jaxpr, inputs)
    maker = makers_within(forward.jaxpr, flow, depending, _taken_by_others(forward, slices.keys()))
    wanted = [v for v in slices if v in maker]
    consts = {v: operand for operand, v in forward.consts}
    sliced: dict[Var, Atom] = {v: operand for operand, v in forward.xs}
    stays = slices.keys() - maker.keys()
    halves, sums = halves_of(forward.jaxpr, flow, depending, half)
    keep = cheapest(wanted, maker, {*stays, *consts, *sliced}, halves, sums)
    again, sources = traced_back(wanted, maker, keep)
    new = [v for v in sources if v not in stays]
    dtypes = {v: half if v in sums else v.aval.dtype for v in sources}
    length = forward.eqn.params["length"]
    stacked = {
        v: Var(jax.core.ShapedArray((length, *v.aval.shape), dtypes[v]))
        for v in new
        if v not in consts and v not in sliced
    }
    if sum(map(size_of, stacked)) >= sum(map(size_of, wanted)):
        return forward.eqn, backward.eqn

    sliced |= stacked
    here = {v: slices[v] if v in stays else retyped(v, dtypes[v]) for v in sources}
    rounded = {v: retyped(v, half) for v in stacked if v in sums}
    wide = {here[v]: Var(v.aval) for v in rounded}
    renamed: dict[Var, Atom] = {v: wide.get(x, x) for v, x in here.items()}
    copies = [called(copied(e, renamed), forward.eqn) for e in forward.jaxpr.eqns if id(e) in again]
    widened = [called(e, forward.eqn) for e in _casts(wide, forward.jaxpr)]
    instead = {v: renamed[made] for v, made in made_as.items() if made in maker}
    kept = [called(taking(e, instead), backward.eqn) for e in backward.jaxpr.eqns]
    casts = list(_casts(rounded, forward.jaxpr))
    less = forward._replace(
        jaxpr=forward.jaxpr.replace(eqns=[*forward.jaxpr.eqns, *casts]),
        ys=[(result, made) for result, made in forward.ys if result not in instead]
        + [(result, rounded.get(made, made)) for made, result in stacked.items()],
    )
    more = backward._replace(
        jaxpr=backward.jaxpr.replace(eqns=[*widened, *copies, *kept]),
        consts=backward.consts + [(consts[v], here[v]) for v in new if v in consts],
        xs=[(operand, v) for operand, v in backward.xs if v not in instead]
        + [(sliced[v], here[v]) for v in new if v in sliced],
        carried=_in_place(backward.carried, instead),
        ys=_in_place(backward.ys, instead),
    )
    return less.rebuilt(), more.rebuilt()


def _casts(pairs: Mapping[Var, Var], jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """The equations that cast variables to others, named as the last of a jaxpr's."""
    for v, other in pairs.items():
        cast = functools.partial(lax.convert_element_type, new_dtype=other.aval.dtype)
        yield from equations_of(cast, [v], [other], jaxpr.eqns[-1].source_info)


def _in_place(
    results: Sequence[tuple[Var, Atom]], instead: Mapping[Var, Atom]
) -> list[tuple[Var, Atom]]:
    return [(result, *in_place([made], instead)) for result, made in results]


def _taken_by_others(scan: Scan, slices: Set[Var]) -> set[Var]:
    """What is stacked for others than the backward scan."""
    return {v for _, v in scan.ys if is_var(v) and v not in slices}
