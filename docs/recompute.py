"""Draws `docs/recompute.png`: what one train step keeps and moves, for each value of `recompute`.

    JAX_PLATFORMS=cpu python docs/recompute.py --measure    # compiles, writes recompute.json, draws
    python docs/recompute.py                                # draws from recompute.json

Compiles GPT-2 with 124M parameters and attention of plain jnp for an H200, which needs no GPU but
JAX's CUDA plugin: `pip install ".[cuda12]"`. Nothing is run: the compiler tells the memory, and
`numerics.traffic` the bytes that kernels read and write. Autocast is around the whole train step,
where `recompute` counts. (The benchmarks' row "kept" has autocast around the loss alone, inside
`jax.value_and_grad`.)
"""

import json
import pathlib
import sys

import jax
import matplotlib

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import jmp_kit
from benchmarks.results import versions
from benchmarks.training import plain_state, plain_step
from benchmarks.zoo import ZOO
from jmp_kit import numerics

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MODEL = "gpt plain"
LEVELS = False, True, "most"
COLOURS = "#bbbbbb", "#4477aa", "#ddaa33"
QUANTITIES = {
    "temporary_bytes": ("memory beside weights and optimizer, GiB", 2**30),
    "bytes_moved": ("bytes that kernels read and write, GB", 1e9),
}


def measured(tiny=False, target=None):
    """A row for each level, of a whole train step in one program."""
    model, there = ZOO[MODEL].at(tiny), numerics.TARGETS.get(target)
    rows = []
    for level in LEVELS:
        step = plain_step(model.task.loss(), model.task.optimizer)
        step = jmp_kit.autocast(step, "mixed_bfloat16", recompute=level)
        args = jax.eval_shape(plain_state(model.task)), *model.batch
        lowered = jax.jit(step, donate_argnums=0).lower(*there.placed(args) if there else args)
        compiled = lowered.compile(there.compiler_options if there else None)
        rows.append(
            {
                "recompute": level,
                "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
                "bytes_moved": numerics.traffic(compiled).nbytes,
            }
        )
    known = {package: versions()[package] for package in ("jax", "jaxlib", "flax")}
    return {"model": MODEL, "target": target, "versions": known, "rows": rows}


def draw(found, path):
    """A panel a quantity, a bar a level."""
    rows = found["rows"]
    names = [f"recompute={row['recompute']!r}".replace("'", '"') for row in rows]
    names[LEVELS.index(True)] += "\n(default)"
    figure, panels = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained", sharey=True)
    for axes, (quantity, (label, unit)) in zip(panels, QUANTITIES.items(), strict=True):
        bars = axes.barh(names, [row[quantity] / unit for row in rows], color=COLOURS)
        axes.bar_label(bars, fmt="{:.1f}", padding=3)
        axes.margins(x=0.15)
        axes.set(xlabel=label)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    figure.suptitle("GPT-2 (124M), autocast around the whole train step, compiled for an H200")
    figure.savefig(path, dpi=120, metadata={"Description": json.dumps(rows)})
    plt.close(figure)


if __name__ == "__main__":
    path = pathlib.Path(__file__).with_suffix(".json")
    if "--measure" in sys.argv:
        path.write_text(json.dumps(measured(target="h200"), indent=1) + "\n")
    draw(json.loads(path.read_text()), path.with_suffix(".png"))
