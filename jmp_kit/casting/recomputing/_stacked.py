"""What a scan stacks for its backward pass: the least that all the rest can be made of.

Of recurrent gates these are the sums of what two products give, one number in place of two.
"""

from collections.abc import Hashable, Mapping, Sequence, Set

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit.casting.reading._extrema import compared
from jmp_kit.casting.reading._parts import parts_of
from jmp_kit.casting.reading._worth import is_linear
from jmp_kit.casting.recomputing._again import Value, kept
from jmp_kit.casting.recomputing._taken import count_of, makers
from jmp_kit.programs._flow import SUMS, Flow, is_exact
from jmp_kit.programs._jaxpr import is_float32, is_var, uses_of
from jmp_kit.programs._marks import marked_dtype


def cheapest(
    wanted: Sequence[Var],
    maker: Mapping[Var, JaxprEqn],
    there: Set[Var],
    halves: Set[Var],
    sums: Set[Var],
) -> set[Var]:
    """What to stack, or take from what is there, for all of these to be made again of it.

    Args:
      there: what costs nothing.
      halves, sums: what is stacked in half; other float32 is not, if it can be made again.
    """
    values: dict[Hashable, Value] = {}
    waiting = list(wanted)
    while waiting:
        v = waiting.pop()
        if v not in values:
            made = [a for a in maker[v].invars if is_var(a)] if v in maker else None
            is_half = v in halves or v in sums
            is_rounded = made is not None and is_float32(v) and not is_half
            nbytes = count_of(v) * (2 if is_half else v.aval.dtype.itemsize) * (v not in there)
            cost = 10 * nbytes + (nbytes if v in sums else 0)  # which is rounded once more
            values[v] = Value(made, cost, False, is_rounded, v in wanted, False, 0)
            waiting += made or ()
    return kept(values, 0)


def halves_of(
    jaxpr: Jaxpr, flow: Flow, depending: Set[Var], half: np.dtype
) -> tuple[set[Var], set[Var]]:
    """What products give in half, also as it is moved, and sums of that, which are no more exact.

    Biases and the like may be among the terms.
    """
    products = (e for e in jaxpr.eqns if flow.is_product(e) and (marked_dtype(e) or half) == half)
    given = {v for e in products for v in filter(is_float32, e.outvars)}
    sums: set[Var] = set()
    for eqn in jaxpr.eqns:
        terms = [a for a in eqn.invars if is_var(a) and a in depending]
        adds = eqn.primitive.name in SUMS
        if terms and (adds or is_exact(eqn)) and given.union(sums).issuperset(terms):
            is_sum = adds or not sums.isdisjoint(terms)
            (sums if is_sum else given).update(filter(is_float32, eqn.outvars))
    return given, sums


def makers_within(
    jaxpr: Jaxpr, flow: Flow, depending: Set[Var], others: Set[Var]
) -> dict[Var, JaxprEqn]:
    """What the backward pass may make again: what other segments or scans take is stored anyway.

    Args:
      depending: the variables that depend on a product.
      others: what other scans take.
    """
    excluded = others | compared(jaxpr.eqns).values
    parts = parts_of(jaxpr.eqns, flow)
    linear = {
        i for i, part in enumerate(parts) if is_linear([e for e in part if not flow.closes(e)])
    }
    part_of = {id(e): i for i, part in enumerate(parts) for e in part}
    uses = uses_of(jaxpr)

    def is_made_again(v: Var, part: int) -> bool:
        alone = all(use is None or part_of[id(use)] == part for use in uses[v])
        is_worth_it = alone and v not in excluded and part not in linear
        return v not in depending or is_worth_it

    return makers(parts, flow, is_made_again)
