"""Floating-point dtypes by name."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# The first name of each is the one that `str(policy)` writes.
_NAMES: dict[np.dtype, tuple[str, ...]] = {
    jnp.dtype(jnp.bfloat16): ("bf16", "bfloat16"),
    jnp.dtype(jnp.float16): ("f16", "float16"),
    jnp.dtype(jnp.float32): ("f32", "float32", "full"),
    jnp.dtype(jnp.float64): ("f64", "float64"),
}
DTYPE_NAMES = ("half", *(name for names in _NAMES.values() for name in names))
# Of the operands of products alone: nothing is stored in it for long, and sums lose too much.
FLOAT8 = jnp.dtype(jnp.float8_e4m3fn)
_FLOAT8_NAMES = ("f8", "float8", "float8_e4m3fn")
_BY_NAME = {name: dtype for dtype, names in _NAMES.items() for name in names}
_BY_NAME |= dict.fromkeys(_FLOAT8_NAMES, FLOAT8)

_ONLY_PRODUCTS = (
    "Got {value!r}, but only products compute in float8, and only as compute dtype: what is kept, "
    'summed or returned needs more digits. Write "mixed_float8", or "compute=float8".'
)

_UNKNOWN_DTYPE = (
    "Unknown dtype {value!r}. A policy casts floating-point values only; write one of "
    + ", ".join(DTYPE_NAMES)
    + ", or a dtype such as jnp.bfloat16."
)


def half_dtype() -> np.dtype:
    """The 16-bit floating-point dtype native to the default backend.

    It is bfloat16 on TPUs and float16 elsewhere, as in jmp. GPUs since Ampere run bfloat16 just as
    fast, and it needs no loss scale: write "mixed_bfloat16" there.

    Returns:
      A NumPy dtype.

    Example:
      >>> import jmp_kit
      >>> jmp_kit.half_dtype()
      dtype('float16')
    """
    on_tpu = jax.local_devices()[0].platform == "tpu"
    return jnp.dtype(jnp.bfloat16 if on_tpu else jnp.float16)


def parse_dtype(value: Any, *, to_compute: bool = False) -> np.dtype:
    """The dtype that a name ("bf16", "float32", "half") or a dtype-like object stands for.

    Args:
      to_compute: whether it is what products compute in, which may be float8.

    Raises:
      ValueError: if it is none, or not a floating-point dtype of 16, 32 or 64 bits.
    """
    if isinstance(value, str):
        dtype = half_dtype() if value == "half" else _BY_NAME.get(value)
    else:
        dtype = _as_dtype(value)
    if dtype == FLOAT8 and not to_compute:
        raise ValueError(_ONLY_PRODUCTS.format(value=value))
    if dtype not in _NAMES and dtype != FLOAT8:
        raise ValueError(_UNKNOWN_DTYPE.format(value=value))
    return dtype


def _as_dtype(value: Any) -> np.dtype | None:
    # NumPy reads None and the Python type float as float64, which nobody who writes them means.
    if value is None or value is float:
        return None
    try:
        return jnp.dtype(value)
    except TypeError:
        return None


def short_name(dtype: np.dtype) -> str:
    """The shortest name that `parse_dtype` reads back as `dtype`."""
    return (_NAMES | {FLOAT8: _FLOAT8_NAMES})[dtype][0]


def stored_dtype(compute_dtype: np.dtype) -> np.dtype:
    """What the values between products are stored in, where products compute in this dtype."""
    return jnp.dtype(jnp.bfloat16) if compute_dtype == FLOAT8 else compute_dtype
