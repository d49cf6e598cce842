"""Custom derivatives, kept: their rules are traced by `jax.jvp` and `jax.vjp` and evaluated too."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_kit.autocast._evaluator import Site, traced_and_run
from jmp_kit.autocast._flow import bodies_of
from jmp_kit.autocast._jaxpr import cut_out, settled
from jmp_kit.autocast._state import STATE


def _smooth(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def _of_smooth(values: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """Of values one for each output, those of outputs that have a derivative."""
    return [x for x, aval in zip(values, outputs, strict=True) if _smooth(aval.dtype)]


def _no_tangent(shape: Sequence[int]) -> np.ndarray:
    return np.zeros(shape, jax.dtypes.float0)


def _as_traced(site: Site) -> tuple[Callable[..., Sequence[Any]], list[Any]]:
    """The call as a function of all its operands, and the dtypes it was traced with."""
    [body] = bodies_of(site.eqn)
    function, invars = cut_out(body.jaxpr, [site.eqn], site.eqn.outvars)
    positions = [site.eqn.invars.index(var) for var in invars]
    dtypes = [atom.aval.dtype for atom in site.eqn.invars]
    return lambda *args: function(*(args[i] for i in positions)), dtypes


def _closed_over(site: Site) -> int:
    """How many operands, the first ones, the function closes over: JAX differentiates by none."""
    return site.eqn.params["num_consts"]


def custom_jvp(site: Site) -> Sequence[Any]:
    """A call of a function with a rule of its own for `jax.jvp`."""
    [body] = bodies_of(site.eqn)
    closed = _closed_over(site)
    constants, given = site.operands[:closed], site.operands[closed:]
    call = jax.custom_jvp(functools.partial(site.inside(body), *constants))
    as_traced, dtypes = _as_traced(site)
    smooth = [i for i, dtype in enumerate(dtypes) if i >= closed and _smooth(dtype)]
    n_in, outputs = len(site.operands), [var.aval for var in site.eqn.outvars]
    known = site.known

    @call.defjvp
    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        def both(*args: Any) -> list[Any]:
            slopes = [_no_tangent(np.shape(x)) for x in primals]
            for i, slope in zip(smooth, args[n_in:], strict=True):
                slopes[i - closed] = slope
            function = functools.partial(as_traced, *args[:closed])
            values, slopes = jax.jvp(function, args[closed:n_in], tuple(slopes))
            return [*values, *_of_smooth(slopes, outputs)]

        results, _ = traced_and_run(
            site.evaluator,
            both,
            [*constants, *primals, *(tangents[i - closed] for i in smooth)],
            [*dtypes, *(dtypes[i] for i in smooth)],
            [*known.depends, *(known.depends[i] for i in smooth)],
            [*known.origins, *(known.origins[i] for i in smooth)],
            [
                *known.whole,
                *(w for w, a in zip(known.whole, outputs, strict=True) if _smooth(a.dtype)),
            ],
        )
        expected = [x.dtype for x in jax.eval_shape(call, *primals)]
        values, slopes = settled(results[: len(outputs)], expected), iter(results[len(outputs) :])
        return values, [
            settled([next(slopes)], [x.dtype])[0] if _smooth(x.dtype) else _no_tangent(x.shape)
            for x in values
        ]

    return call(*given)


def custom_vjp(site: Site) -> Sequence[Any]:
    """A call of a function with a rule of its own for `jax.vjp`."""
    [body] = bodies_of(site.eqn)
    closed = _closed_over(site)
    constants, given = site.operands[:closed], site.operands[closed:]
    call = jax.custom_vjp(functools.partial(site.inside(body), *constants))
    as_traced, dtypes = _as_traced(site)
    smooth = [i for i, dtype in enumerate(dtypes[closed:]) if _smooth(dtype)]
    outputs = [var.aval for var in site.eqn.outvars]
    known = site.known
    residual_dtypes: list[Any] = []

    def forward(*args: Any) -> tuple[list[Any], Any]:
        treedef = None

        def flat(*args: Any) -> list[Any]:
            nonlocal treedef
            function = functools.partial(as_traced, *args[:closed])
            values, pullback = jax.vjp(function, *args[closed:])
            leaves, treedef = jax.tree.flatten(pullback)
            return [*values, *leaves]

        results, found = traced_and_run(
            site.evaluator,
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
            every = [next(given) if _smooth(a.dtype) else _no_tangent(a.shape) for a in outputs]
            results = jax.tree.unflatten(treedef, args[: len(leaves)])(every)
            return [results[i] for i in smooth]

        results, _ = traced_and_run(
            site.evaluator,
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
