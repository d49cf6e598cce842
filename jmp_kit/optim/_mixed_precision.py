"""An optimizer's step made atomic and precise: skip, loss scale and master weights."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import DTypeLike

from jmp_kit._flax import told_to_serialize
from jmp_kit._loss_scale import LossScale, NoOpLossScale, refuse_class
from jmp_kit._tree import all_finite, cast_like, is_array, select_tree
from jmp_kit.optim._checks import (
    check_around,
    check_kept,
    check_parameters,
    not_a_state,
    refuse_another_within,
)
from jmp_kit.optim._master import MASTERS, Keep, Master, full_value, is_narrow, widened
from jmp_kit.optim._moments import (
    cast_moments,
    keys_like,
    narrow_state,
    parse_moment_dtype,
    widen_state,
)
from jmp_kit.optim._shardings import beside_parameters
from jmp_kit.rounding import round_to


class MixedPrecisionState(NamedTuple):
    """What `mixed_precision` remembers from one step to the next.

    Attributes:
      loss_scale: the loss scale of the next step.
      inner_state: the state of the inner optimizer, of float32 parameters.
      master: a tree like the parameters. A 16-bit parameter has what completes it there: float32
        (the master itself), int16 (a remainder), bfloat16 (kahan) or None. Others have None.
      finite: bool[], whether the last step was applied.
      skipped: int32[], how many steps were skipped in all.
      consecutive_skipped: int32[], how many were skipped in a row, up to the last.
      key: uint32[2], key data, where something is rounded at random; else None.

    Example:
      >>> import jax.numpy as jnp, jmp_kit, optax
      >>> optimizer = jmp_kit.mixed_precision(optax.sgd(0.1))
      >>> state = optimizer.init({"w": jnp.ones(2, jnp.bfloat16)})
      >>> state.master
      {'w': Array([1., 1.], dtype=float32)}
    """

    loss_scale: LossScale
    inner_state: optax.OptState
    master: Any
    finite: jax.Array  # bool[]
    skipped: jax.Array  # int32[]
    consecutive_skipped: jax.Array  # int32[]
    key: jax.Array | None = None  # uint32[2]


_GENERATOR = "threefry2x32"  # whatever `jax_default_prng_impl` says: the same bits everywhere


class _Landing(NamedTuple):
    update: jax.Array
    master: Any


def mixed_precision(
    inner: optax.GradientTransformation,
    loss_scale: LossScale = NoOpLossScale(),  # noqa: B008  frozen, and without leaves
    *,
    master: Master = "float32",
    seed: int = 0,
    moment_dtype: DTypeLike | None = None,
    axis_name: str | tuple[str, ...] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Any optax optimizer, as one atomic step for half-precision training.

        finite = all_finite(grads)
        loss_scale = loss_scale.adjust(finite)
        if finite:
            full = parameter completed by master                           # float32
            updates, inner_state = inner.update(grads, inner_state, full)
            full = full + updates
            parameter, master = round(full), what the rounding lost

    When gradients are not finite, only `loss_scale` and the counts of skipped steps change.
    Parameters, moments, schedules, weight decay and masters keep every bit. There is no branch, and
    nothing waits for the host. The inner optimizer sees true gradients and float32 parameters,
    and its state keeps the dtypes it started with. (On a CPU every sum flushes subnormal numbers
    to zero, also the sum in `optax.apply_updates`.)

    You may change a 16-bit parameter between two steps: load, clip or average weights, or put a
    transformation around this one. Then the parameter is what you mean, and the master follows it.

    Wrap the whole optimizer, accumulation included: `mixed_precision(optax.MultiSteps(inner, k))`
    leaves out a micro-batch that overflowed, and waits for another one. `MultiSteps` around
    `mixed_precision` would keep its NaN for good. Clipping may stand on either side.

    Args:
      inner: an optax optimizer, a chain, or `optax.MultiSteps`.
      loss_scale: the loss scale to begin with. `value_and_grad` does the scaling. Give it
        `loss_scale_of(opt_state)`.
      master: chooses how the master weights of 16-bit parameters are stored. float32 parameters are
        their own masters.

        | master       | kept beside the parameter                 | bytes | for               |
        |--------------|-------------------------------------------|-------|-------------------|
        | "float32"    | a float32 copy                            | 2 + 4 | bfloat16, float16 |
        | "remainder"  | int16: the missing bits; ties round away  | 2 + 2 | bfloat16          |
        | "kahan"      | bfloat16: what rounding lost, to 8 bits   | 2 + 2 | bfloat16, float16 |
        | "stochastic" | nothing: rounded at random, by `seed`     | 2     | bfloat16, float16 |
        | "none"       | nothing: small updates are lost           | 2     | bfloat16, float16 |

      seed: the seed of random rounding, for "stochastic" and for 16-bit moments. Its key is part of
        the state, so a run can be repeated, and resumed, bit for bit.
      moment_dtype: "bfloat16" keeps the moments (averages of gradients and of their squares) in
        2 bytes each: float arrays in fields named mu, nu, trace, m1, m2, exp_avg, exp_avg_sq,
        v_row and v_col. The update is computed in float32, and the moments are rounded at random,
        because a second moment that is rounded to nearest never decays. None leaves the moments as
        `inner` makes them.
      axis_name: under `shard_map` and `pmap`, the axes along which devices hold different
        gradients. All devices then take the same decision. Under `jit` nothing is needed.

    Returns:
      An `optax.GradientTransformationExtraArgs` whose state is a `MixedPrecisionState`. Its
      `update(grads, state, params)` takes true (unscaled) gradients. Updates of 16-bit parameters
      are float32, so that `optax.apply_updates` lands on the rounded master exactly. One exception:
      a parameter that nearly cancels (1 to 9e-7) lands within float32's rounding of what it was,
      and so does its master.

    Raises:
      TypeError: if `inner` is no optimizer, or `loss_scale` no loss scale; when updating, if the
        state is another optimizer's.
      ValueError: if `master` is unknown, `seed` is no integer, or moments cannot be stored in
        `moment_dtype`. When initialising: if a float16 parameter is to have a remainder, a
        parameter has fewer than 16 bits, `moment_dtype` finds no moments, `inner` holds a
        `mixed_precision`, or `optax.MultiSteps`, `apply_if_finite` or `lookahead` is on the wrong
        side. When updating: if `params` are missing.

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

      Accumulation over 4 micro-batches, and half the state: 6 bytes a parameter instead of 14.

      >>> optimizer = jmp_kit.mixed_precision(
      ...     optax.MultiSteps(optax.adamw(1e-3), 4),
      ...     jmp_kit.DynamicLossScale(),
      ...     master="stochastic",
      ...     moment_dtype="bfloat16",
      ... )

      Two optimizers in one step, as for a GAN. With a loss scale each they go their own ways. They
      may also share one, which is then a value of your own. Each optimizer still skips on its own
      overflow, and the scale sees all gradients.

      >>> loss_scale = jmp_kit.DynamicLossScale(2.0**15)
      >>> optimizers = [jmp_kit.mixed_precision(optax.sgd(0.5)) for _ in range(2)]
      >>> weights = [jnp.ones(()), jnp.ones(())]
      >>> states = [optimizer.init(w) for optimizer, w in zip(optimizers, weights)]
      >>> grads = [jnp.float32(1), jnp.float32(jnp.inf)]
      >>> for i, optimizer in enumerate(optimizers):
      ...     updates, states[i] = optimizer.update(grads[i], states[i], weights[i])
      ...     weights[i] = optax.apply_updates(weights[i], updates)
      >>> loss_scale = loss_scale.adjust(jmp_kit.all_finite(grads))
      >>> [float(w) for w in weights], float(loss_scale.loss_scale)
      ([0.5, 1.0], 16384.0)

    Sources: Micikevicius et al. 2018, section 3.1, https://arxiv.org/abs/1710.03740; optax,
    https://optax.readthedocs.io/en/latest/api/transformations.html
    """
    if not (hasattr(inner, "init") and hasattr(inner, "update")):
        raise TypeError(
            f"mixed_precision wraps an optimizer, but got {inner!r}. "
            "Write mixed_precision(optax.adamw(3e-4), DynamicLossScale())."
        )
    refuse_class(loss_scale)
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
    told_to_serialize(NoOpLossScale)  # the default was made before Flax was loaded
    keep = MASTERS[master]
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise ValueError(f"seed is {seed!r}, but it must be an integer: write seed=0.")
    moment_dtype = parse_moment_dtype(moment_dtype)
    random = master == "stochastic" or moment_dtype == jnp.bfloat16
    if isinstance(inner, optax.MultiSteps):
        # Its own `gradient_transformation()` would drop the extra arguments.
        inner = optax.GradientTransformationExtraArgs(inner.init, inner.update)
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> MixedPrecisionState:
        key = jax.random.key(seed, impl=_GENERATOR)
        check_around()
        check_parameters(params, master)

        def kept(param: Any, key: Any) -> Any:
            return keep(widened(param), param.dtype, key)[1] if is_narrow(param) else None

        masters = jax.tree.map(kept, params, keys_like(key, params))
        full = jax.tree.map(full_value, params, masters)
        inner_state = inner.init(full)
        refuse_another_within(inner_state, MixedPrecisionState)
        if moment_dtype is not None:
            inner_state = cast_moments(inner_state, moment_dtype, full)
        state = MixedPrecisionState(
            # Copied: a train step that donates its state would delete the caller's loss scale.
            loss_scale=jax.tree.map(jnp.array, loss_scale),
            inner_state=jax.tree.map(_strongly_typed, inner_state),
            master=masters,
            finite=jnp.asarray(True),
            skipped=jnp.zeros((), jnp.int32),
            consecutive_skipped=jnp.zeros((), jnp.int32),
            key=jax.random.key_data(key) if random else None,
        )
        return beside_parameters(state, full)

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
        if not isinstance(state, MixedPrecisionState):
            raise TypeError(not_a_state(state))
        check_kept(params, state.master, master)
        full = jax.tree.map(full_value, params, state.master)
        grads = cast_like(grads, full)
        finite = all_finite(grads, axis_name)

        key, param_key, moment_key = _split(state.key)

        wide = state.inner_state if moment_dtype is None else widen_state(state.inner_state)
        updates, inner_state = inner.update(grads, wide, full, **extra_args)

        def land(param: Any, kept: Any, full: Any, update: Any, key: Any) -> _Landing:
            if is_narrow(param):
                update, landed = _land(keep, param, full + update, key)
                kept = select_tree(finite, landed, kept)
            # -0.0 is the update that changes nothing, neither 0.0 nor -0.0.
            return _Landing(jnp.where(finite, update, jnp.full_like(update, -0.0)), kept)

        updates, keys = cast_like(updates, full), keys_like(param_key, params)
        landings = jax.tree.map(land, params, state.master, full, updates, keys)
        inner_state = narrow_state(
            inner_state, state.inner_state, None if moment_dtype is None else moment_key
        )
        in_a_row = optax.safe_increment(state.consecutive_skipped)
        return _each("update", landings), MixedPrecisionState(
            loss_scale=state.loss_scale.adjust(finite),
            inner_state=select_tree(finite, inner_state, state.inner_state),
            master=_each("master", landings),
            finite=finite,
            skipped=jnp.where(finite, state.skipped, optax.safe_increment(state.skipped)),
            consecutive_skipped=jnp.where(finite, 0, in_a_row),
            key=select_tree(finite, key, state.key),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _land(
    keep: Keep, param: jax.Array, full: jax.Array, key: jax.Array | None
) -> tuple[jax.Array, Any]:
    """The float32 update that takes a 16-bit parameter to the rounded `full`, and what is kept.

    Between the rounded numbers p and q there is no float32 u with round(p + u) == q if q is many
    binades below p. Then the parameter lands within float32's rounding error of p, and so must
    what is kept, which completes the parameter.
    """
    source = widened(param)
    target, kept = keep(full, param.dtype, key)
    # No update leads away from infinity: it would be NaN. The float32 master is not lost, though.
    stuck = jnp.isinf(source)
    update = jnp.where((source == target) | stuck, -0.0, target - source)
    landed = round_to(source + update, param.dtype)
    _, kept_if_off = keep(landed, param.dtype, key)

    def settle(on: jax.Array, off: jax.Array) -> jax.Array:
        return jnp.where((landed == target) | (stuck & (on.dtype == jnp.float32)), on, off)

    return update, jax.tree.map(settle, kept, kept_if_off)


def _split(key_data: jax.Array | None) -> tuple[Any, Any, Any]:
    """The next key data and two keys to draw from."""
    if key_data is None:
        return None, None, None
    keys = jax.random.split(jax.random.wrap_key_data(key_data, impl=_GENERATOR), 3)
    return jax.random.key_data(keys[0]), keys[1], keys[2]


def _each(field: str, landings: Any) -> Any:
    def is_landing(node: Any) -> bool:
        return isinstance(node, _Landing)

    return jax.tree.map(lambda landing: getattr(landing, field), landings, is_leaf=is_landing)


def _strongly_typed(x: Any) -> Any:
    # A number or a weakly typed scalar would be a strongly typed array after one step, which
    # compiles a second program.
    numeric = is_array(x) or isinstance(x, bool | int | float | complex)
    return lax.convert_element_type(x, jnp.result_type(x)) if numeric else x
