"""Where the passes of a segment end: what of it one kernel makes, and others take.

A sum along rows that goes back into its rows, as in softmax and norms, is part of the pass that
takes it. Sums over other axes end a pass, and so does what XLA makes in no kernel with others.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

from jax.extend.core import JaxprEqn, Var

from jmp_kit.casting.planning._plan import Form, Stored
from jmp_kit.casting.planning._program import Program
from jmp_kit.casting.reading._rounding import is_rounding
from jmp_kit.casting.reading._worth import (
    FEW,
    MOST_SUMS,
    ends_of_woven,
    first_of,
    is_costly,
    is_kept,
    looked_up,
)
from jmp_kit.programs._axes import goes_into, reduces
from jmp_kit.programs._jaxpr import (
    Atom,
    is_along_rows,
    is_float32,
    is_var,
    shape_of,
    size_of,
    subjaxprs,
    traced_back,
)

# What moves values, beside what computes with each of them.
_MOVES = {"broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "slice", "rev"}
_MOVES |= {"concatenate", "pad", "iota", "split", "select_n", "clamp", "convert_element_type"}

# What XLA makes of several values in one kernel.
_JOINS = {"concatenate", "pad"}

# What is a name around others, and a rule for derivatives that were taken.
_CALLS = {"jit", "pjit", "custom_jvp_call", "custom_vjp_call"}

# What is this much smaller than the largest value, or smaller than this, is no matter.
_SMALL, _LEAST = 16, 2**14

# A row that one kernel holds in registers.
_LONGEST = 2**14


class Cone(NamedTuple):
    """What a value is made of in one pass."""

    eqns: list[JaxprEqn]
    sources: list[Var]


class Segment:
    """A segment as passes see it.

    Attributes:
      eqns: its equations.
      stored: how some of its values are stored.
      program: that it stands in.
      maker: the equation that makes each of its values.
      place: of each equation, by identity.
      rounded: what is stored in half.
      joins: the size of what each small value is combined with; 0 if that is small, too.
      stops: what ends a pass for whoever takes it, but for sums along rows.
      joined: what is joined with others that the same dear functions go into.
      statistics: the sums along rows that have a pass of their own.
      roots: all that passes make, in order.
    """

    def __init__(
        self,
        segment: Sequence[JaxprEqn],
        made: Sequence[Var],
        stored: Mapping[Var, Stored],
        program: Program,
    ) -> None:
        self.maker = {v: e for e in segment for v in e.outvars}
        self.place = {id(e): i for i, e in enumerate(segment)}
        atoms = (a for e in segment for a in (*e.invars, *e.outvars))
        self.largest = max((n for n in map(size_of, atoms) if isinstance(n, int)), default=0)
        self.rounded = {v for v, s in stored.items() if s.form and v in self.maker}
        self.eqns, self.stored, self.program = segment, stored, program
        self.tables = looked_up(segment) & self.maker.keys()
        self.joins = self._joining(segment)
        # What ends a pass, for whoever takes it: all but what a pass of its own makes again.
        ends = {v for v, e in self.maker.items() if not self.is_fused(e) and not self.is_row(e)}
        ends |= self.tables
        self.stops = ends | self.rounded
        self.joined: Set[Var] = frozenset()
        woven_ends = ends_of_woven(segment)
        if not self._is_in_one_kernel(woven_ends, segment):
            ends |= set(filter(self._is_read_less, woven_ends))
        self.stops |= ends
        self.joined = self._joined(segment)
        wanted = [v for v in made if v in self.maker]
        small = [v for v in wanted if not self.is_big(v)]
        statistics = self._statistics([*(v for v in self.maker if v in ends), *small])
        every = ends.union(self.rounded, self.joined, wanted, statistics)
        self.statistics = statistics
        self.roots = [v for e in segment for v in e.outvars if v in every]

    def is_big(self, atom: Atom) -> bool:
        """Whether it matters how often it is read and written."""
        size = size_of(atom)  # a symbolic one is not known to be
        return isinstance(size, int) and size * _SMALL >= self.largest and size >= _LEAST

    def is_dear(self, eqn: JaxprEqn) -> bool:
        """Whether it computes a costly function of much."""
        return is_costly(eqn) and any(map(self.is_big, eqn.outvars))

    def is_fused(self, eqn: JaxprEqn) -> bool:
        """Whether XLA computes it in registers: one value of another, or of those in its place."""
        inside = [e for jaxpr in subjaxprs(eqn) for e in jaxpr.eqns]
        if inside:
            return eqn.primitive.name in _CALLS and all(map(self.is_fused, inside))
        if eqn.primitive.name in _MOVES:
            return True
        if eqn.primitive.name == "gather":  # which computes nothing that it looks up
            [table, *_] = eqn.invars
            return table not in self.maker or table in self.tables or table in self.rounded
        if eqn.primitive.name == "optimization_barrier":  # it has its operand stored
            return False
        if reduces(eqn):
            [operand], [result] = eqn.invars, eqn.outvars
            return not self.is_big(operand) or size_of(operand) <= FEW * size_of(result)
        if is_kept(eqn.primitive.name):
            return False
        shapes = {shape_of(a) for a in eqn.invars}
        return len(eqn.outvars) == 1 and all(
            goes_into(shape, shape_of(eqn.outvars[0])) for shape in shapes
        )

    def is_row(self, eqn: JaxprEqn) -> bool:
        """Whether it is a sum along rows that goes back into them."""
        [operand] = eqn.invars if reduces(eqn) else [None]
        return (
            operand is not None
            and self.is_big(operand)
            and is_along_rows(eqn)
            and shape_of(operand)[-1] <= _LONGEST
            and 0 < self.joins[eqn.outvars[0]] <= size_of(operand)
            and not is_rounding(eqn)
        )

    def is_extremum(self, eqn: JaxprEqn) -> bool:
        """Whether it is the largest value of a row that is rounded by it."""
        return reduces(eqn) and is_rounding(eqn) and is_along_rows(eqn)

    def cone(self, root: Var, stops: set[Var]) -> Cone:
        """What it is made of, back to what the segment takes, or a pass before this one makes."""
        last = self.maker[root]
        if not reduces(last):  # that may make it again
            stops = stops | self.joined
        eqns, sources = traced_back(list(filter(is_var, last.invars)), self.maker, stops)
        made = {**eqns, id(last): last}
        return Cone([made[i] for i in sorted(made, key=self.place.__getitem__)], list(sources))

    def fresh(self, cone: Cone) -> tuple[Var, ...]:
        """The big values that are there in half."""
        return tuple(
            v
            for v in cone.sources
            if self.is_big(v) and is_float32(v) and self.program.depends(v) and v not in self.maker
        ) + tuple(v for v in cone.sources if v in self.rounded)

    def _joined(self, segment: Sequence[JaxprEqn]) -> Set[Var]:
        """What is joined with others that the same dear functions go into.

        XLA makes neither twice in one kernel, but writes such a function in float32: the cotangents
        of a gate and of what it lets through, say.
        """
        takers: dict[tuple[Var, int], set[Var]] = collections.defaultdict(set)
        for join in [e for e in segment if e.primitive.name in _JOINS]:
            for v in (a for a in join.invars if is_var(a) and a in self.maker and self.is_big(a)):
                for eqn in filter(is_costly, self.cone(v, self.stops).eqns):
                    for dear in filter(self.is_big, eqn.outvars):
                        takers[dear, size_of(join.outvars[0])].add(v)
        found = []
        for (dear, size), several in takers.items():
            sizes = list(map(size_of, several))
            # Each of two halves may be cut from what is dear, or made of less.
            takes_the_same = max(sizes) <= size_of(dear) < sum(sizes)
            # What is added to itself, moved, is another matter.
            is_beside = sum(sizes) <= size
            if takes_the_same and is_beside:
                found.append(several)
        return set().union(*found)

    def _joining(self, segment: Sequence[JaxprEqn]) -> Mapping[Var, int]:
        """The small values that are combined with big ones, and the largest size of these."""
        found: dict[Var, int] = collections.defaultdict(int)
        for eqn in filter(self.is_fused, reversed(segment)):
            sizes = (size_of(v) if self.is_big(v) else found[v] for v in eqn.outvars)
            if largest := max(sizes, default=0):
                small = (a for a in eqn.invars if is_var(a) and not self.is_big(a))
                found.update((a, max(largest, found[a])) for a in small)
        return found

    def _statistics(self, roots: Iterable[Var]) -> set[Var]:
        """The sums along rows that others take than passes over rows, each of which has its own."""
        found: set[Var] = set()
        for v in roots:
            if not self.is_row(self.maker[v]) and not self.is_extremum(self.maker[v]):
                rows = filter(self.is_row, self.cone(v, self.stops | found).eqns)
                found.update(v for eqn in rows for v in eqn.outvars)
        return found | {v for v in roots if self.is_row(self.maker[v])}

    def _is_in_one_kernel(self, several: Set[Var], segment: Sequence[JaxprEqn]) -> bool:
        """Whether all that is stored of these is as large, or two values, each with its sum."""
        stored = first_of(several, segment, self.rounded)
        forms = {self.stored[v].form for v in stored}
        sizes = set(map(size_of, stored | several))
        is_even = forms == {Form.APART} and len(sizes) == 1
        return is_even or (forms <= {Form.FUSED} and len(stored) <= MOST_SUMS)

    def _is_read_less(self, v: Var) -> bool:
        """Whether two who take it move less by a float32 copy than by what it is made of."""
        made_of = sum(size_of(a) for a in self.cone(v, self.stops).sources if self.is_big(a))
        # Written once and read twice in float32, or in half all that it is made of, read twice.
        return self.is_big(v) and (1 + 2) * 4 * size_of(v) <= 2 * 2 * made_of
