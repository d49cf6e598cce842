"""Sums of what products give and of other values, taken by several parts: parts of their own.

Nothing may come between a product and what XLA adds in its kernel: what waits for the product waits
for the sum.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from jax.extend.core import JaxprEqn, Var

from jmp_kit.casting.reading._joined import added
from jmp_kit.programs._flow import Flow
from jmp_kit.programs._jaxpr import traced_back


def summed_first(
    parts: Sequence[Sequence[JaxprEqn]],
    flow: Flow,
    uses: Mapping[Var, Sequence[JaxprEqn | None]],
    is_late: Callable[[JaxprEqn], bool],
) -> Iterator[list[JaxprEqn]]:
    """The parts, such sums in parts of their own."""
    products = {v for part in parts for e in part if flow.is_product(e) for v in e.outvars}
    for part in parts:
        these = set(map(id, part))
        segment = [e for e in part if not flow.closes(e)]
        maker = {v: e for e in segment for v in e.outvars}
        wanted = (v for v in added(segment, products) if is_late(maker[v]))
        sums = [v for v in wanted if any(id(use) not in these for use in uses[v])]
        eqns, _ = traced_back(sums, maker)
        yield [e for e in part if id(e) in eqns]
        yield [e for e in part if id(e) not in eqns]
