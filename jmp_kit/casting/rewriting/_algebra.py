"""Products that are part of linear algebra, and of its derivatives: in float32.

    x = V S⁻¹ Uᵀ b         of least squares, where U, S, V decompose a matrix
    tril(Lᵀ dL) - diag/2   of the derivative of L = cholesky(K), before two solves

A condition number multiplies their errors, too.
"""

from collections.abc import Sequence

import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn

from jmp_kit.programs._algebra import is_algebra
from jmp_kit.programs._flow import Flow, bodies_of
from jmp_kit.programs._jaxpr import is_var, with_subjaxprs
from jmp_kit.programs._marks import marked


def with_exact_algebra(jaxpr: Jaxpr, flow: Flow, inputs: Sequence[bool] = ()) -> Jaxpr:
    """The program, products of the highest precision marked, if they take what algebra gives.

    JAX asks for that precision where it is needed. Elsewhere to ask for it keeps nothing in
    float32: who resizes an image asks for it, too.

    Args:
      inputs: which arguments algebra gives; none, if not said.
    """
    # By linear algebra, or made of that with no other product in between.
    given = {v for v, flag in zip(jaxpr.invars, inputs, strict=False) if flag}
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        flags = [is_var(a) and a in given for a in eqn.invars]
        is_exact = any(flags) or is_algebra(eqn)
        if flow.is_product(eqn):
            is_exact = any(flags) and _is_precise(eqn)
            eqn = marked(eqn, np.dtype(np.float32)) if is_exact else eqn
        elif is_exact:
            inside = ((b.jaxpr, [flags[i] for i in b.inputs]) for b in bodies_of(eqn))
            eqn = with_subjaxprs(eqn, {id(b): with_exact_algebra(b, flow, f) for b, f in inside})
        given.update(eqn.outvars if is_exact else ())
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns) if given else jaxpr


def _is_precise(eqn: JaxprEqn) -> bool:
    precision = eqn.params.get("precision")
    return lax.Precision.HIGHEST in (precision if isinstance(precision, tuple) else (precision,))
