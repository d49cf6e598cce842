"""Operands of products in float8: scaled and rounded, and the copies of them that there are."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Var

from jmp_kit._dtypes import FLOAT8
from jmp_kit.casting.reading._rounding import ROUNDED
from jmp_kit.programs._axes import Operand
from jmp_kit.programs._jaxpr import equations_of, is_var, shape_of

_LARGEST = float(jnp.finfo(FLOAT8).max)
# Of which the reciprocal is finite: rows of zeros have a scale, too.
_LEAST = 2.0**-100


class Copy(NamedTuple):
    """A value in float8."""

    value: Var
    scale: Var  # float32, of the value's rank
    reduced: frozenset[int]  # the axes along which the scale is one


def named(source: Any, name: str) -> Any:
    """What is known of where an equation comes from, with one more name around it."""
    return source.replace(name_stack=source.name_stack.extend(name))


def as_rounding(source: Any, axes: Sequence[int], within: str = "") -> Any:
    """The same, of one that rounds an operand, its scale one along these axes (within …)."""
    return named(source, ROUNDED + "_".join(map(str, axes)) + within)


def copy_of(atom: Any, axes: Sequence[int]) -> Copy:
    """Variables for an operand in float8, and for its scale, one along these axes."""
    aval = atom.aval
    thin = tuple(1 if i in axes else n for i, n in enumerate(aval.shape))
    value = aval.update(dtype=FLOAT8, weak_type=False)
    scale = aval.update(shape=thin, dtype=jnp.float32, weak_type=False)
    return Copy(Var(value), Var(scale), frozenset(axes))


def along(side: Operand, copies: Mapping[Var, list[Copy]], axes: Sequence[int]) -> Copy | None:
    """A copy of the operand whose scale lies along these axes, and along those of the batch."""
    if not is_var(side.atom):
        return None
    others = set(range(len(shape_of(side.atom)))).difference(axes, side.batch)
    return next((c for c in copies.get(side.atom, ()) if others <= c.reduced), None)


def rounded(
    side: Operand,
    axes: Sequence[int],
    copies: Mapping[Var, list[Copy]],
    source: Any,
    factor: tuple[Operand, Copy] | None = None,
) -> tuple[Copy, Iterator[JaxprEqn]]:
    """A copy of an operand, its scale one along these axes, and the equations that make it.

    Args:
      factor: the other operand, if its scale lies along what is contracted and goes into this one.
    """
    copy, given = copy_of(side.atom, axes), [factor] if factor else []
    if not factor and is_var(side.atom):
        copies[side.atom].append(copy)

    def scaled(x: Any, *scales: Any) -> Any:
        x = x.astype(jnp.float32)
        for (other, _), scale in zip(given, scales, strict=True):
            x = x * across(scale, other, side)
        scale = scale_of(jnp.max(jnp.abs(x), axis=tuple(axes), keepdims=True))
        return (x * (1 / scale)).astype(FLOAT8), scale

    operands = [side.atom, *(copy.scale for _, copy in given)]
    return copy, equations_of(scaled, operands, [*copy[:2]], as_rounding(source, axes))


def scale_of(largest: Any) -> Any:
    """The scale of values of which this is the largest."""
    return jnp.maximum(largest, _LEAST) / _LARGEST


def across(scale: Any, other: Operand, side: Operand) -> Any:
    """A scale along the axes that the other operand shares, along those of this one."""
    axes = dict(
        zip((*side.contracted, *side.batch), (*other.contracted, *other.batch), strict=True)
    )
    scale = lax.squeeze(scale, other.kept)
    left = sorted(axes.values())
    ordered = lax.transpose(scale, [left.index(axes[i]) for i in sorted(axes)])
    return lax.expand_dims(ordered, side.kept)


def thin(scale: Any, sides: Sequence[Operand], place: int) -> Any:
    """An operand's scale along the axes of the result: of the batch, the first, the second."""
    side, other = sides[place], sides[1 - place]
    left = [i for i in range(len(shape_of(side.atom))) if i not in side.contracted]
    scale = lax.squeeze(scale, side.contracted)
    scale = lax.transpose(scale, [left.index(i) for i in (*side.batch, *side.kept)])
    start = len(side.batch) + (len(side.kept) if place == 0 else 0)
    return lax.expand_dims(scale, range(start, start + len(other.kept)))
