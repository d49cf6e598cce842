"""Equations written so that XLA makes good kernels of them on GPUs; elsewhere as they were.

- Sums along rows that go back into them: XLA makes one kernel of a row where it recognises the
  difference of a row and its sum, and `max(x - (x - sum(x)))` is that sum. One is enough, the last:
  the kernel takes in those before.
- Two sums over the same axes are the real and the imaginary part of one: XLA does not compute what
  both are made of twice, but writes it.
- A sum that gives few results is taken in two stages, the first of which gives more.
- A sum over the first axis into several axes is one axis in between, and says not how they lie: XLA
  would put the first last in memory, and with it all that this was made of.
- What is scattered into, zeros say, is there once for each scatter, and not before what is added to
  it: XLA would write it where memory is fullest, and copy it for each.
- A sum takes first what is not a sum: of two products XLA asks the first alone whether it can add
  the other to what it gives, and one that adds already cannot.
- The zeros that the backward pass of a maximum over windows starts from are of a shape of their
  own: they are written, and whatever takes zeros of the same shape would read them.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Var

from jmp_kit.programs._axes import is_split
from jmp_kit.programs._flow import ADDS
from jmp_kit.programs._jaxpr import equations_of, is_float32, is_var, scatters, shape_of, size_of

# XLA fuses a sum of many values with what they are made of, unless it gives few results. Over
# leading axes alone it takes two stages itself.
_STAGES, _FEW, _MANY = 8, 2**14, 2**20

# Elements of what is scattered into: of fewer, memory is not worth a kernel of their own.
_LARGE = 2**22


def rows(eqns: Sequence[JaxprEqn], found: Set[Var]) -> Iterator[JaxprEqn]:
    """The equations, the last of these sums along rows written for XLA to see what it is.

    XLA takes a sign out of a sum, and then does not recognise it: it is taken out before.
    """
    negations = {e.outvars[0]: e for e in eqns if e.primitive.name == "neg"}
    added = [e for e in eqns if e.primitive.name == "reduce_sum" and is_float32(e.outvars[0])]
    last = [e for e in added if e.outvars[0] in found][-1:]
    for eqn in eqns:
        if eqn not in last:
            yield eqn
        elif negation := negations.get(eqn.invars[0]):
            total = Var(eqn.outvars[0].aval)
            yield from _on_gpus(row_sum, [eqn.replace(invars=negation.invars, outvars=[total])])
            yield negation.replace(invars=[total], outvars=eqn.outvars)
        else:
            yield from _on_gpus(row_sum, [eqn])


def sums(eqns: Sequence[JaxprEqn], roots: set[Var]) -> Iterator[JaxprEqn]:
    """The equations, the sums among these roots two by two, and in stages.

    All are over the same values in a row, of as many. What is counted is no complex number. Sums of
    few values, in registers, may go into others.
    """
    added = [e for e in eqns if e.primitive.name == "reduce_sum" and is_float32(e.outvars[0])]
    last = roots.difference(a for e in eqns for a in e.invars if is_var(a))
    found = [e for e in added if e.outvars[0] in last]
    yield from (e for e in eqns if e not in found)
    for i in range(0, len(found), 2):
        pair = found[i : i + 2]
        axes, axis = tuple(pair[0].params["axes"]), _divided(pair[0])
        shapes = [shape_of(e.outvars[0]) for e in pair]
        function = functools.partial(
            sums_of, axes=axes, axis=axis, shapes=shapes, is_one_of_many=len(found) > 2
        )
        yield from _on_gpus(function, pair)


def begun_late(eqn: JaxprEqn, begun: Set[Var], sources: Iterable[Var]) -> Iterator[JaxprEqn]:
    """The equation; what it scatters into is not there before these, if it is large.

    Args:
      begun: what is made of numbers and scattered into, and so there whenever XLA likes.
      sources: what is stored that the updates are made of.
    """
    if scatters(eqn):
        start, *others = eqn.invars
        late = [v for v in sources if size_of(v) and not is_split(v)]
        is_begun = is_var(start) and start in begun
        if is_begun and late and size_of(start) >= _LARGE and not is_split(start):
            made = Var(start.aval)
            yield from equations_of(on_gpus_alone(after), [start, *late], [made], eqn.source_info)
            eqn = eqn.replace(invars=[made, *others])
    yield eqn


def flattened(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """The equation; a sum over the first axes into several others does not say how these lie."""
    if eqn.primitive.name == "reduce_sum" and _is_over_first(eqn.params["axes"]):
        [result] = eqn.outvars
        if len(shape_of(result)) > 1 and not is_split(result):  # split axes are not joined
            total = Var(result.aval)
            yield eqn.replace(outvars=[total])
            yield from equations_of(on_gpus_alone(flat), [total], [result], eqn.source_info)
            return
    yield eqn


def given_first(eqns: Sequence[JaxprEqn]) -> Iterator[JaxprEqn]:
    """The equations, in sums what is given before what they make."""
    made = {v for e in eqns for v in e.outvars}
    for eqn in eqns:
        variables = list(filter(is_var, eqn.invars))
        swaps = eqn.primitive.name in ADDS and [v in made for v in variables] == [True, False]
        yield eqn.replace(invars=eqn.invars[::-1]) if swaps else eqn


def own_zeros(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """The equation; the backward pass of a maximum over windows with one dimension more."""
    if eqn.primitive.name == "select_and_scatter_add":
        yield from _on_gpus(functools.partial(scattered, eqn), [eqn])
    else:
        yield eqn


def row_sum(x: jax.Array) -> Sequence[jax.Array]:
    """The sum over the last axis."""
    total = jnp.sum(x, axis=-1, keepdims=True)
    return [jnp.max(x - (x - total), axis=-1)]


def sums_of(
    *xs: jax.Array,
    axes: tuple[int, ...],
    axis: int | None,
    shapes: Sequence[tuple[int, ...]],
    is_one_of_many: bool = False,
) -> Sequence[jax.Array]:
    """The sums of one or two arrays over these axes, of which one is divided in stages, if any.

    Args:
      axes: of the first array, in whose shape the other is taken.
      shapes: of the sums.
      is_one_of_many: whether there are others, in pairs: XLA makes one kernel of the same dtypes.
    """
    xs = tuple(x.reshape(xs[0].shape) for x in xs)
    several = [*xs, jnp.zeros_like(xs[0])] if is_one_of_many else xs
    x = lax.complex(*several[:2]) if len(several) > 1 else xs[0]
    total = jnp.sum(x, axes) if axis is None else staged_sum(x, axes, axis)
    parts = [total.real, total.imag] if len(several) > 1 else [total]
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=False)]


def staged_sum(x: jax.Array, axes: tuple[int, ...], axis: int) -> jax.Array:
    """The sum over these axes, one of which is divided."""
    shape = *x.shape[:axis], _STAGES, x.shape[axis] // _STAGES, *x.shape[axis + 1 :]
    inner = tuple(a if a < axis else a + 1 for a in axes)
    parts = lax.optimization_barrier(jnp.sum(x.reshape(shape), inner))
    return jnp.sum(parts, axis - sum(a < axis for a in axes))


def scattered(eqn: JaxprEqn, source: jax.Array, operand: jax.Array) -> Sequence[jax.Array]:
    """What `select_and_scatter_add` gives, by way of one dimension more."""
    one = {"window_dimensions": 1, "window_strides": 1, "padding": (0, 0)}
    more = {name: (n, *eqn.params[name]) for name, n in one.items()}
    return [eqn.primitive.bind(source[None], operand[None], **eqn.params | more)[0]]


def after(start: jax.Array, *sources: jax.Array) -> jax.Array:
    """What is scattered into, which XLA does not know before it knows these."""
    corners = [lax.slice(x, [0] * x.ndim, [1] * x.ndim).reshape(()) for x in sources]
    other = lax.full_like(start, sum(x.astype(start.dtype) for x in corners))
    return lax.select_n(lax.optimization_barrier(np.True_), other, start)


def flat(total: jax.Array) -> jax.Array:
    """What it is given, along one axis in between: XLA lays out no operand by one."""
    return lax.optimization_barrier(total.reshape(-1)).reshape(total.shape)


def on_gpus_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on GPUs; elsewhere what it is given first."""

    def either(x: jax.Array, *others: jax.Array) -> Any:
        return lax.platform_dependent(
            x, *others, cuda=function, rocm=function, default=lambda x, *others: x
        )

    return either


def _divided(eqn: JaxprEqn) -> int | None:
    """The axis that is summed up in two stages, if one is."""
    [operand], [result], axes = eqn.invars, eqn.outvars, eqn.params["axes"]
    is_small = size_of(operand) < _MANY or size_of(result) >= _FEW
    if is_small or _is_over_first(axes):
        return None
    shape = shape_of(operand)
    return next((a for a in axes if a < len(shape) - 1 and shape[a] % _STAGES == 0), None)


def _is_over_first(axes: Sequence[int]) -> bool:
    return sorted(axes) == list(range(len(axes)))


def _on_gpus(
    function: Callable[..., Sequence[Any]], eqns: Sequence[JaxprEqn]
) -> Iterator[JaxprEqn]:
    """What gives what these equations give: on GPUs, the function of all that they take."""

    def as_they_were(*xs: jax.Array) -> Sequence[Any]:
        rest = iter(xs)
        taken = [[next(rest) for _ in e.invars] for e in eqns]
        return [e.primitive.bind(*xs, **e.params) for e, xs in zip(eqns, taken, strict=True)]

    def either(*xs: jax.Array) -> Any:
        return lax.platform_dependent(*xs, cuda=function, rocm=function, default=as_they_were)

    operands = [a for e in eqns for a in e.invars]
    results = [v for e in eqns for v in e.outvars]
    return equations_of(either, operands, results, eqns[0].source_info)
