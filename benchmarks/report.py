"""The README's figures and the charts, made of `benchmarks/results/*.json`; none is typed by hand.

python -m benchmarks.report            write them
python -m benchmarks.report --check    fail if the README says something else
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import matplotlib

from benchmarks.__main__ import BENCHMARKS
from benchmarks.results import Row, cells

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = pathlib.Path(__file__).parents[1]
START, END = "<!-- figures: made by python -m benchmarks.report -->", "<!-- end of figures -->"

# What the bars of a chart are: the key of a row, what it is called, and its scale.
CHARTS = {
    "gpt": (("words_per_s", "words a second", 1.0), ("program_mib", "memory, GiB", 1 / 1024)),
    "resnet": (("images_per_s", "images a second", 1.0), ("program_mib", "memory, GiB", 1 / 1024)),
    "mlp": (("share", "share of the matrix rate", 1.0),),
}


def newest(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The latest result of each benchmark in full size, a GPU's before a CPU's.

    Files are called after the device and the day: `<device>-<date>.json`.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stem.partition("-")[2]):
        file = json.loads(path.read_text())
        for name, result in file["results"].items():
            before = found.get(name, {"device": "cpu"})["device"]
            if not result["tiny"] and (result["device"] != "cpu" or before == "cpu"):
                date = path.stem.partition("-")[2]
                found[name] = {**result, "date": date, "versions": file["versions"]}
    return found


def text(results: dict[str, dict[str, Any]]) -> str:
    """The README's section."""
    return "\n".join(line for name in BENCHMARKS for line in _section(name, results.get(name)))


def _section(name: str, result: dict[str, Any] | None) -> Iterator[str]:
    module = BENCHMARKS[name]
    question = str(module.__doc__).split("\n")[0]
    if result is None:
        yield f"**{question}** Not yet measured: `python -m benchmarks {name}` on a GPU.\n"
        return
    columns = [c for c in module.COLUMNS if not (c.timed and result["device"] == "cpu")]
    versions = ", ".join(
        f"{package} {version}"
        for package, version in result["versions"].items()
        if version != "not installed"
    )
    yield f"**{question}** On: {result['device']}, {result['date']}; {versions}.\n"
    for group in _groups(result["rows"]):
        if group:
            yield f"*{group}*\n"
        yield "| " + " | ".join(column.heading for column in columns) + " |"
        yield "|---" * len(columns) + "|"
        for row in result["rows"]:
            if row.get("group", "") == group:
                yield "| " + " | ".join(cells(row, columns)) + " |"
        yield ""
    if name in CHARTS:
        yield f"![{question}](docs/{name}.png)\n"


def _groups(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row.get("group", "") for row in rows))


def chart(name: str, result: dict[str, Any], path: pathlib.Path) -> None:
    """Bars of each contender; of each group a row of axes."""
    groups, quantities = _groups(result["rows"]), CHARTS[name]
    size = 5 * len(quantities) + 2, 0.35 * len(result["rows"]) + len(groups)
    figure, grid = plt.subplots(
        len(groups), len(quantities), figsize=size, layout="constrained", squeeze=False
    )
    for group, line in zip(groups, grid, strict=True):
        rows = [row for row in result["rows"] if row.get("group", "") == group]
        for axes, (key, label, scale) in zip(line, quantities, strict=True):
            measured = [row for row in rows if row.get(key) is not None]
            names = [row["contender"] for row in measured]
            colours = ["#4477aa" if "jmp_kit" in n else "#bbbbbb" for n in names]
            bars = axes.barh(names, [row[key] * scale for row in measured], color=colours)
            axes.bar_label(bars, fmt="{:,.3g}", padding=3)
            axes.invert_yaxis()
            axes.margins(x=0.15)
            axes.set(xlabel=label, title=group)
            axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{result['device']}, JAX {result['versions']['jax']}")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def filled(readme: str, figures: str) -> str:
    """The README with these figures between its marks.

    Raises:
      ValueError: if the marks are missing.
    """
    if START not in readme or END not in readme:
        raise ValueError(f"README.md lacks {START!r} or {END!r}, between which figures go.")
    head, _, rest = readme.partition(START)
    return f"{head}{START}\n\n{figures}\n{END}{rest.partition(END)[2]}"


def main(arguments: list[str] | None = None, root: pathlib.Path = ROOT) -> None:
    """Write, or check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    results = newest(root / "benchmarks" / "results")
    readme = root / "README.md"
    new = filled(readme.read_text(), text(results))
    if options.check:
        if new != readme.read_text():
            sys.exit("README.md has other figures: run python -m benchmarks.report")
        return
    readme.write_text(new)
    for name in CHARTS:
        if name in results:
            chart(name, results[name], root / "docs" / f"{name}.png")


if __name__ == "__main__":
    main()
