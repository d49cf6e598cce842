"""A segment as passes over memory, each of which XLA makes one kernel of.

A kernel on a GPU goes over memory once: it reads, computes in registers, and ends with a sum or
with what it writes. XLA decides where kernels end, and where a value is dear to compute, or goes
into two sums, it writes that in float32 for several kernels to read. So each pass here gets
equations of its own, from what is stored in half, and a barrier before them that keeps XLA from
sharing.

A sum along rows that goes back into its rows, as in softmax and norms, is part of the pass that
takes it. Sums over other axes end a pass. How these are written for XLA, `_kernels` says.
"""

import collections
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from jax.extend.core import JaxprEqn, Var

from jmp_kit.casting.planning import _kernels as kernels
from jmp_kit.casting.planning._matrices import of_matrices
from jmp_kit.casting.planning._plan import Form, Piece, Stored
from jmp_kit.casting.planning._program import Program
from jmp_kit.casting.planning._shapes import Shaped, in_one_shape
from jmp_kit.casting.reading._parts import acts
from jmp_kit.casting.reading._rounding import is_rounding
from jmp_kit.casting.reading._worth import (
    FEW,
    MOST_CUTS,
    cuts_before,
    ends_of_woven,
    is_costly,
    is_kept,
    looked_up,
    reduces,
)
from jmp_kit.casting.rewriting._scattered import put_in
from jmp_kit.programs._axes import goes_into, runs_of
from jmp_kit.programs._flow import is_exact
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
_REDUCES = {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"}

# What XLA makes of several values in one kernel.
_JOINS = {"concatenate", "pad"}

# What is a name around others, and a rule for derivatives that were taken.
_CALLS = {"jit", "pjit", "custom_jvp_call", "custom_vjp_call"}

# What is this much smaller than the largest value, or smaller than this, is no matter.
_SMALL, _LEAST = 16, 2**14

# A row that one kernel holds in registers.
_LONGEST = 2**14

# The libraries' products give rows that are as long as a multiple of this.
_ALIGNED = 8


class Cone(NamedTuple):
    """What a value is made of in one pass."""

    eqns: list[JaxprEqn]
    sources: list[Var]


class Pass(NamedTuple):
    """Which values are made in one: all of the same level and key."""

    level: int  # after those of lower levels, whose results it takes
    key: tuple[object, ...]
    sources: frozenset[Var] = frozenset()  # of a sum: what it reads
    is_apart: bool = False
    is_row: bool = False


def passes(
    segment: Sequence[JaxprEqn],
    made: Sequence[Var],
    stored: Mapping[Var, Stored],
    program: Program,
) -> Iterator[Piece]:
    """The segment's equations, in passes.

    Args:
      segment: the equations.
      made: what is wanted of their results.
      stored: how some of these are stored.
      program: that they stand in.
    """
    if any(map(acts, segment)):  # which is alone
        yield Piece(segment, made)
        return
    segment = list(kernels.given_first(segment))
    found = _Segment(segment, made, stored, program)
    groups: dict[Pass, list[Var]] = collections.defaultdict(list)
    for v in found.roots:
        groups[found.pass_of(v)].append(v)
    for group in found.merged(groups):
        yield found.piece(group, groups[group])


class _Segment:
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
        self.summed = {v for v in self.rounded if stored[v].form is Form.FUSED}
        self.put = {v: s.dtype for v, s in stored.items() if s.form is Form.PUT}
        sums = [v for v in self.rounded if stored[v].form is Form.ADDED]
        self.added, _ = traced_back(sums, self.maker)  # by the places of equations
        self.program, self.depends = program, program.depends
        self.tables = looked_up(segment) & self.maker.keys()
        self.joins = self._joining(segment)
        # What ends a pass, for whoever takes it: all but what a pass of its own makes again.
        ends = {v for v, e in self.maker.items() if not self._is_fused(e) and not self._is_row(e)}
        ends |= self.tables
        self.stops = ends | self.rounded
        self.joined: Set[Var] = frozenset()
        ends |= set(filter(self._is_read_less, ends_of_woven(segment)))
        self.stops |= ends
        self.joined = self._joined(segment)
        wanted = [v for v in made if v in self.maker]
        small = [v for v in wanted if not self._is_big(v)]
        statistics = self._statistics([*(v for v in self.maker if v in ends), *small])
        every = ends.union(self.rounded, self.joined, wanted, statistics)
        self.statistics = statistics
        self.roots = [v for e in segment for v in e.outvars if v in every]
        self.is_dear_once = sum(map(self._is_dear, segment)) <= 1
        self.passes: dict[Var, Pass] = {}

    def _is_big(self, atom: Atom) -> bool:
        size = size_of(atom)  # a symbolic one is not known to be
        return isinstance(size, int) and size * _SMALL >= self.largest and size >= _LEAST

    def _is_fused(self, eqn: JaxprEqn) -> bool:
        """Whether XLA computes it in registers: one value of another, or of those in its place."""
        inside = [e for jaxpr in subjaxprs(eqn) for e in jaxpr.eqns]
        if inside:
            return eqn.primitive.name in _CALLS and all(map(self._is_fused, inside))
        if eqn.primitive.name in _MOVES:
            return True
        if eqn.primitive.name == "gather":  # which computes nothing that it looks up
            [table, *_] = eqn.invars
            return table not in self.maker or table in self.tables or table in self.rounded
        if eqn.primitive.name == "optimization_barrier":  # it has its operand stored
            return False
        if eqn.primitive.name in _REDUCES:
            [operand], [result] = eqn.invars, eqn.outvars
            return not self._is_big(operand) or size_of(operand) <= FEW * size_of(result)
        if is_kept(eqn.primitive.name):
            return False
        shapes = {shape_of(a) for a in eqn.invars}
        return len(eqn.outvars) == 1 and all(
            goes_into(shape, shape_of(eqn.outvars[0])) for shape in shapes
        )

    def _is_row(self, eqn: JaxprEqn) -> bool:
        """Whether it is a sum along rows that goes back into them."""
        [operand] = eqn.invars if eqn.primitive.name in _REDUCES else [None]
        return (
            operand is not None
            and self._is_big(operand)
            and is_along_rows(eqn)
            and shape_of(operand)[-1] <= _LONGEST
            and eqn.outvars[0] in self.joins
            and not is_rounding(eqn)
        )

    def _joined(self, segment: Sequence[JaxprEqn]) -> Set[Var]:
        """What is joined with others that the same dear functions go into.

        XLA makes neither twice in one kernel, but writes such a function in float32: the cotangents
        of a gate and of what it lets through, say.
        """
        takers: dict[tuple[Var, int], set[Var]] = collections.defaultdict(set)
        for join in [e for e in segment if e.primitive.name in _JOINS]:
            for v in (a for a in join.invars if is_var(a) and a in self.maker and self._is_big(a)):
                for eqn in filter(is_costly, self.cone(v, self.stops).eqns):
                    for dear in filter(self._is_big, eqn.outvars):
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

    def _is_extremum(self, eqn: JaxprEqn) -> bool:
        """Whether it is the largest value of a row that is rounded by it."""
        return eqn.primitive.name in _REDUCES and is_rounding(eqn) and is_along_rows(eqn)

    def _joining(self, segment: Sequence[JaxprEqn]) -> set[Var]:
        """The small values that are combined with big ones."""
        found: set[Var] = set()
        for eqn in reversed(segment):
            if self._is_fused(eqn) and (
                any(map(self._is_big, eqn.outvars)) or not found.isdisjoint(eqn.outvars)
            ):
                found |= {a for a in eqn.invars if is_var(a) and not self._is_big(a)}
        return found

    def _statistics(self, roots: Iterable[Var]) -> set[Var]:
        """The sums along rows that others take than passes over rows, each of which has its own."""
        found: set[Var] = set()
        for v in roots:
            if not self._is_row(self.maker[v]) and not self._is_extremum(self.maker[v]):
                rows = filter(self._is_row, self.cone(v, self.stops | found).eqns)
                found.update(v for eqn in rows for v in eqn.outvars)
        return found | {v for v in roots if self._is_row(self.maker[v])}

    def cone(self, root: Var, stops: set[Var]) -> Cone:
        """What it is made of, back to what the segment takes, or a pass before this one makes."""
        last = self.maker[root]
        if last.primitive.name not in _REDUCES:  # that may make it again
            stops = stops | self.joined
        eqns, sources = traced_back(list(filter(is_var, last.invars)), self.maker, stops)
        made = {**eqns, id(last): last}
        return Cone([made[i] for i in sorted(made, key=self.place.__getitem__)], list(sources))

    def pass_of(self, root: Var) -> Pass:
        """The pass that makes it."""
        if root not in self.passes:
            self.passes[root] = self._pass_of(root)
        return self.passes[root]

    def _pass_of(self, root: Var) -> Pass:
        cone = self.cone(root, self.stops)
        eqn = self.maker[root]
        is_of_rows = (self._is_big(root) and self._is_fused(eqn)) or self._is_extremum(eqn)
        has_rows = is_of_rows and any(map(self._is_row, cone.eqns))
        whole = eqn.invars[0] if eqn.primitive.name in _REDUCES else root
        is_row = has_rows and self._is_worth_it(cone, whole)
        is_row &= not any(map(self._is_joined, cone.eqns))
        if not is_row and root not in self.statistics:
            cone = self.cone(root, self.stops | self.statistics)
        before = [v for v in cone.sources if v in self.maker]
        level = 1 + max((self.pass_of(v).level for v in before), default=0)
        if is_row:
            return Pass(level, (root,), is_apart=True, is_row=True)
        if root in self.statistics:
            return Pass(level, ("statistics",))
        if eqn.primitive.name in _REDUCES and self._is_big(eqn.invars[0]):
            sources = self._fresh(cone)
            key = eqn.primitive.name, *runs_of(eqn)
            is_scale = is_rounding(eqn)  # XLA finds it where what is rounded is made
            is_dear = any(map(self._is_dear, cone.eqns))
            is_apart = len(sources) > 1 or (self._is_combined(cone) and not is_scale)
            is_apart &= not is_along_rows(eqn) or is_scale
            is_apart |= is_dear
            is_apart &= self._is_worth_it(cone, eqn.invars[0])
            return Pass(level, key, frozenset(sources), is_apart=is_apart)
        costly = (size_of(v) for e in cone.eqns if is_costly(e) for v in e.outvars)
        is_dear = root in self.summed and max(costly, default=0) >= size_of(root)
        if is_dear or (root in self.joined and self._is_worth_it(cone, root)):
            return Pass(level, (root,), is_apart=True)
        is_whole = not self._is_fused(eqn) and eqn.primitive.name not in _REDUCES
        return Pass(level, (id(eqn),) if is_whole else ())

    def _is_dear(self, eqn: JaxprEqn) -> bool:
        return is_costly(eqn) and any(map(self._is_big, eqn.outvars))

    def _is_joined(self, eqn: JaxprEqn) -> bool:
        """Whether it joins values, which XLA does before a kernel of rows, in float32."""
        return eqn.primitive.name == "concatenate" and self._is_big(eqn.outvars[0])

    def _is_column_sum(self, root: Var) -> bool:
        eqn = self.maker[root]
        return eqn.primitive.name in _REDUCES and not is_along_rows(eqn)

    def _is_combined(self, cone: Cone) -> bool:
        """Whether something small is combined with all of it, a bias say."""
        eqns = [e for e in cone.eqns if e.outvars and self._is_big(e.outvars[0])]
        return any(is_var(a) and not self._is_big(a) for e in eqns for a in e.invars)

    def _is_worth_it(self, cone: Cone, whole: Atom) -> bool:
        """Whether to read all that it is made of once more is less than a float32 copy of it.

        And whether XLA would make it in one kernel, which it does not of what is cut and joined
        over and over, as an associative scan is.
        """
        cuts = max(cuts_before(cone.eqns).values(), default=0)
        read = (v for v in cone.sources if self._is_big(v) and v not in self.program.constant)
        return sum(2 * size_of(v) for v in read) <= 8 * size_of(whole) and cuts <= MOST_CUTS

    def _is_read_less(self, v: Var) -> bool:
        """Whether two who take it move less by a float32 copy than by what it is made of."""
        made_of = sum(size_of(a) for a in self.cone(v, self.stops).sources if self._is_big(a))
        # Written once and read twice in float32, or in half all that it is made of, read twice.
        return self._is_big(v) and (1 + 2) * 4 * size_of(v) <= 2 * 2 * made_of

    def merged(self, groups: dict[Pass, list[Var]]) -> list[Pass]:
        """The passes in order, sums made in the pass of others that read the same in any case."""
        for group in [group for group in groups if group.sources]:
            others = (g for g in groups if g.key == group.key and g is not group)
            for other in others:
                if other.level == group.level and other.is_apart and group.sources <= other.sources:
                    groups[other] += groups.pop(group)
                    break
        return sorted(groups, key=lambda group: group.level)

    def _fresh(self, cone: Cone) -> tuple[Var, ...]:
        """The big values that are there in half."""
        return tuple(
            v
            for v in cone.sources
            if self._is_big(v) and is_float32(v) and self.depends(v) and v not in self.maker
        ) + tuple(v for v in cone.sources if v in self.rounded)

    def piece(self, group: Pass, roots: Sequence[Var]) -> Piece:
        """What is evaluated as one."""
        with_rows = group.is_row or not self.statistics.isdisjoint(roots)
        cones = [
            self.cone(v, self.stops | (set() if with_rows else self.statistics)) for v in roots
        ]
        eqns = {id(e): e for cone in cones for e in cone.eqns}
        ordered = [eqns[i] for i in sorted(eqns, key=self.place.__getitem__)]
        fresh = dict.fromkeys(v for cone in cones for v in self._fresh(cone))
        sources = dict.fromkeys(v for cone in cones for v in cone.sources)
        ordered = [e for eqn in ordered for e in kernels.flattened(eqn)]
        late = [v for v in sources if is_float32(v) and self.depends(v)]
        ordered = [e for eqn in ordered for e in kernels.begun_late(eqn, self.program.begun, late)]
        ordered = [e for eqn in ordered for e in self._put(eqn)]
        apart = list(fresh) if group.is_apart else []
        if group.is_apart:  # or XLA takes it for the pass that made these
            apart += [v for v in sources if v in self.maker and v not in fresh]
        compared = self.program.compared.values.intersection(sources)
        apart += [v for v in sources if v in compared and v not in apart]
        lies = all(map(self._is_column_sum, roots))
        lies |= self.is_dear_once and any(map(_is_padded, fresh))  # or XLA writes what is dear
        sums = {e.outvars[0] for e in ordered if group.is_row and self._is_row(e)}
        moved = list(self._moved(ordered))
        is_dear = any(map(self._is_dear, ordered))
        piece = Piece(ordered, list(roots), apart, lies, is_dear, moved)
        matrices = of_matrices(piece, sums) if sums and not lies else None
        if group.is_row:
            ordered = list(kernels.rows(ordered, sums))
        else:
            rest = [e for e in ordered if not any(e is eqn for eqn in moved)]
            # Else it may be a product's kernel that computes it, in the product's shape.
            is_own = is_dear or any(self._is_big(e.invars[0]) for e in rest if reduces(e))
            shaped = in_one_shape(rest) if is_own else Shaped(rest, {})
            found = {shaped.names.get(v, v) for v in roots} if group.is_apart else set()
            ordered = [*moved, *kernels.sums(shaped.eqns, found), *shaped.after(roots)]
        ordered = [e for eqn in ordered for e in kernels.own_zeros(eqn)]
        return piece._replace(eqns=ordered, matrices=matrices)

    def _put(self, eqn: JaxprEqn) -> Iterator[JaxprEqn]:
        found = [self.put[v] for v in eqn.outvars if v in self.put]
        yield from put_in(eqn, found[0]) if found else [eqn]

    def _moved(self, eqns: Sequence[JaxprEqn]) -> Iterator[JaxprEqn]:
        """What only moves values from outside, which may be there in half, or adds them in it."""
        made = {v for e in eqns for v in e.outvars}
        for eqn in eqns:
            operands = [a for a in eqn.invars if is_var(a) and is_float32(a)]
            outside = operands and not any(a in made for a in eqn.invars if is_var(a))
            is_moved = is_exact(eqn) or id(eqn) in self.added
            if outside and is_moved and all(map(self.depends, operands)):
                made.difference_update(eqn.outvars)
                yield eqn


def _is_padded(v: Var) -> bool:
    """Whether the libraries' products give longer rows, and XLA cuts them."""
    [length] = shape_of(v)[-1:] or [0]
    return isinstance(length, int) and length % _ALIGNED > 0
