"""Rounding float32 values to the numbers that a 16-bit format has."""

import jax
import jax.numpy as jnp
from jax import lax


def round_to(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The nearest value of a narrower float format (ties to even), still in the dtype of `x`.

    A pair of casts would do, but XLA may delete it (`xla_allow_excess_precision`), and
    `lax.reduce_precision` alone flushes float16's subnormals, the weights below 6e-5, to zero.

    Args:
      x: float32[...].
      dtype: float16, bfloat16, or a dtype of at least 32 bits, which changes nothing.

    Returns:
      float32[...]; what is beyond the format's largest number is infinite, NaN stays NaN.
    """
    to, source = jnp.finfo(dtype), jnp.finfo(x.dtype)
    if to.bits >= source.bits:
        return x
    normal = lax.reduce_precision(x, to.nexp, to.nmant)
    if to.nexp == source.nexp:
        return normal
    step = float(to.smallest_subnormal)
    subnormal = lax.round(x / step, lax.RoundingMethod.TO_NEAREST_EVEN) * step
    return jnp.where(jnp.abs(x) < float(to.smallest_normal), subnormal, normal)
