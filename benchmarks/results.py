"""Results: where and with what they were measured, on disk and as tables."""

import dataclasses
import importlib.metadata
import json
import pathlib
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from rich.table import Table

Row = dict[str, Any]

PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "jmp",
    "mixed_precision_for_JAX",
    "torch",
    "torchao",
)


@dataclasses.dataclass(frozen=True)
class Options:
    """How to measure."""

    tiny: bool
    steps: int
    only: re.Pattern[str] = re.compile("")  # which contenders

    def takes(self, contender: str) -> bool:
        """Whether it is to be measured."""
        return bool(self.only.search(contender))


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a table: a heading, and how it is read off a row."""

    heading: str
    cell: Callable[[Row], str]
    timed: bool = False  # so it says nothing where it was measured on a CPU that others share


def number(key: str, form: str = ",.1f", scale: float = 1.0) -> Callable[[Row], str]:
    """The value of a key, or nothing where a row has none."""
    return lambda row: format(row[key] * scale, form) if row.get(key) is not None else ""


def tables(title: str, columns: Sequence[Column], rows: Sequence[Row]) -> Iterator[Table]:
    """A table of each group, a row per contender; what could not run says why."""
    for group in dict.fromkeys(row.get("group", "") for row in rows):
        printed = Table(title=f"{group or title}")
        for column in columns:
            printed.add_column(column.heading)
        for row in rows:
            if row.get("group", "") == group:
                printed.add_row(*cells(row, columns))
        yield printed


def cells(row: Row, columns: Sequence[Column]) -> list[str]:
    """A row of a table."""
    if "failed" in row:
        return [columns[0].cell(row), f"not measured: {row['failed']}"]
    return [column.cell(row) for column in columns]


def versions() -> dict[str, str]:
    """Of Python and of all that is compared."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def save(path: pathlib.Path, name: str, result: dict[str, Any]) -> None:
    """Into a file, beside what other benchmarks have put there on the same machine.

    Raises:
      ValueError: if what is there was measured elsewhere, or with other versions.
    """
    now: dict[str, Any] = {"machine": jax.devices()[0].device_kind, "versions": versions()}
    before: dict[str, Any] = (
        json.loads(path.read_text()) if path.exists() else {**now, "results": {}}
    )
    for key, value in now.items():
        if before[key] != value:
            raise ValueError(
                f"{path} was measured with {key} {before[key]!r}, and this is {value!r}: results "
                "of two machines would stand in one table. Give --out another file."
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    merged = {**now, "results": {**before["results"], name: result}}
    path.write_text(json.dumps(merged, indent=1) + "\n")
