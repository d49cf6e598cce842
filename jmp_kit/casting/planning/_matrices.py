"""Rows of arrays of several axes as rows of matrices, for XLA to compile in less time.

XLA on GPUs tries every way to cut what a kernel of rows makes into tiles, and again for each
equation that it may take into the kernel: of four axes there are thousands, of two some fifty.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn, Var

from jmp_kit.casting.planning import _kernels as kernels
from jmp_kit.casting.planning._plan import Matrices, Piece
from jmp_kit.programs._axes import ELEMENTWISE, REDUCES, RESHAPES, are_known, is_shared, reshaped
from jmp_kit.programs._jaxpr import (
    Atom,
    equations_of,
    in_place,
    is_along_rows,
    is_var,
    shape_of,
    subjaxprs,
    taking,
)

Shape = tuple[int, ...]


def of_matrices(piece: Piece, sums: Set[Var]) -> Matrices | None:
    """The piece with one axis in place of all but the last, if these sums over that allow it.

    That is, if no equation treats one of the axes differently, and devices do not share the
    program: on these, one axis may not lie as several do. And not of what XLA makes rather than
    reads, a mask say: it would write that.
    """
    leading = next(shape_of(v) for e in piece.eqns for v in e.outvars if v in sums)
    if len(leading) < 2 or not are_known(leading):
        return None
    rest = [e for e in piece.eqns if not any(e is moved for moved in piece.moved)]
    made = {v for e in rest for v in e.outvars}
    taken = dict.fromkeys(a for e in rest for a in e.invars if is_var(a) and a not in made)
    there = {*piece.apart, *(v for e in piece.moved for v in e.outvars)}
    whole = [v for v in taken if shape_of(v)[:-1] == leading and shape_of(v)[-1] > 1]
    joining = _Joining(leading)
    written = list(map(joining.written, rest))
    if not there.issuperset(whole) or None in written:
        return None
    names = joining.names
    eqns = [e for eqns in written if eqns for e in eqns]
    small = [v for v in taken if v in names and v not in there]
    before = [] if joining.is_tiled else list(_joined_before(small, names, eqns[0].source_info))
    found = {names[v] for v in sums}
    results = [names.get(v, v) for v in piece.results]
    apart = [names.get(v, v) for v in taken if v in there]
    return Matrices(Piece([*before, *kernels.rows(eqns, found)], results, apart), names)


def _joined_before(
    small: Sequence[Var], names: dict[Var, Var], source: object
) -> Iterator[JaxprEqn]:
    """What has the axes of these joined before the kernel that takes them; it names them anew."""
    there = kernels.on_gpus_alone(lax.optimization_barrier)
    for v in small:
        name, names[v] = names[v], Var(names[v].aval)
        yield from equations_of(there, [names[v]], [name], source)


class _Joining:
    def __init__(self, leading: Shape) -> None:
        self.leading = leading
        # Tiles are powers of two, and what they do not divide XLA does not join in a kernel.
        self.is_tiled = not any(n & (n - 1) for n in leading[1:])
        self.names: dict[Var, Var] = {}

    def written(self, eqn: JaxprEqn) -> Sequence[JaxprEqn] | None:
        """The equation with one axis; None if it cannot be."""
        name, [result, *others] = eqn.primitive.name, eqn.outvars
        if not any(map(self.shape, (*eqn.invars, *eqn.outvars))):
            return [taking(eqn, self.names)]
        if any(map(is_shared, (*eqn.invars, result))) or others:
            return None
        if list(subjaxprs(eqn)):
            return self.called(eqn) if _is_in_place(eqn, shape_of(result)) else None
        if name in RESHAPES:
            return self.reshaped(eqn, self.shape(result) or shape_of(result))
        if not self.shape(result):
            return None
        if name == "broadcast_in_dim":
            [operand], axes = eqn.invars, eqn.params["broadcast_dimensions"]
            return self.spread(operand, axes, self.name(result), eqn)
        if name in REDUCES and is_along_rows(eqn):
            return [self.named(eqn, {"axes": (len(self.shape(eqn.invars[0])) - 1,)})]
        return self.elementwise(eqn) if name in ELEMENTWISE else None

    def shape(self, atom: Atom) -> Shape:
        """Its shape with one axis; () if it has not got the others."""
        axes, others = shape_of(atom)[: len(self.leading)], shape_of(atom)[len(self.leading) :]
        return (math.prod(axes), *others) if axes == self.leading else ()

    def name(self, atom: Atom) -> Atom:
        """What it is with one axis; itself, if it has not got the others."""
        if not is_var(atom) or (not self.shape(atom) and atom not in self.names):
            return atom
        return self.names.setdefault(atom, Var(atom.aval.update(shape=self.shape(atom))))

    def named(self, eqn: JaxprEqn, params: Mapping[str, Any]) -> JaxprEqn:
        invars, outvars = list(map(self.name, eqn.invars)), list(map(self.name, eqn.outvars))
        return eqn.replace(invars=invars, outvars=outvars, params={**eqn.params, **params})

    def reshaped(self, eqn: JaxprEqn, shape: Shape) -> Sequence[JaxprEqn]:
        operand, [result] = self.name(eqn.invars[0]), eqn.outvars
        if shape_of(operand) == shape:
            self.names[result] = operand
            return []
        reshape = functools.partial(lax.reshape, new_sizes=shape)
        return self.traced(reshape, operand, self.name(result), eqn)

    def called(self, eqn: JaxprEqn) -> Sequence[JaxprEqn]:
        """The equation of what has the axes that it was traced with: a rule comes with it."""
        whole = {a: Var(a.aval) for a in eqn.invars if is_var(a) and self.shape(a)}
        [result], made = eqn.outvars, Var(eqn.outvars[0].aval)
        before = (e for a, v in whole.items() for e in reshaped(self.name(a), v, eqn))
        call = eqn.replace(invars=in_place(eqn.invars, whole), outvars=[made])
        return [*before, call, *reshaped(made, self.name(result), eqn)]

    def elementwise(self, eqn: JaxprEqn) -> Sequence[JaxprEqn] | None:
        """The equation, before it what has only some of the axes."""
        [result] = eqn.outvars
        several = [a for a in eqn.invars if shape_of(a) and not self.shape(a)]
        whole = {a: Var(a.aval.update(shape=self.shape(result))) for a in several}
        before = [self.spread(a, range(a.aval.ndim), v, eqn) for a, v in whole.items()]
        if None in before:
            return None
        after = self.named(eqn.replace(invars=in_place(eqn.invars, whole)), {})
        return [*(e for eqns in before if eqns for e in eqns), after]

    def spread(
        self, operand: Atom, axes: Sequence[int], result: Var, eqn: JaxprEqn
    ) -> Sequence[JaxprEqn] | None:
        """An operand along axes of the equation's result; None if XLA would write it.

        It has all of the axes that are joined, none, or the first: a value of each image, say, not
        one that all images share.
        """
        whole, shape = shape_of(eqn.outvars[0]), result.aval.shape
        sizes = dict(zip(axes, shape_of(operand), strict=True))
        every = [sizes.get(i, 1) for i in range(len(whole))]
        held, others = tuple(every[: len(self.leading)]), every[len(self.leading) :]
        several = tuple(n for n in held if n > 1)
        if held == self.leading or not several:

            def spread(x: Any) -> Any:
                row = lax.reshape(x, (math.prod(held), *others))
                return lax.broadcast_in_dim(row, shape, range(len(shape)))

        elif self.is_tiled and several == self.leading[: len(several)]:

            def spread(x: Any) -> Any:
                x = lax.reshape(x, shape_of(operand))  # the axes may be others, of the same sizes
                return lax.reshape(lax.broadcast_in_dim(x, whole, axes), shape)

        else:
            return None
        return self.traced(spread, operand, result, eqn)

    def traced(
        self, function: Callable[[Any], Any], operand: Atom, result: Var, eqn: JaxprEqn
    ) -> Sequence[JaxprEqn]:
        return list(equations_of(function, [self.name(operand)], [result], eqn.source_info))


def _is_in_place(eqn: JaxprEqn, shape: Shape) -> bool:
    """Whether it computes each value of those in its place, by itself or in what it calls."""
    inside = [e for jaxpr in subjaxprs(eqn) for e in jaxpr.eqns]
    shapes = set(map(shape_of, (*eqn.invars, *eqn.outvars))) - {()}
    is_known = inside or eqn.primitive.name in ELEMENTWISE
    return bool(is_known) and shapes == {shape} and all(_is_in_place(e, shape) for e in inside)
