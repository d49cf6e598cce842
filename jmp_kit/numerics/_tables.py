"""Tables for a terminal."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, the first a heading, in columns as wide as they need."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


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
