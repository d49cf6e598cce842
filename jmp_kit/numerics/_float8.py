"""What float8 would cost each product of a function, on the user's own numbers."""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun

from jmp_kit._dtypes import FLOAT8
from jmp_kit.casting import in_float8
from jmp_kit.numerics._audited import Product
from jmp_kit.numerics._tables import percent, table
from jmp_kit.numerics._traced import audit_traced
from jmp_kit.programs import (
    PRODUCTS,
    Flow,
    bodies_of,
    equations_of,
    is_kernel,
    marked,
    opened,
    program_of,
    pruned,
    subjaxprs,
    with_subjaxprs,
)

# What `casting` writes in float8.
_WRITTEN = ("dot_general", "ragged_dot_general")


@dataclasses.dataclass(frozen=True)
class ProductError:
    """A product, and what float8 operands do to it."""

    source: str  # "model.py:41", the user's line; empty if it is not known
    path: str  # name scopes, in Flax linen the module; else the parameters that feed it
    shape: tuple[int, ...]  # of the result
    backward: bool
    error: float  # |float8 - float32| / |float32|
    bfloat16_error: float  # the same of bfloat16 operands
    flushed: float  # the share of the operands' values but zero that float8 makes zero


@dataclasses.dataclass(frozen=True)
class Float8Errors:
    """A row for each product, the worst first. Print it for a table."""

    rows: tuple[ProductError, ...]

    def rules(self, limit: float = 0.06) -> dict[str, str]:
        """Rules for `autocast` that leave in bfloat16 what is worse than this, by its path."""
        paths = sorted({row.path for row in self.rows if not row.error <= limit and row.path})
        return {f"^{re.escape(path)}$": "bfloat16" for path in paths}

    def __str__(self) -> str:
        cells = [("float8", "bfloat16", "flushed", "pass", "result", "source", "path")]
        for row in self.rows:
            errors = f"{row.error:.1e}", f"{row.bfloat16_error:.1e}", percent(row.flushed)
            which = "backward" if row.backward else "forward"
            shape = "×".join(map(str, row.shape))
            cells.append((*errors, which, shape, row.source, row.path))
        return table(cells)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return dataclasses.asdict(self)


def float8_errors(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Float8Errors:
    """How far each matrix product would be from float32 in float8, whatever its size.

        error = |float8(x) · float8(y) - x · y| / |x · y|

    In one pass, in which what a product gives goes on as it is, so that each error is its own. Rows
    of an operand have a scale each, as in `"mixed_float8"`. Rounds of a loop are taken together.

    Args:
      fun: any JAX function: a loss, or its gradient, for the products of the backward pass too.
      args, kwargs: what it is called with.

    Returns:
      A `Float8Errors`, which prints as a table, the worst product first; its `rules()` are for
      `autocast`.

    Raises:
      ValueError: if it is called under jit, where there are no numbers to look at.

    Example:
      >>> import jax, jax.numpy as jnp, jmp_kit
      >>> def loss_fn(params, x):
      ...     return jnp.mean(jnp.tanh(x @ params["body"]) @ params["head"])
      >>> params = {"body": jnp.eye(8) + 0.01, "head": jnp.full((8, 2), 1e-3)}
      >>> found = jmp_kit.numerics.float8_errors(jax.grad(loss_fn), params, jnp.ones((4, 8)))
      >>> len(found.rows), all(row.error < 0.06 for row in found.rows), found.rules()
      (4, True, {})
    """
    found = audit_traced(fun, *args, **kwargs).products
    products = [p for p in found if p.primitive in _WRITTEN and not p.is_kernel]
    jaxpr, consts, arrays, _ = program_of(fun, *args, **kwargs)
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        raise ValueError(
            "float8_errors looks at numbers and cannot do so while a program is traced: call it "
            "outside jit, with the arguments of a step."
        )
    sums = np.zeros((len(products), 5))

    def record(place: Any, found: Any) -> None:
        sums[int(place)] += np.asarray(found, np.float64)

    watched = _watched(pruned(jaxpr), itertools.count(), record)
    jax.block_until_ready(jax.jit(jaxpr_as_fun(ClosedJaxpr(watched, consts)))(*arrays))
    jax.effects_barrier()
    rows = [_row(product, *row) for product, row in zip(products, sums, strict=True)]
    return Float8Errors(tuple(sorted(rows, key=lambda row: -_order(row.error))))


def _row(
    product: Product, exact: float, eight: float, half: float, flushed: float, nonzero: float
) -> ProductError:
    of_whole = np.sqrt(np.array([eight, half]) / exact) if exact else np.zeros(2)
    return ProductError(
        source=product.source,
        path=product.path,
        shape=product.shape,
        backward=product.backward,
        error=float(of_whole[0]),
        bfloat16_error=float(of_whole[1]),
        flushed=float(flushed / max(nonzero, 1)),
    )


def _order(error: float) -> float:
    return error if math.isfinite(error) else math.inf


def _watched(jaxpr: Jaxpr, places: Iterator[int], record: Callable[..., None]) -> Jaxpr:
    """The program, which tells of each product what float8 would have made of it."""
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _WRITTEN:
            function = _measuring(eqn, next(places), record)
            eqns += equations_of(function, eqn.invars, eqn.outvars, eqn.source_info)
            continue
        bodies = [] if is_kernel(eqn) else bodies_of(eqn)
        replaced = {id(b.jaxpr): _watched(b.jaxpr, places, record) for b in bodies}
        eqns.append(with_subjaxprs(eqn, replaced))
    effects = jaxpr.effects.union(*(e.effects for e in eqns))
    effects = effects.union(*(sub.effects for e in eqns for sub in subjaxprs(e)))
    return jaxpr.replace(eqns=eqns, effects=effects)


def _measuring(eqn: JaxprEqn, place: int, record: Callable[..., None]) -> Callable[..., Any]:
    def product(dtype: Any, *operands: Any) -> Any:
        params = {**eqn.params, "preferred_element_type": None, "precision": lax.Precision.HIGHEST}
        given = (x.astype(dtype) for x in operands[:2])
        return eqn.primitive.bind(*given, *operands[2:], **params).astype(jnp.float32)

    def measured(*operands: Any) -> Any:
        made = eqn.primitive.bind(*operands, **eqn.params)
        given, sizes = operands[:2], operands[2:]
        if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in given):
            return [made]
        exact, half = product(jnp.float32, *operands), product(jnp.bfloat16, *operands)
        found = _in_float8(functools.partial(product, jnp.float32), given, sizes)
        eight, *rounded = found or [half, *given]  # as it would be
        squares = [jnp.sum(x**2) for x in (exact, eight - exact, half - exact)]
        lost = [jnp.sum((q == 0) & (x != 0)) for q, x in zip(rounded, given, strict=True)]
        nonzero = [jnp.sum(x != 0) for x in given]
        counts = [sum(n.astype(jnp.float32) for n in several) for several in (lost, nonzero)]
        jax.debug.callback(record, place, jnp.stack([*squares, *counts]))
        return [made]

    return measured


def _in_float8(
    product: Callable[..., Any], operands: Sequence[Any], sizes: Sequence[Any]
) -> list[Any]:
    """A product in float8, and its operands; nothing if it is none that is written in float8."""
    wide = [*(x.astype(jnp.float32) for x in operands), *sizes]
    jaxpr, _ = opened(jax.make_jaxpr(product)(*wide))
    eqns = [marked(e, FLOAT8) if e.primitive.name in _WRITTEN else e for e in jaxpr.eqns]
    half = np.dtype(jnp.bfloat16)
    written = in_float8(jaxpr.replace(eqns=eqns), Flow(PRODUCTS), True, half)
    made = (v for e in written.eqns for v in e.outvars)
    rounded = [v for v in made if v.aval.dtype == FLOAT8]
    if not rounded:
        return []
    # The same array twice is rounded once, if by the same axes.
    rounded = rounded if len(rounded) == len(operands) else rounded * len(operands)
    outvars = [*written.outvars, *rounded]
    return list(jaxpr_as_fun(ClosedJaxpr(written.replace(outvars=outvars), []))(*wide))
