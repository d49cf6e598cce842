"""Ways to keep the precision that a 16-bit parameter has no room for."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmp_kit._rounding import round_to


class Master(NamedTuple):
    """What is kept beside a 16-bit parameter, and how the float32 value is got from the two.

    Invariant: `round_to(widen(param, kept), param.dtype) == param`.
    """

    init: Callable[[jax.Array], Any]  # half[...] -> kept
    widen: Callable[[jax.Array, Any], jax.Array]  # half[...], kept -> float32[...]
    keep: Callable[[jax.Array], Any]  # float32[...] -> kept


def widened(param: jax.Array) -> jax.Array:
    """A 16-bit parameter in float32."""
    # Rounded, for where an earlier step in the same program made `param` by a cast, XLA may have
    # left that cast out (`xla_allow_excess_precision`).
    return round_to(param.astype(jnp.float32), param.dtype)


MASTERS = {
    "float32": Master(
        init=lambda param: param.astype(jnp.float32),
        widen=lambda param, kept: kept,
        keep=lambda full: full,
    ),
    "none": Master(
        init=lambda param: None,
        widen=lambda param, kept: widened(param),
        keep=lambda full: None,
    ),
}
