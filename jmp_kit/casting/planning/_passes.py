"""A segment as passes over memory, each of which XLA makes one kernel of.

A kernel on a GPU goes over memory once: it reads, computes in registers, and ends with a sum or
with what it writes. XLA decides where kernels end, and where a value is dear to compute, or goes
into two sums, it writes that in float32 for several kernels to read. So each pass here gets
equations of its own, from what is stored in half, and a barrier before them that keeps XLA from
sharing.

Where passes end, `_segment` says, and `_written`, what is evaluated for each.
"""

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jax.extend.core import JaxprEqn, Var

from jmp_kit.casting.planning import _kernels as kernels
from jmp_kit.casting.planning._plan import Form, Piece, Stored
from jmp_kit.casting.planning._program import Program
from jmp_kit.casting.planning._segment import Cone, Segment
from jmp_kit.casting.planning._written import Writer
from jmp_kit.casting.reading._parts import acts
from jmp_kit.casting.reading._rounding import is_rounding
from jmp_kit.casting.reading._worth import MOST_CUTS, cuts_before, is_costly
from jmp_kit.programs._axes import reduces, runs_of
from jmp_kit.programs._jaxpr import Atom, is_along_rows, is_var, shape_of, size_of

# What turns values or takes a part of them.
_CUTS = {"transpose", "slice", "rev", "split", "gather", "dynamic_slice"}


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
    found = Segment(list(kernels.given_first(segment)), made, stored, program)
    grouping, writer = _Grouping(found), Writer(found)
    for group, roots in grouping.groups():
        yield writer.piece(roots, is_row=group.is_row, is_apart=group.is_apart)


class _Grouping:
    """Which values are made in which pass."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.summed = {v for v in segment.rounded if segment.stored[v].form is Form.FUSED}
        self.passes: dict[Var, Pass] = {}

    def groups(self) -> Iterator[tuple[Pass, list[Var]]]:
        """The passes in order, sums made in the pass of others that read the same in any case."""
        groups: dict[Pass, list[Var]] = collections.defaultdict(list)
        for v in self.segment.roots:
            groups[self.pass_of(v)].append(v)
        for group in [group for group in groups if group.sources]:
            others = (g for g in groups if g.key == group.key and g is not group)
            for other in others:
                if other.level == group.level and other.is_apart and group.sources <= other.sources:
                    groups[other] += groups.pop(group)
                    break
        for group in sorted(groups, key=lambda group: group.level):
            yield group, groups[group]

    def pass_of(self, root: Var) -> Pass:
        """The pass that makes it."""
        if root not in self.passes:
            self.passes[root] = self._pass_of(root)
        return self.passes[root]

    def _pass_of(self, root: Var) -> Pass:
        segment, eqn = self.segment, self.segment.maker[root]
        cone = segment.cone(root, segment.stops)
        is_made = segment.is_big(root) and segment.is_fused(eqn)
        is_of_rows = is_made or segment.is_extremum(eqn)
        has_rows = is_of_rows and any(map(segment.is_row, cone.eqns))
        whole = eqn.invars[0] if reduces(eqn) else root
        is_row = has_rows and self._is_worth_it(cone, whole)
        is_row &= not any(map(self._is_moved, cone.eqns))
        is_row &= not any(map(self._is_looked_up, cone.sources))
        if not is_row and root not in segment.statistics:
            cone = segment.cone(root, segment.stops | segment.statistics)
        before = [v for v in cone.sources if v in segment.maker]
        level = 1 + max((self.pass_of(v).level for v in before), default=0)
        if is_row:
            return Pass(level, (root,), is_apart=True, is_row=True)
        if root in segment.statistics:
            return Pass(level, ("statistics",))
        if reduces(eqn) and segment.is_big(eqn.invars[0]):
            sources = segment.fresh(cone)
            key = eqn.primitive.name, *runs_of(eqn)
            is_scale = is_rounding(eqn)  # XLA finds it where what is rounded is made
            is_dear = any(map(segment.is_dear, cone.eqns))
            is_apart = len(sources) > 1 or (self._is_combined(cone) and not is_scale)
            is_apart &= not is_along_rows(eqn) or is_scale
            is_apart |= is_dear
            is_apart &= self._is_worth_it(cone, eqn.invars[0])
            return Pass(level, key, frozenset(sources), is_apart=is_apart)
        costly = (size_of(v) for e in cone.eqns if is_costly(e) for v in e.outvars)
        is_dear = root in self.summed and max(costly, default=0) >= size_of(root)
        if is_dear or (root in segment.joined and self._is_worth_it(cone, root)):
            return Pass(level, (root,), is_apart=True)
        is_whole = not segment.is_fused(eqn) and not reduces(eqn)
        return Pass(level, (id(eqn),) if is_whole else ())

    def _is_combined(self, cone: Cone) -> bool:
        """Whether something small is combined with all of it, a bias say."""
        eqns = [e for e in cone.eqns if e.outvars and self.segment.is_big(e.outvars[0])]
        return any(is_var(a) and not self.segment.is_big(a) for e in eqns for a in e.invars)

    def _is_moved(self, eqn: JaxprEqn) -> bool:
        """Whether it joins values, which XLA does before a kernel of rows, in float32.

        Or turns or cuts those of several axes, which it tries to cut into tiles in every way: that
        takes long, and the kernel reads no less.
        """
        name, shape = eqn.primitive.name, shape_of(eqn.outvars[0]) if eqn.outvars else ()
        is_cut = name in _CUTS and len(shape) > 2
        return (is_cut or name == "concatenate") and self.segment.is_big(eqn.outvars[0])

    def _is_looked_up(self, v: Var) -> bool:
        """Whether a kernel of rows would have it written first; others look it up themselves."""
        eqn = self.segment.maker.get(v)
        return eqn is not None and eqn.primitive.name == "gather" and self.segment.is_big(v)

    def _is_worth_it(self, cone: Cone, whole: Atom) -> bool:
        """Whether to read all that it is made of once more is less than a float32 copy of it.

        And whether XLA would make it in one kernel, which it does not of what is cut and joined
        over and over, as an associative scan is.
        """
        cuts = max(cuts_before(cone.eqns).values(), default=0)
        constant = self.segment.program.constant
        read = (v for v in cone.sources if self.segment.is_big(v) and v not in constant)
        return sum(2 * size_of(v) for v in read) <= 8 * size_of(whole) and cuts <= MOST_CUTS
