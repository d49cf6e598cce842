"""Products written for how matrices lie in memory.

A product whose result is transposed is turned round, `(a b)ᵀ = bᵀ aᵀ`: JAX's derivative by a weight
is one. XLA turns it round itself, but not with a cast of the result before the transposition.

Operands get their batch dimensions first. XLA moves them, too, but it asks whatever makes an
operand, a norm of queries say, for the layout in which columns lie in memory, and then makes no
kernel of its rows.

Filters are reversed in half. XLA on GPUs has a kernel for the gradient by what a convolution takes,
and uses it where it finds a reversed filter, but not for one that is cast afterwards: it then puts
zeros between the cotangents of a strided convolution, as many more as it strides.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit._dtypes import stored_dtype
from jmp_kit.programs._flow import Flow
from jmp_kit.programs._jaxpr import (
    Atom,
    cast,
    equations_of,
    is_float32,
    is_var,
    shape_of,
    uses_of,
)
from jmp_kit.programs._marks import marked_dtype

Axes = tuple[int, ...]


def turned(jaxpr: Jaxpr, flow: Flow) -> Jaxpr:
    """The program with products in place of transposed ones.

    What a product cannot give, if batch dimensions are no longer the first say, is left to a
    transposition that leaves the last dimension where it is.
    """
    uses = uses_of(jaxpr)
    instead: dict[int, Sequence[JaxprEqn]] = {}
    for eqn in filter(flow.is_product, jaxpr.eqns):
        moves = list(_transpositions(eqn, uses)) if _is_free(eqn) else []
        if moves and (found := _transposed(eqn, moves)):
            instead |= {**dict.fromkeys(map(id, moves), ()), id(eqn): found}
    return jaxpr.replace(eqns=[e for eqn in jaxpr.eqns for e in instead.get(id(eqn), [eqn])])


def fronted(jaxpr: Jaxpr, flow: Flow) -> Jaxpr:
    """The program, operands of products transposed so that batch dimensions are the first."""
    there: dict[tuple[Var, Axes], Var] = {}
    eqns: list[JaxprEqn] = []

    def moved(atom: Atom, batch: Sequence[int], source: object) -> tuple[Atom, Axes]:
        """The operand, and of each of its dimensions which one it was."""
        every = tuple(range(len(shape_of(atom))))
        order = (*batch, *(i for i in every if i not in batch))
        if order == every or not is_var(atom) or not is_float32(atom):
            return atom, every
        if (atom, order) not in there:
            there[atom, order] = _permuted(atom, order)
            eqns.extend(_transposition(atom, order, there[atom, order], source))
        return there[atom, order], order

    for eqn in jaxpr.eqns:
        if flow.is_product(eqn) and _is_free(eqn):
            numbers = eqn.params["dimension_numbers"]
            pairs = zip(eqn.invars, numbers[1], strict=True)
            operands, orders = zip(*(moved(a, b, eqn.source_info) for a, b in pairs), strict=True)
            numbers = tuple(
                tuple(tuple(map(o.index, axes)) for axes, o in zip(pair, orders, strict=True))
                for pair in numbers
            )
            params = {**eqn.params, "dimension_numbers": numbers}
            eqn = eqn.replace(invars=list(operands), params=params)
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns)


def with_filters_in_half(jaxpr: Jaxpr, flow: Flow, half: np.dtype) -> Jaxpr:
    """The program, the filters that products alone take cast before they are reversed."""
    uses = uses_of(jaxpr)

    def written(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
        takers = uses[eqn.outvars[0]] if eqn.primitive.name == "rev" else [None]
        products = [e for e in takers if e is not None and flow.is_product(e)]
        dtypes = {stored_dtype(marked_dtype(e) or half) for e in products}
        if len(dtypes) == 1 and len(products) == len(takers) and is_float32(eqn.outvars[0]):
            [dtype], axes = dtypes, eqn.params["dimensions"]

            def in_half(x: Any) -> Any:
                return cast(lax.rev(cast(x, dtype), axes), np.float32)

            yield from equations_of(in_half, eqn.invars, eqn.outvars, eqn.source_info)
        else:
            yield eqn

    return jaxpr.replace(eqns=[e for eqn in jaxpr.eqns for e in written(eqn)])


def _is_free(eqn: JaxprEqn) -> bool:
    """Whether it is a product whose result may be written as another's."""
    return eqn.primitive.name == "dot_general" and eqn.params.get("out_sharding") is None


def _transpositions(
    eqn: JaxprEqn, uses: Mapping[Var, Sequence[JaxprEqn | None]]
) -> Iterator[JaxprEqn]:
    """Those that all of an equation's result goes through, one after the other."""
    [use, *others] = uses[eqn.outvars[0]] or [None]
    if use is not None and not others and use.primitive.name == "transpose":
        yield use
        yield from _transpositions(use, uses)


def _transposed(product: JaxprEqn, moves: Sequence[JaxprEqn]) -> Sequence[JaxprEqn]:
    """A product that gives its result as it is moved, or more nearly so; none if none does."""
    (contracted, _), (batch, _) = product.params["dimension_numbers"]
    [whole], [result] = product.outvars, moves[-1].outvars
    every = axes = tuple(range(len(shape_of(whole))))
    for move in moves:
        axes = tuple(axes[i] for i in move.params["permutation"])
    if axes == every:
        return [product.replace(outvars=[result])]
    first = len(batch)
    middle = first + len(shape_of(product.invars[0])) - len(contracted) - len(batch)
    order = (*every[:first], *every[middle:], *every[first:middle])
    left = tuple(map(order.index, axes))
    if left == every:
        return [_turned(product, result)]
    if left[-1] != every[-1] or axes[-1] == every[-1]:
        return []
    other = _permuted(whole, order)
    return [
        _turned(product, other),
        *_transposition(other, left, result, moves[-1].source_info),
    ]


def _turned(product: JaxprEqn, result: Var) -> JaxprEqn:
    (a, b), (batch_a, batch_b) = product.params["dimension_numbers"]
    params = {**product.params, "dimension_numbers": ((b, a), (batch_b, batch_a))}
    if isinstance(params.get("precision"), tuple):
        params["precision"] = params["precision"][::-1]
    return product.replace(invars=product.invars[::-1], outvars=[result], params=params)


def _permuted(v: Var, order: Axes) -> Var:
    shape = [shape_of(v)[i] for i in order]
    return Var(jax.core.ShapedArray(shape, v.aval.dtype))


def _transposition(v: Var, order: Axes, result: Var, source: object) -> Iterator[JaxprEqn]:
    transpose = functools.partial(lax.transpose, permutation=order)
    return equations_of(transpose, [v], [result], source)
