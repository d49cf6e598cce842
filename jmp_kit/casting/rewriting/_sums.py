"""Sums over the same values, shared.

The backward pass of a norm sums up a cotangent, and the cotangent times what is the same for all
that is summed up, and over further axes again. What is constant along a sum taken out of it, one
sum is all that reads it:

    sum(x, (0, 1, 2)) = sum(sum(x, (1, 2)), 0)

Also where x · y is summed up over the inner axes, as for the gradients of a bias and of what scales
each image's channels: XLA makes sums over the same axes in one kernel.
"""

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit.casting.rewriting._factored import (
    Axes,
    Sum,
    factors_of,
    left_of,
    of_product,
    taken_out,
)
from jmp_kit.programs._axes import is_split, only_reshapes, staying
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
    uses_of,
)

# A sum that gives this much less than it reads.
_LESS = 16


def shared(jaxpr: Jaxpr, is_late: Callable[[JaxprEqn], bool]) -> Jaxpr:
    """The program, each value of its backward pass summed up over the same axes once."""
    maker = {v: e for e in jaxpr.eqns for v in e.outvars}
    made = (v for e in jaxpr.eqns for v in e.outvars)
    place = {v: i for i, v in enumerate((*jaxpr.constvars, *jaxpr.invars, *made))}

    def ordered(found: Sum) -> Sum:
        pairs = sorted(zip(found.of, found.axes, strict=True), key=lambda pair: place[pair[0]])
        of, axes = zip(*pairs, strict=True)
        return found._replace(of=of, axes=axes)

    late = [e for e in jaxpr.eqns if is_late(e) and _is_sum(e)]
    sums = {id(e): ordered(taken_out(e, maker)) for e in late}
    sums = {i: found for i, found in sums.items() if not any(map(is_split, found.of))}
    count = Counter(found.of for found in sums.values())
    beside: dict[Var, set[frozenset[int]]] = defaultdict(set)  # of what each is a product of
    for found in sums.values():
        for v, axes in factors_of(found, maker).items():
            beside[v].add(frozenset(axes.values()))
    there: dict[Sum, Var] = {}
    instead: dict[Var, Atom] = {}
    eqns: list[JaxprEqn] = []

    def within(found: Sum) -> tuple[int, ...]:
        """Along which of its axes it is to be summed up first, for others are."""
        shape, axes = shape_of(found.of[0]), found.axes[0]
        sizes = {
            some: math.prod(shape[axes[i]] for i in some)
            for v, places in factors_of(found, maker).items()
            for theirs in beside[v]
            if len(some := tuple(i for i, a in places.items() if a in theirs)) < len(axes)
        }
        shorter = sorted(some for some, n in sizes.items() if isinstance(n, int) and n >= _LESS)
        return max(shorter, key=sizes.__getitem__, default=())

    def total_of(found: Sum, source: Any) -> Var:
        total = there.get(found._replace(factors=())) or total_anew(found, source)
        for factor in found.factors:
            total = added(factor.applied, [total, *factor.values], factor.shape, source)
        return total

    def total_anew(found: Sum, source: Any) -> Var:
        (of, *_), (axes, *_) = found.of, found.axes
        if first := within(found):
            narrow = [tuple(a[i] for i in first) for a in found.axes]
            inner = ordered(of_product(zip(found.of, narrow, strict=True), maker))
            shape = left_of(of, narrow[0])
            left = tuple(a - sum(b < a for b in narrow[0]) for a in axes if a not in narrow[0])
            further = functools.partial(_further, shape=shape, axes=left)
            total = added(further, [total_of(inner, source)], found.left, source)
        else:
            total = added(functools.partial(_summed, axes), found.of, found.left, source)
        there[found._replace(factors=())] = total
        return total

    def added(
        function: Callable[..., Any], operands: Sequence[Atom], shape: Sequence[int], source: Any
    ) -> Var:
        result = Var(_of_shape(shape, operands))
        eqns.extend(equations_of(function, in_place(operands, instead), [result], source))
        return result

    for eqn in jaxpr.eqns:
        one = sums.get(id(eqn))
        if one is None or (count[one.of] == 1 and not within(one)):
            eqns.append(taking(eqn, instead))
            continue
        [result], total = eqn.outvars, total_of(one, eqn.source_info)
        if shape_of(total) != shape_of(result):
            reshape = functools.partial(jnp.reshape, shape=shape_of(result))
            total = added(reshape, [total], shape_of(result), eqn.source_info)
        instead[result] = total
    return jaxpr.replace(eqns=eqns, outvars=in_place(jaxpr.outvars, instead))


def _of_shape(shape: Sequence[int], operands: Sequence[Atom]) -> Any:
    """The type of what is made of these: in a `shard_map` it varies as they do."""
    avals = [a.aval for a in operands if a.aval.manual_axis_type.varying]
    if not avals:
        return jax.core.ShapedArray(shape, jnp.float32)
    return max(avals, key=lambda aval: len(aval.manual_axis_type.varying)).update(shape=shape)


def _summed(axes: Axes, x: Any, *others: Any) -> Any:
    for other in others:
        x = x * jnp.reshape(other, x.shape)
    return jnp.sum(x, axes)


def _further(total: Any, shape: tuple[int, ...], axes: Axes) -> Any:
    return jnp.sum(jnp.reshape(total, shape), axes)


def of_one(jaxpr: Jaxpr, is_late: Callable[[JaxprEqn], bool]) -> Jaxpr:
    """The program, each sum of sums along other axes in its backward pass as one."""
    maker, uses = {v: e for e in jaxpr.eqns for v in e.outvars}, uses_of(jaxpr)
    instead: dict[int, Sequence[JaxprEqn]] = {}

    def is_late_sum(eqn: JaxprEqn) -> bool:
        is_sum = eqn.primitive.name == "reduce_sum" and is_float32(eqn.outvars[0])
        return is_sum and not _is_placed(eqn) and is_late(eqn)

    def before(of: Atom, axes: Axes) -> tuple[Atom, Axes, list[JaxprEqn]] | None:
        """Of which value along which axes it is the sum of a sum, and the equations between."""
        eqn = maker.get(of) if is_var(of) and len(uses[of]) == 1 else None
        if eqn is None or not eqn.invars:
            return None
        operand, first = eqn.invars[0], ()
        if is_late_sum(eqn):
            first = tuple(eqn.params["axes"])
            kept = [i for i in range(len(shape_of(operand))) if i not in first]
            axes = tuple(sorted((*first, *(kept[a] for a in axes))))
        else:
            long, stay = [a for a in axes if shape_of(of)[a] != 1], staying(eqn)
            if not stay.keys() >= set(long) or not only_reshapes(eqn):
                return None
            axes = tuple(stay[a] for a in long)
        further = before(operand, axes) or ((operand, axes, []) if first else None)
        return further and (*further[:2], [eqn, *further[2]])

    for eqn in reversed(jaxpr.eqns):
        found = before(eqn.invars[0], eqn.params["axes"]) if is_late_sum(eqn) else None
        if found and id(eqn) not in instead:
            of, axes, between = found
            [result] = eqn.outvars
            one = functools.partial(_sum, axes=axes, shape=shape_of(result))
            instead |= {id(e): [] for e in between}
            instead[id(eqn)] = list(equations_of(one, [of], [result], eqn.source_info))
    return jaxpr.replace(eqns=[e for eqn in jaxpr.eqns for e in instead.get(id(eqn), [eqn])])


def _sum(x: Any, axes: Axes, shape: tuple[int, ...]) -> Any:
    return jnp.reshape(jnp.sum(x, axes), shape)


def _is_placed(eqn: JaxprEqn) -> bool:
    """Whether it says itself how its result lies on devices."""
    return eqn.params.get("out_sharding") is not None


def _is_sum(eqn: JaxprEqn) -> bool:
    return (
        eqn.primitive.name == "reduce_sum"
        and is_var(eqn.invars[0])
        and is_float32(eqn.invars[0])
        and not is_along_rows(eqn)
        and not _is_placed(eqn)
        and size_of(eqn.outvars[0]) * _LESS <= size_of(eqn.invars[0])
    )
