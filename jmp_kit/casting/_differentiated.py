"""Custom derivatives that can be called only while their function is being differentiated.

A rule may take values from around it, and may ask which of its operands are perturbed. Both are
there while JAX differentiates the function, and no more once it was traced. A function with such
rules is differentiated first and evaluated then: when its gradient is taken, the program of that
gradient is traced, as that of a whole train step is. The forward pass is then computed twice, so
that functions with other rules, or none, go the other way.
"""

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Jaxpr, JaxprEqn

from jmp_kit.casting._custom_derivatives import as_traced, closed_over, is_smooth, no_tangent
from jmp_kit.programs._flow import bodies_of
from jmp_kit.programs._jaxpr import every_equation, opened, shape_of

Function = Callable[..., list[Any]]  # from arrays to arrays


def has_bound_rules(jaxpr: Jaxpr) -> bool:
    """Whether a custom derivative in it can be called only while it is being differentiated."""
    # Of one definition, a module's activation say, one call tells of all.
    return any(map(_is_bound, {_definition(eqn): eqn for eqn in _with_rules(jaxpr)}.values()))


def differentiated_first(
    fun: Function, arrays: Sequence[Any], evaluated: Function, run: Callable[..., list[Any]]
) -> list[Any]:
    """`evaluated(*arrays)`, whose gradient is an evaluated program too.

    Args:
      fun: what was traced.
      evaluated: the same under autocast.
      run: `run(function, arrays, cotangents)` evaluates `function(*arrays, *cotangents)`.
    """
    call = jax.custom_vjp(evaluated)

    def forward(*given: Any) -> tuple[list[Any], Any]:
        values = [x.value for x in given]
        perturbed = [i for i, x in enumerate(given) if x.perturbed and is_smooth(x.value)]
        # Not `evaluated`: what differentiates this rule again gets the rule for the results, too.
        return call(*values), (values, dict.fromkeys(perturbed))

    def backward(residuals: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        values, perturbed = residuals

        def pulled_back(*args: Any) -> list[Any]:
            values, received = list(args[: len(arrays)]), iter(args[len(arrays) :])

            def of_perturbed(*given: Any) -> list[Any]:
                filled = dict(enumerate(values)) | dict(zip(perturbed, given, strict=True))
                return fun(*filled.values())

            results, pullback = jax.vjp(of_perturbed, *(values[i] for i in perturbed))
            return list(
                pullback(
                    [
                        next(received).astype(x.dtype) if is_smooth(x) else no_tangent(x)
                        for x in results
                    ]
                )
            )

        received = [_materialized(x) for x in cotangents if not _is_float0(x)]
        grads = dict(zip(perturbed, run(pulled_back, values, received), strict=True))
        return tuple(grads[i].astype(x.dtype) if i in grads else None for i, x in enumerate(values))

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call(*arrays)


def _materialized(x: Any) -> Any:
    return jnp.zeros(x.shape, x.dtype) if isinstance(x, SymbolicZero) else x


def _is_float0(x: Any) -> bool:
    return bool(x.dtype == jax.dtypes.float0)


def _with_rules(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Calls of functions with a rule of their own."""
    for eqn, calls in every_equation(jaxpr):
        # The axes of a shard_map are not there to try what is inside.
        mapped = any(call.primitive.name == "shard_map" for call in calls)
        if eqn.primitive.name in ("custom_vjp_call", "custom_jvp_call") and not mapped:
            yield eqn


def _definition(eqn: JaxprEqn) -> Hashable:
    """Where the function was written, and the types it is called with."""
    [body] = bodies_of(eqn)
    types = ((a.aval.dtype, len(shape_of(a))) for a in eqn.invars)
    return body.jaxpr.debug_info.func_src_info, eqn.params.get("symbolic_zeros"), *types


def _is_bound(eqn: JaxprEqn) -> bool:
    if eqn.params.get("symbolic_zeros"):
        return True
    function, _ = as_traced(eqn)
    closed = closed_over(eqn)

    def pulled_back(*args: Any) -> Any:
        values, pullback = jax.vjp(functools.partial(function, *args[:closed]), *args[closed:])
        return pullback([jnp.ones_like(x) if is_smooth(x) else no_tangent(x) for x in values])

    try:
        program = jax.make_jaxpr(pulled_back)(*(atom.aval for atom in eqn.invars))
    except Exception:  # the rule's own, of whatever kind: when it is called, it says so itself
        return True
    return any(isinstance(x, jax.core.Tracer) for x in opened(program)[1])
