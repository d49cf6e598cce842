"""Ways to keep the precision that a 16-bit parameter has no room for.

What is kept says by its dtype how it completes the parameter, so a state can be read (exported,
restored at another precision) without knowing which way made it.
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jmp_kit.rounding import join_float32, round_to, split_float32, stochastic_round

# (full: float32[...], dtype, key) -> (rounded: float32[...], kept)
# Invariant: what is exact in `dtype` stays, and full_value(rounded, kept) rounds to `rounded`.
Keep = Callable[[jax.Array, Any, jax.Array | None], tuple[jax.Array, Any]]


def is_narrow(param: Any) -> bool:
    """Whether a parameter is floating-point of 16 bits, so that it needs something kept."""
    floating = hasattr(param, "dtype") and jnp.issubdtype(param.dtype, jnp.floating)
    return floating and jnp.finfo(param.dtype).bits == 16


def widened(param: jax.Array) -> jax.Array:
    """A 16-bit parameter in float32."""
    # Rounded, for where an earlier step in the same program made `param` by a cast, XLA may have
    # left that cast out (`xla_allow_excess_precision`).
    return round_to(param.astype(jnp.float32), param.dtype)


def full_value(param: Any, kept: Any) -> Any:
    """The float32 value of a 16-bit parameter and what is kept of it; other parameters as is.

    Where they do not belong together, for something else than `mixed_precision` has changed the
    parameter since, it is the parameter alone.
    """
    if not is_narrow(param):
        return param
    rounded = widened(param)
    if kept is None:
        return rounded
    if kept.dtype == jnp.int16:  # which are the low bits of any parameter
        return join_float32(param, kept)
    full = rounded + widened(kept) if kept.dtype == jnp.bfloat16 else kept
    # No update leads away from infinity, and nobody means it.
    belongs = (round_to(full, param.dtype) == rounded) | jnp.isinf(rounded)
    return jnp.where(belongs, full, rounded)


def _float32(full: jax.Array, dtype: Any, key: jax.Array | None) -> tuple[jax.Array, Any]:
    return round_to(full, dtype), full


def _remainder(full: jax.Array, dtype: Any, key: jax.Array | None) -> tuple[jax.Array, Any]:
    high, low = split_float32(full)
    return high.astype(jnp.float32), low


def _kahan(full: jax.Array, dtype: Any, key: jax.Array | None) -> tuple[jax.Array, Any]:
    rounded = round_to(full, dtype)
    rest = jnp.where(jnp.isfinite(rounded), full - rounded, 0.0)
    # bfloat16 for float16 too, whose own range ends a few bits below the weights it compensates.
    kept = round_to(rest, jnp.bfloat16)
    # Rounded up to just half a step, it would be a tie, which may go to the other neighbour.
    kept = jnp.where(round_to(rounded + kept, dtype) == rounded, kept, kept * (1 - 2.0**-8))
    return rounded, kept.astype(jnp.bfloat16)


def _stochastic(full: jax.Array, dtype: Any, key: jax.Array | None) -> tuple[jax.Array, Any]:
    assert key is not None
    return stochastic_round(key, full, dtype).astype(jnp.float32), None


def _none(full: jax.Array, dtype: Any, key: jax.Array | None) -> tuple[jax.Array, Any]:
    return round_to(full, dtype), None


def keep_like(kept: Any) -> Keep:
    """The way that made what is kept; where that is nothing, rounding to nearest."""
    if kept is None:
        return _none
    return {jnp.dtype(jnp.int16): _remainder, jnp.dtype(jnp.bfloat16): _kahan}.get(
        kept.dtype, _float32
    )


Master = Literal["float32", "remainder", "kahan", "stochastic", "none"]

MASTERS: dict[Master, Keep] = {
    "float32": _float32,
    "remainder": _remainder,
    "kahan": _kahan,
    "stochastic": _stochastic,
    "none": _none,
}
