"""`autocast` itself: from a function to a jaxpr and back."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jmp_kit._dtypes import parse_dtype
from jmp_kit._policy import Policy, get_policy
from jmp_kit._tree import is_array
from jmp_kit.autocast._evaluate import Evaluation
from jmp_kit.autocast._flow import Flow
from jmp_kit.autocast._full_precision import full_precision
from jmp_kit.autocast._jaxpr import cast, is_float32, opened

# The primitives that are products, by name, for JAX does not export all of them.
PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})


def autocast(
    fun: Any,
    policy: Policy | str | DTypeLike | None = None,
    *,
    products: Iterable[str] = PRODUCTS,
    recompute: bool = True,
) -> Callable[..., Any]:
    """The same function with its products in half and everything between them in float32.

        product:  half(x) · half(y), in half, forward and backward
        segment:  float32 inside; stored in half; computed again in the backward pass
        epilogue: float32

    `fun` may be any JAX function: Flax, Equinox, Haiku or plain jnp; a loss, or for bfloat16 a
    whole train step with `jax.value_and_grad` and the optimizer inside. It composes with jit,
    grad, vmap, checkpoint and scan, on either side. Random bits are drawn as often as before,
    effects keep their order, and casts that `fun` makes are kept.

    Args:
      fun: the function. Left out, `autocast(policy)` is a decorator.
      policy: a `Policy`, its description ("mixed_bfloat16"), or a compute dtype, which means
        float32 outputs. Products run in `compute_dtype`, float32 results leave in `output_dtype`;
        results of other dtypes keep theirs. A float32 policy changes nothing.
      products: the names of the primitives that are products.
      recompute: whether the backward pass computes segments again instead of keeping their
        float32 values.

    Returns:
      A function of the same arguments. Arrays among them are traced, whatever else there is is
      constant.

    Raises:
      TypeError: if `fun` is not callable, or, when called, gives something that is no array.
      ValueError: if `policy` or `products` cannot be read.

    Example:
      >>> import jax, jax.numpy as jnp, jmp_kit
      >>> @jmp_kit.autocast("mixed_bfloat16")
      ... def loss_fn(w, x):
      ...     return jnp.mean(jax.nn.softmax(x @ w) ** 2)
      >>> w, x = jnp.ones((4, 3)), jnp.ones((2, 4))
      >>> loss_fn(w, x).dtype, jax.grad(loss_fn)(w, x).dtype
      (dtype('float32'), dtype('float32'))
    """
    if policy is None:
        policy = _as_policy(fun)
        return lambda fun: autocast(fun, policy, products=products, recompute=recompute)
    if not callable(fun):
        raise TypeError(
            f"autocast wraps a function, but got {fun!r}. Write autocast(loss_fn, "
            '"mixed_bfloat16"), or @autocast("mixed_bfloat16") above the function.'
        )
    policy = _as_policy(policy)
    evaluation = Evaluation(policy.compute_dtype, Flow(_names(products)), recompute)
    is_half = jnp.finfo(policy.compute_dtype).bits == 16

    @functools.wraps(fun)
    def autocast_fun(*args: Any, **kwargs: Any) -> Any:
        if not is_half:
            with full_precision():  # within another autocast, the innermost policy wins
                outputs = fun(*args, **kwargs)
            return jax.tree.map(lambda x: _leaving(x, policy) if is_array(x) else x, outputs)
        flat, arrays, structure = _flattened(fun, args, kwargs)
        jaxpr, consts = opened(jax.make_jaxpr(flat)(*arrays))
        nothing = [False] * len(arrays), [False] * len(jaxpr.outvars)
        results = evaluation.run(jaxpr, consts, arrays, *nothing)
        outputs = [
            cast(x, policy.output_dtype) if is_float32(atom) else x
            for x, atom in zip(results, jaxpr.outvars, strict=True)
        ]
        return jax.tree.unflatten(structure(), outputs)

    return autocast_fun


def _flattened(
    fun: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Callable[..., list[Any]], list[Any], Callable[[], Any]]:
    """`fun` from arrays to arrays, its array arguments, and its result's structure once it ran."""
    leaves, treedef = jax.tree.flatten((args, kwargs))
    positions = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
    structures = []

    def flat(*arrays: Any) -> list[Any]:
        filled = list(leaves)
        for i, array in zip(positions, arrays, strict=True):
            filled[i] = array
        args, kwargs = jax.tree.unflatten(treedef, filled)
        outputs = fun(*args, **kwargs)
        for path, x in jax.tree_util.tree_leaves_with_path(outputs):
            if not (is_array(x) or isinstance(x, bool | int | float | complex)):
                raise TypeError(
                    f"autocast returns arrays, but {jax.tree_util.keystr(path) or 'the result'} "
                    f"of the function is {x!r}. Return it by another way, or leave it out."
                )
        results, structure = jax.tree.flatten(outputs)
        structures.append(structure)
        return results

    return flat, [leaves[i] for i in positions], structures.pop


def _leaving(x: Any, policy: Policy) -> Any:
    return cast(x, policy.output_dtype) if x.dtype == jnp.float32 else x


def _as_policy(policy: Any) -> Policy:
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        return get_policy(policy)
    return Policy(jnp.float32, parse_dtype(policy), jnp.float32)


def _names(products: Iterable[str]) -> frozenset[str]:
    names = frozenset(products) if not isinstance(products, str) else frozenset({products})
    for name in names:
        if not isinstance(name, str):
            raise ValueError(
                f"products holds {name!r}, but products are named: write PRODUCTS | "
                '{"my_primitive"}, with the name that a jaxpr shows.'
            )
    return names
