"""Gradients of biases, summed up from the half cotangent that the backward products take.

With `z = x @ w + b`, the derivative by z goes to the products, in half, and to the sum that is the
derivative by b. XLA on GPUs makes both in one kernel, but not where a costly function of z is
computed again for it: there it would store the derivative in float32, too, and read that.
"""

from collections.abc import Mapping, Sequence

import jax
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit.autocast._flow import Flow
from jmp_kit.autocast._jaxpr import cast, is_float32, is_var, primitive_names, subjaxprs

# What XLA computes rather once than twice.
_COSTLY = (
    *("exp", "log", "tan", "erf", "pow", "sin", "cos", "asin", "acos", "atan", "sqrt", "rsqrt"),
    *("cbrt", "digamma", "lgamma", "igamma", "bessel", "regularized"),
)


def bias_of(result: Var, uses: Mapping[Var, Sequence[JaxprEqn | None]]) -> Var | None:
    """What is added to the result of a product, if nothing else is done with either."""
    eqn = uses[result][0] if len(uses[result]) == 1 else None
    if eqn is None or eqn.primitive.name != "add":
        return None
    [bias] = [a for a in eqn.invars if a is not result]
    alone = is_var(bias) and is_float32(bias) and len(uses[bias]) == 1
    return bias if alone and eqn.outvars[0].aval.shape == result.aval.shape else None


def meeting_cost(jaxpr: Jaxpr, flow: Flow) -> set[Var]:
    """The variables of all of which a costly function is computed before the next product."""
    found: set[Var] = set()
    for eqn in reversed(jaxpr.eqns):
        if flow.is_product(eqn) or flow.holds_product(eqn):
            continue
        names = {eqn.primitive.name}.union(*map(primitive_names, subjaxprs(eqn)))
        is_costly = any(name.startswith(_COSTLY) for name in names)
        made = [v for v in eqn.outvars if is_costly or v in found]
        size = max((v.aval.size for v in made), default=-1)
        found |= {a for a in eqn.invars if is_var(a) and a.aval.size <= size}
    return found


@jax.custom_jvp
def carrying_bias(result: jax.Array, bias: jax.Array) -> jax.Array:
    """The result alone; its derivative by the bias is that of `result + bias`."""
    return result


@carrying_bias.defjvp
def _jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (result, bias), (change, bias_change) = primals, tangents
    both = cast(cast(change, bias.dtype) + bias_change, change.dtype)
    # Transposed, the barrier has the cotangent stored in half before it is used.
    return result, lax.optimization_barrier(both)
