"""Rounding float32 values to 16 bits: to nearest, at random, or with the rest kept.

Everything here is bit operations and `lax.reduce_precision`. A pair of casts to a narrower dtype
and back would round too, but XLA may delete it: `xla_allow_excess_precision` is on by default, and
a GPU's compiler makes use of it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jmp_kit._tree import is_array


def round_to(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """The nearest value of a narrower float format (ties to even), still in the dtype of `x`.

        round_to(x, dtype) = x.astype(dtype).astype(x.dtype), in a form that XLA does not delete

    Args:
      x: float32[...].
      dtype: float16, bfloat16, or a dtype of at least 32 bits, which changes nothing.

    Returns:
      float32[...]. Values beyond the format's largest number become infinite. NaN stays NaN.

    Example:
      >>> import jax.numpy as jnp, jmp_kit
      >>> round_to = jmp_kit.rounding.round_to
      >>> float(round_to(jnp.float32(1.01), jnp.bfloat16)), float(round_to(jnp.float32(7e4), "f2"))
      (1.0078125, inf)

    Source: https://docs.jax.dev/en/latest/_autosummary/jax.lax.reduce_precision.html
    """
    to, source = jnp.finfo(dtype), jnp.finfo(x.dtype)
    if to.bits >= source.bits:
        return x
    normal = lax.reduce_precision(x, to.nexp, to.nmant)
    if to.nexp == source.nexp:
        return normal
    # reduce_precision flushes float16's subnormals, the weights below 6e-5, to zero.
    step = float(to.smallest_subnormal)
    subnormal = lax.round(x / step, lax.RoundingMethod.TO_NEAREST_EVEN) * step
    return jnp.where(jnp.abs(x) < float(to.smallest_normal), subnormal, normal)


def split_float32(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A float32 as the nearest bfloat16 and the 16 bits that it lacks: 4 bytes, nothing lost.

         31 30      23 22              16 15                             0
        ┌──┬──────────┬──────────────────┬────────────────────────────────┐
        │ s│ exponent │   7 significand  │      16 low significand bits   │  float32
        └──┴──────────┴──────────────────┴────────────────────────────────┘
        └──────── high: bfloat16 ────────┘└───────── low: int16 ──────────┘

        bits(x) = 2^16 * bits(high) + low            -2^15 <= low < 2^15

    `low` is the low half of the bits, read as a signed number: from 2^15 on it is negative and
    `high` is the next bfloat16, away from zero. So `high` is the bfloat16 nearest to `x`, not
    the one below. Where two are equally near, it is the one further from zero. (A cast takes the
    even one. That would need one bit more: 2^16 + 1 numbers round to an even bfloat16.)

    Args:
      x: float32[...].

    Returns:
      (high, low): bfloat16[...] and int16[...]. Zeros, subnormals, infinities and numbers that
      round to infinity are split exactly too. NaN stays NaN, with its sign; its low payload is
      dropped, so that `high` is NaN as well.

    Raises:
      TypeError: if `x` is no float32 array.

    Example:
      >>> import jax.numpy as jnp, jmp_kit
      >>> high, low = jmp_kit.split_float32(jnp.float32(3.14159274))
      >>> float(high), int(low)
      (3.140625, 4059)
      >>> float(jmp_kit.join_float32(high, low)) == float(jnp.float32(3.14159274))
      True

    Sources: apex's `store_param_remainders`, https://github.com/NVIDIA/apex; bfloat16,
    https://en.wikipedia.org/wiki/Bfloat16_floating-point_format
    """
    _check("split_float32 splits", x, jnp.float32)
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    high = (bits + jnp.uint32(0x8000)) >> 16
    high = jnp.where(jnp.isnan(x), (bits >> 16) | jnp.uint32(0x40), high).astype(jnp.uint16)
    low = jnp.where(jnp.isnan(x), jnp.uint16(0), bits.astype(jnp.uint16))
    return lax.bitcast_convert_type(high, jnp.bfloat16), lax.bitcast_convert_type(low, jnp.int16)


def join_float32(high: jax.Array, low: jax.Array) -> jax.Array:
    """The float32 that `split_float32` split.

             high: bfloat16                  low: int16
        ┌────────────────────┐          ┌────────────────────┐
        │ s  exponent  7 sig │ 0 … 0  + │ -2^15 … 2^15 - 1   │
        └────────────────────┘          └────────────────────┘
              31 … 16        15 … 0        15 … 0, signed

        bits(x) = 2^16 * bits(high) + low            modulo 2^32

    The sum carries and borrows across the boundary: bits of neighbouring floats are neighbouring
    integers, through every binade and up to infinity.

    Args:
      high: bfloat16[...].
      low: int16[...], of the same shape.

    Returns:
      float32[...]. With `low` zero it is `high`, widened.

    Raises:
      TypeError: if `high` is no bfloat16 array or `low` no int16 array.

    Example:
      >>> import jax.numpy as jnp, jmp_kit
      >>> float(jmp_kit.join_float32(jnp.bfloat16(1), jnp.int16(-1)))  # the float32 below 1
      0.9999999403953552

    Source: as `split_float32`.
    """
    _check("join_float32 joins", high, jnp.bfloat16)
    _check("join_float32 joins to it", low, jnp.int16)
    upper = lax.bitcast_convert_type(high, jnp.uint16).astype(jnp.uint32) << 16
    lower = lax.bitcast_convert_type(low.astype(jnp.int32), jnp.uint32)
    return lax.bitcast_convert_type(upper + lower, jnp.float32)


def stochastic_round(key: jax.Array, x: jax.Array, dtype: DTypeLike = jnp.bfloat16) -> jax.Array:
    """One of the two 16-bit neighbours of each value, the nearer one more often.

        below <= x <= above, neighbours in `dtype`
        P(above) = (x - below) / (above - below)         so that E[result] = x

    A float32 that is rounded to bfloat16 loses 16 bits. Add 16 random bits to them: the sum carries
    into the bits that stay just as often as it should:

         31 30      23 22              16 15                             0
        ┌──┬──────────┬──────────────────┬────────────────────────────────┐
        │ s│ exponent │   7 significand  │      16 low significand bits   │  x
        └──┴──────────┴──────────────────┴────────────────────────────────┘
                                         + │      16 random bits         │
                          carry  <───────┘
        then the low 16 are cleared. float16 loses 13 bits, and more below 2^-14.

    So many small updates move a 16-bit weight, on average by their sum. Rounding to nearest would
    leave it where it is.

    Args:
      key: a random key, `jax.random.key(0)`. The same key rounds the same values the same way;
        use each key once.
      x: float32[...].
      dtype: bfloat16 or float16.

    Returns:
      `dtype`[...]. Values that `dtype` can represent, infinities included, stay as they are, and
      NaN stays NaN. The neighbour above the largest number is infinity.

    Raises:
      TypeError: if `x` is no float32 array.
      ValueError: if `dtype` is neither bfloat16 nor float16.

    Example:
      >>> import jax, jax.numpy as jnp, jmp_kit
      >>> x = jnp.full(10_000, 1 + 2.0**-9)  # a quarter of the way from 1 to the next bfloat16
      >>> rounded = jmp_kit.stochastic_round(jax.random.key(0), x)
      >>> sorted({float(r) for r in rounded}), f"{jnp.mean(rounded > 1):.2f}"
      ([1.0, 1.0078125], '0.25')

    Sources: Gupta et al. 2015, https://arxiv.org/abs/1502.02551; for weights in bfloat16,
    Zamirai et al. 2020, https://arxiv.org/abs/2010.06192
    """
    _check("stochastic_round rounds", x, jnp.float32)
    to = jnp.finfo(dtype)
    if to.bits != 16:
        raise ValueError(
            f"stochastic_round rounds float32 to 16 bits, but dtype is {to.dtype}: write "
            "jnp.bfloat16 or jnp.float16."
        )
    bits, draws = lax.bitcast_convert_type(x, jnp.uint32), jax.random.bits(key, x.shape, jnp.uint32)
    lost = jnp.uint32((1 << (23 - to.nmant)) - 1)
    carried = lax.bitcast_convert_type((bits + (draws & lost)) & ~lost, jnp.float32)
    rounded = jnp.where(jnp.isfinite(x), carried, x)
    if to.nexp == 8:
        return rounded.astype(dtype)
    # float16's subnormals are evenly spaced, and its numbers end at 2**16.
    step = float(to.smallest_subnormal)
    size = jnp.abs(x) / step
    below = jnp.floor(size)
    uniform = draws.astype(jnp.float32) * 2.0**-32
    subnormal = jnp.copysign((below + (uniform < size - below).astype(jnp.float32)) * step, x)
    rounded = jnp.where(jnp.abs(x) < float(to.smallest_normal), subnormal, rounded)
    return rounded.astype(dtype)


def _check(what: str, x: Any, dtype: DTypeLike) -> None:
    if not is_array(x) or x.dtype != dtype:
        got = f"{x.dtype}{list(x.shape)}" if is_array(x) else repr(x)
        raise TypeError(
            f"{what} {jnp.dtype(dtype)} arrays, bit by bit, but got {got}. Convert it first: "
            f"jnp.asarray(x, jnp.{jnp.dtype(dtype)})."
        )
