"""Cotangents that are sums of what is stored, of several projections say, stored themselves.

Each pass that takes such a sum would read all of its terms.
"""

from collections.abc import Iterator, Mapping, Sequence

from jax.extend.core import JaxprEqn, Var

from jmp_kit.programs._jaxpr import Atom, is_float32, is_small, is_var, size_of
from jmp_kit.programs._marks import is_backward, stack_of

_SUMS = {"add", "add_any", "sub"}
_MOVES = {"reshape", "transpose", "neg", "convert_element_type", "squeeze"}


def joined(
    segment: Sequence[JaxprEqn], uses: Mapping[Var, Sequence[JaxprEqn | None]]
) -> Iterator[Var]:
    """The sums of several values from outside the segment that several others take.

    Args:
      uses: the equations that take each variable.
    """
    terms: dict[Var, int] = {}  # how many values from outside it is the sum of; 0 of what is none

    def terms_of(atom: Atom, whole: Var) -> int:
        is_term = is_var(atom) and size_of(atom) == size_of(whole)
        return terms.get(atom, 1) if is_term else 0

    for eqn in segment:
        if not eqn.outvars:
            continue
        v = eqn.outvars[0]
        found = [terms_of(a, v) for a in eqn.invars]
        is_sum = eqn.primitive.name in _SUMS | _MOVES and all(found)
        terms.update((out, sum(found) if is_sum else 0) for out in eqn.outvars)
        is_new = eqn.primitive.name in _SUMS and terms[v] > 1 and len(uses[v]) > 1
        # What others take than a backward pass, an optimizer, is a gradient.
        is_cotangent = all(e is not None and is_backward(stack_of(e)) for e in (eqn, *uses[v]))
        if is_new and is_cotangent and is_float32(v) and not is_small(v, segment):
            yield v
