"""Tables for a terminal."""

import shutil
from collections.abc import Sequence


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


def shortened(text: str, length: int) -> str:
    """The end of a text that is longer."""
    return text if len(text) <= length else f"…{text[1 - length :]}"


def count(number: float) -> str:
    """In three digits, before a unit: "1.23 G"."""
    for prefix in ("", "k", "M", "G", "T"):
        if number < 1000:
            return f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:.3g} P"


def percent(share: float) -> str:
    """In one decimal, but nothing and all only of what is."""
    return f"{share:.1%}" if share in (0, 1) else f"{min(max(share, 0.001), 0.999):.1%}"
