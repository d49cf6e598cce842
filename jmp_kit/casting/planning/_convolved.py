"""What a convolution's kernel adds before it writes its result, on NVIDIA GPUs.

    y = half(relu(float32(half(conv(x, w))) + b + z))    as planned, in two kernels
    y = relu(half(conv(x, w)) + half(b) + z)             what XLA takes for one kernel of cuDNN's

A bias, and then a shortcut z, which is there in half, or a ReLU, or both.

That kernel adds in float32, and rounds once. XLA looks for it where everything is in half, and only
where nothing else takes what is in between. Where a derivative is taken of it, or on other devices,
nothing changes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit.casting.planning._plan import Piece
from jmp_kit.casting.rewriting._signs import is_positive_part
from jmp_kit.programs._flow import ADDS, MOVED
from jmp_kit.programs._jaxpr import (
    Atom,
    cast,
    cut_out,
    equations_of,
    is_var,
    shape_of,
    size_of,
)

Uses = Mapping[Var, Sequence[JaxprEqn | None]]


def convolved(
    eqns: Sequence[JaxprEqn],
    products: Mapping[Var, JaxprEqn],
    uses: Uses,
    depends: Callable[[Atom], bool],
) -> dict[Var, list[JaxprEqn]]:
    """What adds a bias to a convolution, and then what its kernel may do, by what they give.

    Args:
      eqns: all equations of a program.
      products: those that are products in half, by what they give.
      uses: the equations that take each variable; None for a result.
      depends: whether a value depends on a product: others are not there in half.
    """
    spread = {e.outvars[0]: e.invars[0] for e in eqns if e.primitive.name == "broadcast_in_dim"}

    def after(v: Var) -> tuple[list[JaxprEqn], JaxprEqn | None]:
        """What moves it, and then takes it, and nothing else does."""
        moves, taker = [], _alone(uses[v])
        while taker is not None and taker.primitive.name in MOVED:
            moves.append(taker)
            taker = _alone(uses[taker.outvars[0]])
        return moves, taker

    shifted = []  # what adds a bias to each
    for product, eqn in products.items():
        moves, add = after(product) if _is_convolution(eqn) else ([], None)
        if add is None or add.primitive.name != "add":
            continue
        channels = shape_of(product)[eqn.params["dimension_numbers"].out_spec[1]]
        biases = [a for a in add.invars if a not in (product, *_results(moves))]
        if all(is_var(a) and size_of(spread.get(a, a)) == channels for a in biases):
            shifted.append([*moves, add])
    ends = [(several, *after(_result(several))) for several in shifted]

    def adds_a_shortcut(eqn: JaxprEqn) -> bool:
        if eqn.primitive.name not in ADDS or len({*map(shape_of, eqn.invars)}) > 1:
            return False
        return all(depends(a) and a not in spread for a in eqn.invars)

    found: dict[Var, list[JaxprEqn]] = {}
    for several in shifted:
        found[_result(several)] = several
        for is_taken in adds_a_shortcut, is_positive_part:
            moves, taker = after(_result(several))
            if taker is not None and is_taken(taker):
                beside = [e for e in ends if e[2] is taker and e[0] is not several]
                others = [e for shift, moves, _ in beside for e in (*shift, *moves)]
                several = [*several, *moves, *others, taker]
                found[_result(several)] = several
    return found


def in_one_kernel(
    jaxpr: Jaxpr, pieces: Iterable[Piece], found: Mapping[Var, list[JaxprEqn]], half: np.dtype
) -> Iterator[Piece]:
    """Pieces of a program, with such equations as one.

    Args:
      found: see `convolved`; of these, what is stored in half.
      half: the dtype that they and the convolutions are stored in.
    """
    for piece in pieces:
        made = {v: e for e in piece.eqns for v in e.outvars}
        whole = {v: e for v, e in found.items() if made.keys() >= {*_results(e)}}
        whole = {v: e for v, e in whole.items() if _is_there(e, made)}
        parts = {v for several in whole.values() for v in _results(several)}
        eqns: list[JaxprEqn] = []
        for eqn in piece.eqns:
            if whole.keys() & set(eqn.outvars):
                [result] = eqn.outvars
                as_it_was, taken = cut_out(jaxpr, whole[result], [result])
                function = _at_once(as_it_was, whole[result], taken, half)
                eqns += equations_of(function, taken, [result], eqn.source_info)
            elif parts.isdisjoint(eqn.outvars):
                eqns.append(eqn)
        yield piece._replace(eqns=eqns)


def _at_once(
    as_it_was: Callable[..., Any], eqns: Sequence[JaxprEqn], taken: Sequence[Var], half: np.dtype
) -> Any:
    """What these equations give of these values, in half for XLA to see it."""

    def in_half(*xs: jax.Array) -> Any:
        env = dict(zip(taken, (cast(x, half) for x in xs), strict=True))
        for eqn in eqns:
            first, *other = (env[a] for a in eqn.invars if is_var(a))
            if eqn.primitive.name in MOVED:
                [made] = jax.tree.leaves(eqn.primitive.bind(first, **eqn.params))
            else:
                made = first + other[0] if other else jnp.maximum(first, 0)
            env[eqn.outvars[0]] = made
        return [cast(env[_result(eqns)], xs[0].dtype)]

    @jax.custom_jvp
    def at_once(*xs: jax.Array) -> Any:
        return lax.platform_dependent(*xs, cuda=in_half, default=as_it_was)

    at_once.defjvp(lambda primals, tangents: jax.jvp(as_it_was, primals, tangents))
    return at_once


def _is_there(eqns: Sequence[JaxprEqn], made: Mapping[Var, JaxprEqn]) -> bool:
    """Whether all that they add is in memory, but for biases along channels."""
    inside = {*_results(eqns)}
    given = (a for e in eqns for a in e.invars if is_var(a) and a not in inside)
    return all(a not in made or made[a].primitive.name == "broadcast_in_dim" for a in given)


def _results(eqns: Iterable[JaxprEqn]) -> list[Var]:
    return [v for e in eqns for v in e.outvars]


def _result(eqns: Sequence[JaxprEqn]) -> Var:
    """Of the last of them."""
    return eqns[-1].outvars[0]


def _alone(uses: Sequence[JaxprEqn | None]) -> JaxprEqn | None:
    return uses[0] if len(uses) == 1 else None


def _is_convolution(eqn: JaxprEqn) -> bool:
    """Of one group: cuDNN's kernels of many groups add nothing."""
    name, params = eqn.primitive.name, eqn.params
    return name == "conv_general_dilated" and params["feature_group_count"] == 1
