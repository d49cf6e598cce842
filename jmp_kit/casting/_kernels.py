"""Equations written so that XLA makes good kernels of them on GPUs; elsewhere as they were.

- A sum along rows that goes back into them: XLA makes one kernel of a row where it recognises the
  difference of a row and its sum, `max(x - (x - sum(x)))` is that sum.
- Two sums over the same axes are the real and the imaginary part of one: XLA does not compute what
  both are made of twice, but writes it.
- A sum that gives few results is taken in two stages, the first of which gives more.
- The zeros that the backward pass of a maximum over windows starts from are of a shape of their
  own: they are written, and whatever takes zeros of the same shape would read them.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Var

from jmp_kit.programs._jaxpr import equations_of, is_float32, shape_of, size_of

# XLA fuses a sum of many values with what they are made of, unless it gives few results. Over
# leading axes alone it takes two stages itself.
_STAGES, _FEW, _MANY = 8, 2**14, 2**20


def rows(eqns: Sequence[JaxprEqn], is_row: Callable[[JaxprEqn], bool]) -> Iterator[JaxprEqn]:
    """The equations, with sums along rows that XLA sees to be such."""
    for eqn in eqns:
        if is_row(eqn) and eqn.primitive.name == "reduce_sum" and is_float32(eqn.outvars[0]):
            yield from _written(row_sum, [eqn])
        else:
            yield eqn


def sums(eqns: Sequence[JaxprEqn], roots: set[Var]) -> Iterator[JaxprEqn]:
    """The equations, the sums among these roots two by two, and in stages.

    All are over the same axes of values of the same shape.
    """
    found = [e for e in eqns if e.primitive.name == "reduce_sum" and e.outvars[0] in roots]
    yield from (e for e in eqns if e not in found)
    for i in range(0, len(found), 2):
        pair = found[i : i + 2]
        axes = tuple(pair[0].params["axes"])
        yield from _written(functools.partial(sums_of, axes=axes, axis=_divided(pair[0])), pair)


def own_zeros(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """The equation; the backward pass of a maximum over windows with one dimension more."""
    if eqn.primitive.name == "select_and_scatter_add":
        one = {"window_dimensions": 1, "window_strides": 1, "padding": (0, 0)}
        params = {**eqn.params, **{name: (n, *eqn.params[name]) for name, n in one.items()}}
        yield from _written(
            lambda *xs: eqn.primitive.bind(*(x[None] for x in xs), **params)[0], [eqn]
        )
    else:
        yield eqn


def row_sum(x: jax.Array) -> jax.Array:
    """The sum over the last axis."""

    def shown(x: jax.Array) -> jax.Array:
        total = jnp.sum(x, axis=-1, keepdims=True)
        return jnp.max(x - (x - total), axis=-1)

    return _on_gpus(shown, lambda x: jnp.sum(x, axis=-1), x)


def sums_of(*xs: jax.Array, axes: tuple[int, ...], axis: int | None) -> Sequence[jax.Array]:
    """The sums of one or two arrays over these axes, of which one is divided in stages, if any."""

    def together(*xs: jax.Array) -> Sequence[jax.Array]:
        x = lax.complex(*xs) if len(xs) > 1 else xs[0]
        total = jnp.sum(x, axes) if axis is None else staged_sum(x, axes, axis)
        return [total.real, total.imag] if len(xs) > 1 else [total]

    return _on_gpus(together, lambda *xs: [jnp.sum(x, axes) for x in xs], *xs)


def staged_sum(x: jax.Array, axes: tuple[int, ...], axis: int) -> jax.Array:
    """The sum over these axes, one of which is divided."""
    shape = *x.shape[:axis], _STAGES, x.shape[axis] // _STAGES, *x.shape[axis + 1 :]
    inner = tuple(a if a < axis else a + 1 for a in axes)
    parts = lax.optimization_barrier(jnp.sum(x.reshape(shape), inner))
    return jnp.sum(parts, axis - sum(a < axis for a in axes))


def _divided(eqn: JaxprEqn) -> int | None:
    """The axis that is summed up in two stages, if one is."""
    [operand], [result], axes = eqn.invars, eqn.outvars, eqn.params["axes"]
    is_leading = sorted(axes) == list(range(len(axes)))
    if size_of(operand) < _MANY or size_of(result) >= _FEW or is_leading:
        return None
    shape = shape_of(operand)
    return next((a for a in axes if a < len(shape) - 1 and shape[a] % _STAGES == 0), None)


def _on_gpus(here: Callable[..., Any], elsewhere: Callable[..., Any], *xs: jax.Array) -> Any:
    return lax.platform_dependent(*xs, cuda=here, rocm=here, default=elsewhere)


def _written(function: Callable[..., Any], eqns: Sequence[JaxprEqn]) -> Iterator[JaxprEqn]:
    """The equations of a function that gives what these give of what they take."""
    operands = [a for e in eqns for a in e.invars]
    results = [v for e in eqns for v in e.outvars]
    return equations_of(function, operands, results, eqns[0].source_info)
