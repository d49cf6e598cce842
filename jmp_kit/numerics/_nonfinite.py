"""Numbers that are not finite, and the record of where they came from."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Range:
    """What an operand held."""

    dtype: str
    shape: tuple[int, ...]
    smallest: float  # of the finite values; NaN if there is none
    largest: float
    nonfinite: int

    def __str__(self) -> str:
        bad = f", {self.nonfinite} not finite" if self.nonfinite else ""
        return f"{self.dtype}{list(self.shape)} from {self.smallest:.3g} to {self.largest:.3g}{bad}"


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """An operation whose result is not finite, though what it takes is. Print it for a report."""

    source: str  # "model.py:41", the user's line; empty if it is not known
    path: str  # name scopes, in Flax linen the module; or the parameters that feed a product
    primitive: str  # "dot_general", "log", …; "argument" if it came in
    kind: str  # "inf" or "nan"
    dtype: str
    inputs: tuple[Range, ...]
    iteration: tuple[int, ...]  # of the loops around it, from outside in
    backward: bool
    suggestion: str  # what to do, where that is clear

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        where = " ".join(filter(None, (self.source, self.path)))
        loops = f" in iteration {', '.join(map(str, self.iteration))}" if self.iteration else ""
        which = " of the backward pass" if self.backward else ""
        head = f"{self.dtype} {self.primitive}{which} gives {self.kind}{loops}: {where}"
        rows = [f"  takes {operand}" for operand in self.inputs]
        return "\n".join([head, *rows, *([f"  {self.suggestion}"] if self.suggestion else [])])


def is_floating(x: Any) -> bool:
    """Whether it is an array, and no reference to one, whose dtype has infinities."""
    return not isinstance(x, jax.Ref) and jnp.issubdtype(jnp.result_type(x), jnp.inexact)


def kind_of(x: Any) -> str:
    """ "nan" if there is one, "inf" if there is none but an infinity; empty if all is finite."""
    if not is_floating(x):
        return ""
    with np.errstate(invalid="ignore"):
        values = np.asarray(x)
        if np.isfinite(values).all():
            return ""
        return "nan" if np.isnan(values).any() else "inf"


def range_of(x: Any) -> Range:
    """What an array holds."""
    values = np.asarray(x, jnp.result_type(x))  # which knows Python's numbers for float32
    with np.errstate(invalid="ignore"):
        finite = values[np.isfinite(values)]
    if np.issubdtype(finite.dtype, np.complexfloating):
        finite = np.abs(finite)
    known = finite.astype(np.float64)
    smallest, largest = (known.min(), known.max()) if known.size else (np.nan, np.nan)
    bad = values.size - finite.size
    return Range(str(values.dtype), values.shape, float(smallest), float(largest), int(bad))
