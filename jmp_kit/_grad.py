"""Gradients of a scaled loss, handed out unscaled."""

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from jmp_kit._loss_scale import SCALED, LossScale, NoOpLossScale, refuse_class
from jmp_kit._tree import at_least_float32, is_array

P = ParamSpec("P")
R = TypeVar("R")
Aux = TypeVar("Aux")

_NUMBERS = (jax.Array, np.ndarray, np.generic, int, float, complex)

_TOO_NARROW = {
    jnp.dtype(jnp.float16): "which ends at 65504: multiplied by the loss scale it would overflow, "
    "and averaging it over a batch loses digits",
    jnp.dtype(jnp.bfloat16): "which has 8 significant bits: averaging it over a batch loses digits",
}


def value_and_grad(
    fun: Callable[P, R],
    loss_scale: LossScale,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    allow_int: bool = False,
) -> Callable[P, tuple[R, Any]]:
    """`jax.value_and_grad` with the backward pass scaled, so that float16 gradients survive it.

        value = fun(x)        grads = grad(x -> loss_scale * fun(x)) / loss_scale

    It is called like `jax.value_and_grad(fun, argnums, has_aux)`, and gives the same structure. The
    value is the loss as `fun` computed it. The gradients are true ones: the scale that multiplied
    them divides them again, in float32 (float64 stays), whatever the dtype of the parameters. Where
    the backward pass overflowed they are infinite or NaN, and `mixed_precision` skips the step.

    Args:
      fun: returns a floating-point scalar, or a pair of it and anything if `has_aux`.
      loss_scale: `NoOpLossScale()`, `StaticLossScale(2.0**15)`, a `DynamicLossScale`, or what
        `loss_scale_of(opt_state)` finds.
      argnums: which positional arguments to differentiate by. They may hold leaves that are no
        arrays, as Equinox modules do: the gradient of such a leaf is None.
      has_aux: whether `fun` returns a pair.
      allow_int: whether integer arguments may be differentiated by (gradients of dtype float0).

    Returns:
      A function of `fun`'s arguments that returns `(value, grads)`, or `((value, aux), grads)`.

    Raises:
      TypeError: if `fun` is not callable, `loss_scale` cannot scale, or, when called, the loss is
        float16 or bfloat16, or `fun` does not return the pair that `has_aux` announces.

    Example:
      >>> import jax, jax.numpy as jnp, jmp_kit
      >>> def loss_fn(w):
      ...     return 1e-8 * w.astype(jnp.float32)
      >>> w = jnp.float16(1)
      >>> float(jax.grad(loss_fn)(w))  # 1e-8 is no float16
      0.0
      >>> loss, grad = jmp_kit.value_and_grad(loss_fn, jmp_kit.StaticLossScale(2.0**15))(w)
      >>> f"{grad:.2e} {grad.dtype}"
      '1.00e-08 float32'

      Several losses, each with a scale of its own. Gradients are true ones, so they can be added.
      Each scale is adjusted by the gradients of its own loss. `mixed_precision` without a scale
      skips the step if any of them overflowed.

      >>> losses = [lambda w: 3e-8 * w.astype(jnp.float32), lambda w: w.astype(jnp.float32) ** 2]
      >>> scales = [jmp_kit.DynamicLossScale(2.0**20), jmp_kit.DynamicLossScale(2.0**4)]
      >>> grads = [jmp_kit.grad(fun, scale)(w) for fun, scale in zip(losses, scales)]
      >>> scales = [s.adjust(jmp_kit.all_finite(g)) for s, g in zip(scales, grads)]
      >>> f"{grads[0]:.2e} {sum(grads):.3f} {[float(s.loss_scale) for s in scales]}"
      '3.00e-08 2.000 [1048576.0, 16.0]'

      A penalty on gradients (WGAN-GP): scale the inner backward pass too. The slope is a true one,
      in float32, and the outer pass differentiates through its scaling and unscaling.

      >>> @jmp_kit.autocast("mixed_float16")
      ... def critic(params, x):
      ...     return jnp.tanh(x @ params["w"]) @ params["v"]
      >>> loss_scale = jmp_kit.DynamicLossScale(2.0**10)
      >>> def penalized(params, x):
      ...     slope = jmp_kit.grad(lambda x: critic(params, x).sum(), loss_scale)(x)
      ...     norm = jnp.sqrt((slope**2).sum(-1) + 1e-12)
      ...     return critic(params, x).mean() + 10 * ((norm - 1) ** 2).mean()
      >>> params = {"w": jnp.ones((3, 4)) / 2, "v": jnp.ones(4)}
      >>> loss, grads = jmp_kit.value_and_grad(penalized, loss_scale)(params, jnp.ones((2, 3)) / 4)
      >>> grads["w"].dtype, bool(jmp_kit.all_finite(grads))
      (dtype('float32'), True)

    Source: Micikevicius et al. 2018, section 3.2, https://arxiv.org/abs/1710.03740
    """

    def grad_of(scaled: Callable[..., Any]) -> Callable[..., Any]:
        gradient = jax.grad(scaled, argnums, has_aux=True, allow_int=allow_int)
        places = [argnums] if isinstance(argnums, int) else [*argnums]

        @functools.wraps(gradient)
        def by_arrays(*args: Any, **kwargs: Any) -> Any:
            if not any(_is_module(args[i]) for i in places if -len(args) <= i < len(args)):
                return gradient(*args, **kwargs)
            grads, aux = _grad_of_modules(scaled, places, args, kwargs)
            return (grads[0] if isinstance(argnums, int) else grads), aux

        return by_arrays

    return value_and_grad_by(grad_of, fun, loss_scale, has_aux)


def _is_module(tree: Any) -> bool:
    """Whether it holds what is neither an array nor a number, or is made of Equinox modules."""
    kind = getattr(sys.modules.get("equinox"), "Module", ())
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return any(isinstance(x, kind) or not isinstance(x, _NUMBERS) for x in leaves)


def _grad_of_modules(
    fun: Callable[..., Any], places: Sequence[int], args: Any, kwargs: Any
) -> tuple[tuple[Any, ...], Any]:
    """`jax.grad(fun, places, has_aux=True)(*args, **kwargs)` by inexact arrays alone."""
    leaves, structure = jax.tree.flatten(tuple(args[i] for i in places))
    found = [i for i, x in enumerate(leaves) if is_array(x, jnp.inexact)]

    def of_arrays(arrays: Sequence[Any]) -> Any:
        filled = list(leaves)
        for i, array in zip(found, arrays, strict=True):
            filled[i] = array
        given = list(args)
        for i, module in zip(places, jax.tree.unflatten(structure, filled), strict=True):
            given[i] = module
        return fun(*given, **kwargs)

    slopes, aux = jax.grad(of_arrays, has_aux=True)([leaves[i] for i in found])
    slope_of = dict(zip(found, slopes, strict=True))
    return jax.tree.unflatten(structure, map(slope_of.get, range(len(leaves)))), aux


def value_and_grad_by(
    grad_of: Callable[..., Any], fun: Callable[P, R], loss_scale: LossScale, has_aux: bool
) -> Callable[P, tuple[R, Any]]:
    """`value_and_grad` by another derivative: `grad_of(f)` gives the gradient and `f`'s second."""
    _check(fun, loss_scale)

    def derive(fun: Callable[..., Any]) -> Callable[..., Any]:
        def scaled(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            scaled = not isinstance(loss_scale, NoOpLossScale)
            with jax.named_scope(SCALED) if scaled else contextlib.nullcontext():
                value = fun(*args, **kwargs)
            loss = _loss_of(value, has_aux)
            return loss_scale.scale(loss), value

        return grad_of(scaled)

    # What autocast gave plans the whole gradient, which it does not see of a plain `jax.grad`.
    planned = getattr(fun, "differentiated", None)

    @functools.wraps(fun)
    def value_and_unscaled_grad(*args: P.args, **kwargs: P.kwargs) -> tuple[R, Any]:
        if planned:
            grads, value = planned(derive, args, kwargs)
        else:
            grads, value = derive(fun)(*args, **kwargs)
        return value, loss_scale.unscale(jax.tree.map(at_least_float32, grads))

    return value_and_unscaled_grad


@overload
def grad(
    fun: Callable[P, tuple[Any, Aux]],
    loss_scale: LossScale,
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: Literal[True],
    allow_int: bool = False,
) -> Callable[P, tuple[Any, Aux]]: ...


@overload
def grad(
    fun: Callable[P, Any],
    loss_scale: LossScale,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    allow_int: bool = False,
) -> Callable[P, Any]: ...


def grad(
    fun: Callable[..., Any],
    loss_scale: LossScale,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    allow_int: bool = False,
) -> Callable[..., Any]:
    """`jax.grad` with the backward pass scaled: `value_and_grad` without the value.

    Args:
      fun, loss_scale, argnums, has_aux, allow_int: as for `value_and_grad`.

    Returns:
      A function of `fun`'s arguments that returns `grads`, or `(grads, aux)`.

    Raises:
      TypeError: as `value_and_grad`.

    Example:
      >>> import jax.numpy as jnp, jmp_kit
      >>> loss_scale = jmp_kit.StaticLossScale(2.0**10)
      >>> float(jmp_kit.grad(lambda w: w**2, loss_scale)(jnp.float32(3)))
      6.0
    """
    with_value = value_and_grad(fun, loss_scale, argnums, has_aux, allow_int=allow_int)
    return without_value(with_value, has_aux)


def without_value(with_value: Callable[..., tuple[Any, Any]], has_aux: bool) -> Callable[..., Any]:
    """Of a function that gives `(value, grads)`, one that gives `grads`, or `(grads, aux)`."""

    @functools.wraps(with_value)
    def unscaled_grad(*args: Any, **kwargs: Any) -> Any:
        value, grads = with_value(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return unscaled_grad


def _check(fun: Any, loss_scale: Any) -> None:
    if not callable(fun):
        raise TypeError(
            f"The first argument is the loss function, but {fun!r} is not callable. "
            "Write value_and_grad(loss_fn, loss_scale)(params, batch)."
        )
    refuse_class(loss_scale)
    if not (hasattr(loss_scale, "scale") and hasattr(loss_scale, "unscale")):
        raise TypeError(
            f"The loss scale is {loss_scale!r}, which cannot scale a loss. Write "
            "StaticLossScale(2.0**15) for a constant, NoOpLossScale() for none, or "
            "loss_scale_of(opt_state) for the one that mixed_precision keeps."
        )


def _loss_of(value: Any, has_aux: bool) -> Any:
    if has_aux and not (isinstance(value, tuple) and len(value) == 2):
        raise TypeError(
            f"has_aux=True announces a pair (loss, aux), but the function returned {value!r}. "
            "Return the pair, or leave has_aux out."
        )
    loss = value[0] if has_aux else value
    if is_array(loss) and loss.dtype in _TOO_NARROW:
        raise TypeError(
            f"The loss is {loss.dtype}, {_TOO_NARROW[loss.dtype]}. Compute it in float32: cast "
            "the logits with logits.astype(jnp.float32) before the loss. Where autocast gives it "
            'in half, write policy.with_output_dtype("float32").'
        )
    return loss
