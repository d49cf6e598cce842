"""Products of halves in float32, gradients of weights, written for what XLA makes of them.

XLA on CPUs has such a product of matrices, and of batches of these, whose axes come first. But it
takes others, and turns round one whose result is transposed, and finds when the program runs that
it cannot.

On GPUs it moves what is summed up over several axes, if they are the first ones of an operand, and
asks whatever makes that to lay it out so, a batch last in memory. Of one axis it does not.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from jmp_kit.programs._axes import Operand, is_shared, sides_of
from jmp_kit.programs._jaxpr import cast, equations_of, shape_of


def runnable(product: JaxprEqn) -> list[JaxprEqn]:
    """The equations of a product that is to give float32 of halves."""
    on_cpus, elsewhere = _behind, _as_it_was
    if product.primitive.name == "dot_general":
        # What lies on devices along two axes cannot lie along one.
        is_on_mesh, sides = any(map(is_shared, product.invars)), sides_of(product)
        if not all(map(_is_matrix, sides)):
            on_cpus = _of_float32 if is_on_mesh else _of_matrices
        if not is_on_mesh and all(map(_is_over_neighbours, sides)):
            elsewhere = _over_one_axis
    function = functools.partial(_either, product, on_cpus, elsewhere)
    if (on_cpus, elsewhere) == (_behind, _as_it_was):  # one product for all devices
        function = functools.partial(_not_turned, product)
    return list(equations_of(function, product.invars, product.outvars, product.source_info))


def _is_over_neighbours(side: Operand) -> bool:
    """Whether several axes are contracted, each of which is next to the one before."""
    axes = list(side.contracted)
    return len(axes) > 1 and axes == list(range(axes[0], axes[0] + len(axes)))


def _is_matrix(side: Operand) -> bool:
    """Whether batch axes come first, and one axis at most is not shared."""
    return len(side.kept) < 2 and list(side.batch) == list(range(len(side.batch)))


def _as_it_was(product: JaxprEqn, *operands: jax.Array) -> jax.Array:
    result: jax.Array = product.primitive.bind(*operands, **product.params)
    return result


def _behind(product: JaxprEqn, *operands: jax.Array) -> jax.Array:
    result: jax.Array = lax.optimization_barrier(_as_it_was(product, *operands))
    return result


def _not_turned(product: JaxprEqn, *operands: jax.Array) -> list[Any]:
    return [behind_on_cpus(_as_it_was(product, *operands))]


def _either(
    product: JaxprEqn,
    on_cpus: Callable[..., jax.Array],
    elsewhere: Callable[..., jax.Array],
    *operands: jax.Array,
) -> list[Any]:
    ways = [functools.partial(way, product) for way in (on_cpus, elsewhere)]
    return [lax.platform_dependent(*operands, cpu=ways[0], default=ways[1])]


def behind_on_cpus(values: Any) -> Any:
    """The same, behind a barrier where it runs on a CPU."""
    return lax.platform_dependent(
        values, cpu=lax.optimization_barrier, default=lambda values: values
    )


def mapped_together(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The same, but where `jax.vmap` maps some operands alone, on CPUs it maps all of them.

    That is a batch of products. Else it would be one product, of a kind that XLA there has not.
    """
    together = jax.custom_batching.custom_vmap(function)

    def mapped(size: int, flags: Sequence[bool], *operands: jax.Array) -> tuple[jax.Array, bool]:
        def spread(*operands: jax.Array) -> jax.Array:
            pairs = zip(operands, flags, strict=True)
            alike = (x if flag else jnp.broadcast_to(x, (size, *x.shape)) for x, flag in pairs)
            return mapped_together(jax.vmap(function))(*alike)

        if all(flags):
            return spread(*operands), True
        as_it_was = jax.vmap(function, [0 if flag else None for flag in flags])
        return lax.platform_dependent(*operands, cpu=spread, default=as_it_was), True

    together.def_vmap(mapped)
    return together


def _of_float32(product: JaxprEqn, *operands: jax.Array) -> jax.Array:
    """Of the same values: as exact, if not as fast on every CPU."""
    wide = (cast(x, jnp.float32) for x in operands)
    result: jax.Array = product.primitive.bind(*wide, **product.params)
    return result


def _of_matrices(product: JaxprEqn, *operands: jax.Array) -> jax.Array:
    sides, shape = sides_of(product), shape_of(product.outvars[0])
    batch = tuple(range(len(sides[0].batch)))
    contracted = tuple(len(batch) + 1 + i for i in range(len(sides[0].contracted)))
    numbers = (contracted, contracted), (batch, batch)
    matrices = map(_matrix, operands, sides)
    result = product.primitive.bind(*matrices, **product.params | {"dimension_numbers": numbers})
    return lax.reshape(lax.optimization_barrier(result), shape)


def _matrix(x: jax.Array, side: Operand) -> jax.Array:
    """With one axis of what it does not share, and what is contracted last."""

    def sizes(axes: Sequence[int]) -> list[int]:
        return [x.shape[i] for i in axes]

    rows = lax.transpose(x, (*side.batch, *side.kept, *side.contracted))
    shape = *sizes(side.batch), math.prod(sizes(side.kept)), *sizes(side.contracted)
    return lax.reshape(rows, shape)


def _over_one_axis(product: JaxprEqn, *operands: jax.Array) -> jax.Array:
    """With one axis in place of those that are contracted."""
    sides = sides_of(product)
    joined = [_joined(x, side) for x, side in zip(operands, sides, strict=True)]
    numbers = tuple(zip(*map(_numbers, sides), strict=True))
    params = product.params | {"dimension_numbers": numbers}
    result: jax.Array = product.primitive.bind(*joined, **params)
    return result


def _joined(x: jax.Array, side: Operand) -> jax.Array:
    first, last = side.contracted[0], side.contracted[-1] + 1
    return lax.reshape(x, (*x.shape[:first], math.prod(x.shape[first:last]), *x.shape[last:]))


def _numbers(side: Operand) -> tuple[tuple[int, ...], tuple[int, ...]]:
    first, *others = side.contracted
    return (first,), tuple(i - len(others) if i > first else i for i in side.batch)
