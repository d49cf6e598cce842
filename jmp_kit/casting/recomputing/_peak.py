"""What is there where most memory is taken, whether it was kept or made again.

That is where the backward pass begins: of what was kept for it, nothing is let go of yet. What it
makes again there takes as much memory as if it had been kept, and bytes as well.
"""

import collections
from collections.abc import Hashable, Iterator, Mapping, Set
from typing import cast

from jax.extend.core import Var

from jmp_kit.casting.recomputing._again import Value
from jmp_kit.casting.recomputing._taken import ForwardPass, Rounded, count_of


def there_at_the_peak(
    program: ForwardPass, values: Mapping[Hashable, Value], keep: Set[Hashable]
) -> set[Hashable]:
    """The values that would cost no memory if they were kept, beside those that are.

    That is where less was let go of before they are taken than their cotangents need then.
    """
    first, last = _taken(program, values, keep)
    let_go = collections.Counter[int]()  # by parts
    for name in keep:
        let_go[last[name]] += values[name].nbytes
    for v, part in _there_for_the_loss(program):
        if v not in values:
            let_go[part] += 2 * count_of(v)
    found: set[Hashable] = set()
    again = [name for name in first if name not in keep and values[name].nbytes_again]
    for name in sorted(again, key=first.__getitem__):
        gone = sum(nbytes for part, nbytes in let_go.items() if part < first[name])
        if gone <= values[name].nbytes:
            found.add(name)
            let_go[last[name]] += values[name].nbytes
    return found


def _taken(
    program: ForwardPass, values: Mapping[Hashable, Value], keep: Set[Hashable]
) -> tuple[dict[Hashable, int], dict[Hashable, int]]:
    """The first part of the backward pass that takes each, and the last, to make others as well."""
    order = {v: i for i, e in enumerate(program.eqns) for v in e.outvars}

    def place(name: Hashable) -> tuple[int, bool]:
        return order[_var_of(name)], isinstance(name, Rounded)

    first: dict[Hashable, int] = {}
    last = dict.fromkeys(values, 0)
    for name in sorted(values, key=place, reverse=True):
        uses = (e for e in program.uses[_var_of(name)] if e is not None and program.is_late(e))
        taken = [program.part_of[id(e)] for e in uses]
        if taken:
            first[name] = min(taken)
        last[name] = max(last[name], *taken, 0)
        for operand in values[name].operands or () if name not in keep else ():
            last[operand] = max(last.get(operand, 0), last[name])
    return first, last


def _var_of(name: Hashable) -> Var:
    return name.var if isinstance(name, Rounded) else cast(Var, name)


def _there_for_the_loss(program: ForwardPass) -> Iterator[tuple[Var, int]]:
    """What the last products of the forward pass give, logits say, and the part that takes it."""
    begins = min(i for i, part in enumerate(program.parts) if any(map(program.is_late, part)))
    for eqn in program.eqns:
        if program.flow.is_product(eqn) and not program.is_late(eqn):
            for v in eqn.outvars:
                uses = [program.part_of[id(e)] for e in program.uses[v] if e is not None]
                if uses and max(uses) >= begins:
                    yield v, max(uses)
