"""Tables for a terminal."""

import collections
import re
import shutil
from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")
Cells = tuple[str, ...]

# So many are read as they are.
_FEW = 2


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, the first a heading, in columns as wide as they need.

    Of the last column, paths as a rule, the ends are shown that fit the terminal.
    """
    *widths, last = [max(map(len, column)) for column in zip(*rows, strict=True)]
    columns = shutil.get_terminal_size((120, 24)).columns
    last = min(last, max(columns - sum(widths) - 2 * len(widths), 20))
    return "\n".join(
        "  ".join(
            cell.ljust(width)
            for cell, width in zip((*cells, shortened(end, last)), (*widths, 0), strict=True)
        ).rstrip()
        for *cells, end in rows
    )


def of_layers(rows: Iterable[tuple[Cells, str, T]]) -> list[tuple[Cells, str, list[T]]]:
    """What has the same cells, and the same path but for one number, that of a layer, in one row.

    Block_0/Dense_1, Block_1/Dense_1, Block_2/Dense_1  ->  Block_{0..2}/Dense_1

    Args:
      rows: of each its cells, its path, and what it is of.
    """
    alike: dict[tuple[Cells, str], list[T]] = collections.defaultdict(list)
    for cells, path, of in rows:
        alike[cells, path].append(of)
    named = {key: key for key in alike}
    most = max((len(_NUMBER.findall(path)) for _, path in alike), default=0)
    for place in range(most):  # the outermost first
        layers: dict[tuple[Cells, str, str], dict[int, tuple[Cells, str]]] = {}
        for cells, path in (key for key in alike if named[key] == key):
            if place < len(numbers := [*_NUMBER.finditer(path)]):
                start, end = numbers[place].span()
                others = cells, path[:start], path[end:]
                layers.setdefault(others, {})[int(path[start:end])] = cells, path
        for (cells, before, after), keys in layers.items():
            if len(keys) > _FEW:
                named |= dict.fromkeys(keys.values(), (cells, before + _listed(keys) + after))
    found: dict[tuple[Cells, str], list[T]] = collections.defaultdict(list)
    for key, of_key in alike.items():
        found[named[key]] += of_key
    return [(*key, of_key) for key, of_key in found.items()]


_NUMBER = re.compile(r"\d+")


def _listed(numbers: Iterable[int]) -> str:
    """As shells expand them, or nearly so: {0..3,5}."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    ends = (f"{run[0]}..{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"{{{','.join(ends)}}}"


def pass_of(backward: bool) -> str:
    """As tables name it."""
    return "backward" if backward else "forward"


def shortened(text: str, length: int) -> str:
    """The end of a text that is longer."""
    return text if len(text) <= length else f"…{text[1 - length :]}"


def count(number: float) -> str:
    """In three digits, before a unit: "1.23 G"."""
    for prefix in ("", "k", "M", "G", "T"):
        if float(digits := f"{number:.3g}") < 1000:
            return f"{digits} {prefix}"
        number /= 1000
    return f"{number:.3g} P"


def percent(share: float) -> str:
    """In one decimal, but nothing and all only of what is."""
    return f"{share:.1%}" if share in (0, 1) else f"{min(max(share, 0.001), 0.999):.1%}"
