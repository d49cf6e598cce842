"""Float32 weights out of a training state, to evaluate, average or hand on."""

from typing import Any

import jax
import optax

from jmp_kit._tree import at_least_float32
from jmp_kit.optim._inspect import states_of
from jmp_kit.optim._master import full_value


def master_params(opt_state: Any, params: Any) -> Any:
    """The float32 weights that are being trained, in whatever form they are kept.

        master_params = params, each 16-bit one completed by what `mixed_precision` keeps of it

    Args:
      opt_state: any pytree with the `MixedPrecisionState`s of these parameters in it, one or
        several (`optax.multi_transform`), however deep.
      params: the parameters that belong to it.

    Returns:
      The parameters in float32 (float64 stays). They are exact under masters "float32" and
      "remainder", compensated under "kahan", and the 16-bit values where nothing more is kept.
      Integers and leaves that are no arrays stay as they are. It may be called under jit.

    Raises:
      ValueError: if there is no `MixedPrecisionState` in `opt_state`, or if the parameters are not
        those it was made for.

    Example:
      For half weights to serve, cast them: `policy.cast_to_compute(full)`.

      >>> import jax, jax.numpy as jnp, jmp_kit, optax
      >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
      >>> optimizer = jmp_kit.mixed_precision(optax.sgd(1e-3), master="remainder")
      >>> updates, opt_state = optimizer.update({"w": jnp.ones(2)}, optimizer.init(params), params)
      >>> params = optax.apply_updates(params, updates)
      >>> jmp_kit.master_params(opt_state, params)
      {'w': Array([0.999, 0.999], dtype=float32)}

      Take an exponential moving average of these weights: in 16 bits it would stand still. A
      skipped step changes nothing, so it is left out of the average.

      >>> ema = optax.ema(0.99)
      >>> ema_state = ema.init(jmp_kit.master_params(opt_state, params))
      >>> @jax.jit
      ... def average(ema_state, opt_state, params):
      ...     full = jmp_kit.master_params(opt_state, params)
      ...     _, new_state = ema.update(full, ema_state)
      ...     finite = jmp_kit.metrics(opt_state)["finite"]
      ...     return jmp_kit.select_tree(finite, new_state, ema_state)
      >>> ema_state = average(ema_state, opt_state, params)
      >>> eval_params = optax.tree.bias_correction(ema_state.ema, 0.99, ema_state.count)
      >>> f"{eval_params['w'][0]:.4f} {eval_params['w'].dtype}"
      '0.9990 float32'
    """

    def is_absent(node: Any) -> bool:
        return node is None or isinstance(node, optax.MaskedNode)

    full = jax.tree.map(lambda param: at_least_float32(full_value(param, None)), params)
    for path, state in states_of(opt_state).items():

        def complete(kept: Any, param: Any, full: Any) -> Any:
            if is_absent(kept):
                return full
            if kept.shape != param.shape:
                raise ValueError(f"one is {list(param.shape)}, and its master {list(kept.shape)}")
            return full_value(param, kept)

        try:
            full = jax.tree.map(complete, state.master, params, full, is_leaf=is_absent)
        except ValueError as error:
            raise ValueError(
                "These parameters are not those that the state at "
                f"{jax.tree_util.keystr(path) or 'the root'} was made for: {error}. Pass the "
                "optimizer's state and its parameters."
            ) from error
    return full
