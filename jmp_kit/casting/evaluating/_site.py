"""A call to be rebuilt around what is inside it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn

from jmp_kit.casting._regions import computing_in
from jmp_kit.casting.planning._plan import Call, Known, Plan
from jmp_kit.casting.reading._state import Origins
from jmp_kit.programs._jaxpr import cast, opened, settled


class Site(NamedTuple):
    """A call where it stands: with its operands, and what evaluates plans."""

    call: Call
    operands: Sequence[Any]
    evaluated: Callable[[Plan, Sequence[Any], Sequence[Any]], list[Any]]

    @property
    def eqn(self) -> JaxprEqn:
        """As it was traced."""
        return self.call.eqn

    def once_cast(self) -> list[Any]:
        """The operands, those in half that products take in every round of a loop."""
        pairs = zip(self.operands, self.call.constant, strict=True)
        return [cast(x, self.call.half) if constant else x for x, constant in pairs]

    def inside(self, which: int = 0) -> Callable[..., list[Any]]:
        """A body of the call as a function of its own arguments."""
        body, plan = self.call.bodies[which]
        return lambda *args: self.evaluated(plan, body.consts, args)

    def traced_and_run(
        self,
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
        with computing_in(self.call.half):
            jaxpr, consts = opened(jax.make_jaxpr(fun)(*settled(args, dtypes)))
        n_out = len(jaxpr.outvars)
        rest = [False] * (n_out - len(whole))
        plan = self.call.plan_of(jaxpr, Known(depends, origins, [True] * n_out, [*whole, *rest]))
        return self.evaluated(plan, consts, args), [atom.aval.dtype for atom in jaxpr.outvars]
