"""Parameters that are split over devices, gathered in half, and their gradients reduced."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jmp_kit._dtypes import parse_dtype
from jmp_kit._tree import is_array


def gather_params(
    params: Any,
    specs: Any,
    axis_name: str | Sequence[str],
    dtype: DTypeLike = jnp.bfloat16,
    *,
    reduce_dtype: DTypeLike = jnp.float32,
) -> Any:
    """Whole parameters to compute with in `shard_map`, of parameters that are split over devices.

        forward:   all_gather(p.astype(dtype))                        # 2 bytes a parameter
        backward:  psum_scatter(g.astype(reduce_dtype))               # psum where p is not split

    Parameters are cast before they are sent. Gradients are summed in `reduce_dtype`, while they are
    multiplied by the loss scale: a step whose sum overflows is skipped like any other. Call it in
    the loss function, and take the mean of the loss over the devices there, `lax.pmean(loss,
    axis_name)`. Gradients are then those of the mean.

    The backward pass keeps what was gathered: a whole copy in `dtype` on every device, while a step
    runs. `jax.checkpoint(loss_fn, policy=jax.checkpoint_policies.dots_saveable)` inside `autocast`
    gathers it again instead, and computes nothing else twice that autocast does not anyway.

    Under plain `jit` the partitioner does the same by itself: it gathers what `autocast` has cast,
    and sums gradients in the `reduce_dtype` of `autocast`.

    Args:
      params: a pytree of floating-point arrays, this device's part of each.
      specs: the `PartitionSpec` of each, as in `in_specs`; one may stand for a subtree.
      axis_name: the mesh axes to gather over, along which devices hold different data. A dimension
        that is split along another axis stays so.
      dtype: on the wire. Arrays of fewer than two dimensions (biases, scales of norms) keep their
        own: there is nothing to save.
      reduce_dtype: of the sum of gradients: float32, or a half dtype to send fewer bytes.

    Returns:
      The same tree, whole along `axis_name`. Gradients have the dtypes and the parts of `params`.

    Raises:
      ValueError: if a dtype is none to compute in, a parameter has fewer dimensions than its
        spec, or a dimension is split over an axis of `axis_name` and then over another that is not.

    Example:
      >>> import functools, jax, jax.numpy as jnp, jmp_kit
      >>> from jax import lax
      >>> from jax.sharding import PartitionSpec as P
      >>> auto = (jax.sharding.AxisType.Auto,)
      >>> mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=auto)
      >>> specs = {"w": P("data"), "b": P()}
      >>> def loss_fn(params, x):
      ...     whole = jmp_kit.gather_params(params, specs, "data")
      ...     y = x.astype(whole["w"].dtype) @ whole["w"]
      ...     return lax.pmean(jnp.mean(y.astype(jnp.float32) + whole["b"]), "data")
      >>> @jax.jit
      ... @functools.partial(
      ...     jax.shard_map, mesh=mesh, in_specs=(specs, P("data")), out_specs=(P(), specs)
      ... )
      ... def step(params, x):
      ...     return jmp_kit.value_and_grad(loss_fn, jmp_kit.StaticLossScale(8.0))(params, x)
      >>> params = {"w": jnp.ones((8, 2)), "b": jnp.ones(2)}
      >>> loss, grads = step(params, jnp.ones((8, 8)))
      >>> float(loss), grads["w"].shape, float(grads["b"][0])
      (9.0, (8, 2), 0.5)

    Source: Rajbhandari et al. 2020, ZeRO, https://arxiv.org/abs/1910.02054
    """
    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    wire, reduced = parse_dtype(dtype), parse_dtype(reduce_dtype)

    def gather(spec: Any, part: Any) -> Any:
        return jax.tree.map(lambda p: _gather(p, spec, axes, wire, reduced), part)

    return jax.tree.map(gather, specs, params, is_leaf=lambda s: isinstance(s, PartitionSpec))


def _gather(param: Any, spec: Any, axes: tuple[str, ...], wire: Any, reduced: Any) -> Any:
    if not is_array(param, jnp.floating):
        return param
    if len(spec) > param.ndim:
        raise ValueError(
            f"The spec {spec} has {len(spec)} dimensions, but the parameter is "
            f"{param.dtype}{list(param.shape)}: give the PartitionSpecs of in_specs."
        )
    names = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
    split = {
        i: tuple(name for name in entry if name in axes)
        for i, entry in enumerate(names)
        if set(entry).intersection(axes)
    }
    for i in split:
        _check_order(names[i], axes, spec)
    rest = tuple(axis for axis in axes if not any(axis in entry for entry in split.values()))
    dtype = wire if param.ndim > 1 else param.dtype

    def gathered(x: jax.Array) -> jax.Array:
        for dimension, entry in split.items():
            x = lax.all_gather(x, entry, axis=dimension, tiled=True)
        return x

    def through(on_wire: Any, x: jax.Array) -> jax.Array:
        x = gathered(x.astype(on_wire))
        return (lax.pcast(x, rest, to="varying") if rest else x).astype(dtype)

    def whole(x: jax.Array) -> jax.Array:
        return through(dtype, x)

    def part(_: None, grad: jax.Array) -> tuple[jax.Array]:
        like = jax.ShapeDtypeStruct(param.shape, reduced)
        [grad] = jax.linear_transpose(gathered, like)(grad.astype(reduced))
        return (lax.psum(grad, rest).astype(param.dtype),)

    if rest and not _is_typed_by_axes(rest):
        by_vjp = jax.custom_vjp(whole)
        by_vjp.defvjp(lambda x: (whole(x), None), part)
        return by_vjp(param)
    # Of what makes the tangent, JAX makes what takes the gradient: all_gather's transpose is
    # psum_scatter, in the dtype of what was gathered, and pcast's is psum.
    by_jvp = jax.custom_jvp(whole)
    by_jvp.defjvp(lambda primals, tangents: (whole(*primals), through(reduced, *tangents)))
    return by_jvp(param)


def _is_typed_by_axes(axes: tuple[str, ...]) -> bool:
    """Whether JAX knows over which axes a value differs: not with `check_vma=False`."""
    number = jnp.zeros(())
    return jax.typeof(lax.pcast(number, axes, to="varying")) != jax.typeof(number)


def _check_order(entry: tuple[str, ...], axes: tuple[str, ...], spec: Any) -> None:
    """Gathered along an axis with another one inside, rows would come in another order."""
    for i, name in enumerate(entry):
        inner = [a for a in entry[i + 1 :] if a not in axes and _is_split_by(a)]
        if name in axes and inner:
            outer = [a for a in entry if a not in axes]
            order = ", ".join(map(repr, (*outer, *(a for a in entry if a in axes))))
            raise ValueError(
                f"The spec {spec} splits a dimension over {name!r} and then over {inner[0]!r}: "
                f"gathered along {name!r} alone, its rows would be in another order than those of "
                f"the parameter. Write PartitionSpec(({order})), or gather along both."
            )


def _is_split_by(axis: str) -> bool:
    try:
        return lax.axis_size(axis) > 1
    except NameError:  # the partitioner's, which sees the whole of it
        return False
