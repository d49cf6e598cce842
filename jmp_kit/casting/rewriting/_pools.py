"""Derivatives of extrema over windows, asked of each value instead of scattered.

A cotangent goes to the first of the largest values of its window. JAX scatters it, which XLA does
in float32, in a kernel of its own and after one that writes zeros. Here each value asks the windows
that it is in whether it is the one, in registers:

    x̄ = sum over windows around x of (its first maximum is x) · cotangent
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn

from jmp_kit.programs._jaxpr import equations_of, is_float32, shape_of

# Each value of a window is an equation, and its place has eight bits.
_MOST = 16


def pooled(jaxpr: Jaxpr) -> Jaxpr:
    """The program, nothing in it scattered to the extrema of small windows."""
    return jaxpr.replace(eqns=[e for eqn in jaxpr.eqns for e in _asked(eqn)])


def _asked(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    if eqn.primitive.name != "select_and_scatter_add" or not _is_small(eqn):
        yield eqn
        return
    keeps, outside = _EXTREMA[eqn.params["select_prim"].name]
    names = ("window_dimensions", "window_strides", "padding")
    window, strides, padding = (eqn.params[name] for name in names)

    def function(cotangent: jax.Array, x: jax.Array) -> jax.Array:
        padded = lax.pad(x, jnp.array(outside, x.dtype), [(*pair, 0) for pair in padding])
        places = _first(padded, cotangent.shape, window, strides, keeps)

        @jax.jit  # one equation, so that all of it is where the cotangent is
        def taken(cotangent: jax.Array, places: jax.Array) -> jax.Array:
            found = _taken(cotangent, places, padded.shape, window, strides)
            starts = [start for start, _ in padding]
            ends = [start + n for start, n in zip(starts, x.shape, strict=True)]
            return lax.slice(found, starts, ends)

        return taken(cotangent, places)

    yield from equations_of(function, eqn.invars, eqn.outvars, eqn.source_info)


def _is_small(eqn: JaxprEqn) -> bool:
    """Whether its windows are, and its sizes are known."""
    [result] = eqn.outvars
    is_known = all(isinstance(n, int) for n in shape_of(result))
    return is_known and is_float32(result) and math.prod(eqn.params["window_dimensions"]) <= _MOST


# What keeps a value before another, and what no value is kept before.
_EXTREMA: dict[str, tuple[Callable[..., jax.Array], float]] = {
    "ge": (lax.ge, -math.inf),
    "le": (lax.le, math.inf),
}


def _first(
    x: jax.Array,
    windows: Sequence[int],
    window: Sequence[int],
    strides: Sequence[int],
    keeps: Callable[..., jax.Array],
) -> jax.Array:
    """Of each window, the place in it of its first extremum: int8, of the shape of the windows."""
    values = []
    for start in itertools.product(*map(range, window)):
        ends = [a + (m - 1) * s + 1 for a, m, s in zip(start, windows, strides, strict=True)]
        values.append(lax.slice(x, start, ends, strides))
    best, place = values[0], jnp.zeros(windows, jnp.int8)
    for n, value in enumerate(values[1:], 1):
        is_kept = keeps(best, value)
        best, place = lax.select(is_kept, best, value), jnp.where(is_kept, place, jnp.int8(n))
    is_alone = all(k <= s for k, s in zip(window, strides, strict=True))
    return place if is_alone else lax.optimization_barrier(place)  # several values ask for it


def _taken(
    cotangent: jax.Array,
    places: jax.Array,
    shape: Sequence[int],
    window: Sequence[int],
    strides: Sequence[int],
) -> jax.Array:
    """What each value gets of the windows that it is in."""
    blocks = [-(-n // s) for n, s in zip(shape, strides, strict=True)]
    axes = tuple(range(1, 2 * len(shape), 2))  # within the blocks
    whole = [n for pair in zip(blocks, strides, strict=True) for n in pair]
    zero = jnp.zeros((), cotangent.dtype)

    def of_blocks(values: jax.Array, nothing: Any, back: Sequence[int]) -> jax.Array:
        """Of each block, what the window has that begins so many blocks before."""
        sizes = zip(back, values.shape, blocks, strict=True)
        moved = lax.pad(values, nothing, [(j, b - j - n, 0) for j, n, b in sizes])
        return jnp.expand_dims(moved, axes)

    total = jnp.broadcast_to(zero, whole)
    reach = [range(-(-k // s)) for k, s in zip(window, strides, strict=True)]
    for back in itertools.product(*reach):
        place, is_inside = jnp.zeros(whole, jnp.int32), jnp.ones(whole, bool)
        for axis, j, k, s in zip(axes, back, window, strides, strict=True):
            within = lax.broadcasted_iota(jnp.int32, whole, axis) + j * s
            place, is_inside = place * k + within, is_inside & (within < k)
        first = of_blocks(places, jnp.int8(-1), back).astype(jnp.int32)
        given = of_blocks(cotangent, zero, back)
        total = total + jnp.where(is_inside & (first == place), given, zero)
    found = total.reshape([b * s for b, s in zip(blocks, strides, strict=True)])
    return lax.slice(found, [0] * len(shape), shape)
