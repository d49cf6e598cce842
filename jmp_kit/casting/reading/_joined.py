"""Cotangents that are sums of what is stored, of several projections say, stored themselves.

Each pass that takes such a sum would read all of its terms. Sums of halves alone, one of which a
product gives, need no pass: XLA adds in the product's kernel.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set

from jax.extend.core import JaxprEqn, Var

from jmp_kit.casting.reading._worth import normed
from jmp_kit.programs._axes import reduces
from jmp_kit.programs._flow import ADDS, MOVED, MOVES, SUMS, Flow
from jmp_kit.programs._jaxpr import (
    Atom,
    is_along_rows,
    is_float32,
    is_small,
    is_var,
    largest_size,
    size_of,
)
from jmp_kit.programs._marks import is_backward, stack_of

# Of these, what more than one takes is stored.
_JOINS = SUMS | {"select_n"}
# What may be done to a value before it is added to others.
_SCALES = {"mul", "div", "pad", "slice"}


def joined(
    segment: Sequence[JaxprEqn],
    uses: Mapping[Var, Sequence[JaxprEqn | None]],
    depends: Callable[[Atom], bool],
) -> Iterator[Var]:
    """The sums of several values from outside the segment that several others take.

    Or of one with what a norm's backward pass makes, before that of the next norm say.

    Args:
      uses: the equations that take each variable.
      depends: whether a value depends on a product; others, zeros say, are no terms.
    """
    terms: dict[Var, Set[Var]] = {}  # the values from outside that it is the sum of, if it is one
    partly: set[Var] = set()  # what is the sum of one, and of others
    alike: set[Var] = set()  # what is made of smaller values alone, as scales of channels are
    rows, largest = normed(segment), largest_size(segment)

    def terms_of(atom: Atom, whole: Var) -> Set[Var]:
        is_term = is_var(atom) and depends(atom) and size_of(atom) * 2 > size_of(whole)
        return terms.get(atom, {atom}) if is_term else set()

    def is_cotangent(eqn: JaxprEqn | None) -> bool:
        # What others take than a backward pass, an optimizer, is a gradient.
        return eqn is not None and is_backward(stack_of(eqn))

    for eqn in segment:
        if not eqn.outvars:
            continue
        v = eqn.outvars[0]
        each = [terms_of(a, v) for a in eqn.invars]
        others = [a for a, found in zip(eqn.invars, each, strict=True) if not found]
        is_alike = all(a in alike or size_of(a) < size_of(v) for a in filter(is_var, others))
        if is_alike and not any(each):
            alike.update(eqn.outvars)
        found: Set[Var] = set()
        if reduces(eqn):  # a pass of its own makes it
            found = {v} if depends(v) else set()
        elif eqn.primitive.name == "select_n":
            found = max(each[1:], key=len)
        else:
            scales = eqn.primitive.name in _SCALES and is_alike and len(each) - len(others) == 1
            adds = eqn.primitive.name in SUMS | MOVES and all(each)
            found = set().union(*each) if scales or adds else set()
            is_partly = bool(others) and any(each)
            is_partly |= not partly.isdisjoint(filter(is_var, eqn.invars))
            if eqn.primitive.name in SUMS and is_partly:
                partly.add(v)
        terms.update((out, found) for out in eqn.outvars)
        is_sum = len(found) > 1 or (v in partly and v in rows)
        # Rows and columns are summed up in two passes, each of which would go over all rows first.
        sums = (e for e in uses[v] if e is not None and e.primitive.name == "reduce_sum")
        axes = {tuple(e.params["axes"]) for e in sums}
        is_sum |= v in rows and len(axes) > 1
        is_new = eqn.primitive.name in _JOINS and is_sum and len(uses[v]) > 1
        is_new &= all(map(is_cotangent, (eqn, *uses[v])))
        if is_new and is_float32(v) and not is_small(v, largest):
            yield v


def added(segment: Sequence[JaxprEqn], products: Set[Var]) -> set[Var]:
    """The sums of what products give and of other values from outside the segment.

    Args:
      products: what products give.
    """
    inside = {v for e in segment for v in e.outvars}
    given, found = set(products), set[Var]()  # what products give also as it is moved
    for eqn in segment:
        operands = list(filter(is_var, eqn.invars))
        if eqn.primitive.name in MOVED and not given.isdisjoint(operands):
            given.update(eqn.outvars)
        elif eqn.primitive.name in ADDS and len(operands) == 2:
            terms = found | given
            sizes = {size_of(a) for a in (*operands, *eqn.outvars)}
            from_outside = all(a in terms or a not in inside for a in operands)
            if from_outside and len(sizes) == 1 and not terms.isdisjoint(operands):
                found.update(filter(is_float32, eqn.outvars))
    return found


def sums_of_halves(segment: Sequence[JaxprEqn], products: Set[Var]) -> set[Var]:
    """Such sums, their terms also moved or scaled by less.

    They are no less exact in half than what products give is.

    Args:
      products: what products give.
    """
    inside = {v for e in segment for v in e.outvars}
    given, others, found = set(products), set[Var](), set[Var]()
    for eqn in (e for e in segment if e.outvars):
        name, operands = eqn.primitive.name, list(filter(is_var, eqn.invars))
        large = [a for a in operands if size_of(a) == size_of(eqn.outvars[0])]
        is_given = not given.isdisjoint(large)
        if not all(a in given or a in others or a not in inside for a in large):
            continue
        if name in SUMS and len(large) == len(operands) == 2 and is_given:
            found.update(filter(is_float32, eqn.outvars))
            given.update(eqn.outvars)
        elif name in MOVES | {"mul"} and len(large) == 1:
            (given if is_given else others).update(eqn.outvars)
    return found


def streams(
    part: Sequence[JaxprEqn],
    flow: Flow,
    products: Set[Var],
    uses: Mapping[Var, Sequence[JaxprEqn | None]],
) -> set[Var]:
    """Such sums of the forward pass that several passes before its next products take.

    A norm that sums up over other axes than rows goes over them twice, and its backward pass, too.
    """
    closing = [e for e in part if flow.closes(e)]
    if all(is_backward(stack_of(e)) for e in closing):
        return set()
    segment = [e for e in part if not flow.closes(e) and not is_backward(stack_of(e))]
    summed = {size_of(e.invars[0]) for e in segment if reduces(e) and not is_along_rows(e)}

    def takers(v: Var) -> int:
        moved = (e for e in uses[v] if e is not None and e.primitive.name in MOVED)
        return len(uses[v]) + sum(takers(e.outvars[0]) - 1 for e in moved)

    moves = {v for e in segment if e.primitive.name in MOVED for v in e.outvars}
    largest = largest_size(segment)
    sums = {v for v in added(segment, products) - moves if size_of(v) in summed}
    return {v for v in sums if takers(v) > 1 and not is_small(v, largest)}


def is_sum(part: Sequence[JaxprEqn]) -> bool:
    """Whether it is a part of such sums alone."""
    return {e.primitive.name for e in part} <= ADDS | MOVED
