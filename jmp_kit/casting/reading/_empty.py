"""Rows that are zero, for nothing was put there.

    held  = zeros.at[slots].set(owners)        who holds each place
    y     = network(x[held])                   of each place by itself
    found = y.at[slots].get()

A place that nobody holds seems to be held by whoever is first. But nobody looks `y` up there, so
its cotangent is zero, and so is what is made of that row by row.
"""

from collections.abc import Iterator, Mapping, Sequence

from jax.extend.core import JaxprEqn, Var

from jmp_kit.programs._axes import ELEMENTWISE, RESHAPES, groups_of, only_reshapes, sides_of
from jmp_kit.programs._flow import SUMS
from jmp_kit.programs._jaxpr import Atom, is_float32, is_var, is_zero, shape_of

Axes = tuple[int, ...]
Maker = Mapping[Var, JaxprEqn]

# What makes zeros of zeros: of any operand, of the first, or of all of them.
_SCALES = {"mul", "dot_general"}
_OF_FIRST = {"div", "neg", "convert_element_type", "copy"}
_OF_ALL = SUMS | {"select_n"}


class Rows:
    """What is known of the rows of a program's values."""

    def __init__(self, maker: Maker) -> None:
        """Of values that these equations make."""
        self.maker = maker
        self.known: dict[tuple[Var, Axes], JaxprEqn | None] = {}

    def put(self, atom: Atom, axes: Sequence[int]) -> JaxprEqn | None:
        """The scatter that puts all rows of a value but zeros, if they are only moved or scaled.

        Args:
          axes: along which there are rows, in the order in which the scatter knows them.
        """
        if not is_var(atom) or atom not in self.maker:
            return None
        key = atom, tuple(axis for axis in axes if shape_of(atom)[axis] != 1)
        if key not in self.known:
            self.known[key] = self._put(*key)
        return self.known[key]

    def _put(self, v: Var, axes: Axes) -> JaxprEqn | None:
        eqn = self.maker[v]
        if eqn.primitive.name == "scatter-add":
            is_put = axes == (0,) and puts_rows(eqn) and begins_with_zeros(eqn, self.maker)
            return eqn if is_put else None
        operands = [pair for pair in _operands(v, eqn, axes) if not is_nothing(pair[0], self.maker)]
        found = [None if theirs is None else self.put(a, theirs) for a, theirs in operands]
        if eqn.primitive.name in _SCALES:
            return next(filter(None, found), None)
        return found[0] if found and all(one is found[0] for one in found) else None


def held(eqns: Sequence[JaxprEqn]) -> Iterator[tuple[Var, JaxprEqn]]:
    """What numbers are put into, and the scatter."""
    for eqn in eqns:
        if eqn.primitive.name == "scatter" and puts_rows(eqn) and len(shape_of(eqn.invars[0])) == 1:
            yield eqn.outvars[0], eqn


def are_same_places(scatter: JaxprEqn, other: JaxprEqn, maker: Maker) -> bool:
    """Whether two scatters put rows at the same places of as many."""
    [size, *_], [other_size, *_] = shape_of(scatter.invars[0]), shape_of(other.invars[0])
    is_alike = size == other_size and scatter.params["mode"] == other.params["mode"]
    return is_alike and _are_same(scatter.invars[1], other.invars[1], maker)


def puts_rows(scatter: JaxprEqn) -> bool:
    """Whether it says for each row, along the first axis, where it goes."""
    dimensions = scatter.params["dimension_numbers"]
    axes = dimensions.inserted_window_dims, dimensions.scatter_dims_to_operand_dims
    return axes == ((0,), (0,)) and not dimensions.operand_batching_dims


def begins_with_zeros(eqn: JaxprEqn, maker: Maker) -> bool:
    """Whether a scatter does, of float32."""
    [start, *_] = eqn.invars
    return is_var(start) and is_float32(start) and is_nothing(start, maker)


def is_nothing(atom: Atom, maker: Maker) -> bool:
    """Whether it is made of zero alone."""
    eqn = maker.get(atom) if is_var(atom) else None
    if eqn is not None and eqn.primitive.name == "broadcast_in_dim":
        [atom, *_] = eqn.invars
    return is_zero(atom)


def _operands(v: Var, eqn: JaxprEqn, axes: Axes) -> Iterator[tuple[Atom, Axes | None]]:
    """Along which axes an equation's operands have the same rows as what it makes; None if not."""
    name, [first, *_] = eqn.primitive.name, eqn.invars or [None]
    if name == "optimization_barrier":
        yield eqn.invars[eqn.outvars.index(v)], axes
    elif name == "transpose":
        yield first, tuple(eqn.params["permutation"][axis] for axis in axes)
    elif name == "reduce_sum":
        kept = [i for i in range(len(shape_of(first))) if i not in eqn.params["axes"]]
        yield first, tuple(kept[axis] for axis in axes)
    elif name == "dot_general":
        one, other = sides_of(eqn)
        batch, free = len(one.batch), len(one.batch) + len(one.kept)
        for side, begin in (one, batch), (other, free):
            places = dict(enumerate(side.batch)) | dict(enumerate(side.kept, begin))
            yield side.atom, _each(places, axes)
    elif only_reshapes(eqn):
        groups = [group for group in groups_of(eqn) if not set(axes).isdisjoint(group[1])]
        is_alone = [axis for _, after in groups for axis in after] == list(axes)
        yield first, tuple(axis for before, _ in groups for axis in before) if is_alone else None
    elif name == "broadcast_in_dim":
        places = {axis: i for i, axis in enumerate(eqn.params["broadcast_dimensions"])}
        yield first, _each(_as_long(first, v, places), axes)
    elif name in ELEMENTWISE & (_SCALES | _OF_FIRST | _OF_ALL):
        operands = eqn.invars[1:] if name == "select_n" else eqn.invars
        for operand in operands[:1] if name in _OF_FIRST else operands:
            places = {axis: axis for axis in range(len(shape_of(operand)))}
            yield operand, _each(_as_long(operand, v, places), axes)


def _as_long(operand: Atom, v: Var, places: Mapping[int, int]) -> Mapping[int, int]:
    """Which of its axes is an axis of the result, but for those that are repeated."""
    sizes, whole = shape_of(operand), shape_of(v)
    return {axis: i for axis, i in places.items() if sizes[i] == whole[axis]}


def _each(places: Mapping[int, int], axes: Axes) -> Axes | None:
    return tuple(places[axis] for axis in axes) if places.keys() >= set(axes) else None


def _are_same(a: Atom, b: Atom, maker: Maker) -> bool:
    """Whether two values are made alike."""
    if a is b:
        return True
    if not is_var(a) or not is_var(b):
        return is_var(a) == is_var(b) and bool(a.val == b.val)
    one, other = maker.get(a), maker.get(b)
    return (
        one is not None
        and other is not None
        and one.primitive is other.primitive
        and one.primitive.name in ELEMENTWISE | RESHAPES | {"broadcast_in_dim"}
        and one.params == other.params
        and one.outvars.index(a) == other.outvars.index(b)
        and all(_are_same(*pair, maker) for pair in zip(one.invars, other.invars, strict=True))
    )
