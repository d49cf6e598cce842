"""A pass as equations that XLA makes one kernel of. How each is written, `_kernels` says."""

from collections.abc import Iterator, Sequence

from jax.extend.core import JaxprEqn, Var

from jmp_kit.casting.planning import _kernels as kernels
from jmp_kit.casting.planning._cut import cut_first
from jmp_kit.casting.planning._matrices import of_matrices
from jmp_kit.casting.planning._plan import Form, Piece
from jmp_kit.casting.planning._segment import Segment
from jmp_kit.casting.planning._shapes import Shaped, in_one_shape
from jmp_kit.casting.reading._parts import barrier_of, living
from jmp_kit.casting.rewriting._scattered import put_in
from jmp_kit.programs._axes import reduces
from jmp_kit.programs._flow import is_exact
from jmp_kit.programs._jaxpr import (
    Atom,
    is_along_rows,
    is_float32,
    is_var,
    shape_of,
    traced_back,
)

# The libraries' products give rows that are as long as a multiple of this.
_ALIGNED = 8


class Writer:
    """Writes the passes of a segment."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.put = {v: s.dtype for v, s in segment.stored.items() if s.form is Form.PUT}
        sums = [v for v in segment.rounded if segment.stored[v].form is Form.ADDED]
        self.added, _ = traced_back(sums, segment.maker)  # by the places of equations
        self.is_dear_once = sum(map(segment.is_dear, segment.eqns)) <= 1

    def piece(self, roots: Sequence[Var], *, is_row: bool, is_apart: bool) -> Piece:
        """What is evaluated as one."""
        segment, program = self.segment, self.segment.program
        with_rows = is_row or not segment.statistics.isdisjoint(roots)
        stops = segment.stops if with_rows else segment.stops | segment.statistics
        cones = [segment.cone(v, stops) for v in roots]
        eqns = {id(e): e for cone in cones for e in cone.eqns}
        ordered = [eqns[i] for i in sorted(eqns, key=segment.place.__getitem__)]
        fresh = dict.fromkeys(v for cone in cones for v in segment.fresh(cone))
        sources = dict.fromkeys(v for cone in cones for v in cone.sources)
        filled = [program.filled[v] for v in sources if v in program.filled]
        outside = [v for v in sources if v not in program.filled]
        ordered = [e for eqn in (*filled, *ordered) for e in kernels.flattened(eqn)]
        ordered = [e for eqn in ordered for e in self._of_sums(eqn)]
        [ordered] = living([list(cut_first(ordered, roots, segment.is_big))], roots)
        late = [v for v in sources if is_float32(v) and program.depends(v)]
        ordered = [e for eqn in ordered for e in kernels.begun_late(eqn, program.begun, late)]
        ordered = [e for eqn in ordered for e in self._put(eqn)]
        apart = list(fresh) if is_apart else []
        if is_apart:  # or XLA takes it for the pass that made these
            apart += [v for v in outside if v in segment.maker and v not in fresh]
        apart += [v for v in outside if v in program.compared.values and v not in apart]
        lies = all(map(self._is_column_sum, roots))
        lies |= self.is_dear_once and any(map(_is_padded, fresh))  # or XLA writes what is dear
        sums = {e.outvars[0] for e in ordered if is_row and segment.is_row(e)}
        moved = list(self._moved(ordered))
        is_dear = any(map(segment.is_dear, ordered))
        piece = Piece(ordered, list(roots), apart, lies, is_dear, moved)
        matrices = of_matrices(piece, sums) if sums and not lies else None
        if is_row:
            ordered = list(kernels.rows(ordered, sums))
        else:
            rest = [e for e in ordered if not any(e is eqn for eqn in moved)]
            # Else it may be a product's kernel that computes it, in the product's shape.
            is_own = is_dear or any(segment.is_big(e.invars[0]) for e in rest if reduces(e))
            shaped = in_one_shape(rest) if is_own else Shaped(rest, {})
            found = {shaped.names.get(v, v) for v in roots} if is_apart else set()
            ordered = [*moved, *kernels.sums(shaped.eqns, found), *shaped.after(roots)]
        ordered = [e for eqn in ordered for e in kernels.own_zeros(eqn)]
        return piece._replace(eqns=ordered, matrices=matrices)

    def _of_sums(self, eqn: JaxprEqn) -> Iterator[JaxprEqn]:
        """The equation; what it sums up is behind a barrier, if it is sums that others take, too.

        XLA makes one sum of a sum of sums, and reads all that was summed up once more.
        """
        if eqn.primitive.name == "reduce_sum" and self._is_summed_up(eqn.invars[0]):
            [of] = eqn.invars
            there = Var(of.aval)
            yield barrier_of([of], [there], on_cpus=False)
            eqn = eqn.replace(invars=[there])
        yield eqn

    def _is_summed_up(self, v: Atom, is_shared: bool = False) -> bool:
        eqn = self.segment.maker.get(v) if is_var(v) else None
        if eqn is None:
            return False
        is_shared |= len(self.segment.program.uses[v]) > 1
        if eqn.primitive.name == "reduce_sum":
            return is_shared and self.segment.is_big(eqn.invars[0]) and not self.segment.is_big(v)
        return is_exact(eqn) and self._is_summed_up(eqn.invars[0], is_shared)

    def _is_column_sum(self, root: Var) -> bool:
        eqn = self.segment.maker[root]
        return reduces(eqn) and not is_along_rows(eqn)

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
            if outside and is_moved and all(map(self.segment.program.depends, operands)):
                made.difference_update(eqn.outvars)
                yield eqn


def _is_padded(v: Var) -> bool:
    """Whether the libraries' products give longer rows, and XLA cuts them."""
    [length] = shape_of(v)[-1:] or [0]
    return isinstance(length, int) and length % _ALIGNED > 0
