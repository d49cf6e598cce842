"""Cotangents of what is looked up at known places, added up where they are instead of scattered.

An image that is resized to its nearest pixels, or positions 0 to n of a table, are gathered at
indices that the program itself computes from numbers. JAX differentiates that by a scatter, which
XLA does in float32, in a kernel of its own and after one that writes zeros. Where the places are in
even steps, as in both, they are slices:

    x̄ = sum over r of (the r-th cotangent of each place)

Others are scattered in half, if no more than two come to one place: float32 sums would be written,
and read to be cast.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit.casting.reading._empty import begins_with_zeros
from jmp_kit.casting.reading._places import Places, within
from jmp_kit.casting.reading._worth import FEW
from jmp_kit.programs._jaxpr import cast, equations_of, shape_of

_PUTS = {"scatter": lax.scatter, "scatter-add": lax.scatter_add}


class _Steps(NamedTuple):
    """Which of several cotangents go to which places: a slice of these to a slice of those."""

    given: slice
    places: slice


def added_up(jaxpr: Jaxpr, closed: Mapping[Var, np.ndarray]) -> Jaxpr:
    """The program, nothing in it scattered to known places in even steps.

    Args:
      closed: the integers that it closes over.
    """
    known = Places(jaxpr, closed)

    def of(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
        if eqn.primitive.name != "scatter-add" or not _is_along_one_axis(eqn, known.maker):
            yield eqn
            return
        operand, indices, updates = eqn.invars
        dimensions = eqn.params["dimension_numbers"]
        [axis] = dimensions.scatter_dims_to_operand_dims
        size, places = shape_of(operand)[axis], known.numbers(indices)
        steps = [] if places is None else _steps(within(places[:, 0], size, eqn.params["mode"]))
        if not 0 < len(steps) <= FEW:
            yield eqn
            return
        [scattered] = set(range(len(shape_of(updates)))) - {*dimensions.update_window_dims}

        def function(updates: jax.Array) -> jax.Array:
            updates = jnp.moveaxis(updates, scattered, axis)
            parts = (_at(updates, axis, size, step) for step in steps)
            return sum(parts, next(parts))

        yield from equations_of(function, [updates], eqn.outvars, eqn.source_info)

    return jaxpr.replace(eqns=[e for eqn in jaxpr.eqns for e in of(eqn)])


def put(jaxpr: Jaxpr, closed: Mapping[Var, np.ndarray]) -> set[Var]:
    """What is put among zeros, or added up there, of no more than two to one place.

    The sum of two halves is rounded once, like that in float32.
    """
    known = Places(jaxpr, closed)
    puts = (e for e in jaxpr.eqns if e.primitive.name in _PUTS)
    found = [e for e in puts if begins_with_zeros(e, known.maker)]
    return {
        e.outvars[0] for e in found if e.primitive.name == "scatter" or known.most_at_one(e) <= 2
    }


def put_in(eqn: JaxprEqn, dtype: np.dtype) -> Iterator[JaxprEqn]:
    """The equation, what it puts among zeros put there in this dtype."""
    names = "dimension_numbers", "indices_are_sorted", "unique_indices", "mode"
    params = {name: eqn.params[name] for name in names}

    def function(zeros: jax.Array, places: jax.Array, values: jax.Array) -> jax.Array:
        scatter = _PUTS[eqn.primitive.name]
        return cast(scatter(cast(zeros, dtype), places, cast(values, dtype), **params), zeros.dtype)

    yield from equations_of(function, eqn.invars, eqn.outvars, eqn.source_info)


def _is_along_one_axis(eqn: JaxprEqn, maker: Mapping[Var, JaxprEqn]) -> bool:
    """Whether it adds to zeros all that there is beside one axis, at a list of places."""
    operand, indices, updates = eqn.invars
    shape, dimensions = shape_of(operand), eqn.params["dimension_numbers"]
    windows = [shape_of(updates)[i] for i in dimensions.update_window_dims]
    others = [n for i, n in enumerate(shape) if i not in dimensions.inserted_window_dims]
    return (
        begins_with_zeros(eqn, maker)
        and all(isinstance(n, int) for n in (*shape, *shape_of(indices)))
        and len(shape_of(indices)) == 2
        and len(dimensions.scatter_dims_to_operand_dims) == 1
        and dimensions.inserted_window_dims == dimensions.scatter_dims_to_operand_dims
        and not dimensions.operand_batching_dims
        and windows == others
    )


def _steps(places: np.ndarray) -> list[_Steps]:
    """The first cotangent of each place, the second, …; none if one of these is in uneven steps."""
    order = np.argsort(places, kind="stable")
    order = order[places[order] >= 0]
    ordered = places[order]
    rank = np.arange(len(order)) - np.searchsorted(ordered, ordered)
    found = []
    for r in range(min(int(rank.max(initial=-1)) + 1, FEW + 1)):
        given, there = _even(order[rank == r]), _even(ordered[rank == r])
        if given is None or there is None:
            return []
        found.append(_Steps(given, there))
    return found


def _even(numbers: np.ndarray) -> slice | None:
    steps = np.unique(np.diff(numbers))
    if len(steps) > 1 or (steps <= 0).any():
        return None
    return slice(int(numbers[0]), int(numbers[-1]) + 1, int(steps[0]) if len(steps) else 1)


def _at(updates: jax.Array, axis: int, size: int, step: _Steps) -> jax.Array:
    """Some of the cotangents where they belong, and zeros elsewhere."""
    given, there = step
    part = lax.slice_in_dim(updates, given.start, given.stop, given.step, axis)
    sides: Sequence[tuple[int, int, int]] = [(0, 0, 0)] * part.ndim
    around = (there.start, size - there.stop, there.step - 1)
    sides = [*sides[:axis], around, *sides[axis + 1 :]]
    is_whole = around == (0, 0, 0)
    return part if is_whole else lax.pad(part, jnp.zeros((), part.dtype), sides)
