"""Deviations from a mean sum up to nothing, so nothing sums them up.

    sum((x - mean(x)) · b) = 0                  where b is constant along the sum

A variance is a mean of squares of deviations, and JAX's derivative by the mean among them is such a
sum: one more pass over x, for what is rounding errors.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit.casting.rewriting._factored import taken_out
from jmp_kit.programs._axes import only_reshapes
from jmp_kit.programs._flow import ADDS
from jmp_kit.programs._jaxpr import Atom, equations_of, in_place, is_var, shape_of, taking

# What gives zeros where its first operand is zeros.
_KEEPS = {"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "slice"}
_KEEPS |= {"neg", "reduce_sum", "div"}


def without_their_sums(jaxpr: Jaxpr, is_late: Callable[[JaxprEqn], bool]) -> Jaxpr:
    """The program, no deviations from a mean summed up over the same axes in its backward pass."""
    maker = {v: e for e in jaxpr.eqns for v in e.outvars}
    zeros: dict[Var, Atom] = {}  # and what is there of the same type, but for its shape
    there: dict[Var, Var] = {}  # zeros that something takes
    instead: dict[Var, Atom] = {}
    eqns: list[JaxprEqn] = []

    def is_zero(atom: Atom) -> bool:
        return is_var(atom) and atom in zeros

    def written(atom: Atom, source: object) -> Iterator[JaxprEqn]:
        if is_zero(atom) and atom not in there:
            there[atom] = Var(atom.aval)
            fill = functools.partial(lax.full_like, fill_value=0, shape=shape_of(atom))
            yield from equations_of(fill, [zeros[atom]], [there[atom]], source)

    for eqn in jaxpr.eqns:
        name, operands = eqn.primitive.name, in_place(eqn.invars, instead)
        is_late_sum = name == "reduce_sum" and is_var(eqn.invars[0]) and is_late(eqn)
        is_sum = is_late_sum and _is_of_deviations(eqn, maker)
        found = [zeros[a] for a in operands if is_var(a) and a in zeros]
        others = [a for a in operands if not is_zero(a)]
        is_kept = (name in _KEEPS and is_zero(operands[0])) or (name in ADDS and not others)
        if is_sum or is_kept or (name == "mul" and found):
            zeros[eqn.outvars[0]] = operands[0] if is_sum else found[0]
        elif name in ADDS and len(others) == 1 and shape_of(others[0]) == shape_of(eqn.outvars[0]):
            instead[eqn.outvars[0]] = others[0]
        else:
            eqns += [e for a in operands for e in written(a, eqn.source_info)]
            eqns.append(taking(taking(eqn, instead), there))
    results = in_place(jaxpr.outvars, instead)
    eqns += [e for a in results for e in written(a, jaxpr.eqns[-1].source_info)]
    return jaxpr.replace(eqns=eqns, outvars=in_place(results, there)) if zeros else jaxpr


def _is_of_deviations(eqn: JaxprEqn, maker: Mapping[Var, JaxprEqn]) -> bool:
    """Whether a sum is of x - mean(x), scaled by what is constant along it."""
    (of, *others), (axes, *_), _ = taken_out(eqn, maker)
    made = maker.get(of) if not others else None
    if made is None or made.primitive.name != "sub":
        return False
    x, mean = made.invars
    return shape_of(x) == shape_of(of) and _is_mean(mean, x, axes, maker)


def _is_mean(mean: Atom, x: Atom, axes: tuple[int, ...], maker: Mapping[Var, JaxprEqn]) -> bool:
    """Whether it is the sum of x along these axes divided by their size, each where x has it."""
    count, whole = math.prod(shape_of(x)[axis] for axis in axes), shape_of(x)
    is_divided = False

    def long(places: Iterable[int]) -> list[int]:
        return [i for i in places if whole[i] != 1]

    kept = long(i for i in range(len(whole)) if i not in axes)
    while is_var(mean) and mean in maker:
        eqn = maker[mean]
        name, mean = eqn.primitive.name, eqn.invars[0]
        if name == "reduce_sum":
            return is_divided and mean is x and long(eqn.params["axes"]) == list(axes)
        if name in ("div", "mul") and not is_var(eqn.invars[1]):
            by = count if name == "div" else 1 / max(count, 1)
            is_so = not is_divided and np.float32(eqn.invars[1].val) == np.float32(by)
            is_divided = True
        elif name == "broadcast_in_dim" and len(shape_of(eqn.outvars[0])) == len(whole):
            places = (i for i in eqn.params["broadcast_dimensions"] if i not in axes)
            is_so = long(places) == kept
        else:
            sizes = [[n for n in shape_of(v) if n != 1] for v in (mean, eqn.outvars[0])]
            is_so = only_reshapes(eqn) and all(s == [whole[i] for i in kept] for s in sizes)
        if not is_so:
            return False
    return False
