"""Gradients of weights that a scan would add up round by round: one product behind it.

The backward pass of a recurrent network multiplies in each round, and adds what that gives to a
float32 sum as large as the weights, which is read and written each time. Of all rounds it is

    sum over t of xₜᵀ ḡₜ = [x₁; x₂; …]ᵀ [ḡ₁; ḡ₂; …]

one product, for which the scan stacks the cotangents. Where those are not much smaller than the
sum, as of micro-batches, it stays as it is.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit.casting.rewriting._scans import Scan, opened_scan
from jmp_kit.programs._flow import ADDS, Flow, bodies_of
from jmp_kit.programs._jaxpr import (
    Atom,
    copied,
    is_float32,
    is_var,
    pruned,
    size_of,
    taking,
    uses_of,
)
from jmp_kit.programs._marks import called, is_backward, stack_of

# What may be between a product and the sums: the gradients of joined weights are cut apart.
_MOVES = {"transpose", "reshape", "squeeze", "slice", "split", "neg"}

# Of each value of a sum in each round: it is read and written, and so is what is added to it.
_MOVED = 4 * 4
# Of each value that is stacked, in half.
_HALF = 2
# What is stacked is there beside all that the loop takes, so it has to spare that many times more.
_FAR = 8


class _Gradients(NamedTuple):
    """What a product is added up to over all rounds."""

    product: JaxprEqn
    moves: list[JaxprEqn]
    sums: dict[int, JaxprEqn]  # by their places in the carry


def hoisted(jaxpr: Jaxpr, flow: Flow, price: float) -> Jaxpr:
    """The program, gradients that scans of its backward pass add up behind them.

    Args:
      price: of a byte that is kept, in bytes moved.
    """
    return jaxpr.replace(eqns=[e for eqn in jaxpr.eqns for e in _hoisted(eqn, flow, price)])


def _hoisted(eqn: JaxprEqn, flow: Flow, price: float) -> Iterator[JaxprEqn]:
    is_late_scan = eqn.primitive.name == "scan" and is_backward(stack_of(eqn))
    if not is_late_scan or not flow.holds_product(eqn) or bodies_of(eqn)[0].consts:
        yield eqn
        return
    scan, length = opened_scan(eqn), eqn.params["length"]
    stacked: dict[Var, Atom] = {v: operand for operand, v in scan.xs}
    new: dict[Var, Var] = {}
    found = []
    for gradients in _gradients(scan, flow):
        fresh = [v for v in gradients.product.invars if v not in stacked]
        if _is_worth_it(gradients.product, fresh, price):
            found.append(gradients)
            shapes = {v: jax.core.ShapedArray((length, *v.aval.shape), v.aval.dtype) for v in fresh}
            new |= {v: Var(shape) for v, shape in shapes.items()}
            stacked |= new
    kept = set(range(len(scan.carry))).difference(*(gradients.sums for gradients in found))
    less = scan._replace(
        carry=[scan.carry[i] for i in sorted(kept)],
        carried=[scan.carried[i] for i in sorted(kept)],
        ys=scan.ys + [(stack, v) for v, stack in new.items()],
    )
    if not found or not _holds_product(less, flow):  # which would run as it was traced
        yield eqn
        return
    yield less.rebuilt()
    for gradients in found:
        yield from _behind(gradients, scan, stacked)


def _holds_product(scan: Scan, flow: Flow) -> bool:
    made = [v for _, v in (*scan.carried, *scan.ys)]
    left = pruned(scan.jaxpr.replace(outvars=made)).eqns
    return any(flow.is_product(e) or flow.holds_product(e) for e in left)


def _is_worth_it(product: JaxprEqn, fresh: Sequence[Var], price: float) -> bool:
    """Whether its sum costs by far more than what is stacked for it."""
    sum_size, *sizes = map(size_of, (*product.outvars, *fresh))
    is_known = all(isinstance(size, int) for size in (sum_size, *sizes))
    return is_known and sum_size * _MOVED > _FAR * (price + 1) * _HALF * sum(sizes)


def _gradients(scan: Scan, flow: Flow) -> Iterator[_Gradients]:
    """The sums of what products give alone, and that no round takes."""
    uses, maker = uses_of(scan.jaxpr), {v: e for e in scan.jaxpr.eqns for v in e.outvars}
    products: dict[int, JaxprEqn] = {}
    moves: dict[int, dict[int, JaxprEqn]] = defaultdict(dict)
    sums: dict[int, dict[int, JaxprEqn]] = defaultdict(dict)
    for place, ((_, before), (_, after)) in enumerate(zip(scan.carry, scan.carried, strict=True)):
        total = maker.get(after) if is_var(after) else None
        if total is None or total.primitive.name not in ADDS:
            continue
        added = [a for a in total.invars if is_var(a) and a is not before]
        if len(added) == len(uses[before]) == len(uses[after]) == 1 and before in total.invars:
            eqn, between = maker.get(added[0]), {}
            while eqn is not None and eqn.primitive.name in _MOVES:
                between[id(eqn)] = eqn
                eqn = maker.get(eqn.invars[0])
            if eqn is not None and _is_matrix(eqn, flow):
                products[id(eqn)] = eqn
                moves[id(eqn)] |= between
                sums[id(eqn)][place] = total
    for n, product in products.items():
        taken = {id(e) for e in (*moves[n].values(), *sums[n].values())}
        made = (v for e in (product, *moves[n].values()) for v in e.outvars)
        if all(id(use) in taken for v in made for use in uses[v]):
            yield _Gradients(product, [e for e in scan.jaxpr.eqns if id(e) in moves[n]], sums[n])


def _is_matrix(eqn: JaxprEqn, flow: Flow) -> bool:
    """Whether it is a product of two values of this round."""
    return (
        eqn.primitive.name == "dot_general"
        and flow.is_product(eqn)
        and eqn.params["out_sharding"] is None
        and is_float32(eqn.outvars[0])
        and all(map(is_var, eqn.invars))
    )


def _behind(gradients: _Gradients, scan: Scan, stacked: Mapping[Var, Atom]) -> Iterator[JaxprEqn]:
    """The equations behind the scan, of all rounds."""
    product, moves, sums = gradients
    contracted, batch = product.params["dimension_numbers"]

    def later(axes: Sequence[int]) -> tuple[int, ...]:
        return tuple(i + 1 for i in axes)

    rounds = tuple((0, *later(axes)) for axes in contracted), tuple(map(later, batch))
    first = product.replace(params=product.params | {"dimension_numbers": rounds})
    renamed = {**stacked, **{scan.carry[i][1]: scan.carry[i][0] for i in sums}}
    for eqn in (first, *moves):
        yield called(copied(eqn, renamed), scan.eqn)
    for place, total in sums.items():
        result, _ = scan.carried[place]
        yield called(taking(total, renamed).replace(outvars=[result]), scan.eqn)
