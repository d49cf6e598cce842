"""Regions in which nothing is half."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp

from jmp_kit.programs._marks import mark


def full_precision(fun: Callable[..., Any] | None = None) -> Any:
    """Keep a region of an autocast function in float32: its products run as they were written.

    Values that come into the region in half are widened. Outside `autocast` it changes nothing.
    Use it as a context manager, or as a decorator.

    Args:
      fun: the function to keep in float32, where it is used as a decorator.

    Returns:
      A context manager, or the function.

    Example:
      >>> import jax, jax.numpy as jnp, jmp_kit
      >>> @jmp_kit.autocast("mixed_bfloat16")
      ... def model(w, x):
      ...     x = jnp.tanh(x @ w)  # in bfloat16
      ...     with jmp_kit.full_precision():
      ...         return x @ w  # in float32
      >>> str(jax.make_jaxpr(model)(jnp.ones((2, 2)), jnp.ones((2, 2)))).count("element_type=bf")
      1
    """
    if fun is None:
        scope: AbstractContextManager[Any] = jax.named_scope(mark(jnp.dtype(jnp.float32)))
        return scope

    @functools.wraps(fun)
    def in_full_precision(*args: Any, **kwargs: Any) -> Any:
        with full_precision():
            return fun(*args, **kwargs)

    return in_full_precision
