"""Where the values of a tree lie: histograms of exponents, and what a cast flushes to zero."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jmp_kit._tree import is_array, register_state

# Those of float32, subnormals included.
LOWEST, HIGHEST = -149, 127


@register_state
@dataclasses.dataclass(frozen=True)
class ExponentHistogram:
    """How many values of an array have each exponent: 2^e <= |x| < 2^(e + 1).

    Two of them add up, and `share_below` reads one.

    Example:
      >>> import jax.numpy as jnp, jmp_kit
      >>> histogram = jmp_kit.numerics.exponent_histogram(jnp.array([0.0, 1.0, 1.5, 2.0**-30]))
      >>> histogram[0], histogram[-30], int(histogram.zeros)
      (2, 1, 1)
      >>> histogram.share_below(-24)  # of those that are not zero
      0.3333333333333333
    """

    counts: jax.Array  # [277], of the exponents -149 to 127; of float64 the ends hold the rest
    zeros: jax.Array  # []
    nonfinite: jax.Array  # []

    def __getitem__(self, exponent: int) -> int:
        if not LOWEST <= exponent <= HIGHEST:
            return 0
        return int(self.counts[exponent - LOWEST])

    __iter__ = None  # which would begin at 0, and never end

    def __add__(self, other: "ExponentHistogram") -> "ExponentHistogram":
        return jax.tree.map(jnp.add, self, other)

    @property
    def nonzero(self) -> int:
        """How many finite values are not zero."""
        return int(np.asarray(self.counts, np.float64).sum())

    def share_below(self, exponent: int) -> float:
        """The share of the finite values but zero that are smaller than 2^exponent."""
        below = np.asarray(self.counts, np.float64)[: max(exponent - LOWEST, 0)].sum()
        return float(below / self.nonzero) if self.nonzero else 0.0


def exponent_histogram(tree: Any) -> Any:
    """Of each floating-point array of a tree, how many values have each exponent.

        counts[e] = #{x : 2^e <= |x| < 2^(e + 1)}       zeros = #{x : x = 0}

    Exact for float16, bfloat16, float32 and float64, subnormals included. It can be used under jit.

    Args:
      tree: a pytree: gradients, parameters, activations.

    Returns:
      The tree with an `ExponentHistogram` (int32 counts) in place of each floating-point array, and
      None in place of every other leaf.

    Example:
      >>> import jax.numpy as jnp, jmp_kit
      >>> found = jmp_kit.numerics.exponent_histogram({"w": jnp.array([3.0, 1e-8]), "step": 1})
      >>> found["w"][1], found["w"][-27], found["step"]
      (1, 1, None)
    """
    return jax.tree.map(lambda x: _exactly(_histogram, x) if _is_floating(x) else None, tree)


def underflow(tree: Any, dtype: DTypeLike, loss_scale: Any = 1.0) -> jax.Array:
    """The share of a tree's non-zero values that a cast would flush to zero.

        #{x != 0 : round_to(dtype, loss_scale x) = 0} / #{x != 0}

    Args:
      tree: a pytree, of true gradients say; only floating-point arrays count.
      dtype: what would be cast to: float16, bfloat16, a float8 type.
      loss_scale: by what values are multiplied first: a number, float32[], or a loss scale.

    Returns:
      float32[], 0 where nothing is but zeros. It can be used under jit.

    Raises:
      ValueError: if `dtype` is no floating-point dtype.

    Example:
      >>> import jax.numpy as jnp, jmp_kit
      >>> grads = jnp.array([1e-3, 1e-7, 1e-8, 0.0])
      >>> jmp_kit.numerics.underflow(grads, jnp.float16)
      Array(0.33333334, dtype=float32)
      >>> jmp_kit.numerics.underflow(grads, jnp.float16, loss_scale=1024.0)
      Array(0., dtype=float32)
    """
    dtype = floating(dtype)
    scale = jnp.asarray(getattr(loss_scale, "loss_scale", loss_scale), jnp.float32)
    counts = functools.partial(_flushed_and_nonzero, scale=scale, dtype=dtype)
    each = (_exactly(counts, x) for x in _arrays(tree))
    flushed, nonzero = sum(each, jnp.zeros(2, jnp.float32))
    return flushed / jnp.maximum(nonzero, 1)


def recommend_loss_scale(tree: Any, dtype: DTypeLike) -> float:
    """A power of two by which a tree's values fit a dtype: none overflows, hardly one is lost.

        scale = 2^(floor(log2(max of dtype / max |x|)) - k)

    k leaves room for gradients to grow: the largest of 0 to 3 with which fewer than 0.1% of the
    values but zero are flushed to zero. If there is none, then the dtype is too narrow, and k is 0.

    Args:
      tree: a pytree of true gradients, finite. Take them late in training, when they are small.
      dtype: what the backward pass computes in.

    Returns:
      A float, for `StaticLossScale`, or for `DynamicLossScale` to start with; 1 if all are zero.

    Raises:
      ValueError: if a value is infinite or NaN, larger than any in `dtype`, or so small that no
        scale saves any, or `dtype` is no floating-point dtype.

    Example:
      >>> import jax.numpy as jnp, jmp_kit
      >>> grads = {"w": jnp.array([1e-3, 1e-7, 1e-8])}
      >>> jmp_kit.numerics.recommend_loss_scale(grads, jnp.float16)
      4194304.0
    """
    dtype = floating(dtype)
    arrays = _arrays(tree)
    bad = sum(int(_exactly(lambda x: (~jnp.isfinite(x)).sum(), x)) for x in arrays)
    if bad:
        raise ValueError(
            f"{bad} values are infinite or NaN, so no scale fits them. Take gradients of a step "
            "that did not overflow: with a smaller scale, or in float32."
        )
    largest = max(map(_largest, arrays), default=0.0)
    if largest == 0:
        return 1.0
    # float32's own range bounds the scale, which is a float32.
    fits = min(_exponent_of_quotient(float(jnp.finfo(dtype).max), largest), HIGHEST)
    if fits < 0:
        raise ValueError(
            f"The largest value is {largest:.3g}, more than {dtype} ends at, so that no loss scale "
            f"of at least 1 helps: compute in bfloat16, or divide: StaticLossScale(2.0**{fits})."
        )
    for room in (3, 2, 1):
        scale = 2.0 ** (fits - room)
        if scale >= 1 and float(underflow(arrays, dtype, scale)) < 0.001:
            return scale
    if float(underflow(arrays, dtype, 2.0**fits)) == 1:
        raise ValueError(
            f"The largest value is {largest:.3g}, zero in {dtype} under any scale that is a "
            "float32: make the loss larger."
        )
    return 2.0**fits


def _exponent_of_quotient(a: float, b: float) -> int:
    """floor(log2(a / b)), exactly."""
    (a_mantissa, a_exponent), (b_mantissa, b_exponent) = math.frexp(a), math.frexp(b)
    return a_exponent - b_exponent - (a_mantissa < b_mantissa)


def _is_floating(x: Any) -> bool:
    return isinstance(x, float) or is_array(x, jnp.floating)


def _arrays(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if _is_floating(x)]


def _exactly(function: Callable[[jax.Array], Any], x: Any) -> Any:
    """`function(x)`, and of NumPy's float64 all digits, whether JAX has them or not."""
    if isinstance(x, jax.Array) or np.asarray(x).dtype != np.float64:
        return function(jnp.asarray(x))
    with jax.ensure_compile_time_eval(), jax.enable_x64(True):
        return function(jnp.asarray(x))


def _largest(x: Any) -> float:
    """Of the magnitudes; found by bits, for arithmetic takes subnormal numbers for zero."""
    bits = np.asarray(_exactly(lambda x: jnp.max(_bits(x), initial=0), x))
    return float(bits.view(np.asarray(x).dtype))


def floating(dtype: DTypeLike) -> np.dtype:
    """The dtype, if it is a floating-point one."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise ValueError(
            f"The dtype is {dtype if found is None else found}, which has no exponents. Write a "
            "floating-point one, such as float16, bfloat16 or float8_e4m3fn."
        )
    return found


# Compiled, for outside of a program a user would wait for each operation.
@jax.jit
def _histogram(x: jax.Array) -> ExponentHistogram:
    nonzero, exponent, _ = _magnitude(x)
    finite = jnp.isfinite(x)
    bins = jnp.clip(exponent, LOWEST, HIGHEST) - LOWEST
    # One bin more, for what is not counted there.
    size = HIGHEST - LOWEST + 1
    bins = jnp.where(nonzero & finite, bins, size)
    counts = jnp.zeros(size + 1, jnp.int32).at[bins.ravel()].add(1)
    zeros, nonfinite = (~nonzero).sum(dtype=jnp.int32), (~finite).sum(dtype=jnp.int32)
    return ExponentHistogram(counts[:size], zeros, nonfinite)


def _bits(x: jax.Array) -> jax.Array:
    """Of a magnitude, as a whole number: they are in the same order."""
    width = 8 * x.dtype.itemsize
    whole = jnp.dtype(f"uint{width}")
    return lax.bitcast_convert_type(x, whole) & whole.type(2 ** (width - 1) - 1)


def _magnitude(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Whether x is not zero, its exponent, and |x| / 2^exponent in [1, 2), of its bits.

    Arithmetic would take subnormal numbers for zero.
    """
    if x.dtype.itemsize == 1:
        x = x.astype(jnp.float32)  # in which none of theirs is subnormal
    info = jnp.finfo(x.dtype)
    digits, whole = info.nmant, jnp.dtype(f"uint{info.bits}")
    bits = _bits(x)
    raw, fraction = bits >> digits, bits & whole.type(2**digits - 1)
    # How far the first 1 of a subnormal fraction is from where the hidden one would be.
    shift = lax.clz(fraction) - whole.type(info.bits - 1 - digits)
    subnormal = raw == 0
    exponent = jnp.where(
        subnormal,
        info.minexp - shift.astype(jnp.int32),
        raw.astype(jnp.int32) + (info.minexp - 1),
    )
    fraction = jnp.where(subnormal, fraction << shift, fraction) & whole.type(2**digits - 1)
    wide = jnp.dtype(jnp.float64 if info.bits == 64 else jnp.float32)
    return bits != 0, exponent, 1 + fraction.astype(wide) * wide.type(2.0**-digits)


@functools.partial(jax.jit, static_argnames="dtype")
def _flushed_and_nonzero(x: jax.Array, scale: jax.Array, dtype: np.dtype) -> jax.Array:
    """How many values become zero, and how many are not zero: float32[2]."""
    found = _flushed(x, dtype, scale), _magnitude(x)[0]
    return jnp.stack([flags.sum(dtype=jnp.float32) for flags in found])


def _flushed(x: jax.Array, dtype: np.dtype, scale: jax.Array) -> jax.Array:
    """Which values but zero become zero: up to half of the smallest number, by ties to even."""
    nonzero, exponent, mantissa = _magnitude(x)
    _, scale_exponent, scale_mantissa = _magnitude(scale)
    product = mantissa * scale_mantissa.astype(mantissa.dtype)
    carried = product >= 2
    exponent = exponent + scale_exponent + carried.astype(jnp.int32)
    exactly = jnp.where(carried, product == 2, product == 1)
    info = jnp.finfo(dtype)
    half_smallest = info.minexp - info.nmant - 1
    return nonzero & ((exponent < half_smallest) | ((exponent == half_smallest) & exactly))
