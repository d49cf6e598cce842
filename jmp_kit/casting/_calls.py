"""Calls, loops and branches, rebuilt around an evaluator of what is inside them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from jmp_kit.casting._custom_derivatives import custom_jvp, custom_vjp
from jmp_kit.casting._evaluator import ANEW, CARRIED, LEADS, SMALL, UPDATED, Site
from jmp_kit.casting._parts import parts_of
from jmp_kit.casting._state import STATE
from jmp_kit.programs._flow import Body, bodies_of
from jmp_kit.programs._jaxpr import cast, is_float32, is_small, scan_counts, settled, where_rows


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


def _opened(site: Site) -> Sequence[Any]:
    """What it is made of: who has a composite as one has it in the dtypes it was traced with."""
    [body] = bodies_of(site.eqn)
    return site.inside(body)(*site.operands)


def _custom_vmap(site: Site) -> Sequence[Any]:
    """A call of a function with a rule of its own for `jax.vmap`, which runs as it was traced."""
    [body] = bodies_of(site.eqn)
    function = site.inside(body)
    call = jax.custom_batching.custom_vmap(function)
    dtypes, tree = [atom.aval.dtype for atom in site.eqn.invars], site.eqn.params["in_tree"]
    expected = [x.dtype for x in jax.eval_shape(function, *site.operands)]

    @call.def_vmap
    def rule(size: int, batched: Sequence[bool], *args: Any) -> tuple[list[Any], list[bool]]:
        given = (jax.tree.unflatten(tree, x) for x in (batched, settled(args, dtypes)))
        which, values = map(list, given)
        results, batched = site.eqn.params["rule"](size, which, *values)
        return settled(jax.tree.leaves(results), expected), jax.tree.leaves(batched)

    return call(*site.operands)


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
        # What is stacked for products alone is stacked in half, state too.
        ys = [
            cast(y, site.evaluator.half) if multiplied else y
            for y, multiplied in zip(results, site.multiplied, strict=True)
        ]
        return settled(results[:n_carry], dtypes), ys[n_carry:]

    params = {name: site.eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(step, settled(start, dtypes), xs, **params)
    return [*carry, *ys]


def _while(site: Site) -> Sequence[Any]:
    condition, body = bodies_of(site.eqn)
    n_cond, n_body = site.eqn.params["cond_nconsts"], site.eqn.params["body_nconsts"]
    cond_consts, body_consts, start = _parted(site.operands, n_cond, n_body)
    dtypes = _carry_dtypes(site, body)
    # The condition gets what the body makes of its variables.
    inside = site.known_inside(body)
    known = site.known._replace(
        depends=[*site.known.depends[: n_cond + n_body], *inside.depends[n_body:]],
        origins=[*site.known.origins[: n_cond + n_body], *inside.origins[n_body:]],
    )
    test = site._replace(known=known).inside(condition)
    step = site.inside(body)

    def goes_on(carry: list[Any]) -> Any:
        return jnp.any(test(*cond_consts, *carry)[0])

    def one_round(carry: list[Any]) -> list[Any]:
        new = settled(step(*body_consts, *carry), dtypes)
        if not condition.jaxpr.outvars[0].aval.shape:
            return new
        # Of several loops in one, as vmap makes them, some have ended.
        goes = test(*cond_consts, *carry)[0]
        return [where_rows(goes, x, old) for x, old in zip(new, carry, strict=True)]

    return lax.while_loop(goes_on, one_round, settled(start, dtypes))


def _parted(operands: Sequence[Any], first: int, second: int) -> tuple[list[Any], ...]:
    parts = operands[:first], operands[first : first + second], operands[first + second :]
    return tuple(map(list, parts))


def _carry_dtypes(site: Site, body: Body) -> list[Any]:
    """Half what depends on a product, feeds one in the body itself, is large and made anew."""
    flow, known = site.evaluator.flow, site.known_inside(body)
    within = flow.body_outputs(body, [False] * len(site.eqn.outvars))
    feeds = flow.reaching(body.jaxpr, within)
    segments = [
        [e for e in part if not flow.is_product(e) and not flow.holds_product(e)]
        for part in parts_of(body.jaxpr.eqns, flow)
    ]
    dtypes = []
    for result, variable in body.carried:
        var, made = body.jaxpr.invars[variable], body.jaxpr.outvars[result]
        dtype = var.aval.dtype
        if is_float32(var) and known.depends[variable] and var in feeds:
            beside = [e for s in segments if _takes_part(s, (var, made)) for e in s]
            if known.whole[result]:
                why = UPDATED if known.origins[variable] & STATE else LEADS
            elif is_small(var, beside):
                why = SMALL
            else:
                dtype, why = site.evaluator.half, ANEW
            site.evaluator.note(site.eqn, var, dtype, f"{CARRIED}, {why}")
        dtypes.append(dtype)
    return dtypes


def _takes_part(segment: Sequence[JaxprEqn], atoms: Sequence[Any]) -> bool:
    return any(a is b for e in segment for a in (*e.invars, *e.outvars) for b in atoms)


CALLS: dict[str, Callable[[Site], Sequence[Any]]] = {
    "jit": _jit,
    "pjit": _jit,
    "remat2": _checkpoint,
    "checkpoint": _checkpoint,
    "shard_map": _shard_map,
    "custom_jvp_call": custom_jvp,
    "custom_vjp_call": custom_vjp,
    "composite": _opened,
    "eval_jaxpr": _opened,
    "custom_vmap_call": _custom_vmap,
    "cond": _cond,
    "scan": _scan,
    "while": _while,
}
