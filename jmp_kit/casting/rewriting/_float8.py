"""Products of large matrices in float8, written out: scaled, rounded, multiplied, scaled back.

    scale(x) = max(|x| along what is contracted) / 448
    x · y    = (e4m3(x / scale(x)) · e4m3(y / scale(y))) * scale(x) * scale(y)

Scales are of what the values are now: there is no state. A backward product contracts other axes
than the forward product did, so a scale of the forward pass may lie along what is contracted. Then
it is multiplied into the other operand before that is rounded, and the copy of the forward pass
serves again: weights and activations are rounded once, and kept in one byte a value. Products of
rows in groups are `_ragged`'s.

Source: torchao's rowwise recipe, https://github.com/pytorch/ao/tree/main/torchao/float8
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit._dtypes import FLOAT8
from jmp_kit.casting.reading._rounding import SCALED_AT_ONCE
from jmp_kit.casting.rewriting import _ragged as ragged
from jmp_kit.casting.rewriting._scaled import Copy, along, named, rounded, thin
from jmp_kit.programs._axes import Operand, sides_of
from jmp_kit.programs._flow import KERNELS, MOVES, Flow
from jmp_kit.programs._jaxpr import cast, equations_of, shape_of, uses_of
from jmp_kit.programs._marks import marked, marked_dtype

# Where float8 is faster than half on an H200, of 8,192 tokens: 0.9 times the speed at width 512,
# 1.0 at 768, 1.1 at 1,024, 1.3 at 2,048 (products at 1,500 TFLOP/s, other kernels at 4.3 TB/s).
SMALLEST_SIDE, SMALLEST_PRODUCT = 1024, 2**36
# What the libraries' float8 products need.
_MULTIPLE = 16


def why_half(eqn: JaxprEqn, by_size: bool) -> str:
    """Why a product is not in float8; empty if it is.

    Args:
      by_size: whether products without a mark are, if they are large.
    """
    dtype = marked_dtype(eqn)
    if dtype not in (None, FLOAT8):
        return "a rule says so"
    if dtype is None and not by_size:
        return "policy"
    if eqn.primitive.name not in ("dot_general", ragged.NAME):
        return f"{eqn.primitive.name} is not written in float8"
    dtypes = [a.aval.dtype for a in eqn.invars[:2]]
    if not all(jnp.issubdtype(d, jnp.floating) for d in dtypes):
        return f"operands are {' and '.join(map(str, dtypes))}"
    if any(n == 0 for a in eqn.invars for n in shape_of(a)):
        return "it is empty"
    why = ragged.why_half(eqn) if eqn.primitive.name == ragged.NAME else ""
    if why or dtype == FLOAT8:
        return why
    return _too_small(eqn) if np.float32 in dtypes else f"written in {dtypes[0]}"


def _too_small(eqn: JaxprEqn) -> str:
    is_ragged = eqn.primitive.name == ragged.NAME
    a, b = ragged.operands_of(eqn) if is_ragged else sides_of(eqn)
    sizes = {
        "M": math.prod(shape_of(a.atom)[i] for i in a.kept),
        "N": math.prod(shape_of(b.atom)[i] for i in b.kept),
        "K": math.prod(shape_of(a.atom)[i] for i in a.contracted),
    }
    unknown = [name for name, size in sizes.items() if not isinstance(size, int)]
    if unknown:
        return f"{unknown[0]} is not known before the program runs"
    for name, size in sizes.items():
        if size < SMALLEST_SIDE or size % _MULTIPLE:
            return f"{name} is {size}"
    if is_ragged and (share := ragged.share_of(eqn)) < SMALLEST_SIDE:
        return f"a group has {share} rows"
    batch = math.prod(shape_of(a.atom)[i] for i in a.batch)
    total = batch * math.prod(sizes.values())
    return f"{total:.1e} multiplications" if total < SMALLEST_PRODUCT else ""


def in_float8(jaxpr: Jaxpr, flow: Flow, by_size: bool, half: np.dtype) -> Jaxpr:
    """The program, its large products on float8 operands.

    Args:
      by_size: whether products without a mark are in float8, if they are large.
      half: what they give.
    """
    copies: dict[Var, list[Copy]] = defaultdict(list)
    uses = uses_of(jaxpr)
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if not flow.is_product(eqn) or why_half(eqn, by_size):
            eqns.append(eqn)
        elif eqn.primitive.name == ragged.NAME:
            eqns += ragged.written(eqn, copies, half)
        else:
            is_apart = _goes_to_kernels(eqn.outvars[0], uses)
            eqns += _written(eqn, copies, half, is_apart)
    return jaxpr.replace(eqns=eqns)


def _goes_to_kernels(v: Var, uses: Mapping[Var, Sequence[JaxprEqn | None]]) -> bool:
    """Whether nothing computes with a product's result on its way to kernels, as of attention."""
    return all(
        use is not None
        and (
            use.primitive.name.startswith(KERNELS)
            or (use.primitive.name in MOVES and _goes_to_kernels(use.outvars[0], uses))
        )
        for use in uses.get(v, [None])
    )


def _written(
    eqn: JaxprEqn, copies: Mapping[Var, list[Copy]], half: np.dtype, is_apart: bool
) -> Iterator[JaxprEqn]:
    sides, source, [result] = sides_of(eqn), eqn.source_info, eqn.outvars
    found = [along(side, copies, side.kept) for side in sides]
    folding: list[Copy | None] = [None, None]
    if not any(found):
        folding = [along(side, copies, side.contracted) for side in sides]
        folding[1] = None if folding[0] else folding[1]
    taken: list[Copy] = []
    for i, copy in enumerate(folding if any(folding) else found):
        if copy is None:
            side, factor = sides[i], folding[1 - i]
            given = (sides[1 - i], factor) if factor else None
            copy, eqns = rounded(side, side.contracted, copies, source, given)
            yield from eqns
        taken.append(copy)
    left = [i for i in (0, 1) if not folding[i]]
    values, scales = [c.value for c in taken], [taken[i].scale for i in left]
    is_free = eqn.params.get("out_sharding") is None
    if is_apart and is_free and all(map(_is_matrix, sides)):
        function = _scaled_matrix(eqn, left)
        for e in equations_of(
            function, [*values, *scales], [result], named(source, SCALED_AT_ONCE)
        ):
            yield marked(e, half) if e.primitive.name == eqn.primitive.name else e
        return
    raw = Var(result.aval.update(dtype=jnp.float32, weak_type=False))
    params = {**eqn.params, "preferred_element_type": np.dtype(np.float32)}
    yield marked(eqn.replace(invars=values, outvars=[raw], params=params), half)

    def unscaled(raw: Any, *scales: Any) -> Any:
        for i, scale in zip(left, scales, strict=True):
            raw = raw * thin(scale, sides, i)
        return cast(raw, result.aval.dtype)

    yield from equations_of(unscaled, [raw, *scales], [result], source)


def _is_matrix(side: Operand) -> bool:
    """Whether the axes that are contracted are one of two."""
    axes, n = list(side.contracted), len(shape_of(side.atom))
    first, last = list(range(len(axes))), list(range(n - len(axes), n))
    return bool(axes) and not side.batch and axes in (first, last)


def _scaled_matrix(eqn: JaxprEqn, left: Sequence[int]) -> Callable[..., Any]:
    """The function of two matrices, and of the scales of these of them, that gives their product.

    Of matrices, and of scales that are there before, XLA scales it in the kernel that makes it.
    """
    sides, [result] = sides_of(eqn), eqn.outvars
    contracted = [0 if 0 in side.contracted else 1 for side in sides]

    def matrix(x: Any, side: Operand, axis: int) -> Any:
        depth = math.prod(x.shape[i] for i in side.contracted)
        return x.reshape((depth, -1) if axis == 0 else (-1, depth))

    def scaled(a: Any, b: Any, *scales: Any) -> Any:
        product = lax.dot_general(
            matrix(a, sides[0], contracted[0]),
            matrix(b, sides[1], contracted[1]),
            ((contracted[:1], contracted[1:]), ((), ())),
            precision=eqn.params["precision"],
            preferred_element_type=jnp.float32,
        )
        for i, scale in zip(left, lax.optimization_barrier(scales), strict=True):
            product = product * scale.reshape((-1, 1) if i == 0 else (1, -1))
        return cast(product.reshape(result.aval.shape), result.aval.dtype)

    return scaled
