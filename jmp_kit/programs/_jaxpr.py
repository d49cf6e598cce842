"""Jaxprs: what differs between versions of JAX, and pieces cut out of one.

Up to JAX 0.11 a `ClosedJaxpr` holds a `Jaxpr` and its constants; from 0.12 they are one class.
Up to 0.11 a scan says `num_consts` and `num_carry`; from 0.12 it has trees, `ft_in` and `ft_out`.
"""

import collections
import math
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.interpreters import partial_eval

Atom = Any  # Var | Literal

# A value this many times smaller than the largest of its segment is not worth storing in half.
_SMALL = 8


def is_var(atom: Atom) -> bool:
    """Whether it is a variable: literals are written into the equation."""
    return not isinstance(atom, Literal)


def is_zero(atom: Atom) -> bool:
    """Whether it is the number 0, or many of it, written into the equation."""
    return isinstance(atom, Literal) and bool(np.all(atom.val == 0))


def is_float32(atom: Atom) -> bool:
    """Whether it is an array whose values were float32 when the program was traced."""
    aval = atom.aval  # that of a reference has a dtype, too
    return isinstance(aval, jax.core.ShapedArray) and bool(aval.dtype == jnp.float32)


def is_complex(atom: Atom) -> bool:
    """Whether its values are complex numbers."""
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating)


def shape_of(atom: Atom) -> tuple[int, ...]:
    """Its shape; () of what has none."""
    return tuple(getattr(atom.aval, "shape", ()))


def size_of(atom: Atom) -> Any:
    """How many values it has, to be compared with others."""
    size = math.prod(shape_of(atom))
    return size if isinstance(size, int) else _SymbolicSize(size)


class _SymbolicSize:
    """A size that is known when an exported program runs. What may hold of it, holds.

    So what may be small, and what may be an update, is not rounded.
    """

    def __init__(self, size: Any) -> None:
        self.size = size

    def _compared(self, compare: Callable[[Any, Any], bool], other: Any) -> bool:
        try:
            return compare(self.size, _plain(other))
        except jax.errors.InconclusiveDimensionOperation:
            return True

    def __lt__(self, other: Any) -> bool:
        return self._compared(operator.lt, other)

    def __le__(self, other: Any) -> bool:
        return self._compared(operator.le, other)

    def __gt__(self, other: Any) -> bool:
        return self._compared(operator.gt, other)

    def __ge__(self, other: Any) -> bool:
        return self._compared(operator.ge, other)

    def __eq__(self, other: object) -> bool:
        return bool(self.size == _plain(other))

    def __hash__(self) -> int:
        return hash(self.size)

    def __add__(self, other: Any) -> "_SymbolicSize":
        return _SymbolicSize(self.size + _plain(other))

    def __mul__(self, other: Any) -> "_SymbolicSize":
        return _SymbolicSize(self.size * _plain(other))

    __radd__ = __add__


def _plain(size: Any) -> Any:
    return size.size if isinstance(size, _SymbolicSize) else size


def largest_size(eqns: Iterable[JaxprEqn]) -> Any:
    """Of the values that these equations take and give."""
    return max((size_of(a) for e in eqns for a in (*e.invars, *e.outvars)), default=0)


def is_small(atom: Atom, beside: Any) -> bool:
    """Whether storing it in half saves nothing, beside values of this size."""
    small: bool = size_of(atom) * _SMALL < beside
    return small


def opened(jaxpr: Any) -> tuple[Jaxpr, list[Any]]:
    """An open jaxpr and its constants, of an open or a closed one."""
    if isinstance(jaxpr, ClosedJaxpr):
        return jaxpr.jaxpr, list(jaxpr.consts)
    return jaxpr, []  # pragma: no cover  (up to JAX 0.11)


def subjaxprs(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """The jaxprs among an equation's parameters."""
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr | Jaxpr):
                yield opened(item)[0]


def every_equation(
    jaxpr: Jaxpr, calls: tuple[JaxprEqn, ...] = ()
) -> Iterator[tuple[JaxprEqn, tuple[JaxprEqn, ...]]]:
    """The equations of a jaxpr, however deep, and those that each is inside of, outermost first."""
    for eqn in jaxpr.eqns:
        yield eqn, calls
        for inner in subjaxprs(eqn):
            yield from every_equation(inner, (*calls, eqn))


def primitive_names(jaxpr: Jaxpr) -> set[str]:
    """The names of all primitives in a jaxpr, however deep."""
    return set().union(*map(names_within, jaxpr.eqns))


def names_within(eqn: JaxprEqn) -> set[str]:
    """The names of the primitives of an equation: its own, and those inside it."""
    return {eqn.primitive.name}.union(*map(primitive_names, subjaxprs(eqn)))


def with_subjaxprs(eqn: JaxprEqn, replaced: Mapping[int, Jaxpr]) -> JaxprEqn:
    """The equation with other (open) jaxprs in place of those of these ids."""

    def other(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(map(other, value))
        if not isinstance(value, ClosedJaxpr | Jaxpr) or id(opened(value)[0]) not in replaced:
            return value
        jaxpr, consts = opened(value)
        new = replaced[id(jaxpr)]
        return ClosedJaxpr(new, consts) if isinstance(value, ClosedJaxpr) else new

    if not replaced:
        return eqn
    return eqn.replace(params={name: other(value) for name, value in eqn.params.items()})


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """How many of a scan's operands are constants, and how many are carried."""
    if "num_consts" in eqn.params:  # pragma: no cover  (up to JAX 0.11)
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()  # pragma: no cover  (from JAX 0.12)
    return len(consts), len(carry)  # pragma: no cover


def uses_of(jaxpr: Jaxpr) -> Mapping[Var, Sequence[JaxprEqn | None]]:
    """The equations that take each variable; None for a result of the jaxpr."""
    uses: dict[Var, list[JaxprEqn | None]] = collections.defaultdict(list)
    for eqn in jaxpr.eqns:
        for atom in eqn.invars:
            if is_var(atom):
                uses[atom].append(eqn)
    for atom in jaxpr.outvars:
        if is_var(atom):
            uses[atom].append(None)
    return uses


def pruned(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr without what none of its results needs, as XLA is given it."""
    live, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return live


def in_place(atoms: Sequence[Atom], renamed: Mapping[Var, Atom]) -> list[Atom]:
    """The atoms, or what stands in place of them."""
    return [renamed.get(a, a) if is_var(a) else a for a in atoms]


def constants_of(eqns: Iterable[JaxprEqn]) -> set[Var]:
    """What is made of numbers in the program alone: zeros, positions, masks made of them."""
    found: set[Var] = set()
    for eqn in eqns:
        if all(not is_var(a) or a in found for a in eqn.invars) and not eqn.effects:
            found.update(eqn.outvars)
    return found


def taking(eqn: JaxprEqn, renamed: Mapping[Var, Atom]) -> JaxprEqn:
    """The equation, of other variables."""
    return eqn.replace(invars=in_place(eqn.invars, renamed))


def copied(eqn: JaxprEqn, renamed: dict[Var, Atom]) -> JaxprEqn:
    """The equation with results of its own, by which its results are renamed from here on."""
    copy = taking(eqn, renamed).replace(outvars=[Var(v.aval) for v in eqn.outvars])
    renamed.update(zip(eqn.outvars, copy.outvars, strict=True))
    return copy


def equations_of(
    function: Callable[..., Any], operands: Sequence[Atom], results: Sequence[Var], source: Any
) -> Iterator[JaxprEqn]:
    """The equations of a function: of these operands it makes these results.

    Args:
      source: the `source_info` that they get.
    """
    jaxpr = _traced(function, [a.aval for a in operands])
    renamed: dict[Var, Atom] = dict(zip(jaxpr.invars, operands, strict=True))
    given = dict(zip(jaxpr.outvars, results, strict=True))
    for eqn in jaxpr.eqns:
        copy = copied(eqn, renamed).replace(source_info=source)
        renamed.update((v, given[v]) for v in eqn.outvars if v in given)
        yield copy.replace(outvars=in_place(eqn.outvars, renamed))


def _traced(function: Callable[..., Any], avals: Sequence[Any]) -> Jaxpr:
    axes = [tuple(aval.manual_axis_type.varying) for aval in avals]
    meshes = [a.sharding.mesh for a, varying in zip(avals, axes, strict=True) if varying]
    if all(mesh == jax.sharding.get_abstract_mesh() for mesh in meshes):
        return opened(jax.make_jaxpr(function)(*avals))[0]
    # Of what varies in a `shard_map`: constants meet it as values that vary, too.
    mesh = meshes[0]
    auto = (jax.sharding.AxisType.Auto,) * len(mesh.axis_names)
    mesh = mesh.update(axis_types=auto)
    found: list[Any] = []

    def mapped(*xs: Any) -> Any:
        given = zip(xs, axes, strict=True)
        found.append(jax.make_jaxpr(function)(*(_varying(x, names) for x, names in given)))
        return jnp.zeros(())

    nowhere = jax.sharding.PartitionSpec()
    around = jax.shard_map(mapped, mesh=mesh, in_specs=nowhere, out_specs=nowhere)
    jax.eval_shape(around, *(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals))
    return opened(found[0])[0]


def _varying(x: Any, axes: Sequence[str]) -> Any:
    return lax.pcast(x, tuple(axes), to="varying") if axes else x


def traced_back(
    wanted: Sequence[Var], maker: Mapping[Var, JaxprEqn], stops: Container[Var] = ()
) -> tuple[dict[int, JaxprEqn], dict[Var, None]]:
    """The equations that make these variables, by id, and the variables that they start from.

    Args:
      maker: the equation that makes each variable; others are started from.
      stops: further variables to start from.
    """
    eqns: dict[int, JaxprEqn] = {}
    sources: dict[Var, None] = {}
    waiting = list(wanted)
    while waiting:
        var = waiting.pop()
        if var not in maker or var in stops:
            sources[var] = None
        elif id(maker[var]) not in eqns:
            eqns[id(maker[var])] = maker[var]
            waiting += filter(is_var, maker[var].invars)
    return eqns, sources


def scatters(eqn: JaxprEqn) -> bool:
    """Whether it puts values at places of its first operand."""
    return eqn.primitive.name.startswith("scatter")


def is_along_rows(eqn: JaxprEqn) -> bool:
    """Whether it reduces the last axis, and no other."""
    return eqn.params.get("axes") == (len(shape_of(eqn.invars[0])) - 1,)


def cut_out(
    jaxpr: Jaxpr, eqns: Sequence[JaxprEqn], outvars: Sequence[Atom]
) -> tuple[Callable[..., Sequence[Any]], list[Var]]:
    """Some equations of a jaxpr as a function, names and source lines kept, and its variables."""
    produced = {var for eqn in eqns for var in eqn.outvars}
    used = (atom for eqn in eqns for atom in eqn.invars if is_var(atom))
    invars = list(dict.fromkeys(var for var in used if var not in produced))
    piece = Jaxpr(
        constvars=[],
        invars=invars,
        outvars=list(outvars),
        eqns=list(eqns),
        effects=set().union(*(eqn.effects for eqn in eqns)),
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return jaxpr_as_fun(ClosedJaxpr(piece, [])), invars


def retyped(atom: Atom, dtype: Any) -> Var:
    """A new variable of the same shape and sharding, in another dtype."""
    return Var(atom.aval.update(dtype=dtype, weak_type=False))


def where_rows(flags: Any, x: Any, y: Any) -> Any:
    """Of two arrays, the rows of the first where a flag for each is set."""
    return jnp.where(flags.reshape(flags.shape + (1,) * (x.ndim - flags.ndim)), x, y)


def cast(x: Any, dtype: Any) -> Any:
    """The value in this dtype."""
    return x if jnp.result_type(x) == dtype else lax.convert_element_type(x, dtype)


def widen(x: Any, atom: Atom) -> Any:
    """A value as it was when the program was traced: if it was stored in half, float32 again."""
    return cast(x, jnp.float32) if is_float32(atom) else x


def settled(values: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """The values in these dtypes."""
    return [cast(x, dtype) for x, dtype in zip(values, dtypes, strict=True)]
