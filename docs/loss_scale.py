"""Draws `docs/loss_scale.png`: the life of a dynamic loss scale.

    python docs/loss_scale.py

Trains the digits network of `examples/digits.py` in float16. The scale starts too high, so the
first steps overflow. It may grow after 25 finite steps rather than 2,000, because the run is short.
"""

import json
import pathlib
import sys

import jax
import matplotlib
import optax

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import jmp_kit
from examples import digits

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STEPS = 300
LINE, SKIPPED = "#4477aa", "#cc3311"


def start():
    """The loss scale before the first step."""
    return jmp_kit.DynamicLossScale(2.0**26, period=25)


def run(steps=STEPS):
    """Of each step the loss scale, and whether its gradients were finite."""
    data, _ = digits.load_data(0)
    params = digits.Network().init(jax.random.key(0), data[0][:1])["params"]
    schedule = optax.cosine_decay_schedule(2e-3, steps)
    optimizer = jmp_kit.mixed_precision(optax.adamw(schedule), start())
    train_step = digits.make_train_step(jmp_kit.get_policy("mixed_float16"), optimizer)
    state = optimizer.init(params)
    found = {"loss_scale": [], "finite": []}
    for batch in digits.batches(data, steps, 0):
        params, state, _ = train_step(params, state, batch)
        for name, values in found.items():
            values.append(jmp_kit.metrics(state)[name])
    return found


def draw(found, path):
    """The scale over the steps; marks show where it is halved and where it is doubled."""
    # After a step `metrics` tells the scale of the next one.
    scales = [float(start().loss_scale), *found["loss_scale"][:-1]]
    skipped = [step for step, finite in enumerate(found["finite"]) if not finite]
    doubled = [i for i in range(1, len(scales)) if scales[i] > scales[i - 1]]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.step(range(len(scales)), scales, color=LINE, lw=2, where="post")
    label = f"overflow: the step is skipped, and the scale halved ({len(skipped)} times)"
    heights = [scales[i] for i in skipped]
    axes.plot(skipped, heights, "x", color=SKIPPED, mew=2, ms=7, label=label)
    label = f"{start().period} finite steps in a row: the scale is doubled ({len(doubled)} times)"
    heights = [scales[i] for i in doubled]
    axes.plot(doubled, heights, "^", color=LINE, ms=7, label=label)
    axes.set_yscale("log", base=2)
    axes.set(
        xlabel="step",
        ylabel="loss scale",
        title="The life of a dynamic loss scale: digits in float16",
    )
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", frameon=False)
    figure.savefig(path, dpi=120, metadata={"Description": json.dumps(found)})
    plt.close(figure)


if __name__ == "__main__":
    draw(run(), ROOT / "docs" / "loss_scale.png")
