"""A program as the planner reads it: which values depend on products, reach them, are state."""

from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit._dtypes import stored_dtype
from jmp_kit.casting.planning._convolved import convolved
from jmp_kit.casting.planning._plan import Known
from jmp_kit.casting.reading._accumulated import begun
from jmp_kit.casting.reading._extrema import Compared, compared
from jmp_kit.casting.reading._state import Origins, States
from jmp_kit.casting.reading._worth import costly, spread, summed
from jmp_kit.casting.rewriting._scattered import put
from jmp_kit.programs._flow import Flow
from jmp_kit.programs._jaxpr import constants_of, is_var, scatters, uses_of
from jmp_kit.programs._marks import marked_dtype


class Program(NamedTuple):
    """A jaxpr and what is known of its variables."""

    jaxpr: Jaxpr
    flow: Flow
    half: np.dtype  # of products without a mark
    depending: Set[Var]  # on a product
    constant: set[Var]  # made of numbers in the program
    filled: Mapping[Var, JaxprEqn]  # with one number, and what fills it
    reaching: Set[Var]  # a product
    origins: Mapping[Var, Origins]  # of what it is an update
    products: Mapping[Var, JaxprEqn]  # by what they give
    convolved: Mapping[Var, list[JaxprEqn]]  # what a convolution's kernel may add, by what it gives
    scattered: set[Var]  # what scatters give
    begun: set[Var]  # what is made of numbers, and scattered into
    put: set[Var]  # what may be scattered in half
    compared: Compared  # with its extrema, see `_extrema`
    whole: set[Var]  # not to be rounded
    taken: set[Var]  # by something that is no product
    costly: set[Var]  # see `_worth`
    summed: set[Var]
    spread: set[Var]
    uses: Mapping[Var, Sequence[JaxprEqn | None]]  # in order; None for a result of the jaxpr
    states: States
    is_gradient: bool

    def leaving(self, eqns: Sequence[JaxprEqn]) -> list[Var]:
        """What others take of the results of these equations."""
        these = set(map(id, eqns))
        made = (v for e in eqns for v in e.outvars)
        return [v for v in made if any(id(use) not in these for use in self.uses.get(v, ()))]

    def depends(self, atom: object) -> bool:
        """Whether it depends on a product."""
        return atom in self.depending if is_var(atom) else False

    def dtype_of(self, product: JaxprEqn) -> np.dtype | None:
        """What a product multiplies in; None of a kernel that runs as it was traced."""
        return _dtype_of(product, self.flow, self.half)

    def apart(self, part: Sequence[JaxprEqn]) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
        """What depends on no product, and the rest: also what a barrier holds back with that."""
        fixed: list[JaxprEqn] = []
        moving: list[JaxprEqn] = []
        made: set[Var] = set()
        for eqn in part:
            held = not made.isdisjoint(filter(is_var, eqn.invars))
            if held or any(map(self.depends, eqn.invars)) or self.flow.is_product(eqn):
                moving.append(eqn)
                made.update(eqn.outvars)
            else:
                fixed.append(eqn)
        return fixed, moving


def read(
    jaxpr: Jaxpr,
    known: Known,
    flow: Flow,
    states: States,
    half: np.dtype,
    is_gradient: bool,
    closed: Mapping[Var, np.ndarray],
) -> Program:
    """What is known of a jaxpr.

    Args:
      known: of its arguments and results.
      states: the analysis of state, where it is called.
      half: the dtype of products without a mark.
      is_gradient: whether it holds a backward pass that may be planned.
      closed: the integers that it closes over.
    """
    depending = flow.depending(jaxpr, known.depends)
    mirrored = states.mirrored(jaxpr, known.origins, known.depends)
    constant, uses = constants_of(jaxpr.eqns), uses_of(jaxpr)
    reaching = flow.reaching(jaxpr, known.reaches)
    products = {v: e for e in jaxpr.eqns if flow.is_product(e) for v in e.outvars}
    in_half = {v: e for v, e in products.items() if _dtype_of(e, flow, half) == half}
    return Program(
        jaxpr=jaxpr,
        flow=flow,
        half=half,
        depending=depending,
        constant=constant,
        filled={e.outvars[0]: e for e in jaxpr.eqns if _fills(e)},
        reaching=reaching,
        origins=mirrored.origins(jaxpr, known.origins, known.depends),
        products=products,
        convolved=convolved(jaxpr.eqns, in_half, uses, depending.__contains__),
        scattered={v for e in jaxpr.eqns if scatters(e) for v in e.outvars},
        begun=begun(jaxpr.eqns, constant, reaching, uses),
        put=put(jaxpr, closed),
        compared=compared(jaxpr.eqns),
        whole=mirrored.whole(jaxpr, known.whole, known.origins, known.depends),
        taken=flow.taken_by_others(jaxpr),
        costly=costly(jaxpr, flow),
        summed=summed(jaxpr, flow),
        spread=spread(jaxpr, flow),
        uses=uses,
        states=mirrored,
        is_gradient=is_gradient,
    )


def _dtype_of(eqn: JaxprEqn, flow: Flow, half: np.dtype) -> np.dtype | None:
    return stored_dtype(marked_dtype(eqn) or half) if flow.is_product(eqn) else None


def _fills(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "broadcast_in_dim" and not is_var(eqn.invars[0])
