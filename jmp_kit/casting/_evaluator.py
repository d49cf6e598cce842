"""What calls and the evaluator of jaxprs know of each other."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit.casting._state import Origins, States
from jmp_kit.programs._flow import Body, Flow
from jmp_kit.programs._jaxpr import opened, settled


class Known(NamedTuple):
    """What is known of a program's arguments and results where it is called."""

    depends: Sequence[bool]  # of each argument, whether it depends on a product
    origins: Sequence[Origins]  # of each argument, of what it is an update
    reaches: Sequence[bool]  # of each result, whether a product can be reached from it
    whole: Sequence[bool]  # of each result, whether it is not to be rounded


# Why a value is stored as it is.
ANEW = "made anew"
MULTIPLIED = "products take it"
UPDATED = "state"
LEADS = "a result or state is made of it"
SMALL = "small"
CARRIED = "carried by a loop"


class Stored(NamedTuple):
    """What was decided of a value that leaves a segment, or that a loop carries."""

    eqn: JaxprEqn  # that makes it, or the loop
    calls: tuple[JaxprEqn, ...]  # that it is inside of, the outermost first
    var: Var
    dtype: np.dtype
    why: str


class Evaluator(Protocol):
    """Evaluates jaxprs with their products in half; `_evaluate` has it."""

    @property
    def half(self) -> np.dtype:
        """The compute dtype."""

    @property
    def flow(self) -> Flow:
        """What is a product, and where products lead."""

    @property
    def states(self) -> States:
        """What is state."""

    def note(self, eqn: JaxprEqn, var: Var, dtype: Any, why: str) -> None:
        """Takes down what was decided."""

    def run(
        self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], known: Known
    ) -> list[Any]:
        """The results of a jaxpr."""


class Site(NamedTuple):
    """A higher-order equation to be rebuilt, where it stands."""

    evaluator: Evaluator
    eqn: JaxprEqn
    operands: Sequence[Any]
    known: Known
    multiplied: Sequence[bool]  # of each result, whether only products take it, and take it in half

    def known_inside(self, body: Body) -> Known:
        """What is known of a body's arguments and results, in any round of a loop."""
        flow, states, known = self.evaluator.flow, self.evaluator.states, self.known
        origins = states.body_inputs(self.eqn, body, known.origins, known.depends)
        return Known(
            flow.body_inputs(body, known.depends),
            origins,
            flow.body_outputs(body, known.reaches),
            states.body_outputs(body, known.whole, origins),
        )

    def inside(self, body: Body) -> Callable[..., list[Any]]:
        """A body of the equation as a function of its own arguments."""
        run, known = self.evaluator.run, self.known_inside(body)
        return lambda *args: run(body.jaxpr, body.consts, args, known)


def traced_and_run(
    evaluator: Evaluator,
    fun: Callable[..., Any],
    args: Sequence[Any],
    dtypes: Sequence[Any],
    depends: Sequence[bool],
    origins: Sequence[Origins],
    whole: Sequence[bool],
) -> tuple[list[Any], list[Any]]:
    """A function traced for arguments of these dtypes and evaluated, and its results' dtypes.

    Whatever it gives is stored in half where it can be: it goes on to products.

    Args:
      whole: of its first results, whether they are not to be rounded.
    """
    jaxpr, consts = opened(jax.make_jaxpr(fun)(*settled(args, dtypes)))
    n_out = len(jaxpr.outvars)
    rest = [False] * (n_out - len(whole))
    known = Known(depends, origins, [True] * n_out, [*whole, *rest])
    results = evaluator.run(jaxpr, consts, args, known)
    return results, [atom.aval.dtype for atom in jaxpr.outvars]
