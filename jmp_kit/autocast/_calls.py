"""Calls, loops and branches, rebuilt around an evaluator of what is inside them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn

from jmp_kit.autocast._custom_derivatives import custom_jvp, custom_vjp
from jmp_kit.autocast._evaluator import Evaluator, inside
from jmp_kit.autocast._flow import Body, bodies_of
from jmp_kit.autocast._jaxpr import is_float32, scan_counts, settled

Call = Callable[[Evaluator, JaxprEqn, Sequence[Any], Sequence[bool], Sequence[bool]], Sequence[Any]]


def _jit(
    evaluator: Evaluator,
    eqn: JaxprEqn,
    operands: Sequence[Any],
    depends: Sequence[bool],
    reaches: Sequence[bool],
) -> Sequence[Any]:
    [body] = bodies_of(eqn)
    function, params = inside(evaluator, body, depends, reaches), eqn.params
    function.__name__ = params["name"]
    return jax.jit(
        function,
        in_shardings=_specified(params["in_shardings"]),
        out_shardings=list(_specified(params["out_shardings"])),
        donate_argnums=[i for i, donated in enumerate(params["donated_invars"]) if donated],
        keep_unused=params["keep_unused"],
        inline=params["inline"],
        compiler_options=dict(params["compiler_options_kvs"]) or None,
    )(*operands)


def _specified(shardings: Sequence[Any]) -> Any:
    return tuple(s if isinstance(s, jax.sharding.Sharding) else None for s in shardings)


def _checkpoint(
    evaluator: Evaluator,
    eqn: JaxprEqn,
    operands: Sequence[Any],
    depends: Sequence[bool],
    reaches: Sequence[bool],
) -> Sequence[Any]:
    [body] = bodies_of(eqn)
    return jax.checkpoint(
        inside(evaluator, body, depends, reaches),
        prevent_cse=eqn.params["prevent_cse"],
        policy=eqn.params["policy"],
    )(*operands)


def _shard_map(
    evaluator: Evaluator,
    eqn: JaxprEqn,
    operands: Sequence[Any],
    depends: Sequence[bool],
    reaches: Sequence[bool],
) -> Sequence[Any]:
    [body] = bodies_of(eqn)
    params = eqn.params
    return jax.shard_map(
        inside(evaluator, body, depends, reaches),
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=list(params["out_specs"]),
        axis_names=set(params["newly_manual_axes"]),
        check_vma=params["check_vma"],
    )(*operands)


def _cond(
    evaluator: Evaluator,
    eqn: JaxprEqn,
    operands: Sequence[Any],
    depends: Sequence[bool],
    reaches: Sequence[bool],
) -> Sequence[Any]:
    index, *operands = operands
    branches = [inside(evaluator, body, depends, reaches) for body in bodies_of(eqn)]
    natural = zip(*(jax.eval_shape(branch, *operands) for branch in branches), strict=True)
    # Half where every branch gives half, else as traced.
    dtypes = [
        found[0].dtype if len({x.dtype for x in found}) == 1 else var.aval.dtype
        for found, var in zip(natural, eqn.outvars, strict=True)
    ]

    def agreeing(branch: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        return lambda *args: settled(branch(*args), dtypes)

    return lax.switch(index, [agreeing(branch) for branch in branches], *operands)


def _scan(
    evaluator: Evaluator,
    eqn: JaxprEqn,
    operands: Sequence[Any],
    depends: Sequence[bool],
    reaches: Sequence[bool],
) -> Sequence[Any]:
    [body] = bodies_of(eqn)
    n_consts, n_carry = scan_counts(eqn)
    fixed, start = operands[:n_consts], operands[n_consts : n_consts + n_carry]
    dtypes = _carry_dtypes(evaluator, body, depends)
    function = inside(evaluator.inside_loop(), body, depends, reaches)

    def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        results = function(*fixed, *carry, *x)
        return settled(results[:n_carry], dtypes), results[n_carry:]

    carry, ys = lax.scan(
        step,
        settled(start, dtypes),
        list(operands[n_consts + n_carry :]),
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    return [*carry, *ys]


def _while(
    evaluator: Evaluator,
    eqn: JaxprEqn,
    operands: Sequence[Any],
    depends: Sequence[bool],
    reaches: Sequence[bool],
) -> Sequence[Any]:
    condition, body = bodies_of(eqn)
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond_consts, body_consts = operands[:n_cond], operands[n_cond : n_cond + n_body]
    dtypes = _carry_dtypes(evaluator, body, depends)
    # What the body makes of its variables, the condition gets.
    inputs = evaluator.flow.body_inputs(body, depends)
    cond_depends = [*depends[:n_cond], *inputs[n_body:]]
    holds = evaluator.inside_loop()
    step = inside(holds, body, depends, reaches)

    def test(carry: list[Any]) -> Any:
        args = [*cond_consts, *carry]
        return holds.run(condition.jaxpr, condition.consts, args, cond_depends, [False])[0]

    return lax.while_loop(
        test,
        lambda carry: settled(step(*body_consts, *carry), dtypes),
        settled(operands[n_cond + n_body :], dtypes),
    )


def _carry_dtypes(evaluator: Evaluator, body: Body, depends: Sequence[bool]) -> list[Any]:
    """Half what depends on a product and feeds one in the body itself, the rest as traced."""
    flow = evaluator.flow
    inputs = flow.body_inputs(body, depends)
    inner = flow.body_outputs(body, [False] * (max(body.outputs, default=-1) + 1))
    reaching = flow.reaching(body.jaxpr, inner)
    dtypes = []
    for _, variable in body.carried:
        var = body.jaxpr.invars[variable]
        half = is_float32(var) and inputs[variable] and var in reaching
        dtypes.append(evaluator.half if half else var.aval.dtype)
    return dtypes


CALLS: dict[str, Call] = {
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
