"""Calls, loops and branches, rebuilt around an evaluator of what is inside them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jmp_kit.casting.evaluating._custom_derivatives import custom_jvp, custom_vjp
from jmp_kit.casting.evaluating._site import Site
from jmp_kit.programs._flow import OPEN_CALLS
from jmp_kit.programs._jaxpr import cast, scan_counts, settled, shape_of, where_rows


def _jit(site: Site) -> Sequence[Any]:
    function, params = site.inside(), site.eqn.params
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
    return jax.checkpoint(
        site.inside(),
        prevent_cse=site.eqn.params["prevent_cse"],
        policy=site.eqn.params["policy"],
    )(*site.operands)


def _shard_map(site: Site) -> Sequence[Any]:
    params = site.eqn.params
    return jax.shard_map(
        site.inside(),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=list(params["out_specs"]),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )(*site.operands)


def _opened(site: Site) -> Sequence[Any]:
    """What it is made of: who has a composite as one has it in the dtypes it was traced with."""
    return site.inside()(*site.operands)


def _custom_vmap(site: Site) -> Sequence[Any]:
    """A call of a function with a rule of its own for `jax.vmap`, which runs as it was traced."""
    function = site.inside()
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
    inside = [site.inside(i) for i in range(len(site.call.bodies))]
    # Traced once: what is two branches deep would be evaluated four times.
    branches = [jax.make_jaxpr(branch)(*operands) for branch in inside]
    natural = zip(*(branch.out_avals for branch in branches), strict=True)
    # Half where every branch gives half, else as traced.
    dtypes = [
        found[0].dtype if len({x.dtype for x in found}) == 1 else var.aval.dtype
        for found, var in zip(natural, site.eqn.outvars, strict=True)
    ]

    def agreeing(branch: ClosedJaxpr) -> Callable[..., list[Any]]:
        return lambda *args: settled(jaxpr_as_fun(branch)(*args), dtypes)

    return lax.switch(index, [agreeing(branch) for branch in branches], *operands)


def _scan(site: Site) -> Sequence[Any]:
    n_consts, n_carry = scan_counts(site.eqn)
    consts, start, xs = _parted(site.once_cast(), n_consts, n_carry)
    dtypes, function = site.call.carried, site.inside()

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        results = function(*consts, *carry, *x)
        # What is stacked for products alone is stacked in half, state too.
        ys = [
            cast(y, site.call.half) if multiplied else y
            for y, multiplied in zip(results, site.call.multiplied, strict=True)
        ]
        return settled(results[:n_carry], dtypes), ys[n_carry:]

    params = {name: site.eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(step, settled(start, dtypes), xs, **params)
    return [*carry, *ys]


def _while(site: Site) -> Sequence[Any]:
    n_cond, n_body = site.eqn.params["cond_nconsts"], site.eqn.params["body_nconsts"]
    cond_consts, body_consts, start = _parted(site.once_cast(), n_cond, n_body)
    dtypes, test, step = site.call.carried, site.inside(0), site.inside(1)
    are_several = bool(shape_of(site.call.bodies[0][0].jaxpr.outvars[0]))

    def goes_on(carry: list[Any]) -> Any:
        return jnp.any(test(*cond_consts, *carry)[0])

    def one_round(carry: list[Any]) -> list[Any]:
        new = settled(step(*body_consts, *carry), dtypes)
        if not are_several:
            return new
        # Of several loops in one, as vmap makes them, some have ended.
        goes = test(*cond_consts, *carry)[0]
        return [where_rows(goes, x, old) for x, old in zip(new, carry, strict=True)]

    return lax.while_loop(goes_on, one_round, settled(start, dtypes))


def _parted(operands: Sequence[Any], first: int, second: int) -> tuple[list[Any], ...]:
    parts = operands[:first], operands[first : first + second], operands[first + second :]
    return tuple(map(list, parts))


CALLS: dict[str, Callable[[Site], Sequence[Any]]] = {
    "jit": _jit,
    "pjit": _jit,
    "remat2": _checkpoint,
    "checkpoint": _checkpoint,
    "shard_map": _shard_map,
    "custom_jvp_call": custom_jvp,
    "custom_vjp_call": custom_vjp,
    "composite": _opened,
    **dict.fromkeys(OPEN_CALLS, _opened),
    "custom_vmap_call": _custom_vmap,
    "cond": _cond,
    "scan": _scan,
    "while": _while,
}
