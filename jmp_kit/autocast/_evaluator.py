"""What calls and the evaluator of jaxprs know of each other."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.extend.core import Jaxpr

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

    def inside_loop(self) -> "Evaluator":
        """The same, for the body of a loop."""


def inside(
    evaluator: Evaluator, body: Body, depends: Sequence[bool], reaches: Sequence[bool]
) -> Callable[..., list[Any]]:
    """A body as a function of its own arguments."""
    operands = evaluator.flow.body_inputs(body, depends)
    outputs = evaluator.flow.body_outputs(body, reaches)
    return lambda *args: evaluator.run(body.jaxpr, body.consts, args, operands, outputs)


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
