"""Rows that are part of an axis and all of those behind, as axes of their own.

A group of channels of an image, channels first, may be written as a row:

    sum(reshape(x, [groups, -1]), -1)    ->    sum(reshape(x, [groups, channels, h, w]), (1, 2, 3))

But no kernel finds it so in memory, where a convolution's channels are the last axis. XLA writes it
so first, in float32. So all that is computed of such rows is computed of these axes.
"""

from collections.abc import Iterator

from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit.casting.reading._parts import without_the_dead
from jmp_kit.programs._axes import ELEMENTWISE, REDUCES, groups_of, only_reshapes, reshaped
from jmp_kit.programs._jaxpr import is_along_rows, is_var, shape_of

Shape = tuple[int, ...]


def over_axes(jaxpr: Jaxpr) -> Jaxpr:
    """The program, of axes where it computes of such rows."""
    split = _Split(jaxpr)
    eqns = [e for eqn in jaxpr.eqns for e in split.written(eqn)]
    return without_the_dead(jaxpr.replace(eqns=eqns)) if split.names else jaxpr


class _Split:
    """Values of such rows.

    Attributes:
      names: what each is called of axes.
    """

    def __init__(self, jaxpr: Jaxpr) -> None:
        self.maker = {v: e for e in jaxpr.eqns for v in e.outvars}
        self.names: dict[Var, Var] = {}

    def written(self, eqn: JaxprEqn) -> Iterator[JaxprEqn]:
        """An equation, of axes, and of rows for whoever takes these."""
        rows = [a for a in eqn.invars if is_var(a) and a in self.names]
        if axes := _axes_of_rows(eqn):
            [operand], [result] = eqn.invars, eqn.outvars
            self._name(result, (*shape_of(result)[:-1], *axes))
            yield from reshaped(self.names.get(operand, operand), self.names[result], eqn)
            yield eqn
        elif rows and only_reshapes(eqn):
            yield from reshaped(self.names[rows[0]], eqn.outvars[0], eqn)
        elif rows and eqn.primitive.name in REDUCES and is_along_rows(eqn):
            name = self.names[rows[0]]
            reduced = range(_row_of(rows[0]), len(shape_of(name)))
            yield eqn.replace(invars=[name], params=eqn.params | {"axes": tuple(reduced)})
        elif rows and eqn.primitive.name in ELEMENTWISE:
            yield from self._computed(eqn, shape_of(self.names[rows[0]])[_row_of(rows[0]) :])
        else:
            yield eqn

    def _name(self, v: Var, shape: Shape) -> None:
        self.names[v] = Var(v.aval.update(shape=shape))

    def _computed(self, eqn: JaxprEqn, axes: Shape) -> Iterator[JaxprEqn]:
        [result], names = eqn.outvars, dict[Var, Var]()
        for a in (a for a in eqn.invars if is_var(a) and shape_of(a) and a not in names):
            *kept, row = shape_of(a)
            shape = (*kept, *(axes if row > 1 else (1,) * len(axes)))
            names[a] = self.names.get(a, a)
            if shape_of(names[a]) != shape:
                names[a] = Var(a.aval.update(shape=shape))
                yield from self._spread(a, names[a], eqn)
        self._name(result, (*shape_of(result)[:-1], *axes))
        invars = [names.get(a, a) if is_var(a) else a for a in eqn.invars]
        yield eqn.replace(invars=invars, outvars=[self.names[result]])
        yield from reshaped(self.names[result], result, eqn)

    def _spread(self, v: Var, name: Var, eqn: JaxprEqn) -> Iterator[JaxprEqn]:
        """A value of axes, spread over these if it is over rows, a mean say."""
        made, row = self.maker.get(v), _row_of(v)
        if made is None or made.primitive.name != "broadcast_in_dim" or len(made.invars) > 1:
            yield from reshaped(v, name, eqn)
            return
        [operand], axes = made.invars, made.params["broadcast_dimensions"]
        sizes = dict(zip(axes, shape_of(operand), strict=True))
        if sizes.pop(row, 1) > 1:
            yield from reshaped(v, name, eqn)
            return
        if row in axes:
            less = Var(operand.aval.update(shape=tuple(sizes.values())))
            yield from reshaped(operand, less, made)
            operand = less
        params = made.params | {"shape": shape_of(name), "broadcast_dimensions": tuple(sizes)}
        yield made.replace(invars=[operand], outvars=[name], params=params)


def _row_of(v: Var) -> int:
    """The last axis."""
    return len(shape_of(v)) - 1


def _axes_of_rows(eqn: JaxprEqn) -> Shape:
    """What a result's rows are made of, if that is part of an operand's axis and those behind."""
    groups = list(groups_of(eqn)) if only_reshapes(eqn) else []
    if not groups or len(groups[-1][0]) == 1 or len(groups[-1][1]) == 1:
        return ()
    rest, found = shape_of(eqn.outvars[0])[-1], list[int]()
    sizes = [shape_of(eqn.invars[0])[axis] for axis in groups[-1][0]]
    while rest >= sizes[-1] and rest % sizes[-1] == 0:  # less than all of them, or no axis is left
        found.insert(0, sizes.pop())
        rest //= found[0]
    is_part = rest < sizes[-1] and sizes[-1] % rest == 0
    return (rest, *found) if found and is_part else ()
