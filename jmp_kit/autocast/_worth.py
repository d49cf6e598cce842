"""What of a segment is worth computing twice, and what is worth storing instead."""

from collections.abc import Callable, Hashable, Sequence

from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit.autocast._flow import KERNELS, Flow
from jmp_kit.autocast._jaxpr import is_var, names_within, shape_of, size_of

# What a segment's backward pass does not compute again, for it is small or takes long.
_COLLECTIVES = ("psum", "pmax", "pmin", "all_", "ppermute", "ragged_all")
_LOOPS = ("sort", "top_k", "gather", "scatter", "cum", "while", "scan", "random_")
_SOLVERS = ("cholesky", "triangular_solve", "lu", "qr", "geqrf", "svd", "eig", "schur", "fft")
_KEPT = ("reduce_", "argm", *_LOOPS, *_SOLVERS, *KERNELS, *_COLLECTIVES)
# The derivative of an extremum compares it with what it is one of: both computed again, or a last
# bit between them would lose the gradient. The third is no reduction.
_NOT_KEPT = ("reduce_max", "reduce_min", "reduce_precision")

# A segment of these alone keeps nothing for its backward pass, and makes nothing larger.
_LINEAR = {"add", "sub", "neg", "convert_element_type"}
_LINEAR |= {"reshape", "transpose", "squeeze", "slice", "split"}

# What XLA stores, in float32, rather than compute it in two kernels.
_COSTLY = (
    *("exp", "log", "tan", "erf", "pow", "sin", "cos", "asin", "acos", "atan", "sqrt", "rsqrt"),
    *("cbrt", "digamma", "lgamma", "igamma", "bessel", "regularized"),
)


def is_kept(primitive: str) -> bool:
    """Whether results of this primitive are kept for the backward pass."""
    return primitive.startswith(_KEPT) and primitive not in _NOT_KEPT


def is_linear(segment: Sequence[JaxprEqn]) -> bool:
    """Whether its derivative needs nothing of it."""
    return {e.primitive.name for e in segment} <= _LINEAR


def is_costly(eqn: JaxprEqn) -> bool:
    """Whether there is a costly function in it."""
    return any(name.startswith(_COSTLY) for name in names_within(eqn))


def summed(jaxpr: Jaxpr, flow: Flow) -> set[Var]:
    """The variables that are summed up before the next product, or what is made of them in place.

    XLA on GPUs fuses such a sum with what it is a sum of.
    """
    return _meeting(jaxpr, flow, _is_sum, shape_of)


def costly(jaxpr: Jaxpr, flow: Flow) -> set[Var]:
    """The variables of all of which a costly function is computed before the next product.

    Or a sum of another shape. With them XLA does not fuse a further sum.
    """
    cost, sums = (_meeting(jaxpr, flow, met, size_of) for met in (is_costly, _is_sum))
    return cost | (sums - summed(jaxpr, flow))


def _is_sum(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "reduce_sum"


def _meeting(
    jaxpr: Jaxpr,
    flow: Flow,
    is_met: Callable[[JaxprEqn], bool],
    measure: Callable[[Var], Hashable],
) -> set[Var]:
    """What goes into such an equation, and what goes into that with its measure kept."""
    found: set[Var] = set()
    for eqn in reversed(jaxpr.eqns):
        if not flow.closes(eqn) and not flow.holds_product(eqn):
            measures = {measure(v) for v in eqn.outvars if v in found}
            met = is_met(eqn)
            found |= {a for a in eqn.invars if is_var(a) and (met or measure(a) in measures)}
    return found
