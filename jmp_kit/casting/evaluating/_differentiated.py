"""Functions whose gradient is a program of its own: JAX makes no derivatives of what runs.

What rounds to float8 has none that JAX could make. And a custom derivative may be one that can be
called only while its function is being differentiated: it takes values from around it, or asks
which of its operands are perturbed. When the gradient of such a function is taken, its forward and
backward pass are traced and evaluated as one program, as those of a whole train step are, and that
is cut where the cotangents come in. There is no `jvp`, so that other functions go the other way.
"""

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from jmp_kit.casting.evaluating._custom_derivatives import (
    as_traced,
    closed_over,
    is_smooth,
    no_tangent,
)
from jmp_kit.programs._flow import bodies_of
from jmp_kit.programs._jaxpr import (
    Atom,
    cut_out,
    every_equation,
    is_var,
    opened,
    shape_of,
)

Function = Callable[..., list[Any]]  # from arrays to arrays


def has_bound_rules(jaxpr: Jaxpr) -> bool:
    """Whether a custom derivative in it can be called only while it is being differentiated."""
    # Of one definition, a module's activation say, one call tells of all.
    return any(map(_is_bound, {_definition(eqn): eqn for eqn in _with_rules(jaxpr)}.values()))


def differentiated_first(
    fun: Function,
    arrays: Sequence[Any],
    evaluated: Function,
    run: Callable[..., list[Any]],
    leaving: Callable[[list[Any]], list[Any]],
) -> list[Any]:
    """`evaluated(*arrays)`, whose gradient is an evaluated program too.

    Args:
      fun: what was traced.
      evaluated: the same under autocast.
      run: `run(function, arrays, cotangents, once)` evaluates `function(*arrays, *cotangents)`;
        such that it can be differentiated, or once and for all.
      leaving: gives results in the dtypes that `evaluated` gives them in.
    """
    call = jax.custom_vjp(evaluated)

    def forward(*given: Any) -> tuple[list[Any], Any]:
        values = [x.value for x in given]
        perturbed = [i for i, x in enumerate(given) if x.perturbed and is_smooth(x.value)]
        function = functools.partial(_with_gradients, fun, len(values), perturbed)
        results = jax.eval_shape(fun, *values)
        smooth = list(filter(is_smooth, results))

        def program(*args: Any) -> list[Any]:
            return run(function, args[: len(values)], args[len(values) :], True)

        def begin_and_keep_all(*values: Any) -> tuple[list[Any], list[Any]]:
            return run(fun, values, [], True), list(values)

        begin, end = _halves(
            jax.make_jaxpr(program)(*values, *smooth), len(values), len(results)
        ) or (begin_and_keep_all, lambda *args: program(*args)[len(results) :])

        # What differentiates these two again gets programs of its own, from the start.
        @jax.custom_vjp
        def first(*values: Any) -> tuple[list[Any], list[Any]]:
            made, kept = begin(*values)
            return leaving(made), kept

        @jax.custom_vjp
        def last(values: Any, kept: Any, cotangents: Any) -> list[Any]:
            return end(*kept, *(c.astype(x.dtype) for c, x in zip(cotangents, smooth, strict=True)))

        def gradients(values: Any, cotangents: Any) -> list[Any]:
            return run(function, values, cotangents, False)[len(results) :]

        def of_gradients(taken: Any, cotangents: Any) -> Any:
            by_values, by_cotangents = jax.vjp(gradients, *taken)[1](cotangents)
            return by_values, None, by_cotangents

        first.defvjp(
            lambda *values: (first(*values), values),
            lambda values, cotangents: jax.vjp(call, *values)[1](cotangents[0]),
        )
        last.defvjp(lambda *args: (last(*args), args[::2]), of_gradients)
        made, kept = first(*values)
        return made, (jax.tree_util.Partial(last), values, kept, dict.fromkeys(perturbed))

    def backward(residuals: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        last, values, kept, perturbed = residuals
        received = [_materialized(x) for x in cotangents if not _is_float0(x)]
        grads = dict(zip(perturbed, last(values, kept, received), strict=True))
        return tuple(grads[i].astype(x.dtype) if i in grads else None for i, x in enumerate(values))

    call.defvjp(forward, backward, symbolic_zeros=True)
    return call(*arrays)


def _with_gradients(fun: Function, arrays: int, perturbed: Sequence[int], *args: Any) -> list[Any]:
    """The function's results, and its gradients by the perturbed arrays.

    Args:
      arrays: how many of the arguments it takes; the others are cotangents.
    """
    values, received = args[:arrays], iter(args[arrays:])

    def of_perturbed(*given: Any) -> list[Any]:
        filled = dict(enumerate(values)) | dict(zip(perturbed, given, strict=True))
        return fun(*filled.values())

    results, pullback = jax.vjp(of_perturbed, *(values[i] for i in perturbed))
    cotangents = [
        next(received).astype(x.dtype) if is_smooth(x) else no_tangent(x) for x in results
    ]
    return [*results, *pullback(cotangents)]


def _halves(
    program: ClosedJaxpr, arrays: int, results: int
) -> tuple[Callable[..., tuple[list[Any], list[Any]]], Function] | None:
    """What a program does before its cotangents are there, and after.

    The first function takes arrays; it gives results, and what is kept. The second takes that and
    cotangents, and gives gradients. None if the results are there after them alone.

    Args:
      arrays: how many arguments are no cotangents.
      results: how many results are no gradients.
    """
    jaxpr, consts = opened(program)
    late = set(jaxpr.invars[arrays:])
    before: list[JaxprEqn] = []
    after: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        is_late = not late.isdisjoint(filter(is_var, eqn.invars))
        late.update(eqn.outvars if is_late else ())
        (after if is_late else before).append(eqn)
    made, gradients = jaxpr.outvars[:results], jaxpr.outvars[results:]
    if not late.isdisjoint(filter(is_var, made)):
        return None
    taken = [*(a for eqn in after for a in eqn.invars), *gradients]
    kept = list(dict.fromkeys(a for a in taken if is_var(a) and a not in late))

    def begin(*values: Any) -> tuple[list[Any], list[Any]]:
        variables = [*jaxpr.constvars, *jaxpr.invars[:arrays]]
        given = dict(zip(variables, [*consts, *values], strict=True))
        found = _made(jaxpr, before, [*made, *kept], given)
        return found[:results], found[results:]

    def end(*values: Any) -> list[Any]:
        given = dict(zip([*kept, *jaxpr.invars[arrays:]], values, strict=True))
        return _made(jaxpr, after, gradients, given)

    return begin, end


def _made(
    jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], wanted: Sequence[Atom], given: Mapping[Var, Any]
) -> list[Any]:
    """What these equations make, or what is given."""
    produced = {v for eqn in eqns for v in eqn.outvars}
    results = [a for a in dict.fromkeys(filter(is_var, wanted)) if a in produced]
    function, invars = cut_out(jaxpr, eqns, results)
    made = dict(zip(results, function(*(given[v] for v in invars)), strict=True))
    return [{**given, **made}[a] if is_var(a) else a.val for a in wanted]


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
    is_forward = eqn.primitive.name == "custom_jvp_call"
    if eqn.params.get("symbolic_zeros") and not is_forward:
        return True
    function, _ = as_traced(eqn)
    closed = closed_over(eqn)

    def slopes(values: Sequence[Any]) -> list[Any]:
        return [jnp.ones_like(x) if is_smooth(x) else no_tangent(x) for x in values]

    def differentiated(*args: Any) -> Any:
        of_others = functools.partial(function, *args[:closed])
        if is_forward:  # there may be no way back, through a loop that ends by itself say
            return jax.jvp(of_others, args[closed:], tuple(slopes(args[closed:])))
        values, pullback = jax.vjp(of_others, *args[closed:])
        return pullback(slopes(values))

    try:
        program = jax.make_jaxpr(differentiated)(*(atom.aval for atom in eqn.invars))
    except Exception:  # the rule's own, of whatever kind: when it is called, it says so itself
        return True
    return any(isinstance(x, jax.core.Tracer) for x in opened(program)[1])
