"""Evaluating a plan, step by step. Everything was decided before."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit.casting.evaluating._calls import CALLS
from jmp_kit.casting.evaluating._site import Site
from jmp_kit.casting.evaluating._wide import behind_on_cpus, mapped_together, runnable
from jmp_kit.casting.planning._biases import carrying_bias
from jmp_kit.casting.planning._plan import Barrier, Call, Fixed, Form, Part, Piece, Plan, Stored
from jmp_kit.programs._flow import is_exact
from jmp_kit.programs._jaxpr import Atom, cast, cut_out, is_float32, is_var, retyped, widen
from jmp_kit.programs._marks import marked, marked_dtype

Env = dict[Var, Any]


def evaluated(plan: Plan, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """The results of a program.

    What was float32 when the program was traced may come in, and go out, in half.
    """
    jaxpr = plan.jaxpr
    env: Env = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    made = (v for eqn in jaxpr.eqns for v in eqn.outvars)
    numbers = {v: i for i, v in enumerate(made)}
    for step in plan.steps:
        match step:
            case Barrier(eqn):
                env.update(zip(eqn.outvars, _behind(step, env), strict=True))
            case Fixed(piece):
                env.update(_piece(jaxpr, piece, dict(env)))
            case Part():
                _part(jaxpr, step, env, numbers)
            case Call(eqn):
                env.update(zip(eqn.outvars, _call(jaxpr, step, env), strict=True))
    return [_read(atom, env) for atom in jaxpr.outvars]


def _read(atom: Atom, env: Mapping[Var, Any]) -> Any:
    return env[atom] if is_var(atom) else atom.val


def _behind(barrier: Barrier, env: Mapping[Var, Any]) -> Sequence[Any]:
    values = [_read(a, env) for a in barrier.eqn.invars]
    behind = behind_on_cpus if barrier.on_cpus else lax.optimization_barrier
    result: Sequence[Any] = behind(values)
    return result


def _piece(jaxpr: Jaxpr, piece: Piece, env: Env) -> dict[Var, Any]:
    """The results of a piece, of what it takes in this environment."""
    _move(jaxpr, piece, env)
    moved = {v for eqn in piece.moved for v in eqn.outvars}
    computed = [v for v in piece.results if v not in moved]
    joined = _joined(piece)
    computing = [e for e in piece.eqns if joined.isdisjoint(e.outvars)]
    function, invars = cut_out(jaxpr, computing, computed)
    env.update(zip(computed, function(*(widen(env[v], v) for v in invars)), strict=True))
    return {v: env[v] for v in piece.results}


def _move(jaxpr: Jaxpr, piece: Piece, env: Env) -> None:
    """What a piece moves before it computes, into the environment."""
    for eqn in piece.moved:
        operands = (_read(a, env) for a in eqn.invars if is_var(a) and is_float32(a))
        dtype = jnp.result_type(*operands)
        env.update(zip(eqn.outvars, _in_dtype(jaxpr, eqn, dtype, env), strict=True))


def _joined(piece: Piece) -> set[Var]:
    """What a piece computes with as it was joined: XLA would join all of it in float32."""
    added: set[Var] = set()
    found: set[Var] = set()
    for eqn in piece.moved:
        if not is_exact(eqn) or not added.isdisjoint(filter(is_var, eqn.invars)):
            added.update(eqn.outvars)  # in half, which no other equation takes
        elif eqn.primitive.name == "concatenate":
            found.update(eqn.outvars)
    return found


def _shaped(x: Any, v: Var) -> Any:
    """The value with a variable's axes."""
    return lax.reshape(x, v.aval.shape)


def _part(jaxpr: Jaxpr, part: Part, env: Env, numbers: Mapping[Var, int]) -> None:
    """A part, its results into the environment.

    Args:
      numbers: of each variable of the program, one of its own.
    """
    eqns = [e for piece in part.segment for e in piece.eqns] + [e for e, _ in part.products]
    _, invars = cut_out(jaxpr, eqns, part.results)

    def results(*args: Any) -> list[Any]:
        values = dict(zip(invars, args, strict=True))
        behind: dict[tuple[Var, ...], Any] = {}
        for piece in part.segment:
            for v, x in _made(jaxpr, piece, values, behind, numbers).items():
                if v in part.stored:
                    with _named(part.stored[v].eqn):
                        x = _stored(x, part.stored[v])
                values[v] = _shaped(x, v) if piece.matrices else x
        for eqn, half in part.products:
            operands = {**values, **dict(_alone(half, values, part.alone.get(eqn.outvars[0], {})))}
            if half is not None and eqn.outvars[0] in part.summed:
                made = [_summed(jaxpr, eqn, half, operands, part.summed[eqn.outvars[0]])]
            else:
                made = _closed(jaxpr, eqn, half, operands)
            values.update(zip(eqn.outvars, made, strict=True))
        return [values[v] for v in part.results]

    if part.saveable:
        results = jax.checkpoint(results, policy=part.saveable)
    args = [cast(env[v], part.halved[v]) if v in part.halved else env[v] for v in invars]
    env.update(zip(part.results, results(*args), strict=True))
    for result, bias in part.biases.items():
        env[result] = carrying_bias(env[result], env[bias])
        env[bias] = lax.stop_gradient(env[bias])


def _named(eqn: JaxprEqn) -> contextlib.AbstractContextManager[Any]:
    """The names around an equation, for what is done beside it."""
    stack = str(eqn.source_info.name_stack)
    return jax.named_scope(stack) if stack else contextlib.nullcontext()


def _made(
    jaxpr: Jaxpr,
    piece: Piece,
    values: Mapping[Var, Any],
    behind: dict[tuple[Var, ...], Sequence[Any]],
    numbers: Mapping[Var, int],
) -> dict[Var, Any]:
    """The results of a piece of a segment, those of matrices as matrices.

    Args:
      behind, numbers: see `_apart`.
    """
    env = dict(values)
    run, names = piece.matrices or (piece, {})
    if piece.matrices:
        _move(jaxpr, piece, env)
        env.update((name, _shaped(env[v], name)) for v, name in names.items() if v in env)
    env.update(zip(run.apart, _apart(run, env, behind, numbers), strict=True))
    made = _piece(jaxpr, run, env)
    return {v: made[names.get(v, v)] for v in piece.results}


def _apart(
    piece: Piece,
    values: Mapping[Var, Any],
    behind: dict[tuple[Var, ...], Sequence[Any]],
    numbers: Mapping[Var, int],
) -> Sequence[Any]:
    """What a piece does not share with others, as XLA does not know it to be the same.

    Args:
      behind: what is behind a barrier. XLA takes two of the same values for one.
      numbers: see `_part`. XLA takes two choices between the same values for one.
    """
    apart = tuple(piece.apart)
    if not apart:
        return []
    if not piece.where_it_lies:
        before = behind.get(apart) or [values[v] for v in apart]
        behind[apart] = lax.optimization_barrier(before)
        return behind[apart]
    number = np.float32(numbers[piece.results[0]] if piece.is_dear else 0)
    opaque, other = lax.optimization_barrier((np.True_, number))
    return [_chosen(values[v], opaque, other if piece.is_dear else 0) for v in apart]


def _chosen(x: Any, opaque: Any, other: Any = 0) -> Any:
    """The value, if that is true, which XLA does not know; else this one."""
    return lax.select_n(opaque, lax.full_like(x, other), x)


def _stored(x: Any, stored: Stored) -> Any:
    """The value as it gets into memory.

    XLA on GPUs deletes a cast to half and back, and stores float32. It sees through neither a
    barrier, which keeps apart what makes the value and what takes it, nor a choice that is made
    when the program runs, which it fuses with both.
    """
    half = cast(x, stored.dtype) if stored.form else x
    match stored.form:
        case Form.APART | Form.ADDED:
            return lax.optimization_barrier(half)
        case Form.FUSED:
            return _chosen(half, lax.optimization_barrier(np.True_))
        case _:
            return half


def _alone(
    half: np.dtype | None, values: Mapping[Var, Any], behind: Mapping[Var, int]
) -> Iterator[tuple[Var, Any]]:
    """Operands of a product that XLA is not to join with others, as it takes them."""
    for v, count in behind.items():
        x = cast(values[v], half) if is_float32(v) else values[v]
        for _ in range(count):
            x = lax.optimization_barrier(x)
        yield v, x


def _closed(jaxpr: Jaxpr, eqn: JaxprEqn, half: np.dtype | None, env: Mapping[Var, Any]) -> Any:
    """The results of a product, or of a kernel that runs as it was traced."""
    if half is None:
        function, invars = cut_out(jaxpr, [eqn], eqn.outvars)
        return function(*(widen(env[v], v) for v in invars))
    return _in_dtype(jaxpr, eqn if marked_dtype(eqn) else marked(eqn, half), half, env)


def _summed(
    jaxpr: Jaxpr, eqn: JaxprEqn, half: np.dtype, env: Mapping[Var, Any], dtype: np.dtype
) -> Any:
    """The result of a product of halves, in float32 where devices sum it up, then in this dtype.

    Its derivatives are products in half: those of a product that gives float32 take float32.
    """
    eqn = eqn if marked_dtype(eqn) else marked(eqn, half)
    narrow, wide = _retyped(eqn, half, half), _retyped(eqn, half, np.dtype(np.float32))
    as_half, _ = cut_out(jaxpr, [narrow], narrow.outvars)
    as_wide, taken = cut_out(jaxpr, runnable(wide), wide.outvars)

    @jax.custom_jvp
    @mapped_together
    def summed(*operands: Any) -> Any:
        values = dict(zip(wide.invars, operands, strict=True))
        [result] = as_wide(*(values[v] for v in taken))
        return cast(result, dtype)

    def derivative(operands: Any, tangents: Any) -> Any:
        _, [tangent] = jax.jvp(as_half, operands, tangents)
        return summed(*operands), cast(tangent, dtype)

    summed.defjvp(derivative)
    return summed(*_operands(eqn, narrow, env))


def _in_dtype(jaxpr: Jaxpr, eqn: JaxprEqn, dtype: np.dtype, env: Mapping[Var, Any]) -> Any:
    """An equation's results, what is float32 in it in this dtype."""
    other = _retyped(eqn, dtype, dtype)
    function, _ = cut_out(jaxpr, [other], other.outvars)
    return function(*_operands(eqn, other, env))


def _operands(eqn: JaxprEqn, other: JaxprEqn, env: Mapping[Var, Any]) -> list[Any]:
    """What an equation takes, in the dtypes that another takes it in."""
    with _named(eqn):
        operands = (_read(a, env) for a in eqn.invars)
        return [cast(x, v.aval.dtype) for x, v in zip(operands, other.invars, strict=True)]


def _retyped(eqn: JaxprEqn, taken: np.dtype, given: np.dtype) -> JaxprEqn:
    """An equation, float32 in it in these dtypes."""

    def in_dtype(atom: Atom, dtype: np.dtype) -> Var:
        return retyped(atom, dtype if is_float32(atom) else atom.aval.dtype)

    invars = [in_dtype(a, taken) for a in eqn.invars]
    outvars = [in_dtype(a, given) for a in eqn.outvars]
    params = dict(eqn.params)
    if "preferred_element_type" in params and is_float32(eqn.outvars[0]):
        params["preferred_element_type"] = given
    return eqn.replace(invars=invars, outvars=outvars, params=params)


def _call(jaxpr: Jaxpr, call: Call, env: Mapping[Var, Any]) -> Sequence[Any]:
    if not call.bodies:
        return _closed(jaxpr, call.eqn, None, env)
    operands = [_read(a, env) for a in call.eqn.invars]
    return CALLS[call.eqn.primitive.name](Site(call, operands, evaluated))
