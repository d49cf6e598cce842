"""What an audit finds: products, conversions, and what could not be looked into."""

import collections
import dataclasses
import re
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from jmp_kit.numerics._tables import Cells, count, of_layers, pass_of, percent, table


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product or a convolution of a program."""

    source: str  # "model.py:41", the user's line; empty if it is not known
    path: str  # name scopes, in Flax linen the module; else the parameters that feed it
    primitive: str  # "dot_general", …
    shape: tuple[int, ...]  # of the result
    lhs_dtype: str
    rhs_dtype: str
    out_dtype: str
    flops: int  # two for each multiplication, every time
    backward: bool
    times: int = 1  # how often the loops around it run it; a while loop counts as one
    is_kernel: bool = False  # of a library or your own, whose FLOPs are not known unless traced

    @property
    def is_half(self) -> bool:
        """Whether both operands have 16 bits or fewer."""
        return all(jnp.dtype(d).itemsize <= 2 for d in (self.lhs_dtype, self.rhs_dtype))


@dataclasses.dataclass(frozen=True)
class Convert:
    """A kernel of a compiled program that does nothing but give an array another dtype."""

    source: str
    path: str
    shape: tuple[int, ...]
    from_dtype: str
    to_dtype: str
    nbytes: int  # read and written, every time
    backward: bool
    times: int = 1


@dataclasses.dataclass(frozen=True)
class Transfer:
    """What devices exchange in a lowered or compiled program."""

    source: str
    path: str
    kind: str  # "all-gather", "all-reduce", "reduce-scatter", "all-to-all", …
    dtype: str
    nbytes: int  # of the whole array: of what was gathered, or is to be reduced, every time
    backward: bool
    times: int = 1


@dataclasses.dataclass(frozen=True)
class Audit:
    """The products of a program. Print it for a table."""

    level: str  # "traced", "lowered", "compiled"
    backend: str  # "cpu", "gpu"
    products: tuple[Product, ...]
    opaque: tuple[str, ...]  # what holds products and runs as traced, with its line
    converts: tuple[Convert, ...] = ()  # of a compiled program; before, nobody knows what fuses
    transfers: tuple[Transfer, ...] = ()  # of a lowered or compiled program

    @property
    def half_fraction(self) -> float:
        """The share of FLOPs whose operands have 16 bits or fewer; 1 where there are none."""
        total = sum(p.flops for p in self.products)
        return sum(p.flops for p in self.products if p.is_half) / total if total else 1.0

    def assert_half(self, except_: str | None = None) -> None:
        """For a test suite of your own: every product is half, but those of some paths.

        Args:
          except_: a regular expression (`re.search`) over paths and sources.

        Raises:
          AssertionError: if another product is not half, or a region runs as traced; it lists them.
          ValueError: if `except_` is no regular expression.
        """
        try:
            allowed = re.compile(except_) if except_ else None
        except re.error as error:
            raise ValueError(
                f"except_ is {except_!r}, which is no regular expression ({error}): write "
                f"{re.escape(except_ or '')!r} for the text itself."
            ) from error
        wide = [
            p
            for p in self.products
            if not p.is_half
            and not (allowed and (allowed.search(p.path) or allowed.search(p.source)))
        ]
        if wide or self.opaque:
            raise AssertionError(
                f"{len(wide)} of {len(self.products)} products do not take half operands, "
                f"{percent(1 - self.half_fraction)} of all FLOPs:\n"
                + "\n".join([_products_table(wide), *self._opaque_lines()])
            )

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return {"half_fraction": self.half_fraction, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        total = sum(p.flops for p in self.products)
        head = (
            f"{len(self.products)} products, {count(total)}FLOP, {percent(self.half_fraction)} of "
            f"it half{self._shares()} ({self.level}, {self.backend})"
        )
        lines = [head, _products_table(self.products), *self._opaque_lines()]
        if self.converts:
            moved = count(sum(c.nbytes for c in self.converts))
            lines += [f"{len(self.converts)} kernels only convert, and move {moved}B:"]
            lines += [_converts_table(self.converts)]
        if self.transfers:
            sent = count(sum(t.nbytes for t in self.transfers))
            lines += [f"{len(self.transfers)} exchanges between devices, of {sent}B:"]
            lines += [_transfers_table(self.transfers)]
        return "\n".join(lines)

    def _shares(self) -> str:
        """Of each dtype, where there are several: what has one half, and what the other."""
        flops: dict[str, int] = collections.defaultdict(int)
        for p in self.products:
            flops[max(p.lhs_dtype, p.rhs_dtype, key=lambda d: jnp.dtype(d).itemsize)] += p.flops
        total = sum(flops.values())
        if len(flops) < 2 or not total:
            return ""
        shares = sorted(flops.items(), key=lambda item: -item[1])
        return ": " + ", ".join(f"{percent(n / total)} {dtype}" for dtype, n in shares)

    def _opaque_lines(self) -> list[str]:
        what = "not looked into" if self.level == "compiled" else "run as traced"
        return [f"{what}: {where}" for where in self.opaque]


def _products_table(products: Iterable[Product]) -> str:
    def dtypes(p: Product) -> str:
        operands = p.lhs_dtype if p.lhs_dtype == p.rhs_dtype else f"{p.lhs_dtype}×{p.rhs_dtype}"
        return f"{'kernel, ' * p.is_kernel}{operands}→{p.out_dtype}"

    return _table("FLOP", ((p.flops, dtypes(p), p) for p in products))


def _converts_table(converts: Iterable[Convert]) -> str:
    rows = ((c.nbytes, f"{c.from_dtype}→{c.to_dtype}", c) for c in converts)
    return _table("bytes", sorted(rows, key=lambda row: -row[0]))


def _transfers_table(transfers: Iterable[Transfer]) -> str:
    rows = ((t.nbytes, f"{t.kind} {t.dtype}", t) for t in transfers)
    return _table("bytes", sorted(rows, key=lambda row: -row[0]))


def _table(unit: str, rows: Iterable[tuple[int, str, Product | Convert | Transfer]]) -> str:
    """A row for each kind: the same line, path, dtypes and pass; layers that are alike are one."""
    kinds = (
        ((found.source, pass_of(found.backward), dtypes), found.path, number)
        for number, dtypes, found in rows
    )
    cells: list[Cells] = [(unit, "times", "source", "pass", "dtypes", "path")]
    for kind, path, numbers in of_layers(kinds):
        cells.append((count(sum(numbers)), str(len(numbers)), *kind, path))
    return table(cells)
