"""Calls, loops and branches, rebuilt around an evaluator of what is inside them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from jmp_kit.autocast._custom_derivatives import custom_jvp, custom_vjp
from jmp_kit.autocast._evaluator import Site
from jmp_kit.autocast._flow import Body, bodies_of
from jmp_kit.autocast._jaxpr import is_float32, scan_counts, settled


def _jit(site: Site) -> Sequence[Any]:
    [body] = bodies_of(site.eqn)
    function, params = site.inside(body), site.eqn.params
    function.__name__ = params["name"]
    return jax.jit(
        function,
        in_shardings=_specified(params["in_shardings"]),
        out_shardings=list(_specified(params["out_shardings"])),
        donate_argnums=[i for i, donated in enumerate(params["donated_invars"]) if donated],
        keep_unused=params["keep_unused"],
        inline=params["inline"],
        compiler_options=dict(params["compiler_options_kvs"]) or None,
    )(*site.operands)


def _specified(shardings: Sequence[Any]) -> Any:
    return tuple(s if isinstance(s, jax.sharding.Sharding) else None for s in shardings)


def _checkpoint(site: Site) -> Sequence[Any]:
    [body] = bodies_of(site.eqn)
    return jax.checkpoint(
        site.inside(body),
        prevent_cse=site.eqn.params["prevent_cse"],
        policy=site.eqn.params["policy"],
    )(*site.operands)


def _shard_map(site: Site) -> Sequence[Any]:
    [body] = bodies_of(site.eqn)
    params = site.eqn.params
    return jax.shard_map(
        site.inside(body),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=list(params["out_specs"]),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )(*site.operands)


def _cond(site: Site) -> Sequence[Any]:
    index, *operands = site.operands
    branches = [site.inside(body) for body in bodies_of(site.eqn)]
    natural = zip(*(jax.eval_shape(branch, *operands) for branch in branches), strict=True)
    # Half where every branch gives half, else as traced.
    dtypes = [
        found[0].dtype if len({x.dtype for x in found}) == 1 else var.aval.dtype
        for found, var in zip(natural, site.eqn.outvars, strict=True)
    ]

    def agreeing(branch: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        return lambda *args: settled(branch(*args), dtypes)

    return lax.switch(index, [agreeing(branch) for branch in branches], *operands)


def _scan(site: Site) -> Sequence[Any]:
    [body] = bodies_of(site.eqn)
    n_consts, n_carry = scan_counts(site.eqn)
    consts, start, xs = _parted(site.operands, n_consts, n_carry)
    dtypes = _carry_dtypes(site, body)
    function = site.inside(body)

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        results = function(*consts, *carry, *x)
        return settled(results[:n_carry], dtypes), results[n_carry:]

    params = {name: site.eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(step, settled(start, dtypes), xs, **params)
    return [*carry, *ys]


def _while(site: Site) -> Sequence[Any]:
    condition, body = bodies_of(site.eqn)
    n_cond, n_body = site.eqn.params["cond_nconsts"], site.eqn.params["body_nconsts"]
    cond_consts, body_consts, start = _parted(site.operands, n_cond, n_body)
    dtypes = _carry_dtypes(site, body)
    # The condition gets what the body makes of its variables.
    carried = site.evaluator.flow.body_inputs(body, site.depends)[n_body:]
    test = site._replace(depends=[*site.depends[: n_cond + n_body], *carried]).inside(condition)
    step = site.inside(body)
    return lax.while_loop(
        lambda carry: test(*cond_consts, *carry)[0],
        lambda carry: settled(step(*body_consts, *carry), dtypes),
        settled(start, dtypes),
    )


def _parted(operands: Sequence[Any], first: int, second: int) -> tuple[list[Any], ...]:
    parts = operands[:first], operands[first : first + second], operands[first + second :]
    return tuple(map(list, parts))


def _carry_dtypes(site: Site, body: Body) -> list[Any]:
    """Half what depends on a product and feeds one in the body itself, the rest as traced."""
    flow = site.evaluator.flow
    depends = flow.body_inputs(body, site.depends)
    feeds = flow.reaching(body.jaxpr, flow.body_outputs(body, [False] * len(site.eqn.outvars)))
    dtypes = []
    for _, variable in body.carried:
        var = body.jaxpr.invars[variable]
        half = is_float32(var) and depends[variable] and var in feeds
        dtypes.append(site.evaluator.half if half else var.aval.dtype)
    return dtypes


CALLS: dict[str, Callable[[Site], Sequence[Any]]] = {
    "jit": _jit,
    "pjit": _jit,
    "remat2": _checkpoint,
    "checkpoint": _checkpoint,
    "shard_map": _shard_map,
    "custom_jvp_call": custom_jvp,
    "custom_vjp_call": custom_vjp,
    "cond": _cond,
    "scan": _scan,
    "while": _while,
}
