"""Products that XLA is not to join with others of the same operand.

XLA on GPUs makes one product of several that share an operand, if they are small, and cuts the
result. Most of what takes such a piece reads it where it lies. But what is taken behind a barrier,
by a pass (see `_passes`) or to compute from it again, is copied first, and that is more than is
saved. And to what a loop adds up it adds in a product's kernel, but not a piece. So these products
take the operand behind a barrier, and each behind one more: XLA takes two barriers of the same for
one.
"""

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Var

from jmp_kit.casting.planning._plan import Barrier, Fixed, Part, Step
from jmp_kit.casting.reading._worth import normed
from jmp_kit.programs._jaxpr import Atom, is_var, size_of

# Elements: at 4.8 TB/s fewer halves are copied within a microsecond, which a kernel more takes.
_LEAST = 2**20


def with_products_alone(steps: Sequence[Step], depends: Callable[[Atom], bool]) -> Iterator[Step]:
    """The steps of a program, of each such product said behind how many barriers an operand is.

    Args:
      steps: what is to become of it so far.
      depends: whether a value depends on a product. What does not, weights say, may be cast where a
        product takes it, and a barrier would have it stored. Norms, of what is looked up say, are
        stored in any case.
    """
    behind = _barriers(steps, depends)
    for step in steps:
        if isinstance(step, Part):
            results = [eqn.outvars[0] for eqn, _ in step.products]
            step = step._replace(alone={v: behind[v] for v in results if v in behind})
        yield step


def _barriers(
    steps: Sequence[Step], depends: Callable[[Atom], bool]
) -> Mapping[Var, Mapping[Var, int]]:
    """Of results of products, and of their operands, behind how many barriers these are."""
    parts = [step for step in steps if isinstance(step, Part)]
    pieces = (piece for part in parts for piece in part.segment if not piece.where_it_lies)
    barriers = (step for step in steps if isinstance(step, Barrier) and not step.on_cpus)
    fixed = [e for step in steps if isinstance(step, Fixed) for e in step.piece.eqns]
    of_rows = normed(fixed)
    copied = {v for piece in pieces for v in piece.apart}
    copied.update(a for barrier in barriers for a in barrier.eqn.invars if is_var(a))
    copied.update(v for part in parts for v, dtype in part.summed.items() if dtype == np.float32)
    sharing: dict[tuple[Var, *tuple[Any, ...]], list[Var]] = collections.defaultdict(list)
    for eqn in (eqn for part in parts for eqn, half in part.products if half is not None):
        for operand in _operands(eqn):
            sharing[operand].append(eqn.outvars[0])
    found: dict[Var, dict[Var, int]] = collections.defaultdict(dict)
    for (operand, *_), results in sharing.items():
        if depends(operand) or operand in of_rows:
            alone = [v for v in results if v in copied and size_of(v) >= _LEAST]
            others = len(alone) < len(results)
            for count, v in enumerate(alone, int(others)):
                if count:
                    found[v][operand] = count
    return found


def _operands(eqn: JaxprEqn) -> Iterator[tuple[Var, *tuple[Any, ...]]]:
    """Each operand of a product with what else is the same in those that XLA joins it with."""
    if eqn.primitive.name == "dot_general":
        sides = zip(eqn.invars, *eqn.params["dimension_numbers"], strict=True)
        yield from ((a, i, *axes) for i, (a, *axes) in enumerate(sides) if is_var(a))
