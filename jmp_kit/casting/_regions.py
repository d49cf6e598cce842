"""Regions of an autocast function that are not its to decide: all in float32, or called in half."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np

from jmp_kit._tree import is_array
from jmp_kit.programs._marks import mark

P = ParamSpec("P")
R = TypeVar("R")

# What the autocast computes in whose function is traced; None outside. JAX keeps what it traces
# apart by it.
_computing_in = jax.make_user_context(None)


def computing_in(dtype: np.dtype) -> contextlib.AbstractContextManager[Any]:
    """While a function is traced, that its products are to be in this dtype."""
    context: contextlib.AbstractContextManager[Any] = _computing_in(jnp.dtype(dtype))
    return context


@overload
def full_precision() -> contextlib.AbstractContextManager[None]: ...


@overload
def full_precision(fun: Callable[P, R]) -> Callable[P, R]: ...


def full_precision(fun: Callable[..., Any] | None = None) -> Any:
    """Keep a region of an autocast function in float32: its products run as they were written.

    The region takes half values as float32. Outside `autocast` it changes nothing. Use it as a
    context manager, or as a decorator.

    Args:
      fun: as a decorator, the function to keep in float32.

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
        return _in_float32()
    _check(fun, "full_precision")

    @functools.wraps(fun)
    def in_full_precision(*args: Any, **kwargs: Any) -> Any:
        with _in_float32():
            return fun(*args, **kwargs)

    return in_full_precision


@contextlib.contextmanager
def _in_float32() -> Iterator[None]:
    with jax.named_scope(mark(jnp.dtype(jnp.float32))), computing_in(jnp.dtype(jnp.float32)):
        yield


def half_precision(fun: Callable[P, R]) -> Callable[P, R]:
    """Call a function inside `autocast` as it would be called by hand: with half arrays.

        half_precision(fun)(x) = float32(fun(half(x)))

    Some kernels take only half operands: cuDNN's attention, or your own in Pallas or behind
    `jax.ffi`. They refuse the float32 values that autocast traces a function with. This casts the
    float32 arrays among the arguments, in any pytree, to the dtype that the autocast around it
    computes in (bfloat16 under a float8 policy), and casts results of that dtype back to float32.
    The casts cancel out with those of autocast, and the kernel runs as often as by hand. It is also
    for your own code in half. Outside `autocast`, under a float32 policy and in `full_precision` it
    changes nothing.

    Args:
      fun: the function; used as a decorator, or around a call.

    Returns:
      A function of the same arguments.

    Raises:
      TypeError: if `fun` is no function.

    Example:
      >>> import jax, jax.numpy as jnp, jmp_kit
      >>> @jmp_kit.half_precision
      ... def kernel(x):
      ...     assert x.dtype == jnp.bfloat16
      ...     return 2 * x
      >>> @jmp_kit.autocast("mixed_bfloat16")
      ... def model(w, x):
      ...     return kernel(x @ w)
      >>> model(jnp.ones((2, 2)), jnp.ones((1, 2)))
      Array([[4., 4.]], dtype=float32)

      Attention by cuDNN, where there is a GPU:

      >>> def attention(q, k, v):  # [batch, time, heads, width]
      ...     attend = jax.nn.dot_product_attention
      ...     if jax.default_backend() != "gpu":
      ...         return attend(q, k, v, is_causal=True)
      ...     return jmp_kit.half_precision(attend)(q, k, v, is_causal=True, implementation="cudnn")
      >>> q = jnp.ones((1, 4, 2, 8))
      >>> jmp_kit.autocast(attention, "mixed_float16")(q, q, q).dtype
      dtype('float32')
    """
    _check(fun, "half_precision")

    @functools.wraps(fun)
    def in_half_precision(*args: P.args, **kwargs: P.kwargs) -> R:
        half = _computing_in.value
        if half is None or half == jnp.float32:
            return fun(*args, **kwargs)
        args, kwargs = _cast((args, kwargs), jnp.dtype(jnp.float32), half)
        results: R = _cast(fun(*args, **kwargs), half, jnp.dtype(jnp.float32))
        return results

    return in_half_precision


def _cast(tree: Any, this: np.dtype, to: np.dtype) -> Any:
    """The tree with its arrays of this dtype in another."""
    return jax.tree.map(lambda x: x.astype(to) if is_array(x) and x.dtype == this else x, tree)


def _check(fun: Any, name: str) -> None:
    if not callable(fun):
        raise TypeError(
            f"{name} takes a function, but got a {type(fun).__name__}. Write {name}(fun)(x) for "
            f"{name}(fun(x)), or @jmp_kit.{name} above the function."
        )
