"""Custom derivatives, kept: their rules are traced by `jax.jvp` and `jax.vjp` and evaluated too."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn

from jmp_kit.casting.evaluating._site import Site
from jmp_kit.casting.reading._state import STATE
from jmp_kit.programs._flow import bodies_of
from jmp_kit.programs._jaxpr import cut_out, settled


def as_traced(eqn: JaxprEqn) -> tuple[Callable[..., Sequence[Any]], list[Any]]:
    """A call as a function of all its operands, and the dtypes it was traced with."""
    [body] = bodies_of(eqn)
    function, invars = cut_out(body.jaxpr, [eqn], eqn.outvars)
    positions = [eqn.invars.index(var) for var in invars]
    dtypes = [atom.aval.dtype for atom in eqn.invars]
    return lambda *args: function(*(args[i] for i in positions)), dtypes


def closed_over(eqn: JaxprEqn) -> int:
    """How many operands, the first ones, the function closes over: JAX differentiates by none."""
    count: int = eqn.params["num_consts"]
    return count


def is_smooth(x: Any) -> bool:
    """Whether it has a derivative."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def no_tangent(x: Any) -> Any:
    """The tangent of what has no derivative."""
    return np.zeros(np.shape(x), jax.dtypes.float0)


def _of_smooth(values: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """Of values one for each output, those of outputs that have a derivative."""
    return [x for x, aval in zip(values, outputs, strict=True) if is_smooth(aval)]


def custom_jvp(site: Site) -> Sequence[Any]:
    """A call of a function with a rule of its own for `jax.jvp`."""
    closed = closed_over(site.eqn)
    constants, given = site.operands[:closed], site.operands[closed:]
    call = jax.custom_jvp(functools.partial(site.inside(), *constants))
    call_as_traced, dtypes = as_traced(site.eqn)
    n_in, outputs = len(site.operands), [var.aval for var in site.eqn.outvars]
    known = site.call.known

    @functools.partial(call.defjvp, symbolic_zeros=True)
    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        moving = [i for i, x in enumerate(tangents, closed) if not isinstance(x, SymbolicZero)]

        def both(*args: Any) -> list[Any]:
            def of_moving(*given: Any) -> Sequence[Any]:
                filled = dict(enumerate(args[:n_in])) | dict(zip(moving, given, strict=True))
                return call_as_traced(*filled.values())

            values, slopes = jax.jvp(of_moving, tuple(args[i] for i in moving), args[n_in:])
            return [*values, *_of_smooth(slopes, outputs)]

        results, _ = site.traced_and_run(
            both,
            [*constants, *primals, *(tangents[i - closed] for i in moving)],
            [*dtypes, *(dtypes[i] for i in moving)],
            [*known.depends, *(known.depends[i] for i in moving)],
            [*known.origins, *(known.origins[i] for i in moving)],
            [
                *known.whole,
                *(w for w, a in zip(known.whole, outputs, strict=True) if is_smooth(a)),
            ],
        )
        expected = [x.dtype for x in jax.eval_shape(call, *primals)]
        values, slopes = settled(results[: len(outputs)], expected), iter(results[len(outputs) :])
        return values, [
            settled([next(slopes)], [x.dtype])[0] if is_smooth(x) else no_tangent(x) for x in values
        ]

    return call(*given)


def custom_vjp(site: Site) -> Sequence[Any]:
    """A call of a function with a rule of its own for `jax.vjp`."""
    closed = closed_over(site.eqn)
    constants, given = site.operands[:closed], site.operands[closed:]
    call = jax.custom_vjp(functools.partial(site.inside(), *constants))
    call_as_traced, dtypes = as_traced(site.eqn)
    smooth = [i for i, a in enumerate(site.eqn.invars[closed:]) if is_smooth(a.aval)]
    outputs = [var.aval for var in site.eqn.outvars]
    known = site.call.known
    residual_dtypes: list[Any] = []

    def forward(*args: Any) -> tuple[list[Any], Any]:
        treedef = None

        def flat(*args: Any) -> list[Any]:
            nonlocal treedef
            function = functools.partial(call_as_traced, *args[:closed])
            values, pullback = jax.vjp(function, *args[closed:])
            leaves, treedef = jax.tree.flatten(pullback)
            return [*values, *leaves]

        results, found = site.traced_and_run(
            flat,
            [*constants, *args],
            dtypes,
            known.depends,
            known.origins,
            known.whole,
        )
        residual_dtypes[:] = found[len(outputs) :]
        expected = [x.dtype for x in jax.eval_shape(call, *args)]
        pullback = jax.tree.unflatten(treedef, results[len(outputs) :])
        like = [jnp.zeros((), x.dtype) for x in args]
        return settled(results[: len(outputs)], expected), (pullback, like)

    def backward(residuals: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        pullback, like = residuals
        leaves, treedef = jax.tree.flatten(pullback)
        received = _of_smooth(cotangents, outputs)

        def flat(*args: Any) -> list[Any]:
            given = iter(args[len(leaves) :])
            every = [next(given) if is_smooth(a) else no_tangent(a) for a in outputs]
            results = jax.tree.unflatten(treedef, args[: len(leaves)])(every)
            return [results[i] for i in smooth]

        results, _ = site.traced_and_run(
            flat,
            [*leaves, *received],
            [*residual_dtypes, *_of_smooth([a.dtype for a in outputs], outputs)],
            [True] * (len(leaves) + len(received)),
            # The cotangent of state is state.
            [0] * len(leaves) + [STATE * whole for whole in _of_smooth(known.whole, outputs)],
            [bool(known.origins[closed + i] & STATE) for i in smooth],
        )
        given = dict(zip(smooth, results, strict=True))
        return tuple(
            settled([given[i]], [x.dtype])[0] if i in given else None for i, x in enumerate(like)
        )

    call.defvjp(forward, backward)
    return call(*given)
