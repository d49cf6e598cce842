"""Reading what `mixed_precision` keeps, wherever in an optimizer's state it lies."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jmp_kit._loss_scale import LossScale
from jmp_kit.optim._mixed_precision import MixedPrecisionState

_HIGHEST = 2.0**40  # float16 gradients as small as this makes large are none


def loss_scale_of(opt_state: Any) -> LossScale:
    """The loss scale that `mixed_precision` keeps in an optimizer's state.

    Args:
      opt_state: any pytree with one `MixedPrecisionState` in it, however deep: in an
        `optax.chain`, `MultiSteps`, `inject_hyperparams`, or a whole Flax `TrainState`.

    Returns:
      The loss scale to hand to `value_and_grad`.

    Raises:
      ValueError: if there is none in it, or more than one.

    Example:
      >>> import jax.numpy as jnp, jmp_kit, optax
      >>> scaled = jmp_kit.mixed_precision(optax.sgd(0.1), jmp_kit.DynamicLossScale(1024.0))
      >>> optimizer = optax.chain(optax.clip_by_global_norm(1.0), scaled)
      >>> opt_state = optimizer.init({"w": jnp.ones(2)})
      >>> float(jmp_kit.loss_scale_of(opt_state).loss_scale)
      1024.0
    """
    return _find(opt_state).loss_scale


def metrics(opt_state: Any) -> dict[str, Any]:
    """Numbers for the log: the loss scale, and how many steps were skipped.

    They are Python's numbers, which print and go into JSON as they are. So it waits for the device,
    as `float` does. Under jit, and for states stacked by `vmap` or `pmap`, they are arrays.

    Args:
      opt_state: as for `loss_scale_of`.

    Returns:
      "loss_scale" (float32), "finite" (bool: the last step was applied), "skipped" (int32: steps
      skipped in all) and "consecutive_skipped" (int32: steps skipped in a row).

    Raises:
      ValueError: as `loss_scale_of`.

    Example:
      >>> import jax.numpy as jnp, jmp_kit, optax
      >>> optimizer = jmp_kit.mixed_precision(optax.sgd(0.1), jmp_kit.DynamicLossScale(1024.0))
      >>> opt_state = optimizer.init({"w": jnp.ones(2)})
      >>> jmp_kit.metrics(opt_state)
      {'loss_scale': 1024.0, 'finite': True, 'skipped': 0, 'consecutive_skipped': 0}
    """
    state = _find(opt_state)
    found = {
        "loss_scale": jnp.asarray(state.loss_scale.loss_scale, jnp.float32),
        "finite": jnp.asarray(state.finite),
        "skipped": jnp.asarray(state.skipped),
        "consecutive_skipped": jnp.asarray(state.consecutive_skipped),
    }
    is_traced = any(isinstance(x, jax.core.Tracer) for x in found.values())
    return found if is_traced else {k: x.tolist() if x.ndim == 0 else x for k, x in found.items()}


def raise_if_diverged(opt_state: Any, max_consecutive_skips: int = 50) -> None:
    """Stop a run whose steps are all skipped, or whose loss scale grows without an end.

    In the first case its parameters no longer move. In the second the scale scales nothing.

    It waits for the device: call it outside jit, every hundred steps or so.

    Args:
      opt_state: as for `loss_scale_of`.
      max_consecutive_skips: how many skipped steps in a row are allowed. A scale that starts far
        too high is halved once a step, and each halving is a skipped step.

    Raises:
      FloatingPointError: if more were skipped, or a scale without a `max_loss_scale` is over
        2^40. The message says what the scale is, and what to do.
      ValueError: as `loss_scale_of`; or if it is called under jit.

    Example:
      >>> import jax.numpy as jnp, jmp_kit, optax
      >>> optimizer = jmp_kit.mixed_precision(optax.sgd(0.1))
      >>> jmp_kit.raise_if_diverged(optimizer.init({"w": jnp.ones(2)}))
    """
    state = _find(opt_state)
    if isinstance(state.consecutive_skipped, jax.core.Tracer):
        raise ValueError(
            "raise_if_diverged reads numbers from the device and cannot do so while a program is "
            "traced: call it outside jit, on the state that the train step returned."
        )
    in_a_row, scale = int(state.consecutive_skipped), float(state.loss_scale.loss_scale)
    limit = getattr(state.loss_scale, "max_loss_scale", scale)
    if scale > _HIGHEST and limit == math.inf:
        raise FloatingPointError(
            f"The loss scale has grown to {scale:g}, and no gradient overflows: it is over 2^40. "
            "Either nothing is scaled by it: call jmp_kit.value_and_grad(loss_fn, "
            "loss_scale_of(opt_state)), not jax.value_and_grad; or, if you multiply the loss "
            "yourself, did you unscale? Or compute is bfloat16, which needs no scale: write "
            "NoOpLossScale(). If it is meant, give it a max_loss_scale."
        )
    if in_a_row <= max_consecutive_skips:
        return
    raise FloatingPointError(
        f"The gradients of the last {in_a_row} steps were not finite, so all of them were skipped "
        f"and the parameters do not move. The loss scale is {scale:g}. {_advice(state.loss_scale)}"
    )


def _advice(loss_scale: LossScale) -> str:
    if float(loss_scale.loss_scale) > getattr(loss_scale, "min_loss_scale", 1):
        return (
            "It may still be too high: start with a lower one, or, if it is a StaticLossScale, "
            "use a DynamicLossScale, which falls by itself. If you multiply the loss yourself: did "
            "you unscale? update takes true gradients, as jmp_kit.value_and_grad gives them."
        )
    return (
        "It can fall no further, so scaling is not to blame: look for a division by zero or a "
        "logarithm of it in the loss, for bad values in the data or in the parameters, and for "
        "float16 activations over 65504 (bfloat16 has float32's range); lower the learning rate."
    )


def states_of(opt_state: Any) -> dict[tuple[Any, ...], MixedPrecisionState]:
    """Every `MixedPrecisionState` in a pytree, by its key path."""

    def is_state(node: Any) -> bool:
        return isinstance(node, MixedPrecisionState)

    nodes = jax.tree_util.tree_leaves_with_path(opt_state, is_leaf=is_state)
    found = {path: node for path, node in nodes if is_state(node)}
    if not found:
        raise ValueError(
            f"There is no mixed_precision state in this {type(opt_state).__name__}. Make the "
            "optimizer with mixed_precision(optax.adamw(3e-4), DynamicLossScale()) and pass what "
            "its init gave."
        )
    return found


def _find(opt_state: Any) -> MixedPrecisionState:
    found = states_of(opt_state)
    if len(found) == 1:
        return next(iter(found.values()))
    raise ValueError(
        f"This optimizer state holds {len(found)} mixed_precision states, each with a loss scale "
        f"of its own: at {', '.join(map(jax.tree_util.keystr, found))}. Pass the one you mean, or "
        "wrap the whole optimizer in a single mixed_precision."
    )
