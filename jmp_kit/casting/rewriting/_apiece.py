"""What a product gives with its bias, made by each part that takes it rather than stored beside it.

A slope of an integrator, say, which its next stage takes, and the sum of all of them: to read what
it is made of is to read no more, and it is not written.
"""

from collections.abc import Callable, Mapping, Sequence, Set

from jax.extend.core import JaxprEqn, Var

from jmp_kit.casting.reading._parts import is_alone
from jmp_kit.programs._flow import SUMS, Flow
from jmp_kit.programs._jaxpr import (
    Atom,
    copied,
    is_float32,
    is_small,
    is_var,
    largest_size,
    size_of,
    taking,
    traced_back,
)

# Biases, scales and what they are spread by, and a ReLU.
_CHEAP = SUMS | {"mul", "div", "neg", "max", "min", "broadcast_in_dim"}


def apiece(
    parts: Sequence[Sequence[JaxprEqn]],
    flow: Flow,
    depending: Set[Var],
    uses: Mapping[Var, Sequence[JaxprEqn | None]],
    is_late: Callable[[JaxprEqn], bool],
) -> list[list[JaxprEqn]]:
    """The parts, each with equations of its own for what earlier ones make of what a product gives.

    Only cheap functions of its values, each in its place, are made so. What the backward pass takes
    of the forward pass is another matter: see `_again`.

    Args:
      depending: the variables that depend on a product; others are there in any case.
      uses: the equations that take each variable; None for a result of the program.
    """
    made_in = {v: i for i, part in enumerate(parts) for e in part for v in e.outvars}
    order = {id(e): i for i, e in enumerate(e for part in parts for e in part)}
    largest = [largest_size(part) for part in parts]
    products = (e for part in parts for e in part if flow.is_product(e) and not _convolves(e))
    given = {v for eqn in products for v in eqn.outvars}

    def is_on_the_way(v: Var, eqn: JaxprEqn) -> bool:
        """Whether it is cheap, and stored for none but those who would make it themselves."""
        is_cheap = eqn.primitive.name in _CHEAP
        return is_cheap and not any(use is None or flow.closes(use) for use in uses[v])

    maker = [{v: e for e in part for v in e.outvars if is_on_the_way(v, e)} for part in parts]

    def is_crossing(atom: Atom, eqn: JaxprEqn, part: int) -> bool:
        here = made_in.get(atom, part) if is_var(atom) and atom in depending else part
        return (
            here != part
            and atom in maker[here]
            and is_late(maker[here][atom]) == is_late(eqn)
            and is_float32(atom)
            and not is_small(atom, largest[here])
        )

    def of_one(v: Var) -> list[JaxprEqn]:
        """What makes it of what one product gives, if that is all that it is made of."""
        eqns, sources = traced_back([v], maker[made_in[v]])
        large = {a for a in sources if not is_small(a, size_of(v))}
        is_one = sum(map(size_of, large)) <= size_of(v) and large <= given
        return sorted(eqns.values(), key=lambda e: order[id(e)]) if is_one else []

    found: list[list[JaxprEqn]] = []
    for i, part in enumerate(parts):
        found.append([])
        is_closed = len(part) == 1 and is_alone(part[0], flow)
        renamed: dict[Var, Atom] = {}
        for eqn in part:
            crossing = [a for a in eqn.invars if not is_closed and is_crossing(a, eqn, i)]
            again = [e for v in crossing for e in of_one(v)]
            found[-1] += [copied(e, renamed) for e in again if renamed.keys().isdisjoint(e.outvars)]
            found[-1].append(taking(eqn, {v: renamed[v] for v in crossing if v in renamed}))
    return found


def _convolves(eqn: JaxprEqn) -> bool:
    """Whether one kernel makes it with what is added to it, and stores the sum alone."""
    return eqn.primitive.name == "conv_general_dilated"
