"""Where an optimizer's state lies: beside its parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jmp_kit._tree import path_names


def state_shardings(opt_state: Any, params: Any) -> Any:
    """Where each array of an optimizer's state belongs: with its parameter, or on every device.

    Masters, remainders and moments belong with their parameter: they have its shape, and their path
    ends in its path. The rest are scalars (counts, the loss scale), and belong on every device.

    `mixed_precision` itself starts its state there, under `jit` too. Use this where the places must
    be known before: for `out_shardings`, and for the abstract state that a checkpoint is restored
    into.

    Args:
      opt_state: the state of any optimizer, `mixed_precision` or not; it may be abstract.
      params: the parameters with their shardings, arrays or `jax.ShapeDtypeStruct`.

    Returns:
      A tree like `opt_state` of `jax.sharding.Sharding`, None where no parameter has one.

    Example:
      >>> import jax, jax.numpy as jnp, jmp_kit, optax
      >>> from jax.sharding import NamedSharding, PartitionSpec as P
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
      >>> split = NamedSharding(mesh, P("data"))
      >>> params = jax.ShapeDtypeStruct((16, 4), jnp.bfloat16, sharding=split)
      >>> optimizer = jmp_kit.mixed_precision(optax.adam(1e-3))
      >>> shardings = jmp_kit.state_shardings(jax.eval_shape(optimizer.init, params), params)
      >>> shardings.master.spec == P("data"), shardings.inner_state[0].count.spec == P()
      (True, True)
    """
    shardings = [s for s in (getattr(p, "sharding", None) for p in jax.tree.leaves(params)) if s]
    named = [s for s in shardings if isinstance(s, NamedSharding)]
    anywhere = next(iter(shardings), None)
    everywhere = NamedSharding(named[0].mesh, PartitionSpec()) if named else anywhere

    def place(param: Any, leaf: Any) -> Any:
        return everywhere if param is None else getattr(param, "sharding", everywhere)

    return _beside(place, opt_state, params)


def beside_parameters(opt_state: Any, params: Any) -> Any:
    """The state, with the arrays that belong to parameters sharded as these are, under `jit` too.

    A new array of zeros takes nothing of a parameter, so the partitioner would put all of it on
    every device. What is selected between the two goes where both are.
    """

    def place(param: Any, leaf: Any) -> Any:
        if not isinstance(param, jax.core.Tracer):
            return leaf  # An array that is there has its place.
        there, here = (jax.typeof(x).sharding for x in (param, leaf))
        # They differ where shardings are types, in some versions of JAX.
        moved = leaf if there.spec == here.spec else jax.reshard(leaf, there)
        return jnp.where(False, param.astype(leaf.dtype), moved)

    return _beside(place, opt_state, params)


def _beside(place: Any, opt_state: Any, params: Any) -> Any:
    """`place(param, leaf)` of every array of a state; the parameter is None if it has none."""
    by_path = {path_names(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}

    def of(path: Any, leaf: Any) -> Any:
        names = path_names(path)
        ends = (by_path.get(names[i:]) for i in range(len(names) + 1))
        shape = np.shape(leaf)
        return place(
            next((p for p in ends if p is not None and shape == p.shape != ()), None), leaf
        )

    return jax.tree_util.tree_map_with_path(of, opt_state)
