"""`autocast` itself: from a function to a jaxpr and back."""

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, Primitive, Var, primitives
from jax.typing import DTypeLike

from jmp_kit._policy import Policy, policy_to_compute
from jmp_kit._tree import is_array
from jmp_kit.casting._differentiated import differentiated_first, has_bound_rules
from jmp_kit.casting._evaluate import Evaluation
from jmp_kit.casting._evaluator import Known, Stored
from jmp_kit.casting._full_precision import full_precision
from jmp_kit.casting._misused import NO_CONTEXT, check_function, policy_alone
from jmp_kit.casting._models import holds_models, on_models
from jmp_kit.casting._state import STATE, States
from jmp_kit.casting._warned import warn_of
from jmp_kit.programs._arguments import eval_shape, flattened, paths_of_arrays
from jmp_kit.programs._flow import PRODUCTS, Flow
from jmp_kit.programs._jaxpr import cast, is_float32, opened, primitive_names
from jmp_kit.programs._rules import Rules


def autocast(
    fun: Any,
    policy: Policy | str | DTypeLike | None = None,
    *,
    rules: Mapping[str, Policy | str | DTypeLike] | None = None,
    products: Iterable[str] = PRODUCTS,
    recompute: bool = True,
) -> Callable[..., Any]:
    """The same function with its products in half and everything between them in float32.

        product:  half(x) · half(y), in half, forward and backward
        segment:  float32 inside; stored in half; computed again in the backward pass
        state:    float32; products take it in half
        epilogue: float32

    State is what is updated rather than made anew: a value that an argument of `fun`, or the carry
    of a loop, reaches at its own size by additions, factors, maxima and selections. So weights that
    an optimizer or an inner loop changes keep the smallest update, also where products follow:
    `jax.lax.fori_loop(0, 1000, lambda _, y: y + 1e-3 * (y @ w), y)`.

    `fun` may be any JAX function: Flax, Equinox, Haiku or plain jnp; a loss, or for bfloat16 a
    whole train step with `jax.value_and_grad` and the optimizer inside. It composes with jit,
    grad, vmap, checkpoint and scan, on either side. Random bits are drawn as often as before,
    effects keep their order, and casts that `fun` makes are kept. Of nnx models and optimizers
    among its arguments what `fun` changes is kept, and of an Equinox module what is no array goes
    in and comes out as it is. Solvers (`jax.lax.custom_linear_solve`) are left in float32. A call
    of a kind that is not known here runs as it was traced.

    Warnings tell of that, of float64 arguments, beside which nothing is half, of a product that
    asks for another half dtype than the policy's, and of float16 gradients without a loss scale.

    Args:
      fun: the function. Left out, `autocast(policy)` is a decorator.
      policy: a `Policy`, its description ("mixed_bfloat16"), or a compute dtype or its name, which
        means float32 outputs. Products run in `compute_dtype`, float32 results leave in
        `output_dtype`; results of other dtypes keep theirs. A float32 policy changes nothing.
      rules: another compute dtype for some products, `{"lm_head": "float32"}`: regular expressions
        (`re.search`), of which the first match wins, over two kinds of path. One is that of a
        parameter that the product multiplies by, reshaped, cast, or computed with in any way but
        a product; it begins with the name of `fun`'s argument ("params/decoder/lm_head/kernel").
        The other is the product's name scope ("Decoder/lm_head"; Flax linen has one per module,
        others use `jax.named_scope`). Around a whole train step use name scopes: the product that
        makes a weight's gradient does not multiply by the weight.
      products: the names of the primitives that are products.
      recompute: whether the backward pass computes segments again instead of keeping their
        float32 values. In a wrapped train step it does so but for layers in a `cond`, or in a
        scan within a scan: there wrap the loss.

    Returns:
      A function of the same arguments. Arrays among them are traced, whatever else there is is
      constant.

    Raises:
      TypeError: if `fun` is no function but a class, a Flax module, or nothing to call; when
        called, if it gives something that is neither an array, nor among its arguments, nor a
        constant such as a string.
      ValueError: if `policy`, `rules` or `products` cannot be read, or, when called, if a rule
        matches nothing.

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
            )
        )
    check_function(fun)
    policy = policy_to_compute(policy)
    plan = _Plan(fun, policy, _compiled(rules or {}), Flow(_names(products)), recompute)

    @functools.wraps(fun)
    def autocast_fun(*args: Any, **kwargs: Any) -> Any:
        return plan.evaluated(args, kwargs, notes=None)

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
    plan = _Plan(fun, policy, _compiled(rules), Flow(PRODUCTS), recompute=True, of_module=True)
    return lambda *args, **kwargs: plan.evaluated(args, kwargs, notes=None)


def stored_values(
    fun: Callable[..., Any],
    policy: Policy | str | DTypeLike,
    *args: Any,
    rules: Mapping[str, Policy | str | DTypeLike] | None = None,
    **kwargs: Any,
) -> list[Stored]:
    """What `autocast(fun, policy, rules=rules)` stores of these arguments, in which dtype, why."""
    plan = _Plan(fun, policy_to_compute(policy), _compiled(rules or {}), Flow(PRODUCTS), True)
    notes: dict[Var, Stored] = {}
    eval_shape(lambda *args, **kwargs: plan.evaluated(args, kwargs, notes), *args, **kwargs)
    return list(notes.values())


class _Plan(NamedTuple):
    """A function and how it is to be evaluated."""

    fun: Callable[..., Any]
    policy: Policy
    dtypes: Mapping[re.Pattern[str], np.dtype]
    flow: Flow
    recompute: bool
    of_module: bool = False  # see Rules

    @property
    def halves(self) -> list[np.dtype]:
        """What is computed in and has 16 bits, the policy's first."""
        dtypes = self.policy.compute_dtype, *self.dtypes.values()
        return [dtype for dtype in dtypes if jnp.finfo(dtype).bits == 16]

    def evaluated(
        self,
        args: Any,
        kwargs: Any,
        notes: dict[Var, Stored] | None,
        paths_of: Callable[[], list[str]] | None = None,
    ) -> Any:
        """The function's results; `paths_of` gives its arrays' paths, if they are not its own."""
        fun, policy, dtypes = self.fun, self.policy, self.dtypes
        if holds_models((args, kwargs)):
            internal = policy.with_output_dtype(jnp.float32)

            def run(function: Callable[..., Any], paths: list[str], *values: Any) -> Any:
                inner = self._replace(fun=function, policy=internal)
                return inner.evaluated(values, {}, notes, lambda: paths)

            outputs = on_models(fun, run, args, kwargs)
            return jax.tree.map(lambda x: _leaving(x, policy) if is_array(x) else x, outputs)
        if not self.halves:
            with full_precision():  # within another autocast, the innermost policy wins
                outputs = fun(*args, **kwargs)
            return jax.tree.map(lambda x: _leaving(x, policy) if is_array(x) else x, outputs)
        if jnp.float16 in self.halves and jax.default_backend() == "tpu":
            raise ValueError(_NO_FLOAT16)
        flat, arrays, structure = flattened(fun, args, kwargs)
        paths_of = paths_of or functools.partial(paths_of_arrays, fun, args, kwargs)
        paths = paths_of() if dtypes else []
        program = self._program(flat, arrays, paths)
        rebuilt = structure()
        warn_of(program[0], self.flow, self.halves, arrays, paths_of)

        def results(*values: Any) -> list[Any]:
            return self._results(program, values, 0, notes)

        def pulled_back(function: Any, values: Any, cotangents: Any) -> list[Any]:
            given = [*values, *cotangents]
            internal = self._replace(policy=policy.with_output_dtype(jnp.float32))
            gradient = internal._program(function, given, [*paths, *("" for _ in cotangents)])
            return internal._results(gradient, given, len(cotangents), None)

        if has_bound_rules(program[0]):
            return rebuilt(differentiated_first(flat, arrays, results, pulled_back))
        return rebuilt(results(*arrays))

    def _program(
        self, function: Callable[..., list[Any]], arrays: Any, paths: list[str]
    ) -> tuple[Jaxpr, list[Any]]:
        jaxpr, consts = opened(jax.make_jaxpr(function)(*arrays))
        _require_primitives(self.flow.products, jaxpr)
        if self.dtypes:
            unmarked = self.halves[0]
            rules = Rules(
                self.dtypes, self.policy.compute_dtype, unmarked, self.flow, self.of_module
            )
            jaxpr = rules.marked(jaxpr, paths)
        return jaxpr, consts

    def _results(
        self,
        program: tuple[Jaxpr, list[Any]],
        values: Sequence[Any],
        cotangents: int,
        notes: dict[Var, Stored] | None,
    ) -> list[Any]:
        """Of these values, the last of which are cotangents: made of products, and no state."""
        jaxpr, consts = program
        made = [i >= len(values) - cotangents for i in range(len(values))]
        known = Known(
            depends=made,
            origins=[0 if flag else STATE for flag in made],
            reaches=[False] * len(jaxpr.outvars),
            whole=[True] * len(jaxpr.outvars),
        )
        evaluation = Evaluation(self.halves[0], self.flow, self.recompute, States(self.flow), notes)
        results = evaluation.run(jaxpr, consts, values, known)
        return [
            cast(x, self.policy.output_dtype) if is_float32(atom) else x
            for x, atom in zip(results, jaxpr.outvars, strict=True)
        ]


def _leaving(x: Any, policy: Policy) -> Any:
    return cast(x, policy.output_dtype) if x.dtype == jnp.float32 else x


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


def _names(products: Iterable[str]) -> frozenset[str]:
    names = frozenset(products) if not isinstance(products, str) else frozenset({products})
    for name in names:
        if not isinstance(name, str):
            raise ValueError(
                f"products holds {name!r}, but products are named: write PRODUCTS | "
                '{"my_primitive"}, with the name that a jaxpr shows.'
            )
    return names


def _require_primitives(names: frozenset[str], jaxpr: Jaxpr) -> None:
    exported = {p.name for p in vars(primitives).values() if isinstance(p, Primitive)}
    if unknown := names - PRODUCTS - exported:
        used = primitive_names(jaxpr)
        for name in sorted(unknown - used):
            raise ValueError(
                f"products holds {name!r}, which is no primitive that JAX exports, nor one that "
                f"this function uses, so it changes nothing. It uses {', '.join(sorted(used))}."
            )


_NO_FLOAT16 = (
    "TPUs do not multiply in float16: products would be computed in another format, slowly, with a "
    'loss scale for nothing. Write "mixed_bfloat16" for "mixed_float16"; it needs no loss scale.'
)
