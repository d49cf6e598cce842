"""A pass in one shape: what reshapes values between its equations reshapes what it reads instead.

A norm of groups of channels computes with [n, h, w, groups, channels], and a bias with
[n, h, w, groups · channels]. XLA indexes the two separately, computes what is behind the reshape
once for each way it is indexed, and soon writes it in float32 instead.

    f(reshape(x) + b)    ->    reshape(f(x + reshape(b)))

Each axis is split as finely as any reshape splits it, and every equation is one of all of these.
"""

import collections
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jax.extend.core import JaxprEqn, Var

from jmp_kit.programs._axes import ELEMENTWISE, REDUCES, RESHAPES, groups_of, is_shared, reshaped
from jmp_kit.programs._jaxpr import Atom, is_var, shape_of, taking

_MOVES = RESHAPES | {"broadcast_in_dim", "transpose"}
_KNOWN = ELEMENTWISE | _MOVES | REDUCES

Axis = tuple[Var, int]
Shape = tuple[int, ...]


class Shaped(NamedTuple):
    """Equations of a pass, in one shape."""

    eqns: Sequence[JaxprEqn]
    names: Mapping[Var, Var]  # what the variables are in them

    def after(self, results: Sequence[Var]) -> Iterator[JaxprEqn]:
        """What gives results the shapes that others take them in."""
        maker = {v: e for e in self.eqns for v in e.outvars}
        for v in results:
            name = self.names.get(v, v)
            if name is not v:
                yield from reshaped(name, v, maker[name])


def in_one_shape(eqns: Sequence[JaxprEqn]) -> Shaped:
    """The equations in one shape, if they are in several."""
    as_they_were = Shaped(eqns, {})
    variables = {a for e in eqns for a in (*e.invars, *e.outvars) if is_var(a)}
    is_known = all(isinstance(n, int) and n > 0 for v in variables for n in shape_of(v))
    if not is_known or not _splits(eqns) or any(map(is_shared, variables)):
        return as_they_were
    axes = _Axes(eqns)
    return axes.written(eqns) if axes.are_nested else as_they_were


def _splits(eqns: Sequence[JaxprEqn]) -> bool:
    """Whether something is computed here, split into other axes, and computed with."""
    taken: set[Var] = set()
    for eqn in reversed(eqns):
        is_moved = eqn.primitive.name in _MOVES and not taken.isdisjoint(eqn.outvars)
        if is_moved or eqn.primitive.name in ELEMENTWISE:
            taken.update(filter(is_var, eqn.invars))
    computed: set[Var] = set()
    for eqn in eqns:
        is_computed = not computed.isdisjoint(filter(is_var, eqn.invars))
        if eqn.primitive.name not in _MOVES or is_computed:
            computed.update(eqn.outvars)
        is_between = is_computed and not taken.isdisjoint(eqn.outvars)
        if eqn.primitive.name in RESHAPES and is_between and _regroups(eqn):
            return True
    return False


class _Axes:
    def __init__(self, eqns: Sequence[JaxprEqn]) -> None:
        self.same: dict[Axis, Axis] = {}  # an axis as long, of the same split
        # Where an axis is split: how many values each of the parts on the right are.
        self.cuts: dict[Axis, set[int]] = collections.defaultdict(set)
        self.are_nested = True
        together = [pair for eqn in eqns for pair in self._together(eqn)]
        count = -1
        while count != (count := sum(map(len, self.cuts.values()))):
            for one, other in together:
                cuts = self._cuts(one) | self._cuts(other)
                self._cut(one, cuts)
                self._cut(other, cuts)
        for (v, i), cuts in self.cuts.items():
            ends = [1, *sorted(cuts), shape_of(v)[i]]
            self.are_nested &= all(b % a == 0 for a, b in itertools.pairwise(ends))

    def _together(self, eqn: JaxprEqn) -> Iterator[tuple[list[Axis], list[Axis]]]:
        """The axes that are one another, if these are several; one and one are the same."""
        if not _is_known(eqn):
            return
        name, [result] = eqn.primitive.name, eqn.outvars
        for operand in filter(is_var, eqn.invars):
            axes: Sequence[int] = range(len(shape_of(operand)))
            if name in RESHAPES:
                pairs = list(groups_of(eqn))
            elif name == "broadcast_in_dim":
                pairs = [([i], [axis]) for i, axis in enumerate(eqn.params["broadcast_dimensions"])]
            elif name == "transpose":
                pairs = [([axis], [i]) for i, axis in enumerate(eqn.params["permutation"])]
            else:
                kept = [i for i in axes if i not in eqn.params.get("axes", ())]
                pairs = [([axis], [i]) for i, axis in enumerate(kept)]
            for some, others in pairs:
                one, other = [(operand, i) for i in some], [(result, i) for i in others]
                if len(one) > 1 or len(other) > 1:
                    yield one, other
                elif shape_of(operand)[some[0]] == shape_of(result)[others[0]]:
                    self._unite(one[0], other[0])

    def _first(self, axis: Axis) -> Axis:
        while axis in self.same:
            axis = self.same[axis]
        return axis

    def _unite(self, one: Axis, other: Axis) -> None:
        one, other = self._first(one), self._first(other)
        if one != other:
            self.same[other] = one

    def _cuts(self, axes: Sequence[Axis]) -> set[int]:
        """Where several axes in a row are split, or end."""
        found, inner = set[int](), 1
        for v, i in reversed(axes):
            found |= {inner, *(inner * cut for cut in self.cuts[self._first((v, i))])}
            inner *= shape_of(v)[i]
        return found - {1}

    def _cut(self, axes: Sequence[Axis], cuts: set[int]) -> None:
        inner = 1
        for v, i in reversed(axes):
            here = {cut for cut in cuts if inner < cut < inner * shape_of(v)[i]}
            self.are_nested &= all(cut % inner == 0 for cut in here)
            self.cuts[self._first((v, i))] |= {cut // inner for cut in here}
            inner *= shape_of(v)[i]

    def split(self, v: Var, axis: int) -> Shape:
        """An axis as several."""
        ends = [1, *sorted(self.cuts[self._first((v, axis))]), shape_of(v)[axis]]
        return tuple(b // a for a, b in itertools.pairwise(ends))[::-1]

    def splits(self, v: Var) -> list[Shape]:
        """Each axis as several."""
        return [self.split(v, axis) for axis in range(len(shape_of(v)))]

    def shape(self, v: Var) -> Shape:
        """All of these."""
        return tuple(itertools.chain(*self.splits(v)))

    def places(self, v: Var, axes: Sequence[int]) -> tuple[int, ...]:
        """Which of all of these some axes are."""
        ends = list(itertools.accumulate(map(len, self.splits(v)), initial=0))
        return tuple(i for axis in axes for i in range(ends[axis], ends[axis + 1]))

    def written(self, eqns: Sequence[JaxprEqn]) -> Shaped:
        """The equations, of the axes that they are split into."""
        names: dict[Var, Var] = {}
        return Shaped([e for eqn in eqns for e in self._written(eqn, names)], names)

    def _named(self, v: Var) -> Var:
        shape = self.shape(v)
        return v if shape == shape_of(v) else Var(v.aval.update(shape=shape))

    def _written(self, eqn: JaxprEqn, names: dict[Var, Var]) -> Iterator[JaxprEqn]:
        for a in (a for a in eqn.invars if is_var(a) and a not in names):
            names[a] = self._named(a)
            yield from reshaped(a, names[a], eqn)
        if not _is_known(eqn):
            before = {a: Var(a.aval) for a in eqn.invars if is_var(a) and names[a] is not a}
            for a, v in before.items():
                yield from reshaped(names[a], v, eqn)
            yield taking(eqn, before)
            for v in eqn.outvars:
                names[v] = self._named(v)
                yield from reshaped(v, names[v], eqn)
            return
        [result] = eqn.outvars
        invars = [names[a] if is_var(a) else a for a in eqn.invars]
        if eqn.primitive.name in RESHAPES and shape_of(invars[0]) == self.shape(result):
            names[result] = invars[0]
            return
        names[result] = self._named(result)
        yield from self._rewritten(eqn, invars, names[result])

    def _rewritten(self, eqn: JaxprEqn, invars: list[Atom], name: Var) -> Iterator[JaxprEqn]:
        """The equation, of operands of these axes."""
        [result], params = eqn.outvars, dict(eqn.params)
        if eqn.primitive.name in RESHAPES:
            yield from reshaped(invars[0], name, eqn)
            return
        if eqn.primitive.name == "broadcast_in_dim":
            axes = params["broadcast_dimensions"]
            places = self.places(result, axes)
            params.update(shape=shape_of(name), broadcast_dimensions=places)
        elif eqn.primitive.name in ELEMENTWISE:
            axes = range(len(shape_of(result)))
        else:
            axes = None
            for key in {"axes", "permutation"} & params.keys():
                params[key] = self.places(eqn.invars[0], params[key])
        for i, (a, x) in enumerate(zip(eqn.invars, invars, strict=True)):
            if axes is not None and is_var(a) and shape_of(a):
                shape = self._beside(a, result, axes)
                if shape != shape_of(x):
                    invars[i] = Var(x.aval.update(shape=shape))
                    yield from reshaped(x, invars[i], eqn)
        yield eqn.replace(invars=invars, outvars=[name], params=params)

    def _beside(self, operand: Var, result: Var, axes: Sequence[int]) -> Shape:
        """An operand's shape, its axes of one value as many as the result's beside them."""
        pairs = [(self.split(operand, i), self.split(result, j)) for i, j in enumerate(axes)]
        return tuple(n for a, b in pairs for n in (a if len(a) == len(b) else (1,) * len(b)))


def _is_known(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name in _KNOWN and len(eqn.outvars) == 1


def _regroups(eqn: JaxprEqn) -> bool:
    return any(len(one) != len(other) for one, other in groups_of(eqn))
