"""What a program asks for that its user may not have meant."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from jmp_kit._loss_scale import SCALED
from jmp_kit._warn import warn
from jmp_kit.programs._flow import Flow
from jmp_kit.programs._jaxpr import every_equation
from jmp_kit.programs._marks import is_backward, marked_dtype, names_in, stack_of

_HALVES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def warn_of(
    jaxpr: Jaxpr,
    flow: Flow,
    halves: Sequence[np.dtype],
    arrays: Sequence[Any],
    paths_of: Callable[[], list[str]],
) -> None:
    """Warn of products in float64, and of another half."""
    products = _products(jaxpr, flow)
    wide = sum(jnp.dtype(jnp.float64) in _operands(eqn) for eqn, _ in products)
    named = zip(arrays, paths_of() if wide else (), strict=False)
    if at_fault := [path for x, path in named if x.dtype == jnp.float64]:
        warn(
            f"{wide} of {len(products)} products are in float64, which autocast leaves alone, for "
            f"arguments are: {', '.join(at_fault[:4])}. Cast them, x.astype(jnp.float32), and "
            "products run in half."
        )
    for eqn, stack in products:
        other = {d for d in _operands(eqn) if d in _HALVES and d not in halves}
        if other and marked_dtype(eqn) is None:
            where = f" in {names_in(stack)}" if names_in(stack) else ""
            warn(
                f"A product{where} asks for {other.pop()} itself, and the policy for {halves[0]}: "
                "its operands are cast already, and stay. Leave the module's own dtype= out, or "
                "give the policy the same."
            )
            break


def warn_of_unscaled(jaxpr: Jaxpr, flow: Flow, halves: Sequence[np.dtype]) -> None:
    """Warn of float16 gradients without a loss scale."""
    if jnp.float16 == halves[0] and any(
        is_backward(stack) and SCALED not in stack and marked_dtype(eqn) is None
        for eqn, stack in _products(jaxpr, flow)
    ):
        warn(
            "Gradients are computed in float16, of a loss that no loss scale multiplies: those "
            "below 6e-8 are zero. Write jmp_kit.value_and_grad(loss_fn, loss_scale) for "
            "jax.value_and_grad, or compute in bfloat16, which needs no scale."
        )


def _products(jaxpr: Jaxpr, flow: Flow) -> list[tuple[JaxprEqn, str]]:
    return [
        (eqn, stack_of(eqn, calls))
        for eqn, calls in every_equation(jaxpr)
        if eqn.primitive.name in flow.products
    ]


def _operands(eqn: JaxprEqn) -> set[Any]:
    return {atom.aval.dtype for atom in eqn.invars}
