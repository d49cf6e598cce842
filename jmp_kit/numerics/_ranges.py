"""How large and how small the values of each array are, and what a dtype would lose of them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmp_kit._tree import path_names
from jmp_kit.numerics._exponents import LOWEST, exponent_histogram, floating, underflow
from jmp_kit.numerics._tables import percent, table


@dataclasses.dataclass(frozen=True)
class LeafRange:
    """Where the values of one array lie."""

    path: str
    dtype: str
    size: int
    zeros: int
    nonfinite: int
    lowest: int | None  # exponent of the smallest value but zero; None if there is none
    highest: int | None
    underflow: float  # the share of the values but zero that the cast flushes
    overflow: float  # the share of the finite values that the cast makes infinite


@dataclasses.dataclass(frozen=True)
class Ranges:
    """A row for each floating-point array of a tree. Print it for a table."""

    dtype: str  # that is cast to
    loss_scale: float
    rows: tuple[LeafRange, ...]

    def __str__(self) -> str:
        cells = [("values", "zeros", "exponents", "flushed", "overflows", "dtype", "path")]
        for row in self.rows:
            ends = [] if row.lowest is None else [f"{row.lowest} to {row.highest}"]
            ends += [f"{row.nonfinite} not finite"] if row.nonfinite else []
            cells.append(
                (
                    f"{row.size:,}",
                    percent(row.zeros / max(row.size, 1)),
                    ", ".join(ends),
                    percent(row.underflow),
                    percent(row.overflow),
                    row.dtype,
                    row.path,
                )
            )
        scaled = f" after scaling by {self.loss_scale:g}" if self.loss_scale != 1 else ""
        return f"cast to {self.dtype}{scaled}:\n{table(cells)}"

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return dataclasses.asdict(self)


def ranges(tree: Any, dtype: DTypeLike = jnp.float16, loss_scale: Any = 1.0) -> Ranges:
    """How large and how small the values of each array are, and what a cast loses of them.

    Args:
      tree: a pytree: parameters, gradients, a whole checkpoint. Only floating-point arrays count.
      dtype: what would be cast to.
      loss_scale: by what values are multiplied first: a number, or a loss scale.

    Returns:
      A `Ranges`, which prints as a table.

    Raises:
      ValueError: if `dtype` is no floating-point dtype.

    Example:
      >>> import jax.numpy as jnp, jmp_kit
      >>> params = {"w": jnp.array([1e-9, 1.0, 1e6]), "step": 3}
      >>> [row] = jmp_kit.numerics.ranges(params, jnp.float16).rows
      >>> row.path, row.lowest, row.highest, round(row.underflow, 2), round(row.overflow, 2)
      ('w', -30, 19, 0.33, 0.33)
    """
    dtype, scale = floating(dtype), float(getattr(loss_scale, "loss_scale", loss_scale))
    rows = [
        _range("/".join(path_names(path)), leaf, dtype, scale)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if exponent_histogram(leaf) is not None
    ]
    return Ranges(str(dtype), scale, tuple(rows))


def _range(path: str, leaf: Any, dtype: np.dtype, loss_scale: float) -> LeafRange:
    histogram = exponent_histogram(leaf)
    flushed = float(underflow(leaf, dtype, loss_scale))
    exponents = np.flatnonzero(histogram.counts) + LOWEST
    x = np.asarray(leaf, np.float64) * loss_scale
    finite = np.isfinite(x)
    with np.errstate(over="ignore", invalid="ignore"):
        overflows = finite & ~np.isfinite(x.astype(dtype).astype(np.float64))
    return LeafRange(
        path=path,
        dtype=str(np.asarray(leaf).dtype),
        size=x.size,
        zeros=int(histogram.zeros),
        nonfinite=int(histogram.nonfinite),
        lowest=int(exponents[0]) if exponents.size else None,
        highest=int(exponents[-1]) if exponents.size else None,
        underflow=flushed,
        overflow=float(overflows.sum() / max(finite.sum(), 1)),
    )
