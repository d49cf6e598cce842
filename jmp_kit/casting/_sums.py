"""Sums over the same values, shared: what is constant along a sum is taken out of it.

The backward pass of a norm sums up a cotangent, and the cotangent times what is the same for all
that is summed up, and over further axes again. Written so, one sum is all that reads it:

    sum(x · b, axes) = sum(x, axes) · b             where b is constant along the axes
    sum(x, (0, 1, 2)) = sum(sum(x, (1, 2)), 0)

The latter also where x · y is summed up over the inner axes, as for the gradients of a bias and of
what scales each image's channels: XLA makes sums over the same axes in one kernel.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit.programs._jaxpr import (
    Atom,
    equations_of,
    in_place,
    is_along_rows,
    is_float32,
    is_var,
    shape_of,
    size_of,
    taking,
)

Axes = tuple[int, ...]

# A sum that gives this much less than it reads.
_LESS = 16


class _Factor(NamedTuple):
    """What is constant along a sum, and how it is applied to the sum."""

    applied: Callable[..., Any]  # to the sum, and these
    values: tuple[Atom, ...] = ()


class Sum(NamedTuple):
    """A sum of less than was written, to which factors are applied."""

    of: Var
    axes: Axes
    factors: list[_Factor]  # the outermost first


def shared(jaxpr: Jaxpr, is_late: Callable[[JaxprEqn], bool]) -> Jaxpr:
    """The program, each value of its backward pass summed up over the same axes once."""
    maker = {v: e for e in jaxpr.eqns for v in e.outvars}
    sums = {id(e): taken_out(e, maker) for e in jaxpr.eqns if is_late(e) and _is_sum(e)}
    wanted: dict[Var, list[Axes]] = defaultdict(list)
    for found in sums.values():
        wanted[found.of].append(found.axes)
    beside: dict[Var, list[Axes]] = defaultdict(list)  # of what is made of each in place
    for found in sums.values():
        for v in _factors(found.of, maker):
            beside[v].append(found.axes)
    there: dict[tuple[Var, Axes], Var] = {}
    instead: dict[Var, Atom] = {}
    eqns: list[JaxprEqn] = []

    def within(axes: Axes, of: Var) -> list[Axes]:
        return [a for a in beside[of] if set(a) < set(axes)]

    def sum_of(of: Var, axes: Axes, source: Any) -> Var:
        if (of, axes) not in there:
            inner = max(within(axes, of), key=len, default=())
            operand = sum_of(of, inner, source) if inner else of
            left = tuple(a - sum(i < a for i in inner) for a in axes if a not in inner)
            shape = [n for i, n in enumerate(shape_of(of)) if i not in axes]
            there[of, axes] = Var(jax.core.ShapedArray(shape, jnp.float32))
            add(lambda x: jnp.sum(x, left), [operand], there[of, axes], source)
        return there[of, axes]

    def add(function: Callable[..., Any], operands: list[Atom], result: Var, source: Any) -> None:
        given = in_place(operands, instead)
        eqns.extend(equations_of(function, given, [result], source))

    for eqn in jaxpr.eqns:
        one = sums.get(id(eqn))
        if one is None or (len(wanted[one.of]) == 1 and not within(one.axes, one.of)):
            eqns.append(taking(eqn, instead))
            continue
        total = sum_of(one.of, one.axes, eqn.source_info)
        for factor in reversed(one.factors):
            made = Var(eqn.outvars[0].aval)
            add(factor.applied, [total, *factor.values], made, eqn.source_info)
            total = made
        instead[eqn.outvars[0]] = total
    return jaxpr.replace(eqns=eqns, outvars=in_place(jaxpr.outvars, instead))


def _factors(of: Var, maker: Mapping[Var, JaxprEqn]) -> set[Var]:
    """A value, and what it is a product of."""
    found: set[Var] = set()
    waiting = [of]
    while waiting:
        v = waiting.pop()
        found.add(v)
        if v in maker and maker[v].primitive.name in ("mul", "neg"):
            operands = filter(is_var, maker[v].invars)
            waiting += [a for a in operands if shape_of(a) == shape_of(of) and a not in found]
    return found


def _is_sum(eqn: JaxprEqn) -> bool:
    return (
        eqn.primitive.name == "reduce_sum"
        and is_var(eqn.invars[0])
        and is_float32(eqn.invars[0])
        and not is_along_rows(eqn)
        and size_of(eqn.outvars[0]) * _LESS <= size_of(eqn.invars[0])
    )


def taken_out(eqn: JaxprEqn, maker: Mapping[Var, JaxprEqn]) -> Sum:
    """The sum, of as little as it can be of."""
    axes, [of] = tuple(eqn.params["axes"]), eqn.invars
    factors: list[_Factor] = []
    while of in maker:
        found = _factor(maker[of], axes, maker)
        if found is None:
            break
        factors.append(found[0])
        of = found[1]
    return Sum(of, axes, factors)


def _factor(eqn: JaxprEqn, axes: Axes, maker: Mapping[Var, JaxprEqn]) -> tuple[_Factor, Var] | None:
    """What an equation multiplies by that is constant along the axes, and what it multiplies."""
    name, whole = eqn.primitive.name, shape_of(eqn.outvars[0])
    if name == "neg":
        return _Factor(lax.neg), eqn.invars[0]
    if name not in ("mul", "div"):
        return None
    operation = jnp.multiply if name == "mul" else jnp.divide
    pairs = [eqn.invars] if name == "div" else [eqn.invars, eqn.invars[::-1]]
    for x, factor in pairs:
        constant = _constant(factor, axes, whole, maker)
        if is_var(x) and shape_of(x) == whole and constant is not None:
            return _Factor(functools.partial(_applied, operation, constant[1]), constant[:1]), x
    return None


def _applied(operation: Callable[..., Any], along: Callable[..., Any], *values: Any) -> Any:
    total, factor = values
    return operation(total, along(factor))


def _constant(
    atom: Atom, axes: Axes, whole: Sequence[int], maker: Mapping[Var, JaxprEqn]
) -> tuple[Atom, Callable[[Any], Any]] | None:
    """What is the same all along the axes: of which value, and how, it is made without them."""
    shape = shape_of(atom)
    if not shape:
        return atom, lambda x: x
    if all(shape[a] == 1 for a in axes):
        return atom, lambda x: lax.squeeze(x, axes)
    eqn = maker.get(atom) if is_var(atom) else None
    if eqn is None or eqn.primitive.name != "broadcast_in_dim" or len(eqn.invars) > 1:
        return None
    [value], dimensions = eqn.invars, tuple(map(int, eqn.params["broadcast_dimensions"]))
    if any(d in axes and n != 1 for d, n in zip(dimensions, shape_of(value), strict=True)):
        return None
    narrow = [1 if i in axes else n for i, n in enumerate(whole)]
    return value, lambda x: lax.squeeze(lax.broadcast_in_dim(x, narrow, dimensions), axes)
