"""What of a segment is worth computing twice, and what is worth storing instead."""

from collections.abc import Callable, Container, Hashable, Sequence, Set

from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit.casting.reading._rounding import is_rounding
from jmp_kit.programs._algebra import ALGEBRA
from jmp_kit.programs._axes import REDUCES, reduces
from jmp_kit.programs._flow import KERNELS, MOVED, PAIRED, SUMS, Flow
from jmp_kit.programs._jaxpr import (
    Atom,
    is_along_rows,
    is_var,
    names_within,
    shape_of,
    size_of,
)

# What a segment's backward pass does not compute again, for it is small or takes long.
_COLLECTIVES = ("psum", "pmax", "pmin", "all_", "ppermute", "ragged_all")
_LOOPS = ("sort", "top_k", "scatter", "cum", "while", "scan", "random_")
_KEPT = ("reduce_", "argm", "fft", *_LOOPS, *ALGEBRA, *KERNELS, *_COLLECTIVES)
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

_JOINING = {"concatenate", "pad", "dynamic_update_slice", "scatter", "gather"}

# So many values are summed up in registers, by whatever takes their sum.
FEW = 8

# So many values are made in one kernel with the sum of each.
MOST_SUMS = 2

# What XLA cuts and joins in a kernel with what it computes, if that is not often in a row.
CUTS, MOST_CUTS = {"slice", "pad", "concatenate", "split", "rev"}, 8


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
    return _meeting(jaxpr, flow, _sums, shape_of)


def costly(jaxpr: Jaxpr, flow: Flow) -> set[Var]:
    """The variables of all of which a costly function is computed before the next product.

    Or a sum of another shape. With them XLA does not fuse a further sum.
    """
    cost = _meeting(jaxpr, flow, lambda eqn, _: is_costly(eqn), size_of)
    return cost | (_meeting(jaxpr, flow, _sums, size_of) - summed(jaxpr, flow))


def spread(jaxpr: Jaxpr, flow: Flow) -> set[Var]:
    """The variables that are combined with larger ones before the next product."""
    return _meeting(jaxpr, flow, _spreads, size_of)


def reduced(segment: Sequence[JaxprEqn], depends: Callable[[Atom], bool]) -> set[Var]:
    """The results of a segment's reductions, and what is made of them in place, and of no other.

    What is combined with what it was reduced from, the sum of a softmax's row say, is not rounded:
    all of the row would be wrong alike, and derivatives are differences within it.
    """
    found: set[Var] = set()
    for eqn in segment:
        sizes = {size_of(a) for a in eqn.invars if is_var(a) and a in found}
        sizes -= {size_of(a) for a in eqn.invars if depends(a) and a not in found}
        if not REDUCES.isdisjoint(names_within(eqn)):
            largest = max(map(size_of, eqn.invars), default=0)
            sizes |= {size for size in map(size_of, eqn.outvars) if size < largest}
        found |= {v for v in eqn.outvars if size_of(v) in sizes}
    return found


def normed(segment: Sequence[JaxprEqn]) -> set[Var]:
    """What is made with sums along rows."""
    found: set[Var] = set()
    for eqn in segment:
        is_made_of_sums = not reduces(eqn) and any(is_var(a) and a in found for a in eqn.invars)
        is_row = reduces(eqn) and is_along_rows(eqn) and not is_rounding(eqn)
        if is_made_of_sums or is_row:
            found.update(eqn.outvars)
    return found


def looked_up(segment: Sequence[JaxprEqn]) -> set[Var]:
    """The values from which more is looked up than they hold.

    XLA computes nothing where it looks it up, but writes all of it before.
    """
    found: set[Var] = set()
    for eqn in reversed(segment):
        if _looks_up_more(eqn) or (eqn.primitive.name in MOVED and eqn.outvars[0] in found):
            found.update(filter(is_var, eqn.invars[:1]))
    return found


def cuts_before(eqns: Sequence[JaxprEqn]) -> dict[Var, int]:
    """How often in a row what each result is made of is cut or joined."""
    found: dict[Var, int] = {}
    for eqn in eqns:
        cuts = max((found.get(a, 0) for a in eqn.invars if is_var(a)), default=0)
        found |= dict.fromkeys(eqn.outvars, cuts + (eqn.primitive.name in CUTS))
    return found


def woven(segment: Sequence[JaxprEqn]) -> set[Var]:
    """What is cut and joined over and over, before and after, as in an associative scan.

    XLA writes it, in float32, forward and backward.
    """
    after: dict[Var, int] = {}
    for eqn in reversed(segment):
        cuts = max((after.get(v, 0) for v in eqn.outvars), default=0)
        cuts += eqn.primitive.name in CUTS
        after |= {a: max(cuts, after.get(a, 0)) for a in eqn.invars if is_var(a)}
    before = cuts_before(segment).items()
    return {v for v, n in before if n and after.get(v) and n + after[v] > MOST_CUTS}


def ends_of_woven(segment: Sequence[JaxprEqn]) -> set[Var]:
    """What is cut and joined over and over ends in, before anything else is computed of it."""
    before = cuts_before(segment)
    often = [v for v, n in before.items() if n > MOST_CUTS and isinstance(size_of(v), int)]
    whole = max(map(size_of, often), default=0)  # of symbolic ones, none may be the largest
    joins = {v for e in segment if e.primitive.name in CUTS | SUMS for v in e.outvars}
    ends = {v for v in often if v in joins and size_of(v) == whole}
    others = (e for e in segment if e.primitive.name not in CUTS | SUMS)
    return {a for e in others for a in e.invars if is_var(a) and a in ends}


def first_of(several: Set[Var], segment: Sequence[JaxprEqn], stored: Container[Var]) -> set[Var]:
    """What is stored that is made of these, and of nothing else that is stored and made of them."""
    made, found = set(several), set[Var]()
    for eqn in segment:
        if not made.isdisjoint(filter(is_var, eqn.invars)):
            found.update(v for v in eqn.outvars if v in stored)
            made.update(v for v in eqn.outvars if v not in stored)
    return found


def _looks_up_more(eqn: JaxprEqn) -> bool:
    sizes = [size_of(a) for a in (*eqn.invars[:1], *eqn.outvars)]
    is_known = all(isinstance(size, int) for size in sizes)  # which a symbolic one is not
    return eqn.primitive.name == "gather" and is_known and sizes[0] <= sizes[1]


def _sums(eqn: JaxprEqn, _: Var) -> bool:
    return eqn.primitive.name == "reduce_sum"


def _spreads(eqn: JaxprEqn, operand: Var) -> bool:
    joins = eqn.primitive.name in _JOINING
    return not joins and any(size_of(v) > size_of(operand) for v in eqn.outvars)


def _meeting(
    jaxpr: Jaxpr,
    flow: Flow,
    is_met: Callable[[JaxprEqn, Var], bool],
    measure: Callable[[Var], Hashable],
) -> set[Var]:
    """What goes into such an equation, and what goes into that with its measure kept."""
    found: set[Var] = set()
    for eqn in reversed(jaxpr.eqns):
        if eqn.primitive.name in PAIRED:
            pairs = zip(eqn.invars, eqn.outvars, strict=True)
            found |= {a for a, v in pairs if v in found and is_var(a)}
        elif not flow.closes(eqn) and not flow.is_call(eqn):
            measures = {measure(v) for v in eqn.outvars if v in found}
            operands = filter(is_var, eqn.invars)
            found |= {a for a in operands if is_met(eqn, a) or measure(a) in measures}
    return found
