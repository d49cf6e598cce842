"""Where the first number that is not finite came from."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn

from jmp_kit.numerics._advice import advice_on
from jmp_kit.numerics._nonfinite import NonFinite, is_floating, kind_of, range_of
from jmp_kit.numerics._sources import is_added, lines_of, source_of
from jmp_kit.programs import (
    PRODUCTS,
    Body,
    bodies_of,
    cut_out,
    is_backward,
    is_var,
    names_in,
    program_of,
    scan_counts,
    stack_of,
    subjaxprs,
    where_rows,
)


def locate_nonfinite(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> NonFinite | None:
    """The first operation to give an infinity or a NaN that reaches a result of a function.

    Evaluates the program once, operation by operation, each at its own dtype, in the bodies of
    loops and branches too: slow, and to the point. An infinity that is written into the program, a
    mask's, is blamed only if nothing else is. What XLA fuses may keep more range than it has here.

    Args:
      fun: any JAX function: a loss, its gradient, a train step.
      args, kwargs: what it is called with.

    Returns:
      None if all results are finite; else a record of the operation, which prints as a report.

    Raises:
      ValueError: if it is called under jit, where there are no numbers to look at.

    Example:
      >>> import jax.numpy as jnp, jmp_kit
      >>> def loss_fn(x):
      ...     x = x * 300
      ...     return jnp.sum(x * x)
      >>> x = jnp.array([1.0, 2.0], jnp.float16)
      >>> found = jmp_kit.numerics.locate_nonfinite(loss_fn, x)
      >>> found.primitive, found.dtype, found.kind, found.inputs[0].largest
      ('mul', 'float16', 'inf', 600.0)
      >>> jmp_kit.numerics.locate_nonfinite(loss_fn, x / 10) is None
      True
    """
    jaxpr, consts, arrays, paths = program_of(fun, *args, **kwargs)
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        raise ValueError(
            "locate_nonfinite looks at numbers and cannot do so while a program is traced: call "
            "it outside jit, with the arguments of the step that went wrong."
        )
    search = _Search()
    inputs = [search.argument(x, path) for x, path in zip(arrays, paths, strict=True)]
    results = search.run(Body(jaxpr, consts, range(len(inputs)), ()), inputs)
    first = _first(result.cause for result in results)
    return first.record if first else None


@dataclasses.dataclass(frozen=True)
class _Cause:
    record: NonFinite
    order: int
    is_constant: bool = False  # written into the program, a mask's -inf say


@dataclasses.dataclass(frozen=True)
class _Value:
    """A value, why it is not finite, and the arguments it is made of with no product between."""

    value: Any
    cause: _Cause | None = None
    paths: frozenset[str] = frozenset()
    maker: "_Place | None" = None  # of what it is, or is cast from


class _Place(NamedTuple):
    """An equation, and the calls that it is inside of, the outermost first."""

    eqn: JaxprEqn
    calls: tuple[JaxprEqn, ...]

    @property
    def source(self) -> str:
        return str(source_of(*self))


class _Site(NamedTuple):
    """An equation, where it is run, and with what."""

    jaxpr: Jaxpr
    eqn: JaxprEqn
    operands: list[_Value]
    calls: tuple[JaxprEqn, ...]  # that it is inside of, the outermost first
    loops: tuple[int, ...]  # iterations

    @property
    def within(self) -> tuple[JaxprEqn, ...]:
        """The calls that what it calls is inside of."""
        return (*self.calls, self.eqn)

    @property
    def place(self) -> _Place:
        """Where its results are made: of a cast that autocast added, where what it casts is."""
        place = _Place(self.eqn, self.calls)
        if self.eqn.primitive.name != "convert_element_type":
            return place
        is_users = place.source and not is_added(lines_of(self.eqn))
        return place if is_users else self.operands[0].maker or place


class _Search:
    def __init__(self) -> None:
        self._count = 0
        # Of references, why what they hold is not finite. They are kept: an id is no one else's.
        self._held: dict[int, tuple[Any, _Cause | None]] = {}

    def argument(self, value: Any, path: str) -> _Value:
        cause = None
        if kind := kind_of(value):
            ranges = (range_of(value),)
            record = NonFinite("", path, "argument", kind, str(value.dtype), ranges, (), False, "")
            cause = self._cause(record)
        return _Value(value, cause, frozenset([path]))

    def run(
        self,
        body: Body,
        args: Sequence[_Value],
        calls: tuple[JaxprEqn, ...] = (),
        loops: tuple[int, ...] = (),
    ) -> list[_Value]:
        """The results of a jaxpr, inside these calls and iterations."""
        env = dict(zip(body.jaxpr.constvars, map(_Value, body.consts), strict=True))
        env.update(zip(body.jaxpr.invars, args, strict=True))

        def read(atom: Any) -> _Value:
            return env[atom] if is_var(atom) else _Value(atom.val)

        for eqn in body.jaxpr.eqns:
            site = _Site(body.jaxpr, eqn, [read(a) for a in eqn.invars], calls, loops)
            results = _CALLS.get(eqn.primitive.name, _Search._operation)(self, site)
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in body.jaxpr.outvars]

    def _operation(self, site: _Site) -> list[_Value]:
        eqn = site.eqn
        function, invars = cut_out(site.jaxpr, [eqn], eqn.outvars)
        by_var = {a: x.value for a, x in zip(eqn.invars, site.operands, strict=True) if is_var(a)}
        values = function(*(by_var[v] for v in invars))
        paths: frozenset[str] = frozenset().union(*(x.paths for x in site.operands))
        made_of = frozenset[str]() if eqn.primitive.name in PRODUCTS else paths
        place = site.place
        for ref in (x.value for x in site.operands if isinstance(x.value, jax.Ref)):
            self._held[id(ref)] = ref, _first(map(self._known, site.operands))
        causes = (self._cause_of(site, place, value, paths) for value in values)
        return [_Value(v, c, made_of, place) for v, c in zip(values, causes, strict=True)]

    def _known(self, x: _Value) -> _Cause | None:
        """Why a value, or what a reference holds, is not finite."""
        return x.cause or self._held.get(id(x.value), (None, None))[1]

    def _cause_of(
        self, site: _Site, place: _Place, value: Any, paths: frozenset[str]
    ) -> _Cause | None:
        kind, kinds = kind_of(value), [kind_of(x.value) for x in site.operands]
        if not kind:
            return None
        first = _first(map(self._known, site.operands))
        # An infinity that is handed on is the constant's; a NaN made of infinities is not.
        handed_on = any(kinds) and not (kind == "nan" and "nan" not in kinds)
        if first and (handed_on or not first.is_constant):
            return first
        stack = stack_of(*place)
        name, operands = site.eqn.primitive.name, [x.value for x in site.operands]
        is_of_arguments = name in PRODUCTS or not place.source
        record = NonFinite(
            source=place.source,
            path=names_in(stack) or " ".join(sorted(paths) if is_of_arguments else ()),
            primitive=name,
            kind=kind,
            dtype=str(value.dtype),
            inputs=tuple(range_of(x) for x in operands if is_floating(x)),
            iteration=site.loops,
            backward=is_backward(stack),
            suggestion=_OPAQUE.format(name=name)
            if list(subjaxprs(site.eqn))
            else advice_on(name, kind, value, operands),
        )
        return self._cause(record, is_constant=handed_on)

    def _cause(self, record: NonFinite, is_constant: bool = False) -> _Cause:
        self._count += 1
        return _Cause(record, self._count, is_constant)

    def _inside(self, site: _Site) -> list[_Value]:
        [body] = bodies_of(site.eqn)
        return self.run(body, [site.operands[i] for i in body.inputs], site.within, site.loops)

    def _branch(self, site: _Site) -> list[_Value]:
        bodies = bodies_of(site.eqn)
        body = bodies[min(max(int(site.operands[0].value), 0), len(bodies) - 1)]
        return self.run(body, [site.operands[i] for i in body.inputs], site.within, site.loops)

    def _while(self, site: _Site) -> list[_Value]:
        condition, body = bodies_of(site.eqn)
        n_asked = site.eqn.params["cond_nconsts"]
        n_fixed = n_asked + site.eqn.params["body_nconsts"]
        asked, fixed = site.operands[:n_asked], site.operands[n_asked:n_fixed]
        carry = site.operands[n_fixed:]
        i = 0
        while True:
            inner = site.within, (*site.loops, i)
            goes_on = self.run(condition, [*asked, *carry], *inner)[0].value
            if not goes_on.any():
                return carry
            new = self.run(body, [*fixed, *carry], *inner)
            carry = [_where(goes_on, x, old) for x, old in zip(new, carry, strict=True)]
            i += 1

    def _scan(self, site: _Site) -> list[_Value]:
        [body] = bodies_of(site.eqn)
        n_fixed, n_carry = scan_counts(site.eqn)
        fixed, carry = site.operands[:n_fixed], site.operands[n_fixed : n_fixed + n_carry]
        rows, order = site.operands[n_fixed + n_carry :], range(site.eqn.params["length"])
        made = {}
        for i in reversed(order) if site.eqn.params["reverse"] else order:
            args = [*fixed, *carry, *(_row(x, i) for x in rows)]
            results = self.run(body, args, site.within, (*site.loops, i))
            carry, made[i] = results[:n_carry], results[n_carry:]
        stacked = enumerate(site.eqn.outvars[n_carry:])
        return [*carry, *(_stack([made[i][k] for i in order], var.aval) for k, var in stacked)]


_OPAQUE = (
    "{name} is looked at as one operation: call locate_nonfinite with the function that it calls, "
    "and what one call of it takes, to see inside."
)

_INLINE = ("jit", "pjit", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call")
_CALLS: dict[str, Callable[..., list[_Value]]] = {
    **dict.fromkeys(_INLINE, _Search._inside),
    "cond": _Search._branch,
    "while": _Search._while,
    "scan": _Search._scan,
}


def _where(goes_on: Any, new: _Value, old: _Value) -> _Value:
    """What a loop carries on; of several in one, as vmap makes them, some have ended."""
    if not goes_on.shape:
        return new
    value = where_rows(goes_on, new.value, old.value)
    cause = _first((old.cause, new.cause)) if kind_of(value) else None
    return _Value(value, cause, new.paths | old.paths)


def _row(x: _Value, i: int) -> _Value:
    row = x.value[i]
    # A row may be finite where others are not.
    return dataclasses.replace(x, value=row, cause=x.cause if kind_of(row) else None)


def _stack(rows: list[_Value], like: Any) -> _Value:
    if not rows:
        return _Value(jnp.zeros(like.shape, like.dtype))
    paths: frozenset[str] = frozenset().union(*(row.paths for row in rows))
    return _Value(jnp.stack([row.value for row in rows]), _first(row.cause for row in rows), paths)


def _first(causes: Iterable[_Cause | None]) -> _Cause | None:
    """The first to blame: a constant only if nothing else is."""
    known = [cause for cause in causes if cause is not None]
    blamed = [cause for cause in known if not cause.is_constant] or known
    return min(blamed, key=lambda cause: cause.order, default=None)
