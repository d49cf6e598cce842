"""Biases and ReLUs that a convolution's kernel adds before it writes its result, on NVIDIA GPUs.

    y = half(relu(float32(half(conv(x, w))) + b))    as planned, in two kernels
    y = relu(half(conv(x, w)) + half(b))             what XLA takes for one kernel of cuDNN's

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

from jmp_kit.casting._plan import Piece
from jmp_kit.casting._signs import is_positive_part
from jmp_kit.programs._jaxpr import cast, cut_out, equations_of, is_var, shape_of, size_of

Uses = Mapping[Var, Sequence[JaxprEqn | None]]


def convolved(
    eqns: Sequence[JaxprEqn], products: Mapping[Var, JaxprEqn], uses: Uses
) -> dict[Var, list[JaxprEqn]]:
    """What adds a bias to a convolution, and the ReLU of that, if any, by what they give.

    Args:
      eqns: all equations of a program.
      products: those that are products in half, by what they give.
      uses: the equations that take each variable; None for a result.
    """
    found: dict[Var, list[JaxprEqn]] = {}
    spread = {e.outvars[0]: e.invars[0] for e in eqns if e.primitive.name == "broadcast_in_dim"}
    for product, eqn in products.items():
        add = _alone(uses[product])
        if not _is_convolution(eqn) or add is None or add.primitive.name != "add":
            continue
        channels = shape_of(product)[eqn.params["dimension_numbers"].out_spec[1]]
        biases = [a for a in add.invars if a is not product]
        if all(is_var(a) and size_of(spread.get(a, a)) == channels for a in biases):
            relu = _alone(uses[add.outvars[0]])
            several = [add, relu] if relu is not None and is_positive_part(relu) else [add]
            found[several[-1].outvars[0]] = several
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
        there = {v for e in piece.eqns for v in e.outvars}
        whole = {v: e for v, e in found.items() if there.issuperset(_results(e))}
        parts = {v for several in whole.values() for v in _results(several)}
        eqns: list[JaxprEqn] = []
        for eqn in piece.eqns:
            if whole.keys() & set(eqn.outvars):
                [result] = eqn.outvars
                as_it_was, taken = cut_out(jaxpr, whole[result], [result])
                function = _at_once(as_it_was, half, len(whole[result]) > 1)
                eqns += equations_of(function, taken, [result], eqn.source_info)
            elif parts.isdisjoint(eqn.outvars):
                eqns.append(eqn)
        yield piece._replace(eqns=eqns)


def _at_once(as_it_was: Callable[..., Any], half: np.dtype, is_positive: bool) -> Any:
    """What adds two values, the positive part of it alone if so, in half for XLA to see it."""

    def in_half(x: jax.Array, y: jax.Array) -> Any:
        total = cast(x, half) + cast(y, half)
        return [cast(jnp.maximum(total, 0) if is_positive else total, x.dtype)]

    @jax.custom_jvp
    def at_once(x: jax.Array, y: jax.Array) -> Any:
        return lax.platform_dependent(x, y, cuda=in_half, default=as_it_was)

    at_once.defjvp(lambda primals, tangents: jax.jvp(as_it_was, primals, tangents))
    return at_once


def _results(eqns: Iterable[JaxprEqn]) -> list[Var]:
    return [v for e in eqns for v in e.outvars]


def _alone(uses: Sequence[JaxprEqn | None]) -> JaxprEqn | None:
    return uses[0] if len(uses) == 1 else None


def _is_convolution(eqn: JaxprEqn) -> bool:
    """Of one group: cuDNN's kernels of many groups add nothing."""
    name, params = eqn.primitive.name, eqn.params
    return name == "conv_general_dilated" and params["feature_group_count"] == 1
