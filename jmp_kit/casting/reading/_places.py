"""How many values a scatter adds up at one place at most, where the program itself says so.

Relative positions are made of no argument, and counted. Words sorted by their experts, or patches
that are shuffled and put back, are looked up at a permutation, or at what is computed of each of
its numbers:

    order = argsort(…)      each of 0 … n - 1 once, in whatever order
    order // 2              each of 0 … n / 2 - 1 twice
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit.casting.reading._empty import Rows, are_same_places, held
from jmp_kit.casting.reading._ranks import MOST, MOVES, is_whole, ranked
from jmp_kit.programs._axes import are_known
from jmp_kit.programs._jaxpr import Atom, cut_out, is_var, shape_of, traced_back

# What moves integers, or some of them; in which order, read row by row, stays.
_MOVES = MOVES | {"slice"}

# What computes with each of them.
_COMPUTES: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "rem": np.fmod,
    "sign": np.sign,
    "max": np.maximum,
    "min": np.minimum,
    "neg": np.negative,
    "abs": np.abs,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.invert,
    "div": lambda x, y: (x - np.fmod(x, y)) // y,  # towards zero
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "select_n": lambda which, *cases: np.choose(which, cases),
}


class _Numbers(NamedTuple):
    """What an array holds: in each of its rows, of these numbers each once at most.

    Attributes:
      order: the variable whose order they are in; None if all of the array is one number.
      rows: how many axes, the first, tell rows from each other.
    """

    each: np.ndarray
    order: Var | None = None
    rows: int = 0


class Places:
    """What is known of the places that a program looks up at, or scatters to."""

    def __init__(self, jaxpr: Jaxpr, closed: Mapping[Var, np.ndarray]) -> None:
        """Of this program, and of the integers that it closes over."""
        self.jaxpr, self.closed = jaxpr, closed
        self.maker = {v: e for e in jaxpr.eqns for v in e.outvars}
        self.rows = Rows(self.maker)

    def most_at_one(self, scatter: JaxprEqn) -> float:
        """How many updates of a scatter go to one place at most; infinity if that is not known."""
        if scatter.params["unique_indices"]:
            return 1
        operand, indices, _ = scatter.invars
        dimensions = scatter.params["dimension_numbers"]
        axes = dimensions.scatter_dims_to_operand_dims
        sizes = [shape_of(operand)[axis] for axis in axes]
        # Of slices, which may overlap, more would have to be known.
        if not set(axes) <= set(dimensions.inserted_window_dims) or not are_known(sizes):
            return math.inf
        batch, mode = dimensions.scatter_indices_batching_dims, scatter.params["mode"]
        if (numbers := self.numbers(indices)) is not None:
            return _counted(numbers, sizes, batch, mode)
        found = self._in_order(scatter) if is_var(indices) else None
        if found is None or len(axes) != 1:
            return math.inf
        others = [n for i, n in enumerate(shape_of(indices)[: found.rows]) if i not in batch]
        places = within(found.each, sizes[0], mode)
        _, counts = np.unique(places[places >= 0], return_counts=True)
        return math.prod(others) * int(counts.max(initial=0))

    def numbers(self, atom: Atom) -> np.ndarray | None:
        """What is made of numbers in the program alone; None of what is not."""
        if is_var(atom) and atom in self.closed:
            return self.closed[atom]
        made, sources = traced_back(list(filter(is_var, [atom])), self.maker)
        eqns = [e for e in self.jaxpr.eqns if id(e) in made]
        shapes = [shape_of(v) for e in eqns for v in e.outvars]
        is_small = all(are_known(shape) and math.prod(shape) <= MOST for shape in shapes)
        if not sources.keys() <= self.closed.keys() or not is_small or any(e.effects for e in eqns):
            return None
        function, given = cut_out(self.jaxpr, eqns, [atom])
        with jax.ensure_compile_time_eval():
            [found] = function(*(self.closed[v] for v in given))
        # Where `jax.shard_map` runs without `jax.jit`, all is traced.
        return None if isinstance(found, jax.core.Tracer) else np.asarray(found)

    def columns(self, indices: Atom) -> list[np.ndarray | None]:
        """Of each axis that indices are for, their numbers, where the program alone makes them."""
        parts = [indices]
        if is_var(indices) and indices in self.maker:
            made, last = self.maker[indices], len(shape_of(indices)) - 1
            if made.primitive.name == "concatenate" and made.params["dimension"] == last:
                parts = made.invars
        found: list[np.ndarray | None] = []
        for part in parts:
            numbers = self.numbers(part)
            unknown = [None] * shape_of(part)[-1]
            found += unknown if numbers is None else list(np.moveaxis(numbers, -1, 0))
        return found

    def _in_order(self, scatter: JaxprEqn) -> _Numbers | None:
        """The numbers of its places, if they are in an order."""
        _, indices, _ = scatter.invars
        made, _ = traced_back([indices], self.maker)
        eqns = [e for e in self.jaxpr.eqns if id(e) in made]
        found = _followed(eqns, {}).get(indices)
        if found and found.order:
            return found
        for ranks in ranked(eqns, self.numbers, _COMPUTES):
            pairs = {ranks.choices: ranks.choice, ranks.made: ranks.number}
            each = {v: _Numbers(numbers, ranks.made) for v, numbers in pairs.items()}
            found = _followed(eqns, each).get(indices)
            if found and found.order:
                return found
        for v, put in held(eqns):
            owners = self.numbers(put.invars[2])
            if owners is not None and self._is_empty_elsewhere(scatter, put):
                found = _followed(eqns, {v: _Numbers(owners.reshape(-1), v)}).get(indices)
                if found and found.order is v:
                    return found
        return None

    def _is_empty_elsewhere(self, scatter: JaxprEqn, put: JaxprEqn) -> bool:
        """Whether of what is scattered all rows are zero but those where something was put."""
        _, _, updates = scatter.invars
        window = scatter.params["dimension_numbers"].update_window_dims
        axes = [axis for axis in range(len(shape_of(updates))) if axis not in window]
        found = self.rows.put(updates, axes)
        return found is not None and are_same_places(found, put, self.maker)


def _followed(eqns: Sequence[JaxprEqn], given: Mapping[Var, _Numbers]) -> dict[Var, _Numbers]:
    """What is known of variables, if this is known."""
    known = dict(given)
    for eqn in eqns:
        for v in filter(is_whole, eqn.outvars):
            if v not in given and (numbers := _made(v, eqn, known)):
                known[v] = numbers
    return known


def _counted(
    places: np.ndarray, sizes: Sequence[int], batch: Sequence[int], mode: lax.GatherScatterMode
) -> int:
    """How many go to one place at most: to the same along all axes, of the same batch."""
    axes = [within(places[..., i], size, mode) for i, size in enumerate(sizes)]
    rows = np.indices(places.shape[:-1])[list(batch)]
    inside = np.logical_and.reduce([axis >= 0 for axis in axes])
    everywhere = (*(places.shape[i] for i in batch), *sizes)
    found = np.ravel_multi_index([axis[inside] for axis in (*rows, *axes)], everywhere)
    _, counts = np.unique(found, return_counts=True)
    return int(counts.max(initial=0))


def within(places: np.ndarray, size: int, mode: lax.GatherScatterMode) -> np.ndarray:
    """Places along an axis of this size as a scatter takes them; -1 of what goes nowhere."""
    places = places.astype(np.int64)
    if mode == lax.GatherScatterMode.CLIP:
        return np.clip(places, 0, size - 1)
    return np.where((places >= 0) & (places < size), places, -1)


def _made(v: Var, eqn: JaxprEqn, known: Mapping[Var, _Numbers]) -> _Numbers | None:
    """What an equation makes of known numbers."""
    name, last = eqn.primitive.name, len(shape_of(v)) - 1
    if name == "iota" and eqn.params["dimension"] == last:
        return _Numbers(np.arange(shape_of(v)[-1]), v, last)
    if name == "top_k" and v is eqn.outvars[1] and eqn.params.get("axis", last) in (-1, last):
        [*_, whole] = shape_of(eqn.invars[0])
        return _Numbers(np.arange(whole), v, last) if isinstance(whole, int) else None
    operands = [_number(a, known) for a in eqn.invars]
    if name == "sort" and eqn.params["dimension"] == last:
        before = operands[eqn.outvars.index(v)]
        return before._replace(order=v) if before and before.rows == last else None
    found = [numbers for numbers in operands if numbers]
    orders = {(n.order, n.rows) for n in found if n.order}
    if not found or len(found) < len(operands) or len(orders) > 1:
        return None
    order, rows = orders.pop() if orders else (None, 0)
    first = shape_of(eqn.invars[0])
    if name in _COMPUTES:
        with np.errstate(all="ignore"):
            each = _COMPUTES[name](*(n.each for n in found))
        return _Numbers(np.asarray(each).astype(v.aval.dtype), order, rows)
    keeps_rows = order is None or shape_of(v)[:rows] == first[:rows]
    is_spread = order is not None and math.prod(shape_of(v)) > math.prod(first)
    if name in _MOVES and keeps_rows and not is_spread:
        order = v if order and name == "slice" else order  # two slices are of other places
        return _Numbers(found[0].each.astype(v.aval.dtype), order, rows)
    return None


def _number(atom: Atom, known: Mapping[Var, _Numbers]) -> _Numbers | None:
    return known.get(atom) if is_var(atom) else _Numbers(np.asarray(atom.val))
