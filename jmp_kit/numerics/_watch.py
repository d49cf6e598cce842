"""Histograms of gradients over a run, kept by the optimizer's state."""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jmp_kit.numerics._exponents import ExponentHistogram, exponent_histogram


class WatchState(NamedTuple):
    """What `watch` keeps."""

    steps: jax.Array  # int32[], updates seen
    collected: jax.Array  # int32[], of these collected
    histograms: Any  # as `exponent_histogram` gives, float32 counts, summed


def watch(every: int = 100) -> optax.GradientTransformation:
    """An optax transformation that changes nothing and counts exponents of every Nth update.

        if steps % every == 0: histograms += exponent_histogram(updates)

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
        def empty(histogram: ExponentHistogram) -> ExponentHistogram:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), histogram)

        zero = jnp.zeros((), jnp.int32)
        return WatchState(zero, zero, empty(jax.eval_shape(exponent_histogram, params)))

    def update(updates: Any, state: WatchState, params: Any = None) -> tuple[Any, WatchState]:
        del params

        def collect() -> Any:
            found = exponent_histogram(updates)
            return jax.tree.map(lambda a, b: a + b.astype(jnp.float32), state.histograms, found)

        now = state.steps % every == 0
        histograms = lax.cond(now, collect, lambda: state.histograms)
        collected = state.collected + now.astype(jnp.int32)
        return updates, WatchState(state.steps + 1, collected, histograms)

    return optax.GradientTransformation(init, update)


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
    return found[0].histograms


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
