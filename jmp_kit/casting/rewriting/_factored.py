"""A sum of a product, and what is constant along it, taken out of it.

    sum(x · b, axes) = sum(x, axes) · b             where b is constant along the axes
    sum(reshape(x), axes) = reshape(sum(x, axes))   where these axes stay as they are

So that sums which are written differently are found to be of the same.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Var

from jmp_kit.programs._axes import staying
from jmp_kit.programs._jaxpr import Atom, is_var, shape_of

Axes = tuple[int, ...]
Maker = Mapping[Var, JaxprEqn]

# Of more values a product is not written anew.
_MOST = 4


class Factor(NamedTuple):
    """What is constant along a sum, and how it is applied to the sum."""

    applied: Callable[..., Any]  # to the sum, and these
    shape: tuple[int, ...]  # of what that gives
    values: tuple[Atom, ...] = ()


class Sum(NamedTuple):
    """A sum of a product, to which factors are applied.

    Attributes:
      of: what is multiplied: as many values in the same order, but maybe in several shapes.
      axes: of each, along which it is summed up, one beside the other; none is of one value.
      factors: in their order.
    """

    of: tuple[Var, ...]
    axes: tuple[Axes, ...]
    factors: tuple[Factor, ...] = ()

    @property
    def left(self) -> tuple[int, ...]:
        """The shape of the sum."""
        return left_of(self.of[0], self.axes[0])


def taken_out(eqn: JaxprEqn, maker: Maker) -> Sum:
    """The sum, of as little as it can be of."""
    [of], axes = eqn.invars, eqn.params["axes"]
    return of_product([(of, tuple(a for a in axes if shape_of(of)[a] != 1))], maker)


def of_product(values: Iterable[tuple[Var, Axes]], maker: Maker, depth: int = _MOST) -> Sum:
    """The sum of a product, of as little as it can be of.

    Args:
      values: what is multiplied, and along which of its axes that is summed up.
      depth: how many products of products are opened, each of which may be one of twice as many.
    """
    parts = [_split(v, axes, maker, depth) for v, axes in values]
    of, every = zip(*(pair for pairs, _ in parts for pair in pairs), strict=True)
    return Sum(of, every, tuple(factor for _, factors in parts for factor in factors))


def _split(
    v: Var, axes: Axes, maker: Maker, depth: int
) -> tuple[list[tuple[Var, Axes]], list[Factor]]:
    """What is multiplied in it, and what is taken out of a sum along these axes."""
    factors: list[Factor] = []
    while found := _one_of(v, axes, maker):
        factor, v, axes = found
        factors = [*factor, *factors]
    operands = maker[v].invars if v in maker and maker[v].primitive.name == "mul" else []
    if depth and operands and len({shape_of(a) for a in (v, *operands)}) == 1:
        inner = of_product([(a, axes) for a in operands], maker, depth - 1)
        if inner.factors and len(inner.of) <= _MOST:
            return list(zip(inner.of, inner.axes, strict=True)), [*inner.factors, *factors]
    return [(v, axes)], factors


def _one_of(v: Var, axes: Axes, maker: Maker) -> tuple[list[Factor], Var, Axes] | None:
    """What makes a value, if the sum may be taken before: what that is, and of what it is made."""
    eqn = maker.get(v)
    if eqn is None or not axes or not eqn.invars:
        return None
    name, left, stay = eqn.primitive.name, left_of(v, axes), staying(eqn)
    if is_var(eqn.invars[0]) and stay.keys() >= set(axes):
        return [], eqn.invars[0], tuple(stay[a] for a in axes)
    if name == "neg":
        return [Factor(functools.partial(_negated, left), left)], eqn.invars[0], axes
    pairs = {"mul": [eqn.invars, eqn.invars[::-1]], "div": [eqn.invars]}.get(name, [])
    operation = jnp.multiply if name == "mul" else jnp.divide
    for x, factor in pairs:
        constant = _constant(factor, axes, maker)
        if is_var(x) and shape_of(x) == shape_of(v) and constant is not None:
            applied = functools.partial(_applied, operation, left, constant[1])
            return [Factor(applied, left, constant[:1])], x, axes
    return None


def _negated(left: tuple[int, ...], total: Any) -> Any:
    return -jnp.reshape(total, left)


def _applied(
    operation: Callable[..., Any],
    left: tuple[int, ...],
    along: Callable[..., Any],
    total: Any,
    factor: Any,
) -> Any:
    return operation(jnp.reshape(total, left), along(factor))


def _constant(atom: Atom, axes: Axes, maker: Maker) -> tuple[Atom, Callable[[Any], Any]] | None:
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
    along = tuple(i for i, d in enumerate(dimensions) if d in axes)
    found = _constant(value, along, maker)
    if found is None:
        return None
    kept = [i for i in range(len(shape)) if i not in axes]
    places = [kept.index(d) for d in dimensions if d not in axes]

    def without(x: Any) -> Any:
        return lax.broadcast_in_dim(found[1](x), [shape[i] for i in kept], places)

    return found[0], without


def factors_of(found: Sum, maker: Maker) -> dict[Var, dict[int, int]]:
    """What it is a sum of, and what that is a product of: which of its axes the sum is along."""
    reached = {v: dict(enumerate(axes)) for v, axes in zip(found.of, found.axes, strict=True)}
    waiting = list(reached)
    while waiting:
        v = waiting.pop()
        eqn, places = maker.get(v), reached[v]
        if eqn is None:
            continue
        operands = list(filter(is_var, eqn.invars))
        if eqn.primitive.name in ("mul", "neg"):
            operands = [a for a in operands if shape_of(a) == shape_of(v)]
        else:
            stay = staying(eqn)
            places = {i: stay[axis] for i, axis in places.items() if axis in stay}
        for a in operands:
            if places and a not in reached:
                reached[a] = places
                waiting.append(a)
    return reached


def left_of(of: Var, axes: Axes) -> tuple[int, ...]:
    return tuple(n for i, n in enumerate(shape_of(of)) if i not in axes)
