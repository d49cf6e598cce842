"""Draws `docs/masters.png`: how far each way of keeping precision strays from a float32 run.

    python docs/masters.py

Trains the digits network of `examples/digits.py` with bfloat16 parameters, once a way, on the same
batches as a float32 run, and measures the distance of the weights after every step.
"""

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

# Those that hardly differ lie on one another: wide and pale below, narrow and dark above.
WAYS = {
    "none": {"color": "#cc6677", "lw": 1.8},
    "stochastic": {"color": "#aa4499", "ls": "--", "lw": 1.8},
    "float32": {"color": "#ddaa33", "lw": 5},
    "remainder": {"color": "#4477aa", "lw": 2.2},
    "kahan": {"color": "#111111", "ls": ":", "lw": 1.8},
}


def distances(optimizer, dtype, steps, ways=tuple(WAYS)):
    """The norm of (weights - float32 run's weights) over the latter's, a list of steps a way."""
    data, _ = digits.load_data(0)
    start = digits.Network().init(jax.random.key(0), data[0][:1])["params"]
    start = jax.tree.map(lambda p: p.astype(dtype), start)

    def weights(params, master):
        wrapped = jmp_kit.mixed_precision(optimizer, master=master)
        train_step = digits.make_train_step(jmp_kit.get_policy("float32"), wrapped)
        state = wrapped.init(params)
        for batch in digits.batches(data, steps, 0):
            params, state, _ = train_step(params, state, batch)
            yield jmp_kit.master_params(state, params)

    reference = list(weights(jmp_kit.cast_to_full(start), "float32"))
    return {
        way: [
            float(optax.tree.norm(optax.tree.sub(here, there)) / optax.tree.norm(there))
            for here, there in zip(weights(start, way), reference, strict=True)
        ]
        for way in ways
    }


def draw(found, path):
    """A line a way, over the steps."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for way, values in found.items():
        axes.plot(values, label=f'master="{way}"', **WAYS[way])
    axes.set(
        yscale="log",
        ylim=(3e-4, 0.5),
        xlabel="step",
        ylabel="relative distance from the float32 run",
        title="bfloat16 parameters, AdamW at 1e-4: how far the weights stray",
    )
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    found = distances(optax.adamw(1e-4), "bfloat16", 300)
    draw(found, ROOT / "docs" / "masters.png")
