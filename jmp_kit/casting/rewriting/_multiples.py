"""Sums of what products take a multiple of, taken of the multiple, which is stored for them.

    y = x · c,  sum(x)    ->    sum(y) / c        where products alone take y, and c is a constant

Attention scales its logits before it adds a bias. The bias's gradient sums up derivatives that the
products take scaled: to sum up what is not stored is to make it again, from all that softmax reads.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit.programs._flow import Flow
from jmp_kit.programs._jaxpr import equations_of, is_float32, is_var, shape_of, uses_of

# Beyond, half may hold the value and not the multiple.
_MOST = 256


class Multiple(NamedTuple):
    """An equation that makes a multiple, of what, and the constant."""

    eqn: JaxprEqn
    x: Var
    c: Any

    def undone(self, total: Any) -> Any:
        """Of a sum of the multiple, that of x."""
        return (lax.div if self.eqn.primitive.name == "mul" else lax.mul)(total, self.c)


def summed_as_stored(jaxpr: Jaxpr, flow: Flow, is_late: Callable[[JaxprEqn], bool]) -> Jaxpr:
    """The program, such sums of its backward pass taken of the multiples."""
    uses = uses_of(jaxpr)
    maker = {v: e for e in jaxpr.eqns for v in e.outvars}

    def is_stored(multiple: Multiple) -> bool:
        """Whether products alone take it, and sums alone what it is a multiple of."""
        eqn, x, _ = multiple
        sums, takers = [e for e in uses[x] if e is not eqn], uses[eqn.outvars[0]]
        is_summed = all(e is not None and e.primitive.name == "reduce_sum" for e in sums)
        is_taken = all(e is not None and flow.closes(e) for e in takers)
        if not (sums and takers and is_summed and is_taken and x in maker):
            return False
        return all(e is not None and is_late(e) for e in (eqn, maker[x], *sums))

    found = {m.x: m for m in filter(None, map(_multiple, jaxpr.eqns)) if is_stored(m)}
    if not found:
        return jaxpr
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        multiples = [found[a] for a in eqn.invars if is_var(a) and a in found]
        if not multiples:
            eqns.append(eqn)
        for multiple in multiples:
            eqns += _of(multiple, eqn) if multiple.eqn is not eqn else ()
        eqns += (found[v].eqn for v in eqn.outvars if v in found)  # before all that take it
    return jaxpr.replace(eqns=eqns)


def _multiple(eqn: JaxprEqn) -> Multiple | None:
    name = eqn.primitive.name
    if name not in ("mul", "div"):
        return None
    values = list(filter(is_var, eqn.invars))
    if len(values) != 1 or not is_float32(values[0]):
        return None
    [x], [c] = values, [a for a in eqn.invars if not is_var(a)]
    is_multiple = (name == "mul" or eqn.invars[0] is x) and not shape_of(c)
    if not is_multiple or not 1 <= _MOST * abs(c.val) <= _MOST**2:
        return None
    return Multiple(eqn, x, c.val)


def _of(multiple: Multiple, eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """The sum, taken of the multiple."""
    [result], total = eqn.outvars, Var(eqn.outvars[0].aval)
    yield eqn.replace(invars=multiple.eqn.outvars, outvars=[total])
    yield from equations_of(multiple.undone, [total], [result], eqn.source_info)
