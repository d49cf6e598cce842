"""A program with its products cast by hand, and nothing else: what state is compared with."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

from jmp_kit import PRODUCTS
from jmp_kit.programs import scan_counts


def products_alone(fun: Callable[..., Any], half: Any) -> Callable[..., Any]:
    """`fun` with each product of float32 in half, its result cast back to float32."""

    def call(*args: Any) -> Any:
        jaxpr, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
        results = _run(jaxpr, half, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return call


def _run(closed: Any, half: Any, *args: Any) -> list[Any]:
    if not isinstance(closed, ClosedJaxpr):  # up to JAX 0.11
        closed = ClosedJaxpr(closed, ())
    env = dict(zip(closed.jaxpr.invars, args, strict=True))
    env |= dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in closed.jaxpr.eqns:
        results = _bound(eqn, half, *map(read, eqn.invars))
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in closed.jaxpr.outvars]


def _bound(eqn: Any, half: Any, *args: Any) -> Any:
    name, params = eqn.primitive.name, dict(eqn.params)
    if name in PRODUCTS:
        [result] = eqn.outvars
        if result.aval.dtype == jnp.float32:
            args = [x.astype(half) if x.dtype == jnp.float32 else x for x in args]
            params["preferred_element_type"] = half
        return [eqn.primitive.bind(*args, **params).astype(result.aval.dtype)]
    if name == "scan":
        n_consts, n_carry = scan_counts(eqn)
        consts, start, xs = args[:n_consts], args[n_consts:][:n_carry], args[n_consts + n_carry :]

        def step(carry: Any, x: Any) -> Any:
            results = _run(params["jaxpr"], half, *consts, *carry, *x)
            return results[:n_carry], results[n_carry:]

        loop = {name: params[name] for name in ("length", "reverse", "unroll")}
        carry, ys = lax.scan(step, list(start), list(xs), **loop)
        return [*carry, *ys]
    if name == "while":
        n_test, n_body = params["cond_nconsts"], params["body_nconsts"]
        tested, used, start = args[:n_test], args[n_test:][:n_body], args[n_test + n_body :]
        return lax.while_loop(
            lambda carry: _run(params["cond_jaxpr"], half, *tested, *carry)[0],
            lambda carry: _run(params["body_jaxpr"], half, *used, *carry),
            list(start),
        )
    if name == "cond":
        branches = [lambda *args, b=b: _run(b, half, *args) for b in params["branches"]]
        return lax.switch(args[0], branches, *args[1:])
    for inner in ("jaxpr", "call_jaxpr"):
        if inner in params:
            return _run(params[inner], half, *args)
    results = eqn.primitive.bind(*args, **params)
    return results if eqn.primitive.multiple_results else [results]
