"""Draws `docs/programs.png`: what steps compiled for an H200 move and need, beside code by hand.

    python docs/programs.py

Everything in the picture is read from `benchmarks/results/h200compiled-*.json`.
"""

import json
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = pathlib.Path(__file__).parents[1]
CONTENDERS = {"jmp_kit, bfloat16": "four lines", "jmp_kit, bfloat16, one line": "one line"}
QUANTITIES = {"bytes_moved_ratio": "bytes moved", "temporary_mib_ratio": "temporary memory"}
KERNELS = "XLA's own kernels"


def last_results(folder=ROOT / "benchmarks" / "results"):
    """The rows of the last run of `python -m benchmarks programs` at full size."""
    files = sorted(folder.glob("h200compiled-*.json"), reverse=True)
    results = (json.loads(path.read_text())["results"] for path in files)
    return next(found["programs"]["rows"] for found in results if "programs" in found)


def ratios(rows):
    """By model: by quantity: by way of use: jmp_kit's figure over that of code by hand."""
    found = {}
    for row in rows:
        if row["group"] == KERNELS and row["contender"] in CONTENDERS:
            model = found.setdefault(row["model"], {q: {} for q in QUANTITIES})
            for quantity, ways in model.items():
                ways[CONTENDERS[row["contender"]]] = row[quantity]
    return found


def draw(found, path):
    """A line a model, a panel a quantity, a mark a way of use."""
    plt.style.use("tableau-colorblind10")
    models = sorted(found, key=lambda model: found[model]["temporary_mib_ratio"]["one line"])
    size = 8, 0.28 * len(models) + 1.4
    figure, panels = plt.subplots(1, 2, figsize=size, layout="constrained", sharey=True)
    for axes, (quantity, title) in zip(panels, QUANTITIES.items(), strict=True):
        axes.axvline(1.0, color="grey", lw=1)
        for way, marker in (("four lines", "o"), ("one line", "D")):
            values = [found[model][quantity][way] for model in models]
            places = range(len(models))
            filled = "none" if way == "four lines" else None
            axes.scatter(values, places, marker=marker, facecolors=filled, color="C0", label=way)
        axes.set(title=f"{title}, by hand = 1", xlim=(0, 1.25))
        axes.grid(axis="x", alpha=0.3)
    panels[0].set_yticks(range(len(models)), models)
    panels[0].legend(loc="upper left")
    figure.savefig(path, dpi=120, metadata={"Description": json.dumps(found)})
    plt.close(figure)


if __name__ == "__main__":
    draw(ratios(last_results()), ROOT / "docs" / "programs.png")
