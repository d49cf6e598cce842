"""What calls and the evaluator of jaxprs know of each other."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from jmp_kit.autocast._flow import Body, Flow
from jmp_kit.autocast._jaxpr import opened, settled


class Evaluator(Protocol):
    """Evaluates jaxprs with their products in half; `_evaluate` has it."""

    @property
    def half(self) -> np.dtype:
        """The compute dtype."""

    @property
    def flow(self) -> Flow:
        """What is a product, and where products lead."""

    def run(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        args: Sequence[Any],
        depends: Sequence[bool],
        reaches: Sequence[bool],
    ) -> list[Any]:
        """The results of a jaxpr."""


class Site(NamedTuple):
    """A higher-order equation to be rebuilt, where it stands."""

    evaluator: Evaluator
    eqn: JaxprEqn
    operands: Sequence[Any]
    depends: Sequence[bool]  # of each operand, whether it depends on a product
    reaches: Sequence[bool]  # of each result, whether a product can be reached from it

    def inside(self, body: Body) -> Callable[..., list[Any]]:
        """A body of the equation as a function of its own arguments."""
        run, flow = self.evaluator.run, self.evaluator.flow
        depends = flow.body_inputs(body, self.depends)
        reaches = flow.body_outputs(body, self.reaches)
        return lambda *args: run(body.jaxpr, body.consts, args, depends, reaches)


def traced_and_run(
    evaluator: Evaluator,
    fun: Callable[..., Any],
    args: Sequence[Any],
    dtypes: Sequence[Any],
    depends: Sequence[bool],
) -> tuple[list[Any], list[Any]]:
    """A function traced for arguments of these dtypes and evaluated, and its results' dtypes.

    Whatever it gives is stored in half where it can be: it goes on to products.
    """
    jaxpr, consts = opened(jax.make_jaxpr(fun)(*settled(args, dtypes)))
    results = evaluator.run(jaxpr, consts, args, depends, [True] * len(jaxpr.outvars))
    return results, [atom.aval.dtype for atom in jaxpr.outvars]
