"""What need not be stored for the parts behind is computed in the part that takes it first.

A value that another part takes is stored. Often it is made of less: the decays between all times of
a state space of one number for each time, what a gate lets through of a projection that is stored
in any case. So it sinks, with what is computed for it alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set

from jax.extend.core import JaxprEqn, Var

from jmp_kit.casting.reading._parts import ahead, is_alone, is_whole
from jmp_kit.programs._axes import ELEMENTWISE
from jmp_kit.programs._flow import ADDS, Flow
from jmp_kit.programs._jaxpr import is_small, is_var, largest_size, size_of

# What makes the same or more of one value.
_SPREADS = {"gather", "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose"}
# What moves or scales one.
_MOVES = {"pad", "mul", "div", "neg", "reshape", "transpose", "squeeze", "convert_element_type"}


def sunk(
    parts: Sequence[Sequence[JaxprEqn]],
    flow: Flow,
    depending: Set[Var],
    uses: Mapping[Var, Sequence[JaxprEqn | None]],
    is_late: Callable[[JaxprEqn], bool],
) -> list[list[JaxprEqn]]:
    """The parts, what need not be stored for others in the part that takes it first.

    In the backward pass that is what only moves or scales a value. Where it follows what it moves
    it would be stored once more, of several projections joined each as large as all. It is also the
    sum of some terms of several, as of what many stages or levels take, which are stored in any
    case. In the forward pass it is what is computed of smaller values, or of what is stored.

    Args:
      depending: the variables that depend on a product; others are there in any case.
      uses: the equations that take each variable; None for a result of the program.
    """
    eqns = [e for part in parts for e in part]
    part_of = {id(e): i for i, part in enumerate(parts) for e in part}
    maker = {v: e for e in eqns for v in e.outvars}
    wanted = ahead(eqns, flow, uses, is_late)
    largest = [largest_size(part) for part in parts]
    closed = [len(part) == 1 and is_alone(part[0], flow) for part in parts]
    added: set[Var] = set()  # sums of what is stored for others

    def is_there(v: Var, eqn: JaxprEqn) -> bool:
        """Whether it is stored for others than a sum, or is a sum of such values itself."""
        others = [u for u in uses[v] if u is not eqn]
        if any(u is None or flow.closes(u) for u in others):
            return True
        if part_of[id(maker[v])] == part_of[id(eqn)]:
            return v in added and not others
        return bool(others) or not flow.is_product(maker[v])  # in whose kernel XLA adds

    for eqn in filter(is_late, eqns):
        operands = (a for a in eqn.invars if is_var(a) and a in maker)
        if eqn.primitive.name in ADDS and all(is_there(a, eqn) for a in operands):
            added.update(eqn.outvars)

    def takers(v: Var) -> Iterator[JaxprEqn | None]:
        """Of the same pass, and not for derivatives alone."""
        late = is_late(maker[v])
        return (u for u in uses[v] if u is None or (late and is_late(u)) or id(u) in wanted)

    def to_be_stored(eqn: JaxprEqn, part: int) -> Iterator[Var]:
        """What it takes that is there in no case, and that no other part has stored."""
        for v in (a for a in eqn.invars if is_var(a) and a in depending and a in maker):
            others = (u is None or flow.closes(u) or part_of[id(u)] != part for u in takers(v))
            if part_of[id(maker[v])] == part and not any(others):
                yield v

    def is_made_of_less(eqn: JaxprEqn, part: int) -> bool:
        """Whether less is stored if it sinks, with what is computed for it alone."""
        with_it, taken = {id(eqn)}, {*to_be_stored(eqn, part)}
        while True:
            alone = {v for v in taken if {id(u) for u in takers(v)} <= with_it}
            more = [maker[v] for v in alone if _is_computed(maker[v])]
            if not more:
                return sum(map(size_of, taken)) < max(map(size_of, eqn.outvars))
            with_it.update(map(id, more))
            taken.difference_update(v for e in more for v in e.outvars)
            taken.update(v for e in more for v in to_be_stored(e, part))

    def sinks(eqn: JaxprEqn, part: int) -> bool:
        [v] = eqn.outvars if _is_computed(eqn) else [None]
        is_large = v in depending and not is_small(v, largest[part])
        if is_late(eqn):
            is_term = v in added and [u and u.primitive.name in ADDS for u in uses[v]] == [True]
            return _moves(eqn) or (is_large and is_term)
        return is_large and is_made_of_less(eqn, part)

    last: dict[int, int] = {}  # the part of the first product that is made of it: none moves
    for eqn in reversed(eqns):
        part, used = part_of[id(eqn)], [use for v in eqn.outvars for use in takers(v)]
        behind = (last[id(use)] for v in eqn.outvars for use in uses[v] if use)
        last[id(eqn)] = part if is_whole(eqn, flow) else min(behind, default=len(parts))
        target = min((part_of[id(use)] if use else part for use in used), default=part)
        can_sink = part != target <= last[id(eqn)] and not closed[target]
        if can_sink and sinks(eqn, part):
            part_of[id(eqn)] = target
    for eqn in eqns:  # for derivatives alone: behind what they are made of
        made = [part_of[id(maker[a])] for a in eqn.invars if is_var(a) and a in maker]
        part_of[id(eqn)] = max(part_of[id(eqn)], *made, 0)
    found: list[list[JaxprEqn]] = [[] for _ in parts]
    for eqn in sorted(eqns, key=flow.closes):
        found[part_of[id(eqn)]].append(eqn)
    return [part for part in found if part]


def _is_computed(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in ELEMENTWISE | _SPREADS


def _moves(eqn: JaxprEqn) -> bool:
    """Whether it makes of one value another, no smaller, by moving or scaling it."""
    operands = [a for a in eqn.invars if is_var(a)]
    is_one = len(operands) == 1 and size_of(operands[0]) <= size_of(eqn.outvars[0])
    return is_one and eqn.primitive.name in _MOVES
