"""Ragged products in float8: of rows in groups, each with a matrix of its own, as of experts.

    scale(x) of each row, scale(w) of each group
    x · w    = (e4m3(x / scale(x)) · e4m3(w / scale(w))) * scale(x) * scale(w of the row's group)
    xᵀ · y   = (e4m3(x / scale(x))ᵀ · e4m3(y * scale(x) / scale)) * scale, of each group

Of a matrix one scale is enough: e4m3 keeps its digits over four powers of ten. A scale for each
column would have to be gathered for each row, and no copy of the forward pass would serve again.
A group whose rows weigh little keeps its digits beside others. Rows beyond the groups are in no
scale but their own.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Var

from jmp_kit._dtypes import FLOAT8
from jmp_kit.casting.rewriting._scaled import (
    Copy,
    across,
    along,
    as_rounding,
    copy_of,
    rounded,
    scale_of,
    thin,
)
from jmp_kit.programs._axes import Operand
from jmp_kit.programs._jaxpr import cast, equations_of, shape_of
from jmp_kit.programs._marks import marked

NAME = "ragged_dot_general"


def why_half(eqn: JaxprEqn) -> str:
    """Why a ragged product cannot be written in float8; empty if it can."""
    _, (batch, _) = _numbers(eqn).dot_dimension_numbers
    if batch:
        return "it is ragged and has batch axes"
    return "its groups differ along an axis" if len(shape_of(eqn.invars[2])) > 1 else ""


def operands_of(eqn: JaxprEqn) -> tuple[Operand, Operand]:
    """Its operands without the sizes, the groups of the second taken for a batch."""
    numbers = _numbers(eqn)
    (ac, bc), _ = numbers.dot_dimension_numbers
    a, b, _ = eqn.invars
    return Operand(a, ac, ()), Operand(b, bc, numbers.rhs_group_dimensions)


def share_of(eqn: JaxprEqn) -> int:
    """How many rows a group has where all have as many: those by which its matrix is rounded."""
    a, _ = operands_of(eqn)
    axes = a.contracted if _is_contracting(eqn) else a.kept
    return math.prod(shape_of(a.atom)[i] for i in axes) // _groups(eqn)


def written(eqn: JaxprEqn, copies: Mapping[Var, list[Copy]], half: np.dtype) -> Iterator[JaxprEqn]:
    """The product on float8 operands."""
    write = _summed if _is_contracting(eqn) else _multiplied
    return write(eqn, copies, half)


def _numbers(eqn: JaxprEqn) -> Any:
    return eqn.params["ragged_dot_dimension_numbers"]


def _groups(eqn: JaxprEqn) -> int:
    [groups] = shape_of(eqn.invars[2])
    return groups


def _is_contracting(eqn: JaxprEqn) -> bool:
    """Whether rows are summed in each group, as in the gradient of its matrix."""
    return not _numbers(eqn).rhs_group_dimensions


def _multiplied(
    eqn: JaxprEqn, copies: Mapping[Var, list[Copy]], half: np.dtype
) -> Iterator[JaxprEqn]:
    """Rows by the matrix of their group."""
    rows, matrices = sides = operands_of(eqn)
    [axis] = _numbers(eqn).lhs_ragged_dimensions
    whole = [*matrices.contracted, *matrices.kept]
    taken = []
    for side, kept, axes in ((rows, rows.kept, rows.contracted), (matrices, [], whole)):
        copy = along(side, copies, kept)
        if copy is None:
            copy, eqns = rounded(side, axes, copies, eqn.source_info)
            yield from eqns
        taken.append(copy)

    def unscaled(raw: Any, of_rows: Any, of_groups: Any, sizes: Any) -> Any:
        place = rows.kept.index(axis)
        of_groups = _spread(of_groups.reshape(-1), _members(sizes, raw.shape[place]))
        others = [i for i in range(raw.ndim) if i != place]
        of_groups = lax.expand_dims(of_groups, others)
        # Beyond the groups the result is zero, whatever the rows are.
        scale = jnp.where(of_groups == 0, 0, thin(of_rows, sides, 0) * of_groups)
        return cast(raw * scale, eqn.outvars[0].aval.dtype)

    scales = [*(copy.scale for copy in taken), eqn.invars[2]]
    yield from _product(eqn, [copy.value for copy in taken], half, unscaled, scales)


def _summed(eqn: JaxprEqn, copies: Mapping[Var, list[Copy]], half: np.dtype) -> Iterator[JaxprEqn]:
    """Rows by rows, summed in each group."""
    sides = operands_of(eqn)
    found = [along(side, copies, side.contracted) for side in sides]
    one = 1 if found[1] and not found[0] else 0
    copy, side, other = found[one], sides[1 - one], sides[one]
    if copy is None:
        copy, eqns = rounded(other, other.kept, copies, eqn.source_info)
        yield from eqns
    [axis] = _numbers(eqn).lhs_ragged_dimensions
    axis = side.contracted[sides[0].contracted.index(axis)]
    others = [i for i in range(len(shape_of(side.atom))) if i != axis]

    def scaled(x: Any, factor: Any, sizes: Any) -> tuple[Any, Any]:
        x = x.astype(jnp.float32) * across(factor, other, side)
        members = _members(sizes, x.shape[axis])
        largest = lax.expand_dims(jnp.max(jnp.abs(x), axis=others), [0])
        scale = scale_of(jnp.max(_where(members, largest), axis=1))
        x = (x * lax.expand_dims(_spread(1 / scale, members), others)).astype(FLOAT8)
        return x, lax.expand_dims(scale, range(1, x.ndim))

    value, _, _ = copy_of(side.atom, ())
    shape = (_groups(eqn), *(1 for _ in others))
    scale = Var(side.atom.aval.update(shape=shape, dtype=jnp.float32, weak_type=False))
    source = as_rounding(eqn.source_info, others, "groups")
    operands = [side.atom, copy.scale, eqn.invars[2]]
    yield from equations_of(scaled, operands, [value, scale], source)

    def unscaled(raw: Any, of_groups: Any) -> Any:
        of_groups = lax.expand_dims(of_groups.reshape(-1), range(1, raw.ndim))
        return cast(raw * of_groups, eqn.outvars[0].aval.dtype)

    values = [value, copy.value] if one else [copy.value, value]
    yield from _product(eqn, values, half, unscaled, [scale])


def _product(
    eqn: JaxprEqn,
    values: Sequence[Var],
    half: np.dtype,
    unscaled: Callable[..., Any],
    scales: Sequence[Any],
) -> Iterator[JaxprEqn]:
    """The product of these values, and what scales it back."""
    [result] = eqn.outvars
    raw = Var(result.aval.update(dtype=jnp.float32, weak_type=False))
    params = {**eqn.params, "preferred_element_type": np.dtype(np.float32)}
    yield marked(eqn.replace(invars=[*values, eqn.invars[2]], outvars=[raw], params=params), half)
    yield from equations_of(unscaled, [raw, *scales], [result], eqn.source_info)


def _members(sizes: Any, rows: int) -> Any:
    """Of each group, which rows are in it."""
    sizes = sizes.astype(jnp.int32)
    ends = lax.cumsum(sizes)
    row = lax.broadcasted_iota(jnp.int32, (len(ends), rows), 1)
    return ((ends - sizes)[:, None] <= row) & (row < ends[:, None])


def _where(members: Any, values: Any) -> Any:
    """The values, and zeros beside them, whatever is there: not by multiplication."""
    values = lax.broadcast_in_dim(values, members.shape, (0, 1))
    return lax.select(members, values, lax.full_like(values, 0))


def _spread(values: Any, members: Any) -> Any:
    """Of each row the value of its group, and zero beyond the groups."""
    return jnp.sum(_where(members, lax.expand_dims(values, [1])), axis=0)
