"""Cotangents of what is chosen from each row, asked of each place instead of scattered.

A loss takes of each row of logits that of the label, a critic the value of the action. JAX scatters
the cotangent, which XLA does in a kernel of its own, in float32, into zeros that another kernel
writes, as many as there are logits. Here each place asks whether it is the one, in registers:

    x̄[i, j] = cotangent[i] where j is chosen[i], else 0
"""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit.casting.reading._empty import begins_with_zeros
from jmp_kit.casting.reading._places import Places
from jmp_kit.casting.reading._worth import FEW
from jmp_kit.programs._axes import are_known
from jmp_kit.programs._jaxpr import equations_of, shape_of


class _Choice(NamedTuple):
    """Which axes of what is added to tell which of the places.

    Attributes:
      axis: the axis of the places along which some are chosen.
      column: the number in the indices that says which.
      rows: by axis of the places, the axis of the indices that runs along it.
      windows: by axis of the places, the axis of the updates that does, where no index says where.
    """

    axis: int
    column: int
    rows: Mapping[int, int]
    windows: Mapping[int, int]


def asked(jaxpr: Jaxpr, closed: Mapping[Var, np.ndarray]) -> Jaxpr:
    """The program, nothing in it scattered to a few places of each row.

    Args:
      closed: the integers that it closes over.
    """
    known = Places(jaxpr, closed)

    def of(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
        is_sum = eqn.primitive.name == "scatter-add" and begins_with_zeros(eqn, known.maker)
        choice = _choice(eqn, known) if is_sum else None
        if choice is None:
            yield eqn
            return

        def function(indices: jax.Array, updates: jax.Array) -> jax.Array:
            return _where_chosen(eqn, choice, indices, updates)

        yield from equations_of(function, eqn.invars[1:], eqn.outvars, eqn.source_info)

    return jaxpr.replace(eqns=[e for eqn in jaxpr.eqns for e in of(eqn)])


def _choice(eqn: JaxprEqn, known: Places) -> _Choice | None:
    """What is chosen, if it is a few along one axis, of all rows in turn."""
    operand, indices, updates = map(shape_of, eqn.invars)
    if not are_known([*operand, *indices]):
        return None
    dimensions = eqn.params["dimension_numbers"]
    batching = dimensions.operand_batching_dims
    rows = dict(zip(batching, dimensions.scatter_indices_batching_dims, strict=True))
    inside = {*dimensions.inserted_window_dims, *batching}
    others = [axis for axis in range(len(operand)) if axis not in inside]
    windows = dict(zip(others, dimensions.update_window_dims, strict=True))
    whole = {axis for axis, window in windows.items() if updates[window] == operand[axis]}
    chosen = []
    numbers = known.columns(eqn.invars[1])
    for column, axis in enumerate(dimensions.scatter_dims_to_operand_dims):
        along = _axis_counted(numbers[column], operand[axis])
        if axis in whole and _is_at_the_start(numbers[column], eqn.params["mode"]):
            continue
        if axis in windows or along is None or along in rows.values():
            chosen.append((axis, column))
        else:
            rows[axis] = along
    if len(chosen) != 1:
        return None
    [(axis, column)] = chosen
    if not rows and operand[axis] > FEW:  # a few rows of a table cost less where they are added
        return None
    one = axis not in windows or updates[windows[axis]] == 1
    few = math.prod(n for i, n in enumerate(indices[:-1]) if i not in rows.values())
    told = {axis, *rows, *(whole - {axis})}
    is_chosen = one and few <= FEW and told == set(range(len(operand)))
    return _Choice(axis, column, rows, windows) if is_chosen else None


def _is_at_the_start(numbers: np.ndarray | None, mode: lax.GatherScatterMode) -> bool:
    """Whether a window as large as the axis is: nothing is dropped for where it begins."""
    return mode == lax.GatherScatterMode.CLIP or (numbers is not None and not numbers.any())


def _axis_counted(numbers: np.ndarray | None, size: int) -> int | None:
    """The axis along which these are 0, 1, … to this size, and constant along others."""
    if numbers is None:
        return None
    for axis, n in enumerate(numbers.shape):
        counted = np.arange(n).reshape([-1 if i == axis else 1 for i in range(numbers.ndim)])
        if n == size and (numbers == counted).all():
            return axis
    return None


def _where_chosen(
    eqn: JaxprEqn, choice: _Choice, indices: jax.Array, updates: jax.Array
) -> jax.Array:
    operand = eqn.invars[0].aval
    dimensions = eqn.params["dimension_numbers"]
    scattered = [i for i in range(updates.ndim) if i not in dimensions.update_window_dims]
    each = [i for i in range(indices.ndim - 1) if i not in choice.rows.values()]
    places = indices[..., choice.column]
    if eqn.params["mode"] == lax.GatherScatterMode.CLIP:
        last = min(operand.shape[choice.axis] - 1, np.iinfo(places.dtype).max)
        places = jnp.clip(places, *np.array([0, last], places.dtype))

    def along_axes(x: jax.Array, axes: Mapping[int, int], some: list[int]) -> jax.Array:
        """What is chosen first, then all axes of the places, of one where x has none."""
        x = x.transpose([*some, *(axes[axis] for axis in sorted(axes))])
        missing = (axis for axis in range(operand.ndim) if axis not in axes)
        x = x.reshape(math.prod(x.shape[: len(some)]), *x.shape[len(some) :])
        return jnp.expand_dims(x, [axis + 1 for axis in missing])

    rows = {axis: scattered[i] for axis, i in choice.rows.items()}
    updates = along_axes(updates, {**rows, **choice.windows}, [scattered[i] for i in each])
    places = along_axes(places, choice.rows, each)
    wide = places.dtype if places.dtype.itemsize > 4 else np.dtype(np.int32)
    there = lax.broadcasted_iota(wide, operand.shape, choice.axis)
    is_chosen = (there == place for place in places.astype(wide))
    parts = [jnp.where(i, update, 0) for i, update in zip(is_chosen, updates, strict=True)]
    return sum(parts, jnp.zeros(operand.shape, operand.dtype)) if len(parts) != 1 else parts[0]
