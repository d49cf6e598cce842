"""Functions as a rewriting of their programs leaves them, and what these hold."""

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jmp_kit.casting._inline import inlined
from jmp_kit.programs import every_equation


def rewritten(fun, rewriting):
    """The function, its program rewritten: a list of results."""

    def function(*args):
        closed = jax.make_jaxpr(fun)(*args)
        jaxpr = rewriting(inlined(closed.jaxpr))
        return jaxpr_as_fun(ClosedJaxpr(jaxpr, closed.consts))(*args)

    return function


def holds(primitive, fun, *args):
    """Whether there is such an equation in the function's program, however deep."""
    eqns = every_equation(jax.make_jaxpr(fun)(*args).jaxpr)
    return any(eqn.primitive.name == primitive for eqn, _ in eqns)
