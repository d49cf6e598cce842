"""Loss scales: numbers that multiply the loss, so that float16 gradients do not vanish."""

import dataclasses
import math
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jmp_kit._flax import told_to_serialize
from jmp_kit._tree import at_least_float32, boolean_scalar, is_array, register_state

T = TypeVar("T")

# The name scope of a loss that is scaled, and of its backward pass.
SCALED = "jmp_kit_scaled"

_STATIC = {"static": True}
_MOST = np.iinfo(np.int32).max  # that a count of steps can be
_SMALLEST = float(np.finfo(np.float32).tiny)  # scale that gradients can be divided by


@register_state
@dataclasses.dataclass(frozen=True)
class NoOpLossScale:
    """No scaling: the identity, for float32 and bfloat16.

    `scale`, `unscale` and `adjust` return what they are given. It has no leaves.

    Example:
      >>> import jmp_kit
      >>> jmp_kit.NoOpLossScale().scale(2.5)
      2.5
    """

    def __post_init__(self) -> None:
        told_to_serialize(NoOpLossScale)

    @property
    def loss_scale(self) -> int:
        """1, always."""
        return 1

    def scale(self, tree: T) -> T:
        """The tree itself."""
        return tree

    def unscale(self, tree: T) -> T:
        """The tree itself."""
        return tree

    def adjust(self, grads_finite: ArrayLike) -> "NoOpLossScale":
        """The loss scale itself."""
        del grads_finite
        return self


class _Scaling:
    """Scaling by `loss_scale`, in float32 or wider."""

    loss_scale: Any

    def scale(self, tree: T) -> T:
        """Every floating-point leaf times the loss scale, in float32 or wider."""
        return _apply(lax.mul, tree, self.loss_scale)

    def unscale(self, tree: T) -> T:
        """Every floating-point leaf over the loss scale, in float32 or wider."""
        # The reciprocal of a large scale is subnormal, which GPUs flush to zero: divide.
        return _apply(lax.div, tree, self.loss_scale)


@register_state
@dataclasses.dataclass(frozen=True)
class StaticLossScale(_Scaling):
    """A constant scale, for a run whose good scale is known.

        scale(x) = x * loss_scale        unscale(x) = x / loss_scale

    Both work on the floating-point leaves of a pytree, and their results are float32 or wider.

    Args:
      loss_scale: a positive, finite number. It is part of the structure: there are no leaves.

    Raises:
      ValueError: if it is not positive and finite.

    Example:
      >>> import jax.numpy as jnp, jmp_kit
      >>> loss_scale = jmp_kit.StaticLossScale(2.0**15)
      >>> loss_scale.unscale(loss_scale.scale(jnp.float32(1.5)))
      Array(1.5, dtype=float32)
    """

    loss_scale: float = dataclasses.field(metadata=_STATIC)

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss_scale", _positive("loss_scale", self.loss_scale))
        told_to_serialize(StaticLossScale)

    def adjust(self, grads_finite: ArrayLike) -> "StaticLossScale":
        """The loss scale itself."""
        del grads_finite
        return self


@register_state
@dataclasses.dataclass(frozen=True)
class DynamicLossScale(_Scaling):
    """A scale that grows while gradients are finite and backs off when they are not.

        for grads in history:
            if all_finite(grads):
                overflows = 0
                counter += 1
                if counter >= period:
                    counter = 0
                    grown = min(loss_scale * factor, max_loss_scale)
                    loss_scale = grown if isfinite(grown) else loss_scale
            else:
                counter = 0
                overflows = min(overflows + 1, hysteresis)
                if overflows == hysteresis:
                    loss_scale = max(loss_scale * backoff_factor, min_loss_scale)

    Args:
      loss_scale: float32[], the scale at the start; a leaf.
      counter: int32[], finite steps since the scale last changed or a step overflowed; a leaf.
      period: the scale grows after so many finite steps in a row; from 2**31 on it never grows.
      factor: multiplies the scale when it grows; over 1.
      min_loss_scale: the scale never falls below it; 0 for no limit but float32's own.
      backoff_factor: multiplies the scale when a step overflows; below 1. None means 1 / factor.
      max_loss_scale: the scale never grows over it; None for no limit but float32's own.
      hysteresis: the scale backs off after so many overflows in a row. From 2 on there is a third
        leaf, `overflows`, int32[], which counts them.

    Raises:
      ValueError: if a value is no number, bool, NaN, infinite, zero or negative, `factor` is not
        over 1, `backoff_factor` not below it, or `loss_scale` outside its limits.

    Example:
      >>> import jax.numpy as jnp, jmp_kit
      >>> loss_scale = jmp_kit.DynamicLossScale(2.0**15, period=1)
      >>> float(loss_scale.adjust(jnp.asarray(True)).loss_scale)
      65536.0
      >>> float(loss_scale.adjust(jnp.asarray(False)).loss_scale)
      16384.0

    Sources: Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740; the interface of jmp,
    https://github.com/google-deepmind/jmp; hysteresis as in
    https://deepspeed.readthedocs.io/en/latest/training.html
    """

    loss_scale: Any = 2.0**16  # float32[], of any number
    counter: Any = 0  # int32[], of any number
    period: int = dataclasses.field(default=2000, metadata=_STATIC)
    factor: float = dataclasses.field(default=2, metadata=_STATIC)
    min_loss_scale: float = dataclasses.field(default=1, metadata=_STATIC)
    _: dataclasses.KW_ONLY
    backoff_factor: float | None = dataclasses.field(default=None, metadata=_STATIC)
    max_loss_scale: float | None = dataclasses.field(default=None, metadata=_STATIC)
    hysteresis: int = dataclasses.field(default=1, metadata=_STATIC)
    overflows: jax.Array | None = dataclasses.field(default=None, init=False)  # int32[]

    def __post_init__(self) -> None:
        period = _whole("period", self.period, least=1)
        factor = _positive("factor", self.factor)
        if factor <= 1:
            raise ValueError(
                f"factor is {factor}, but the scale grows by it: write a number over 1, say 2."
            )
        backoff = 1 / factor
        if self.backoff_factor is not None:
            backoff = _positive("backoff_factor", self.backoff_factor)
        if backoff >= 1:
            raise ValueError(
                f"backoff_factor is {backoff}, but the scale shrinks by it when a step overflows, "
                "or it would overflow for good: write a number below 1, say 0.5."
            )
        least, most = _number("min_loss_scale", self.min_loss_scale), math.inf
        if least != 0:
            least = _positive("min_loss_scale", self.min_loss_scale)
        if self.max_loss_scale is not None and self.max_loss_scale != math.inf:
            most = _positive("max_loss_scale", self.max_loss_scale)
        if least > most:
            raise ValueError(
                f"min_loss_scale is {least} and max_loss_scale is {most}, so no scale lies "
                "between them: exchange the two."
            )
        if not isinstance(self.loss_scale, jax.core.Tracer):
            start = _positive("loss_scale", self.loss_scale)
            if not least <= start <= most:
                raise ValueError(
                    f"loss_scale is {start}, but min_loss_scale is {least} and max_loss_scale is "
                    f"{most}: start between them, or move them."
                )
        if not isinstance(self.counter, jax.core.Tracer):
            counter = _whole("counter", self.counter, least=0, most=_MOST)
            if counter >= period:
                raise ValueError(
                    f"counter is {counter}, but it counts finite steps up to period, which is "
                    f"{period}, and then starts again: write 0."
                )
        hysteresis = _whole("hysteresis", self.hysteresis, least=1, most=_MOST)
        resolved = {
            "loss_scale": jnp.asarray(self.loss_scale, jnp.float32),
            "counter": jnp.asarray(self.counter, jnp.int32),
            "period": period,
            "factor": factor,
            "min_loss_scale": least,
            "backoff_factor": backoff,
            "max_loss_scale": most,
            "hysteresis": hysteresis,
            "overflows": jnp.zeros((), jnp.int32) if hysteresis > 1 else None,
        }
        for name, value in resolved.items():
            object.__setattr__(self, name, value)
        told_to_serialize(DynamicLossScale)

    def adjust(self, grads_finite: ArrayLike) -> "DynamicLossScale":
        """The loss scale after a step whose gradients were, or were not, all finite.

        Args:
          grads_finite: bool[], usually `all_finite(grads)`.

        Raises:
          ValueError: if it is not a boolean scalar.
        """
        finite = boolean_scalar("grads_finite", grads_finite)
        steps = jnp.where(finite, jnp.minimum(self.counter, _MOST - 1) + 1, 0)
        grow = jnp.asarray(False)
        if self.period <= _MOST:
            grow = steps >= self.period  # over it where a checkpoint of another period went on
        if self.overflows is None:
            overflows, back_off = [], ~finite
        else:
            overflow_count = jnp.where(finite, 0, jnp.minimum(self.overflows + 1, self.hysteresis))
            overflows, back_off = [overflow_count], overflow_count == self.hysteresis
        assert self.max_loss_scale is not None
        assert self.backoff_factor is not None  # both resolved at construction
        grown = jnp.minimum(self.loss_scale * self.factor, self.max_loss_scale)
        least = self.min_loss_scale or _SMALLEST
        shrunk = jnp.maximum(self.loss_scale * self.backoff_factor, least)
        loss_scale = jnp.where(grow & jnp.isfinite(grown), grown, self.loss_scale)
        loss_scale = jnp.where(back_off, shrunk, loss_scale)
        loss_scale = jnp.clip(loss_scale, least, self.max_loss_scale)
        leaves = [loss_scale, jnp.where(grow, 0, steps), *overflows]
        return jax.tree.unflatten(jax.tree.structure(self), leaves)


LossScale = NoOpLossScale | StaticLossScale | DynamicLossScale
"""Any of the three, for annotations."""


def refuse_class(loss_scale: Any) -> None:
    """Raise where a loss scale is named and not made."""
    if isinstance(loss_scale, type):
        raise TypeError(
            f"The loss scale is the class {loss_scale.__name__}: write {loss_scale.__name__}()."
        )


def _apply(op: Any, tree: T, loss_scale: ArrayLike) -> T:
    def scaled(x: Any) -> Any:
        if not (isinstance(x, float | complex) or is_array(x, jnp.inexact)):
            return x
        wide = at_least_float32(jnp.asarray(x))
        return op(wide, jnp.asarray(loss_scale, wide.dtype))

    return jax.tree.map(scaled, tree)


def _positive(name: str, value: Any) -> float:
    number = _number(name, value)
    if not _SMALLEST <= number <= float(np.finfo(np.float32).max):
        raise ValueError(
            f"{name} is {number}, but it must be positive and finite in float32, or gradients "
            "would be lost: write a number such as 2.0**15."
        )
    return number


def _whole(name: str, value: Any, least: int, most: float = math.inf) -> int:
    number = _number(name, value)
    if not (least <= number <= most and number < math.inf and number == math.floor(number)):
        below = f" and <= {most}" if most < math.inf else ""
        raise ValueError(
            f"{name} is {number}, but it counts steps: write an integer >= {least}{below}."
        )
    return int(number)


def _number(name: str, value: Any) -> float:
    if isinstance(value, jax.core.Tracer):
        raise ValueError(
            f"{name} is a traced value, but it is part of the loss scale's structure and must be "
            "known when the program is traced: build the loss scale outside jit."
        )
    try:
        array = np.asarray(value)
        if array.dtype == bool or array.shape != ():
            raise TypeError
        return float(array)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {value!r}, but it must be a number.") from None
