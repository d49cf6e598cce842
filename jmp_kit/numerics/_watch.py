"""Histograms of gradients over a run, kept by the optimizer's state."""

import dataclasses
import functools
import itertools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jmp_kit._tree import register_state
from jmp_kit.numerics._exponents import HIGHEST, LOWEST, ExponentHistogram, exponent_histogram

_BINS = HIGHEST - LOWEST + 1


@register_state
@dataclasses.dataclass(frozen=True)
class WatchState:
    """What `watch` keeps."""

    steps: jax.Array  # int32[], updates seen
    collected: jax.Array  # int32[], of these collected
    # float32[arrays, 279]: summed counts, zeros and what is not finite, of each array in order. In
    # one array, for each that goes into a step and comes out of it takes some microseconds.
    counts: jax.Array
    structure: Any = dataclasses.field(metadata={"static": True})  # of the tree of histograms


def watch(every: int = 100) -> optax.GradientTransformation:
    """An optax transformation that changes nothing and counts exponents of every Nth update.

        if steps % every == 0: counts += exponent_histogram(updates)

    Put it where the values to watch pass: first in a chain for gradients, last for updates. Inside
    `mixed_precision` gradients are the true ones, and those of skipped steps are left out. Nothing
    waits for the host; the steps between cost a comparison.

    Args:
      every: collect in the first and then in each so many-th step.

    Returns:
      A gradient transformation whose state `watched` finds.

    Raises:
      ValueError: if `every` is no positive number.

    Example:
      >>> import jax.numpy as jnp, jmp_kit, optax
      >>> from jmp_kit import numerics
      >>> inner = optax.chain(numerics.watch(every=10), optax.adam(1e-3))
      >>> optimizer = jmp_kit.mixed_precision(inner, jmp_kit.DynamicLossScale())
      >>> params = {"w": jnp.ones(3)}
      >>> state = optimizer.init(params)
      >>> updates, state = optimizer.update({"w": jnp.full(3, 1e-8)}, state, params)
      >>> numerics.watched(state)["w"][-27]
      3

    Source: https://optax.readthedocs.io/en/latest/api/transformations.html
    """
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every is {every!r}, but has to be a number of steps: 1, 100, …")

    def init(params: Any) -> WatchState:
        found, structure = jax.tree.flatten(jax.eval_shape(exponent_histogram, params))
        zero = jnp.zeros((), jnp.int32)
        size = sum(x.size for x in found)
        counts = jnp.zeros((size // (_BINS + 2), _BINS + 2), jnp.float32)
        return WatchState(zero, zero, counts, structure)

    def update(updates: Any, state: WatchState, params: Any = None) -> tuple[Any, WatchState]:
        del params

        def collect() -> jax.Array:
            found = map(_of_all_devices, jax.tree.leaves(exponent_histogram(updates)))
            # Where there is nothing to watch, there is nothing to join.
            joined = jnp.concatenate([jnp.zeros(0, jnp.int32), *(x.ravel() for x in found)])
            return state.counts + joined.reshape(state.counts.shape).astype(jnp.float32)

        now = state.steps % every == 0
        counts = lax.cond(now, collect, lambda: state.counts)
        collected = state.collected + now.astype(jnp.int32)
        return updates, WatchState(state.steps + 1, collected, counts, state.structure)

    return optax.GradientTransformation(init, update)


def _of_all_devices(count: jax.Array) -> jax.Array:
    """A count, summed up over the axes along which devices have parts of an array."""
    axes = tuple(sorted(jax.typeof(count).manual_axis_type.varying))
    return lax.psum(count, axes) if axes else count


def watched(opt_state: Any) -> Any:
    """The histograms that `watch` has collected, wherever in an optimizer's state they lie.

    Args:
      opt_state: any pytree with one `WatchState` in it, however deep.

    Returns:
      A tree as that of the gradients, with an `ExponentHistogram` for each floating-point array.

    Raises:
      ValueError: if there is none in it, or more than one.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_kit import numerics
      >>> optimizer = optax.chain(numerics.watch(), optax.sgd(0.1))
      >>> numerics.watched(optimizer.init(jnp.ones(3))).nonzero
      0
    """
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, WatchState))
    found = [node for node in nodes if isinstance(node, WatchState)]
    if len(found) != 1:
        raise ValueError(
            f"There are {len(found)} WatchStates in this optimizer state, and watched reads one. "
            "Put numerics.watch() into the chain once, or pass the part of the state to read."
        )
    parts = ((row[:_BINS], row[_BINS], row[_BINS + 1]) for row in found[0].counts)
    return jax.tree.unflatten(found[0].structure, itertools.chain.from_iterable(parts))


def total_histogram(tree: Any) -> ExponentHistogram:
    """All histograms of a tree in one.

    Args:
      tree: what `exponent_histogram` or `watched` gives.

    Returns:
      Their sum; empty for a tree without any.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_kit import numerics
      >>> found = numerics.exponent_histogram({"a": jnp.ones(2), "b": jnp.ones(3)})
      >>> numerics.total_histogram(found)[0]
      5
    """

    def is_histogram(node: Any) -> bool:
        return isinstance(node, ExponentHistogram)

    found = list(filter(is_histogram, jax.tree.leaves(tree, is_leaf=is_histogram)))
    empty = exponent_histogram(jnp.zeros(0, jnp.float32))
    return functools.reduce(operator.add, found or [empty])
