"""What a part is taken of, computed of that part alone.

XLA makes a kernel of rows of what it reads, cut as it lies, but of no part of what it computes: it
would write all of that, in float32. The values that are let through a gate, half of those of a
function, are such a part where a norm takes them.

    slice(f(x, y)) = f(slice(x), slice(y))
"""

import collections
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import jax
from jax import lax
from jax.extend.core import JaxprEqn, Var

from jmp_kit.casting.reading._worth import cuts_before
from jmp_kit.programs._axes import ELEMENTWISE
from jmp_kit.programs._jaxpr import equations_of, in_place, is_var, shape_of, size_of, traced_back

# Along each axis, where it begins and ends.
_Part = tuple[tuple[int, int], ...]


def cut_first(
    eqns: Sequence[JaxprEqn], results: Sequence[Var], is_big: Callable[[Var], bool]
) -> Iterator[JaxprEqn]:
    """The equations, what is cut from big values that they compute cut before.

    But for values of which all is taken, in parts, and what is cut over and over, as in an
    associative scan.
    """
    place = {id(e): i for i, e in enumerate(eqns)}
    maker = {e.outvars[0]: e for e in eqns if e.primitive.name in ELEMENTWISE}
    cuts = cuts_before(eqns)
    wanted = {*results, *(a for e in eqns for a in e.invars if is_var(a))}
    parts = {id(e): [(part, v) for part, v in _parts(e) if v in wanted] for e in eqns}
    taken = collections.Counter[Var]()
    for eqn in eqns:
        for _, v in parts[id(eqn)]:
            taken[eqn.invars[0]] += size_of(v)

    def is_less(whole: Var, results: Sequence[Var]) -> bool:
        return taken[whole] < size_of(whole) and all(map(size_of, results))

    for eqn in eqns:
        whole = eqn.invars[0] if parts[id(eqn)] else None
        is_cut_once = whole in maker and is_big(whole) and not cuts[whole]
        if is_cut_once and is_less(whole, [v for _, v in parts[id(eqn)]]):
            made, _ = traced_back([whole], maker)
            ordered = [eqns[i] for i in sorted(map(place.__getitem__, made))]
            for part, result in parts[id(eqn)]:
                yield from _part_of(ordered, part, result)
        else:
            yield eqn


def _part_of(eqns: Sequence[JaxprEqn], part: _Part, result: Var) -> Iterator[JaxprEqn]:
    """What makes a part of what the last of these equations makes."""
    names: dict[Var, Var] = {}
    for eqn in eqns:
        for a in (a for a in eqn.invars if is_var(a) and shape_of(a) and a not in names):
            names[a] = Var(a.aval.update(shape=_shape(a, part)))
            cut = functools.partial(_cut, part)
            yield from equations_of(cut, [a], [names[a]], eqn.source_info)
        [v] = eqn.outvars
        names[v] = result if eqn is eqns[-1] else Var(v.aval.update(shape=_shape(v, part)))
        yield eqn.replace(invars=in_place(eqn.invars, names), outvars=[names[v]])


def _parts(eqn: JaxprEqn) -> Iterator[tuple[_Part, Var]]:
    """What an equation cuts out, and which results that is."""
    if eqn.primitive.name == "slice" and eqn.params["strides"] is None:
        first, last = eqn.params["start_indices"], eqn.params["limit_indices"]
        yield tuple(zip(first, last, strict=True)), eqn.outvars[0]
    elif eqn.primitive.name == "split":
        ends = [0, *itertools.accumulate(eqn.params["sizes"])]
        for pair, result in zip(itertools.pairwise(ends), eqn.outvars, strict=True):
            every = [(0, n) for n in shape_of(eqn.invars[0])]
            every[eqn.params["axis"]] = pair
            yield tuple(every), result


def _ends(shape: Sequence[int], part: _Part) -> list[tuple[int, int]]:
    """Of axes that are whole or of one value, which is the same for all that it is spread to."""
    return [(0, 1) if n == 1 else ends for n, ends in zip(shape, part, strict=True)]


def _shape(v: Var, part: _Part) -> tuple[int, ...]:
    return tuple(last - first for first, last in _ends(shape_of(v), part))


def _cut(part: _Part, x: jax.Array) -> list[jax.Array]:
    return [lax.slice(x, *zip(*_ends(x.shape, part), strict=True))]
