"""The site's tables and charts, made of `benchmarks/results/*.json`; none is typed by hand.

python -m benchmarks.report            write them
python -m benchmarks.report --check    fail if a page says something else
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import matplotlib

from benchmarks.__main__ import BENCHMARKS
from benchmarks.results import Row, cells

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = pathlib.Path(__file__).parents[1]
START, END = "<!-- figures: made by python -m benchmarks.report -->", "<!-- end of figures -->"

# Of each benchmark: its rows, the device, the date and the versions.
Results = dict[str, dict[str, Any]]

# What the bars of a chart are: the key of a row, what it is called, and its scale.
CHARTS = {
    "gpt": (("words_per_s", "words a second", 1.0), ("program_mib", "memory, GiB", 1 / 1024)),
    "resnet": (("images_per_s", "images a second", 1.0), ("program_mib", "memory, GiB", 1 / 1024)),
    "mlp": (("share", "share of the matrix rate", 1.0),),
}


def newest(folder: pathlib.Path) -> Results:
    """The latest result of each benchmark in full size, a GPU's before a CPU's.

    Files are called after the device and the day: `<device>-<date>.json`.
    """
    found: Results = {}
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stem.partition("-")[2]):
        file = json.loads(path.read_text())
        for name, result in file["results"].items():
            before = found.get(name, {"device": "cpu"})["device"]
            if not result["tiny"] and (result["device"] != "cpu" or before == "cpu"):
                date = path.stem.partition("-")[2]
                found[name] = {**result, "date": date, "versions": file["versions"]}
    return found


def everything(results: Results) -> str:
    """A section for each benchmark that has results, and one for those that have none."""
    lines = [line for name in BENCHMARKS if name in results for line in _section(name, results)]
    if missing := [name for name in BENCHMARKS if name not in results]:
        lines += ["## Not yet measured", "", _MISSING, ""]
        lines += [f"- {_question(name)} `python -m benchmarks {name}`" for name in missing]
        lines += [""]
    return "\n".join(lines)


_MISSING = (
    "There is no claim about these questions yet, because no training step was timed on a GPU:"
)


def _question(name: str) -> str:
    return str(BENCHMARKS[name].__doc__).split("\n")[0]


def _section(name: str, results: Results) -> Iterator[str]:
    module, result = BENCHMARKS[name], results[name]
    columns = [c for c in module.COLUMNS if not (c.timed and result["device"] == "cpu")]
    versions = ", ".join(
        f"{package} {version}"
        for package, version in result["versions"].items()
        if version != "not installed"
    )
    yield f"## {_question(name)}\n"
    yield f"On: {result['device']}, {result['date']}; {versions}.\n"
    for group in _groups(result["rows"]):
        if group:
            yield f"### {group[0].upper()}{group[1:]}\n"
        rows = [row for row in result["rows"] if row.get("group", "") == group]
        told = [row for row in rows if "failed" not in row]
        shown = [c for c in columns if not told or any(map(c.cell, told))]
        yield from _table([c.heading for c in shown], (cells(row, shown) for row in rows))
    if name in CHARTS:
        yield f"![{_question(name)}]({name}.png)\n"


def _table(headings: list[str], rows: Iterable[list[str]]) -> Iterator[str]:
    yield "| " + " | ".join(headings) + " |"
    yield "|---" * len(headings) + "|"
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""


def accuracies(results: Results) -> str:
    """What each policy reaches on data that no training saw, a row for each task."""
    policies = ["float32, default", "bfloat16, mixed", "float16, mixed", "bfloat16 only"]
    policies += ["float16 only"]
    rows = []
    if "accuracy" in results:
        found = results["accuracy"]["rows"]
        reached = {(row["group"], row["contender"]): row["accuracy"] for row in found}
        for group in _groups(found):
            rows.append([f"{group}, accuracy", *(f"{reached[group, p]:.1%}" for p in policies)])
    if "language" in results:
        bits = [f"{row['bits_per_byte']:.3f}" for row in results["language"]["rows"]]
        rows.append(["GPT on source text, bits per byte", *bits, "", ""])
    headings = ["float32", "mixed bfloat16", "mixed float16", "bfloat16 only", "float16 only"]
    return "\n".join(_table(["task", *headings], rows))


def recomputation(results: Results) -> str:
    """What a step needs with and without recomputation."""
    rows = []
    if "programs" in results:
        found = {(r["group"], r["model"], r["contender"]): r for r in results["programs"]["rows"]}
        own, ours = "XLA's own kernels", "jmp_kit, bfloat16"
        for model in ("gpt plain", "resnet"):
            ways = {
                "by hand, bfloat16": found[own, model, "by hand, bfloat16"],
                "jmp_kit, `recompute=False`": found["other ways", model, f"{ours}, kept"],
                "jmp_kit, the default": found[own, model, ours],
            }
            for name, row in ways.items():
                memory, moved = row["temporary_mib"] / 1024, row["bytes_moved"] / 1e9
                rows.append([f"{model}: {name}", f"{memory:.2f}", f"{moved:.1f}"])
    headings = ["step", "temporary memory, GiB", "read and written, GB"]
    return "\n".join(_table(headings, rows))


# Which page has which figures between its marks.
PAGES: dict[str, Callable[[Results], str]] = {
    "README.md": accuracies,
    "docs/benchmarks.md": everything,
    "docs/concepts/recomputation.md": recomputation,
}


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


def filled(page: pathlib.Path, figures: str) -> str:
    """The text of a page with these figures between its marks.

    Raises:
      ValueError: if the marks are missing.
    """
    text = page.read_text()
    if START not in text or END not in text:
        raise ValueError(f"{page.name} lacks {START!r} or {END!r}, between which figures go.")
    head, _, rest = text.partition(START)
    return f"{head}{START}\n\n{figures}\n{END}{rest.partition(END)[2]}"


def main(arguments: list[str] | None = None, root: pathlib.Path = ROOT) -> None:
    """Write, or check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    results = newest(root / "benchmarks" / "results")
    pages = {root / name: filled(root / name, make(results)) for name, make in PAGES.items()}
    if options.check:
        for page, text in pages.items():
            if text != page.read_text():
                sys.exit(f"{page.name} has other figures: run python -m benchmarks.report")
        return
    for page, text in pages.items():
        page.write_text(text)
    for name in CHARTS:
        if name in results:
            chart(name, results[name], root / "docs" / f"{name}.png")


if __name__ == "__main__":
    main()
