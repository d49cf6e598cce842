"""`autocast` itself, and what it is called with, checked."""

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, overload

import numpy as np
from jax.typing import DTypeLike

from jmp_kit._dtypes import parse_dtype
from jmp_kit._policy import Policy, policy_to_compute
from jmp_kit.casting._casting import Casting
from jmp_kit.casting._misused import NO_CONTEXT, check_function, policy_alone
from jmp_kit.casting.planning._plan import Plan
from jmp_kit.programs._arguments import eval_shape
from jmp_kit.programs._flow import PRODUCTS, Flow

P = ParamSpec("P")
R = TypeVar("R")


class Wrap(Protocol):
    """A decorator: what it gives is called as what it takes."""

    def __call__(self, fun: Callable[P, R], /) -> Callable[P, R]:
        """The function, wrapped."""


@overload
def autocast(
    fun: Callable[P, R],
    policy: Policy | str | DTypeLike,
    *,
    rules: Mapping[str, Policy | str | DTypeLike] | None = None,
    products: Iterable[str] = PRODUCTS,
    recompute: bool | float | Literal["most"] = True,
    reduce_dtype: DTypeLike = np.float32,
) -> Callable[P, R]: ...


@overload
def autocast(
    fun: Policy | str | DTypeLike,
    policy: None = None,
    *,
    rules: Mapping[str, Policy | str | DTypeLike] | None = None,
    products: Iterable[str] = PRODUCTS,
    recompute: bool | float | Literal["most"] = True,
    reduce_dtype: DTypeLike = np.float32,
) -> Wrap: ...


def autocast(
    fun: Any,
    policy: Policy | str | DTypeLike | None = None,
    *,
    rules: Mapping[str, Policy | str | DTypeLike] | None = None,
    products: Iterable[str] = PRODUCTS,
    recompute: bool | float | Literal["most"] = True,
    reduce_dtype: DTypeLike = np.float32,
) -> Any:
    """The same function with its products in half and everything between them in float32.

        product:  half(x) · half(y), in half, forward and backward
        segment:  float32 inside; stored in half; computed again in the backward pass
        state:    float32; products take it in half
        epilogue: float32

    A product is a matrix product or a convolution. A segment is what lies between two products, and
    the epilogue is what follows the last one: the loss, the optimizer. State is what is updated
    rather than made anew: an argument of `fun`, or the carry of a loop, that is changed by
    additions, factors, maxima and selections at its own size. So weights keep the smallest update,
    also in `jax.lax.fori_loop(0, 1000, lambda _, y: y + 1e-3 * (y @ w), y)`.

    `fun` may be any JAX function: Flax, Equinox, Haiku or plain jnp; a loss, or for bfloat16 a
    whole train step with `jax.value_and_grad` and the optimizer inside. It composes with jit,
    grad, vmap, checkpoint and scan, on either side. Random bits are drawn as often as before,
    effects keep their order, and `fun`'s own casts are kept. Changes that `fun` makes to nnx models
    and optimizers among its arguments are kept. Leaves of an Equinox module that are not arrays
    pass through. Linear algebra (`jnp.linalg.cholesky`, `eigh`, `solve`) stays in float32, with
    what it takes and gives and the products of its derivatives. autocast warns of a call that it
    does not know, which runs as it was traced. A product's `precision=`, which says how float32 is
    multiplied, keeps nothing else in float32: `full_precision` and `rules` do.

    It also warns of float64 arguments, because nothing beside them is half, of a product that asks
    for another half dtype than the policy's, and of float16 gradients without a loss scale.

    With `"mixed_float8"`, large matrix products take float8 operands, each row divided by a scale
    of its own. They give bfloat16, and the rest is as in `"mixed_bfloat16"`, but for `jax.jvp`,
    which JAX refuses then.

    Args:
      fun: the function. Without it, `autocast(policy)` is a decorator.
      policy: a `Policy`, its description ("mixed_bfloat16"), or a compute dtype or its name, which
        means float32 outputs. Products run in `compute_dtype`. float32 results leave in
        `output_dtype`; results of other dtypes keep theirs. A float32 policy changes nothing.
      rules: another compute dtype for some products, `{"lm_head": "float32"}`. The keys are regular
        expressions (`re.search`), and the first that matches wins. They are compared with two kinds
        of path. One is the path of a parameter that the product multiplies by; it begins with the
        name of `fun`'s argument ("params/decoder/lm_head/kernel"). The parameter may be reshaped,
        cast, or changed in any way but by a product. The other is the product's name scope
        ("Decoder/lm_head"): Flax linen has one for each module, others use `jax.named_scope`.
        Around a whole train step use name scopes, because the product that makes a weight's
        gradient does not multiply by the weight.
      products: the names of the primitives that are products.
      recompute: how much the backward pass computes again instead of taking it from memory. True
        is the default. False keeps everything, as JAX does. "most" needs the least memory. A
        number says how many bytes may be moved to keep one less; the default is 1.2. It counts
        where the backward pass is part of the program: in a wrapped train step and in
        `jmp_kit.value_and_grad`. Of a loss that `jax.grad` differentiates, segments are computed
        again, or with False they are not.
      reduce_dtype: in what devices sum gradients of weights, under `jit` with shardings: float32,
        or the compute dtype, which sends half the bytes. The product that makes a gradient
        multiplies halves either way. A float32 sum is rounded afterwards, but for sums in a loop,
        over micro-batches, which are not. It counts where the backward pass is part of the program,
        as with `recompute`. Gradients of convolutions are summed in half, because a convolution
        that gives float32 also multiplies in it.

    Returns:
      A function of the same arguments. It traces the arrays among them, and takes all else as
      constant.

    Raises:
      TypeError: if `fun` is a class, a Flax module, or cannot be called. When it is called: if it
        returns something that is neither an array, nor one of its arguments, nor a constant such as
        a string.
      ValueError: if `policy`, `rules` or another argument cannot be read. When it is called: if a
        rule matches nothing.

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
        return _Decorator(
            functools.partial(
                autocast,
                policy=policy_alone(fun),
                rules=rules,
                products=products,
                recompute=recompute,
                reduce_dtype=reduce_dtype,
            )
        )
    check_function(fun)
    policy = policy_to_compute(policy)
    casting = Casting(
        fun,
        policy,
        _compiled(rules or {}),
        Flow(_names(products)),
        _price(recompute),
        is_summed_wide=_is_summed_wide(reduce_dtype, policy),
    )

    @functools.wraps(fun)
    def autocast_fun(*args: Any, **kwargs: Any) -> Any:
        return casting.evaluated(args, kwargs)

    autocast_fun.differentiated = casting.differentiated  # type: ignore[attr-defined]
    return autocast_fun


class _Decorator:
    """`autocast` that waits for its function."""

    def __init__(self, wrap: Callable[..., Any]) -> None:
        self.wrap = wrap

    def __call__(self, fun: Any) -> Callable[..., Any]:
        return self.wrap(fun)

    def __enter__(self) -> None:
        raise TypeError(NO_CONTEXT)

    def __exit__(self, *_: object) -> None:
        """Never reached."""


def autocast_method(
    fun: Callable[..., Any], policy: Policy, rules: Mapping[str, Policy | str | DTypeLike]
) -> Callable[..., Any]:
    """`autocast` of a method of a module; a rule may name what this method does not use."""
    casting = Casting(fun, policy, _compiled(rules), Flow(PRODUCTS), _PRICE, of_module=True)
    return lambda *args, **kwargs: casting.evaluated(args, kwargs)


def plans_of(
    fun: Callable[..., Any],
    policy: Policy | str | DTypeLike,
    *args: Any,
    rules: Mapping[str, Policy | str | DTypeLike] | None = None,
    recompute: bool | float | str = True,
    **kwargs: Any,
) -> list[Plan]:
    """What `autocast` makes of a function with these arguments, which may be abstract."""
    compiled, price = _compiled(rules or {}), _price(recompute)
    casting = Casting(fun, policy_to_compute(policy), compiled, Flow(PRODUCTS), price)
    plans: list[Plan] = []
    eval_shape(lambda *args, **kwargs: casting.evaluated(args, kwargs, plans), *args, **kwargs)
    return plans


def _compiled(rules: Mapping[str, Any]) -> dict[re.Pattern[str], np.dtype]:
    if not isinstance(rules, Mapping):
        raise TypeError(
            f'rules are a dict, but got {rules!r}: write rules={{"lm_head": "float32"}}, a regular '
            "expression for paths and what their products compute in."
        )
    compiled = {}
    for pattern, policy in rules.items():
        try:
            compiled[re.compile(pattern)] = policy_to_compute(policy).compute_dtype
        except (re.error, TypeError) as error:
            raise ValueError(
                f"The rule {pattern!r} is no regular expression ({error}), so no path can be "
                'compared with it: write part of a path, "lm_head", and a backslash before a '
                "parenthesis, bracket, plus, star or dot that is meant literally."
            ) from error
    return compiled


# What a byte that is kept for the backward pass may save in bytes moved.
_PRICE, _MOST = 1.2, 1e3


def _price(recompute: bool | float | str) -> float | None:
    if isinstance(recompute, bool):
        return _PRICE if recompute else None
    if recompute == "most":
        return _MOST
    if isinstance(recompute, str) or not 0 <= recompute < math.inf:
        raise ValueError(
            f"recompute is {recompute!r}: write True for the default, False to keep everything, "
            '"most" for the least memory, or a number of bytes that may be moved to keep one less.'
        )
    return float(recompute)


def _is_summed_wide(reduce_dtype: DTypeLike, policy: Policy) -> bool:
    dtype, compute = parse_dtype(reduce_dtype), policy.compute_dtype
    if dtype not in (np.float32, compute) and compute != np.float32:
        raise ValueError(
            f"reduce_dtype is {dtype}, but products give {compute}: write float32 for sums of "
            f"gradients that lose nothing, or {compute} for half the bytes between devices."
        )
    return dtype == np.float32


def _names(products: Iterable[str]) -> frozenset[str]:
    names = frozenset(products) if not isinstance(products, str) else frozenset({products})
    for name in names:
        if not isinstance(name, str):
            raise ValueError(
                f"products holds {name!r}, but products are named: write PRODUCTS | "
                '{"my_primitive"}, with the name that a jaxpr shows.'
            )
    return names
