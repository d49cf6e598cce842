"""Calls of jit replaced by what they call: forward and backward pass become one program."""

from collections.abc import Iterator, Sequence

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit.programs._flow import bodies_of
from jmp_kit.programs._jaxpr import Atom, copied, in_place
from jmp_kit.programs._marks import called


def inlined(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr without calls of jit, but for those that place what they take.

    XLA inlines them, too.
    """
    renamed: dict[Var, Atom] = {}
    eqns = list(_inlined(jaxpr.eqns, renamed, ()))
    return jaxpr.replace(eqns=eqns, outvars=in_place(jaxpr.outvars, renamed))


def _inlined(
    eqns: Sequence[JaxprEqn], renamed: dict[Var, Atom], calls: Sequence[JaxprEqn]
) -> Iterator[JaxprEqn]:
    for eqn in eqns:
        copy = copied(eqn, renamed)
        for call in reversed(calls):
            copy = called(copy, call)
        if not _only_calls(eqn):
            yield copy
            continue
        [body] = bodies_of(eqn)
        inner: dict[Var, Atom] = dict(zip(body.jaxpr.invars, copy.invars, strict=True))
        yield from _inlined(body.jaxpr.eqns, inner, (*calls, eqn))
        renamed.update(zip(eqn.outvars, in_place(body.jaxpr.outvars, inner), strict=True))


def _only_calls(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name not in ("jit", "pjit"):
        return False
    shardings = *eqn.params["in_shardings"], *eqn.params["out_shardings"]
    placed = any(isinstance(s, jax.sharding.Sharding) for s in shardings)
    return not placed and not any(body.consts for body in bodies_of(eqn))
