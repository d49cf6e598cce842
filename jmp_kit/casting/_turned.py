"""Products whose result is transposed, turned round: `(a b)ᵀ = bᵀ aᵀ`.

JAX's derivative by a weight is a transposed product. XLA turns it round itself, but not with a cast
of the result before the transposition.
"""

from collections.abc import Iterator, Mapping, Sequence

from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit.programs._flow import Flow
from jmp_kit.programs._jaxpr import shape_of, uses_of


def turned(jaxpr: Jaxpr, flow: Flow) -> Jaxpr:
    """The program with products in place of transposed products."""
    uses = uses_of(jaxpr)
    instead: dict[int, JaxprEqn | None] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general" and flow.is_product(eqn):
            moves = list(_transpositions(eqn, uses))
            if moves and (product := _transposed(eqn, moves)):
                instead |= {id(eqn): product, **dict.fromkeys(map(id, moves))}
    eqns = (instead.get(id(eqn), eqn) for eqn in jaxpr.eqns)
    return jaxpr.replace(eqns=[eqn for eqn in eqns if eqn is not None])


def _transpositions(
    eqn: JaxprEqn, uses: Mapping[Var, Sequence[JaxprEqn | None]]
) -> Iterator[JaxprEqn]:
    """Those that all of an equation's result goes through, one after the other."""
    [use, *others] = uses[eqn.outvars[0]] or [None]
    if use is not None and not others and use.primitive.name == "transpose":
        yield use
        yield from _transpositions(use, uses)


def _transposed(product: JaxprEqn, moves: Sequence[JaxprEqn]) -> JaxprEqn | None:
    """The product that gives its transposed result; None if no product does."""
    (contracted, _), (batch, _) = product.params["dimension_numbers"]
    n = len(shape_of(product.outvars[0]))
    axes = tuple(range(n))
    for move in moves:
        axes = tuple(axes[i] for i in move.params["permutation"])
    first = len(batch)
    middle = first + len(shape_of(product.invars[0])) - len(contracted) - len(batch)
    if axes == tuple(range(n)):
        return product.replace(outvars=moves[-1].outvars)
    is_turned = axes == (*range(first), *range(middle, n), *range(first, middle))
    is_free = product.params.get("out_sharding") is None
    return _turned(product, moves[-1]) if is_turned and is_free else None


def _turned(product: JaxprEqn, use: JaxprEqn) -> JaxprEqn:
    (a, b), (batch_a, batch_b) = product.params["dimension_numbers"]
    params = {**product.params, "dimension_numbers": ((b, a), (batch_b, batch_a))}
    if isinstance(params.get("precision"), tuple):
        params["precision"] = params["precision"][::-1]
    return product.replace(invars=product.invars[::-1], outvars=use.outvars, params=params)
