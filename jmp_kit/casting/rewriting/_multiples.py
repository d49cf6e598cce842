"""Sums of what products take a multiple of, taken of the multiple, which is stored for them.

    y = x · c,  sum(x)    ->    sum(y) / c        where products alone take y, and c is a constant

Attention scales its logits before it adds a bias. The bias's gradient sums up derivatives that the
products take scaled: to sum up what is not stored is to make it again, from all that softmax reads.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit.programs._flow import Flow
from jmp_kit.programs._jaxpr import equations_of, is_float32, is_var, shape_of, uses_of

Uses = Mapping[Var, Sequence[JaxprEqn | None]]

_UNDONE: Mapping[str, Callable[..., Any]] = {"mul": lax.div, "div": lax.mul}

# Beyond, half may hold the value and not the multiple.
_MOST = 256


def summed_as_stored(jaxpr: Jaxpr, flow: Flow, is_late: Callable[[JaxprEqn], bool]) -> Jaxpr:
    """The program, such sums of its backward pass taken of the multiples."""
    uses = uses_of(jaxpr)
    made = {v for e in jaxpr.eqns for v in e.outvars}
    late = (e for e in jaxpr.eqns if is_late(e) and _is_stored(e, flow, uses))
    multiples = {e.invars[0]: e for e in late if e.invars[0] in made}
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        [multiple] = [multiples[a] for a in eqn.invars if is_var(a) and a in multiples] or [None]
        if multiple is None:
            eqns.append(eqn)
        elif multiple is not eqn:
            eqns += _of(multiple, eqn)
        eqns += (multiples[v] for v in eqn.outvars if v in multiples)  # before all that take it
    return jaxpr.replace(eqns=eqns) if multiples else jaxpr


def _is_stored(eqn: JaxprEqn, flow: Flow, uses: Uses) -> bool:
    """Whether it is a multiple that products alone take, of what else sums alone take."""
    if eqn.primitive.name not in _UNDONE:
        return False
    (x, c), takers = eqn.invars, uses[eqn.outvars[0]]
    if not is_var(x) or not is_float32(x) or is_var(c) or shape_of(c):
        return False
    if not 1 <= _MOST * abs(c.val) <= _MOST**2:
        return False
    sums = [e for e in uses[x] if e is not eqn]
    is_summed = all(e is not None and e.primitive.name == "reduce_sum" for e in sums)
    is_taken = all(e is not None and flow.closes(e) for e in takers)
    return bool(sums and takers and is_summed and is_taken)


def _of(multiple: JaxprEqn, eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """The sum, taken of the multiple."""
    [result], c, total = eqn.outvars, multiple.invars[1], Var(eqn.outvars[0].aval)
    yield eqn.replace(invars=multiple.outvars, outvars=[total])
    undone = _UNDONE[multiple.primitive.name]
    yield from equations_of(lambda s: undone(s, c.val), [total], [result], eqn.source_info)
