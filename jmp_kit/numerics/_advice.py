"""What to do about an operation that overflowed."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmp_kit.numerics._nonfinite import is_floating


def advice_on(primitive: str, kind: str, result: Any, operands: Sequence[Any]) -> str:
    """A sentence for the user, or an empty string where nothing is clear."""
    values = [np.asarray(x, np.float64) for x in operands if _is_real(x)]
    if not values or primitive.endswith("callback"):
        return ""
    if not all(np.isfinite(v).all() for v in values):
        return _AMONG_INFINITIES.get(primitive, "") if kind == "nan" else ""
    first, last = values[0], values[-1]
    if primitive == "div" and (last == 0).any():
        return (
            f"{int((last == 0).sum())} of {last.size} denominators are 0: add an epsilon, or "
            "choose another denominator with jnp.where before the division."
        )
    if primitive in ("log", "log1p") and (first <= (0 if primitive == "log" else -1)).any():
        return (
            f"The smallest argument is {first.min():.3g}: keep it above the pole with jnp.maximum, "
            "or compute the logarithm itself, as jax.nn.log_softmax does."
        )
    if primitive in ("sqrt", "rsqrt", "pow") and (first <= 0).any():
        return (
            f"The smallest argument is {first.min():.3g}: add an epsilon inside. The derivative of "
            "a root at 0 is infinite too."
        )
    dtype, largest = jnp.dtype(result.dtype), max(float(abs(v).max(initial=0)) for v in values)
    if kind != "inf":
        return ""
    end = float(jnp.finfo(dtype).max)
    overflow = f"{dtype} ends at {end:.3g}, and the largest operand is {largest:.3g}"
    if dtype == jnp.float16:
        return (
            f"{overflow}: use bfloat16, or float32 for it alone: a rule for its path, or "
            "jmp_kit.full_precision. With a loss scale, a lower one may do."
        )
    if primitive in ("exp", "exp2", "expm1"):
        return f"{overflow}: subtract the maximum first, as jax.nn.softmax and logsumexp do."
    return f"{overflow}: the values grow; lower the learning rate, or normalise before."


_AMONG_INFINITIES = {
    "sub": "Infinity minus infinity: is a whole row of a mask -inf? Mask with a finite number.",
    "add": "Infinity plus minus infinity: mask with a finite number.",
    "mul": "0 times infinity: choose with jnp.where instead of multiplying by a mask.",
    "dot_general": "0 times infinity: mask after the product, with jnp.where.",
}


def _is_real(x: Any) -> bool:
    return is_floating(x) and jnp.issubdtype(jnp.result_type(x), jnp.floating)
