"""Gradients of biases, summed up from the half cotangent that the backward products take.

With `z = x @ w + b`, the derivative by z goes to the products, in half, and to the sum that is the
derivative by b. XLA on GPUs makes both in one kernel, but not where a costly function of z is
computed again for it: there it would store the derivative in float32, too, and read that.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Var

from jmp_kit.programs._jaxpr import cast, is_float32, is_var


def bias_of(result: Var, uses: Mapping[Var, Sequence[JaxprEqn | None]]) -> Var | None:
    """What is added to the result of a product, if nothing else is done with either."""
    eqn = uses[result][0] if len(uses[result]) == 1 else None
    if eqn is None or eqn.primitive.name != "add":
        return None
    [bias] = [a for a in eqn.invars if a is not result]
    alone = is_var(bias) and is_float32(bias) and len(uses[bias]) == 1
    return bias if alone and eqn.outvars[0].aval.shape == result.aval.shape else None


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
    return _again(result, bias), lax.optimization_barrier(both)


def with_nothing_of(result: jax.Array, bias: jax.Array) -> jax.Array:
    """The result alone; all of its derivatives by the bias are those of `result + bias`."""
    nothing = jnp.where(jnp.isfinite(bias), bias - lax.stop_gradient(bias), 0)
    return cast(cast(result, bias.dtype) + nothing, result.dtype)


# The derivative of the derivative is by the bias, too. In a scan, JAX before 0.12 forgets the rule
# of what a rule calls.
_again = carrying_bias if jax.__version_info__ >= (0, 12) else with_nothing_of
