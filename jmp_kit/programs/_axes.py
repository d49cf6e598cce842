"""What equations do to axes: reshape, reduce or contract them, or give each value in its place."""

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Var, primitives
from jax.sharding import AxisType

from jmp_kit.programs._jaxpr import Atom, shape_of

RESHAPES = {"reshape", "squeeze", "expand_dims"}
REDUCES = {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"}
# What makes each value of those in its place.
ELEMENTWISE = {"add", "add_any", "sub", "mul", "div", "rem", "max", "min", "pow", "integer_pow"}
ELEMENTWISE |= {"neg", "sign", "abs", "square", "sqrt", "rsqrt", "cbrt", "floor", "ceil", "round"}
ELEMENTWISE |= {"exp", "exp2", "expm1", "log", "log2", "log1p", "logistic", "one_minus_square"}
ELEMENTWISE |= {"erf", "erfc", "erf_inv", "tan", "sin", "cos", "atan", "asin", "acos", "atan2"}
ELEMENTWISE |= {"tanh", "sinh", "cosh", "atanh", "asinh", "acosh"}
ELEMENTWISE |= {"eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not", "is_finite"}
ELEMENTWISE |= {"select_n", "clamp", "convert_element_type", "reduce_precision", "copy"}
ELEMENTWISE |= {"stop_gradient", "name"}


def reduces(eqn: JaxprEqn) -> bool:
    """Whether it sums up its operand, or chooses from it, along axes."""
    return eqn.primitive.name in REDUCES


def only_reshapes(eqn: JaxprEqn) -> bool:
    """Whether it gives what it takes, one value after the other, in shapes that are known."""
    if eqn.primitive.name not in RESHAPES | {"broadcast_in_dim"} or len(eqn.invars) > 1:
        return False
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    is_known = all(isinstance(n, int) and n > 0 for n in (*before, *after))
    turns = eqn.primitive.name == "reshape" and eqn.params["dimensions"] is not None
    is_free = not (turns or any(map(is_shared, (*eqn.invars, *eqn.outvars))))
    return is_known and is_free and math.prod(before) == math.prod(after)


def staying(eqn: JaxprEqn) -> dict[int, int]:
    """Of a reshape, the axes of its result that stay as they are, and which of its operand's."""
    groups = groups_of(eqn) if only_reshapes(eqn) else []
    return {after[0]: before[0] for before, after in groups if len(before) == len(after) == 1}


def groups_of(eqn: JaxprEqn) -> Iterator[tuple[list[int], list[int]]]:
    """Which axes a reshape makes of which, but for those of one value."""
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    one, other = (iter([i for i, n in enumerate(s) if n != 1]) for s in (before, after))
    for i in one:
        j = next(other)
        group, sizes = ([i], [j]), [before[i], after[j]]
        while sizes[0] != sizes[1]:
            if sizes[0] < sizes[1]:
                group[0].append(next(one))
                sizes[0] *= before[group[0][-1]]
            else:
                group[1].append(next(other))
                sizes[1] *= after[group[1][-1]]
        yield group


def reshaped(a: Atom, b: Var, eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """A value in another shape, if it is another variable."""
    if a is not b:
        params = {"new_sizes": shape_of(b), "dimensions": None, "sharding": None}
        reshape = {"primitive": primitives.reshape_p, "params": params, "effects": set()}
        yield eqn.replace(invars=[a], outvars=[b], **reshape)


def is_shared(atom: Atom) -> bool:
    """Whether devices may hold parts of it, of which this program does not say which."""
    sharding = getattr(atom.aval, "sharding", None)
    kinds = sharding.mesh.axis_types if sharding and not sharding.mesh.empty else ()
    return any(kind is not AxisType.Manual for kind in kinds)


def is_split(atom: Atom) -> bool:
    """Whether its type says that devices hold parts of it."""
    return any(getattr(getattr(atom.aval, "sharding", None), "spec", ()))


class Operand(NamedTuple):
    """Of a product: the value, and the axes that it shares with the other, in the same order."""

    atom: Any
    contracted: Sequence[int]
    batch: Sequence[int]

    @property
    def kept(self) -> list[int]:
        """The other axes."""
        shared = {*self.contracted, *self.batch}
        return [i for i in range(len(shape_of(self.atom))) if i not in shared]


def sides_of(eqn: JaxprEqn) -> tuple[Operand, Operand]:
    """The operands of a matrix product."""
    (ac, bc), (ab, bb) = eqn.params["dimension_numbers"]
    a, b = eqn.invars
    return Operand(a, ac, ab), Operand(b, bc, bb)


def runs_of(eqn: JaxprEqn) -> Iterator[tuple[bool, int]]:
    """What a reduction goes over: of neighbouring axes that it reduces, or keeps, the size."""
    shape, axes = shape_of(eqn.invars[0]), eqn.params["axes"]
    long = ((i in axes, n) for i, n in enumerate(shape) if n != 1)
    for is_reduced, several in itertools.groupby(long, key=operator.itemgetter(0)):
        yield is_reduced, math.prod(n for _, n in several)


def are_known(sizes: Iterable[Any]) -> bool:
    """Whether none of them is a symbol."""
    return all(isinstance(n, int) for n in sizes)


def goes_into(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether one shape is broadcast to another with its axes where they are, or is the same."""
    return not shape or (
        len(shape) == len(whole) and all(a in (1, b) for a, b in zip(shape, whole, strict=True))
    )
