"""What half precision would lose of a real training run, and what a loss scale saves.

    python examples/underflow.py
    python examples/underflow.py --steps 1000 --seed 1 --out my_run

Trains the digits network in float32 and looks, all along, at what the formats of half precision
would have made of it: the gradients that float16 flushes to zero, unscaled and scaled, and the
updates that are lost when they are added to weights of 16 bits. These are the facts for which the
loss is scaled and float32 masters are kept: https://arxiv.org/abs/1710.03740
"""

import argparse
import dataclasses
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jmp_kit
from examples import digits
from jmp_kit import numerics

HALVES = (jnp.float16, jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Look:
    """What was seen at a step, shares of 0 to 1."""

    step: int
    loss: float
    below: float  # of the gradient's values that are not zero, below 2^-24
    flushed: float  # by a cast to float16
    scale: float  # that is recommended
    flushed_scaled: float
    lost: dict[str, float]  # of the updates that are not zero, added to weights of each half dtype


@dataclasses.dataclass(frozen=True)
class Seen:
    """A run, and the exponents of its gradients, summed."""

    looks: list[Look]
    histograms: Any


def lost_updates(params: Any, updates: Any, dtype: Any) -> jax.Array:
    """The share of updates that leave a weight of this dtype as it was."""
    lost, all_ = jnp.zeros(()), jnp.zeros(())
    for param, update in zip(jax.tree.leaves(params), jax.tree.leaves(updates), strict=True):
        weight = jmp_kit.rounding.round_to(param, dtype)
        same = jmp_kit.rounding.round_to(weight + update, dtype) == weight
        moves = update != 0
        lost, all_ = lost + jnp.sum(same & moves), all_ + jnp.sum(moves)
    return lost / jnp.maximum(all_, 1)


def look_on(steps: int, seed: int, every: int) -> Seen:
    """Train in float32, and look every so many steps."""
    train_data, _ = digits.load_data(seed)
    schedule = optax.cosine_decay_schedule(2e-3, steps)
    optimizer = optax.chain(numerics.watch(every), optax.adamw(schedule))
    params = digits.Network().init(jax.random.key(seed), train_data[0][:1])["params"]
    opt_state = optimizer.init(params)

    def loss_fn(params: Any, images: Any, labels: Any) -> jax.Array:
        logits = digits.predict(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @jax.jit
    def step_and_parts(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, (loss, grads, updates)

    lost = {jnp.dtype(d).name: jax.jit(lost_updates, static_argnums=2) for d in HALVES}
    looks = []
    batches = digits.batches(train_data, steps, seed)
    for step, batch in enumerate(track(batches, "training in float32", total=steps)):
        before = params
        params, opt_state, (loss, grads, updates) = step_and_parts(params, opt_state, batch)
        if step % every == 0:
            scale = numerics.recommend_loss_scale(grads, jnp.float16)
            histogram = numerics.total_histogram(numerics.exponent_histogram(grads))
            looks.append(
                Look(
                    step=step,
                    loss=float(loss),
                    below=histogram.share_below(-24),
                    flushed=float(numerics.underflow(grads, jnp.float16)),
                    scale=scale,
                    flushed_scaled=float(numerics.underflow(grads, jnp.float16, scale)),
                    lost={name: float(f(before, updates, name)) for name, f in lost.items()},
                )
            )
    return Seen(looks, numerics.watched(opt_state))


def table_of(looks: list[Look]) -> Table:
    """A row for each of a few looks."""
    table = Table(title="What half precision would lose", box=SIMPLE_HEAD)
    for heading in (
        "step",
        "loss",
        "grads\n<2^-24",
        "float16\nflushes",
        "scaled\nby",
        "then\nflushes",
        "lost in\nfloat16",
        "lost in\nbfloat16",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for i in np.unique(np.linspace(0, len(looks) - 1, 8).astype(int)):
        look = looks[i]
        table.add_row(
            str(look.step),
            f"{look.loss:.4f}",
            f"{look.below:.2%}",
            f"{look.flushed:.2%}",
            f"2^{np.log2(look.scale):g}",
            f"{look.flushed_scaled:.3%}",
            *(f"{share:.1%}" for share in look.lost.values()),
        )
    return table


def main(arguments: list[str] | None = None) -> None:
    """Train, look, print the table and save the figure."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=digits.positive, default=400, help="of training")
    parser.add_argument("--every", type=digits.positive, default=10, help="steps between looks")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and the split")
    parser.add_argument("--out", default="out", help="folder for the figure")
    options = parser.parse_args(arguments)
    console = Console()
    seen = look_on(options.steps, options.seed, options.every)
    console.print(table_of(seen.looks))
    console.print(
        "Of the values that are not zero: gradients below 2^-24 and those that a cast to float16 "
        "flushes, before and after scaling; and updates lost in weights of 16 bits."
    )
    scale = sorted(look.scale for look in seen.looks)[len(seen.looks) // 2]
    path = pathlib.Path(options.out) / "underflow.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = numerics.plot_exponents(seen.histograms, jnp.float16, loss_scale=scale)
    figure.suptitle("Gradients of the digits network over the run")
    figure.savefig(path)
    print(f"The exponents of all gradients, and the limits of float16: {path}")


if __name__ == "__main__":
    main()
