"""An optimizer's step made atomic and precise: skip, loss scale and master weights."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jmp_kit._loss_scale import LossScale, NoOpLossScale
from jmp_kit._rounding import round_to
from jmp_kit._tree import all_finite, cast_like, is_array, select_tree
from jmp_kit.optim._master import MASTERS, widened


class MixedPrecisionState(NamedTuple):
    """What `mixed_precision` remembers from one step to the next.

    Example:
      >>> import jax.numpy as jnp, jmp_kit, optax
      >>> optimizer = jmp_kit.mixed_precision(optax.sgd(0.1))
      >>> state = optimizer.init({"w": jnp.ones(2, jnp.bfloat16)})
      >>> state.master
      {'w': Array([1., 1.], dtype=float32)}
    """

    loss_scale: LossScale
    inner_state: optax.OptState  # of the inner optimizer, about float32 parameters
    master: Any  # like the parameters: float32[...] for 16-bit ones, None for the others
    finite: jax.Array  # bool[]: did the last step apply
    skipped: jax.Array  # int32[]: steps that did not, in all
    consecutive_skipped: jax.Array  # int32[]: and in a row, up to the last


class _Landing(NamedTuple):
    update: jax.Array
    master: Any


def mixed_precision(
    inner: optax.GradientTransformation,
    loss_scale: LossScale = NoOpLossScale(),  # noqa: B008  frozen, and without leaves
    *,
    master: str = "float32",
    axis_name: str | tuple[str, ...] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Any optax optimizer, as one atomic step for half-precision training.

        finite = all_finite(grads)
        loss_scale = loss_scale.adjust(finite)
        if finite:
            full = master where a parameter is 16-bit else parameter       # float32
            updates, inner_state = inner.update(grads, inner_state, full)
            full = full + updates
            parameter, master = round(full), full

    When gradients are not finite, everything but `loss_scale` and the counts of skipped steps
    keeps every bit: parameters, moments, schedules, weight decay, masters. There is no branch and
    nothing waits for the host. The inner optimizer sees true gradients and float32 parameters,
    and its state keeps the dtypes it started with.

    Wrap the whole optimizer, accumulation included: `mixed_precision(optax.MultiSteps(inner, k))`
    leaves a micro-batch that overflowed out and waits for another one, while `MultiSteps` around
    `mixed_precision` would keep its NaN for good. Clipping may stand on either side.

    Args:
      inner: an optax optimizer, a chain, or `optax.MultiSteps`.
      loss_scale: the loss scale to begin with. Scaling itself is `value_and_grad`'s, which asks
        for `loss_scale_of(opt_state)`.
      master: how the precision of 16-bit parameters is kept: "float32", a float32 copy (4 bytes a
        parameter), or "none", where updates far smaller than a weight are lost. float32
        parameters are their own masters.
      axis_name: under `shard_map` and `pmap`, the axes along which devices hold different
        gradients, so that all of them take the same decision. Under `jit` nothing is needed.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a `MixedPrecisionState`. Its
      `update(grads, state, params)` takes true (unscaled) gradients. Updates of 16-bit parameters
      are float32, so that `optax.apply_updates` lands on the rounded master exactly.

    Raises:
      TypeError: if `inner` is no optimizer, or `loss_scale` no loss scale.
      ValueError: if `master` is unknown, or, when updating, `params` are missing.

    Example:
      >>> import jax, jax.numpy as jnp, jmp_kit, optax
      >>> optimizer = jmp_kit.mixed_precision(optax.adam(1e-3), jmp_kit.DynamicLossScale(2.0**15))
      >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
      >>> opt_state = optimizer.init(params)
      >>> @jax.jit
      ... def train_step(params, opt_state):
      ...     loss_fn = lambda params: jnp.sum(params["w"].astype(jnp.float32) ** 2)
      ...     loss_scale = jmp_kit.loss_scale_of(opt_state)
      ...     loss, grads = jmp_kit.value_and_grad(loss_fn, loss_scale)(params)
      ...     updates, opt_state = optimizer.update(grads, opt_state, params)
      ...     return optax.apply_updates(params, updates), opt_state, loss
      >>> params, opt_state, loss = train_step(params, opt_state)
      >>> opt_state.master["w"].dtype, bool(opt_state.finite)
      (dtype('float32'), True)

    Sources: Micikevicius et al. 2018, section 3.1, https://arxiv.org/abs/1710.03740; optax,
    https://optax.readthedocs.io/en/latest/api/transformations.html
    """
    if not (hasattr(inner, "init") and hasattr(inner, "update")):
        raise TypeError(
            f"mixed_precision wraps an optimizer, but got {inner!r}. "
            "Write mixed_precision(optax.adamw(3e-4), DynamicLossScale())."
        )
    if not hasattr(loss_scale, "adjust"):
        raise TypeError(
            f"The loss scale is {loss_scale!r}, which cannot adjust itself. Write "
            "DynamicLossScale(), StaticLossScale(2.0**15) or NoOpLossScale()."
        )
    if master not in MASTERS:
        raise ValueError(
            f"master is {master!r}, which is no way to keep precision: "
            f"write one of {', '.join(map(repr, MASTERS))}."
        )
    way = MASTERS[master]
    if isinstance(inner, optax.MultiSteps):
        # Its own `gradient_transformation()` would drop the extra arguments.
        inner = optax.GradientTransformationExtraArgs(inner.init, inner.update)
    inner = optax.with_extra_args_support(inner)

    def full_precision(params: Any, master: Any) -> Any:
        return jax.tree.map(lambda p, m: way.widen(p, m) if _is_narrow(p) else p, params, master)

    def init(params: optax.Params) -> MixedPrecisionState:
        kept = jax.tree.map(lambda p: way.init(p) if _is_narrow(p) else None, params)
        return MixedPrecisionState(
            # Copied: a train step that donates its state would delete the caller's loss scale.
            loss_scale=jax.tree.map(jnp.array, loss_scale),
            inner_state=jax.tree.map(_strongly_typed, inner.init(full_precision(params, kept))),
            master=kept,
            finite=jnp.asarray(True),
            skipped=jnp.zeros((), jnp.int32),
            consecutive_skipped=jnp.zeros((), jnp.int32),
        )

    def update(
        grads: optax.Updates,
        state: MixedPrecisionState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, MixedPrecisionState]:
        if params is None:
            raise ValueError(
                "mixed_precision needs the parameters, to land on the rounded masters exactly: "
                "write optimizer.update(grads, opt_state, params)."
            )
        finite = all_finite(grads)
        if axis_name is not None:
            finite = lax.pmin(finite.astype(jnp.int32), axis_name) == 1

        full = full_precision(params, state.master)
        updates, inner_state = inner.update(
            cast_like(grads, full), state.inner_state, full, **extra_args
        )

        def land(param: Any, kept: Any, full: Any, update: Any) -> _Landing:
            if _is_narrow(param):
                update, landed = _land(param, full + update)
                kept = select_tree(finite, way.keep(landed), kept)
            # -0.0 is the update that changes nothing, neither 0.0 nor -0.0.
            return _Landing(jnp.where(finite, update, jnp.full_like(update, -0.0)), kept)

        landings = jax.tree.map(land, params, state.master, full, cast_like(updates, full))
        inner_state = cast_like(inner_state, state.inner_state)
        in_a_row = optax.safe_increment(state.consecutive_skipped)
        return _each("update", landings), MixedPrecisionState(
            loss_scale=state.loss_scale.adjust(finite),
            inner_state=select_tree(finite, inner_state, state.inner_state),
            master=_each("master", landings),
            finite=finite,
            skipped=jnp.where(finite, state.skipped, optax.safe_increment(state.skipped)),
            consecutive_skipped=jnp.where(finite, 0, in_a_row),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _is_narrow(param: Any) -> bool:
    return is_array(param, jnp.floating) and jnp.finfo(param.dtype).bits == 16


def _land(param: jax.Array, full: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The float32 update that takes a 16-bit parameter to the rounded `full`, and the master.

    Between the rounded numbers p and q there is no float32 u with round(p + u) == q if q is many
    binades below p. Then the parameter lands within float32's rounding error of p, and so must
    the master, whose rounding the parameter is.
    """
    source, target = widened(param), round_to(full, param.dtype)
    # The difference of an infinite parameter and itself would be NaN.
    update = jnp.where(source == target, -0.0, target - source)
    landed = round_to(source + update, param.dtype)
    return update, jnp.where(landed == target, full, landed)


def _each(field: str, landings: Any) -> Any:
    def is_landing(node: Any) -> bool:
        return isinstance(node, _Landing)

    return jax.tree.map(lambda landing: getattr(landing, field), landings, is_leaf=is_landing)


def _strongly_typed(x: Any) -> Any:
    # A number or a weakly typed scalar would be a strongly typed array after one step, which
    # compiles a second program.
    numeric = is_array(x) or isinstance(x, bool | int | float | complex)
    return lax.convert_element_type(x, jnp.result_type(x)) if numeric else x
