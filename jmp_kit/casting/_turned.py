"""Products whose result is transposed, turned round: `(a b)ᵀ = bᵀ aᵀ`.

JAX's derivative by a weight is a transposed product. XLA turns it round itself, but not with a cast
of the result before the transposition.
"""

from jax.extend.core import Jaxpr, JaxprEqn

from jmp_kit.programs._flow import Flow
from jmp_kit.programs._jaxpr import shape_of, uses_of


def turned(jaxpr: Jaxpr, flow: Flow) -> Jaxpr:
    """The program with products in place of transposed products."""
    uses = uses_of(jaxpr)
    instead: dict[int, JaxprEqn | None] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general" and flow.is_product(eqn):
            [use, *others] = uses[eqn.outvars[0]] or [None]
            if use is not None and not others and _exchanges(eqn, use):
                instead[id(eqn)], instead[id(use)] = _turned(eqn, use), None
    eqns = (instead.get(id(eqn), eqn) for eqn in jaxpr.eqns)
    return jaxpr.replace(eqns=[eqn for eqn in eqns if eqn is not None])


def _exchanges(product: JaxprEqn, use: JaxprEqn) -> bool:
    """Whether it transposes the result so that the other operand's axes come first."""
    if use.primitive.name != "transpose" or product.params.get("out_sharding") is not None:
        return False
    (contracted, _), (batch, _) = product.params["dimension_numbers"]
    n = len(shape_of(product.outvars[0]))
    first = len(batch)
    middle = first + len(shape_of(product.invars[0])) - len(contracted) - len(batch)
    exchanged = (*range(first), *range(middle, n), *range(first, middle))
    return tuple(use.params["permutation"]) == exchanged


def _turned(product: JaxprEqn, use: JaxprEqn) -> JaxprEqn:
    (a, b), (batch_a, batch_b) = product.params["dimension_numbers"]
    params = {**product.params, "dimension_numbers": ((b, a), (batch_b, batch_a))}
    if isinstance(params.get("precision"), tuple):
        params["precision"] = params["precision"][::-1]
    return product.replace(invars=product.invars[::-1], outvars=use.outvars, params=params)
