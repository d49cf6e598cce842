"""Handwritten digits in float32, bfloat16 and float16: what each policy costs and reaches.

    python examples/digits.py
    python examples/digits.py --policy mixed_float16 --steps 1000 --seed 1 --out my_run
    python examples/digits.py --policy bfloat16 --master remainder --checkpoint-dir checkpoints

Trains the same network on the same batches once per policy, on the 1,797 scanned digits that come
with scikit-learn, and compares. `make_train_step` is the part to copy. With --checkpoint-dir a run
that was stopped, whenever and however, goes on where it was and ends with the same bits.
"""

import argparse
import dataclasses
import itertools
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import orbax.checkpoint as ocp
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jmp_kit
import jmp_kit.checkpoint

matplotlib.use("Agg")
import matplotlib.pyplot as plt

POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
BATCH_SIZE = 128

Batch = tuple[np.ndarray, np.ndarray]  # images float32[batch, 8, 8, 1], labels int32[batch]


class Network(nn.Module):
    """Two convolutions and two dense layers; it says nothing about precision."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits [batch, 10] of images [batch, 8, 8, 1]."""
        x = nn.relu(nn.Conv(32, (3, 3))(images))
        x = nn.relu(nn.Conv(64, (3, 3), strides=2)(x))
        x = nn.relu(nn.Dense(128)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


def make_train_step(
    policy: jmp_kit.Policy, optimizer: optax.GradientTransformation
) -> jax.stages.Wrapped:
    """The train step of any policy. This is all there is to mixed precision."""

    @jmp_kit.autocast(policy.with_output_dtype(jnp.float32))  # a loss is never half
    def loss_fn(params: Any, images: Any, labels: Any) -> jax.Array:
        logits = predict(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @jax.jit
    def train_step(params: Any, opt_state: Any, batch: Batch) -> tuple[Any, Any, jax.Array]:
        loss_scale = jmp_kit.loss_scale_of(opt_state)
        loss, grads = jmp_kit.value_and_grad(loss_fn, loss_scale)(params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return train_step


def make_optimizer(
    policy: jmp_kit.Policy, steps: int, master: Any = "float32"
) -> optax.GradientTransformation:
    """AdamW with masters and atomic steps, and a loss scale where float16 needs one."""
    schedule = optax.cosine_decay_schedule(2e-3, steps)
    loss_scale: jmp_kit.LossScale = jmp_kit.NoOpLossScale()
    if policy.compute_dtype == jnp.float16:
        # Over a real run's length the default period of 2000 is right; here it would never grow.
        loss_scale = jmp_kit.DynamicLossScale(period=25)
    return jmp_kit.mixed_precision(optax.adamw(schedule), loss_scale, master=master)


def predict(params: Any, images: jax.Array) -> jax.Array:
    """Logits [batch, 10], wholly in float32 if nobody says otherwise."""
    logits: Any = Network().apply({"params": params}, images)
    return logits


@dataclasses.dataclass(frozen=True)
class Run:
    """What training under one policy cost and reached."""

    policy: str
    losses: list[float]  # one a step
    loss_scales: list[float]  # one a step, as it was during the step
    skipped: list[int]  # the steps that did not apply
    final_loss_scale: float
    accuracy: float  # on the held-out test images, 0 to 1
    step_seconds: float  # median; NaN if all steps were trained before
    temporary_bytes: int | None  # of the compiled train step, where the compiler tells
    state: Any  # parameters, optimizer state and history, as in a checkpoint

    @property
    def final_loss(self) -> float:
        """The mean loss of the last ten steps."""
        return statistics.fmean(self.losses[-10:])


def load_data(seed: int) -> tuple[Batch, Batch]:
    """The digits as (train, test), a fifth of them held out."""
    digits = load_digits()
    images = (digits.images[..., None] / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    parts = train_test_split(
        images, labels, test_size=0.2, random_state=seed, stratify=digits.target
    )
    train_images, test_images, train_labels, test_labels = parts
    return (train_images, train_labels), (test_images, test_labels)


def batches(train: Batch, steps: int, seed: int) -> Iterator[Batch]:
    """`steps` random batches, the same ones for every policy."""
    generator = np.random.default_rng(seed)
    images, labels = train
    for _ in range(steps):
        chosen = generator.choice(len(labels), BATCH_SIZE, replace=False)
        yield images[chosen], labels[chosen]


def train(
    policy_name: str,
    steps: int,
    seed: int,
    on_step: Callable[[float], None] = lambda loss: None,
    *,
    master: str = "float32",
    checkpoint_dir: pathlib.Path | None = None,
    checkpoint_every: int = 50,
) -> Run:
    """Train under one policy; `on_step` is told the loss of every step."""
    policy = jmp_kit.get_policy(policy_name)
    train_data, (test_images, test_labels) = load_data(seed)
    optimizer = make_optimizer(policy, steps, master)
    params = Network().init(jax.random.key(seed), train_data[0][:1])["params"]
    params = policy.cast_to_param(params)
    state = {
        "params": params,
        "opt_state": optimizer.init(params),
        "step": 0,
        "losses": np.zeros(steps, np.float32),
        "loss_scales": np.zeros(steps, np.float32),
        "skipped": np.zeros(steps, bool),
    }
    example = next(batches(train_data, 1, seed))
    train_step = (
        make_train_step(policy, optimizer).lower(params, state["opt_state"], example).compile()
    )

    seconds = []
    with Checkpoints(checkpoint_dir, checkpoint_every) as checkpoints:
        state = checkpoints.latest(state)
        done = state["step"]
        for loss in state["losses"][:done]:
            on_step(float(loss))
        for step, batch in enumerate(batches(train_data, steps, seed)):
            if step < done:
                continue
            state["loss_scales"][step] = jmp_kit.metrics(state["opt_state"])["loss_scale"]
            start = time.perf_counter()
            params, opt_state, loss = jax.block_until_ready(
                train_step(state["params"], state["opt_state"], batch)
            )
            seconds.append(time.perf_counter() - start)
            state |= {"params": params, "opt_state": opt_state, "step": step + 1}
            state["losses"][step] = loss
            state["skipped"][step] = not jmp_kit.metrics(opt_state)["finite"]
            checkpoints.save(state)
            on_step(float(loss))
    jmp_kit.raise_if_diverged(state["opt_state"])

    memory = train_step.memory_analysis()
    logits = jax.jit(jmp_kit.autocast(predict, policy))(state["params"], test_images)
    return Run(
        policy=policy_name,
        losses=state["losses"].tolist(),
        loss_scales=state["loss_scales"].tolist(),
        skipped=np.flatnonzero(state["skipped"]).tolist(),
        final_loss_scale=jmp_kit.metrics(state["opt_state"])["loss_scale"],
        accuracy=float(np.mean(np.argmax(logits, axis=-1) == test_labels)),
        step_seconds=statistics.median(seconds) if seconds else math.nan,
        temporary_bytes=memory.temp_size_in_bytes if memory else None,
        state=state,
    )


class Checkpoints:
    """A training state saved by Orbax every few steps, in the background, and found again."""

    def __init__(self, directory: pathlib.Path | None, every: int) -> None:
        self._directory, self._every = directory, every

    def __enter__(self) -> "Checkpoints":
        if self._directory is not None:
            options = ocp.CheckpointManagerOptions(max_to_keep=3)
            self._manager = ocp.CheckpointManager(self._directory.absolute(), options=options)
        return self

    def __exit__(self, *_: object) -> None:
        if self._directory is not None:
            self._manager.close()

    def latest(self, state: Any) -> Any:
        """The state that was saved last, in the precision of this one; or this one."""
        if self._directory is None or self._manager.latest_step() is None:
            return state
        return jmp_kit.checkpoint.restore(self._directory, like=state)

    def save(self, state: Any) -> None:
        """Save the state, if it is time to."""
        if self._directory is not None and state["step"] % self._every == 0:
            # Copied, for the loop goes on writing to the history while it is being saved.
            state = jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, state)
            self._manager.save(state["step"], args=ocp.args.StandardSave(state))


def table_of(runs: list[Run]) -> Table:
    """The comparison, a row per policy."""
    device = jax.devices()[0]
    table = Table(title=f"Digits on {device.device_kind} ({device.platform})", box=SIMPLE_HEAD)
    table.add_column("policy", no_wrap=True)
    for heading in (
        "test\naccuracy",
        "final\nloss",
        "skipped\nsteps",
        "final\nloss\nscale",
        "median\nstep",
        "temp.\nmemory",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        table.add_row(
            run.policy,
            f"{run.accuracy:.2%}",
            f"{run.final_loss:.4f}",
            str(len(run.skipped)),
            f"2^{math.log2(run.final_loss_scale):g}",
            "unknown" if math.isnan(run.step_seconds) else f"{run.step_seconds * 1e3:.1f} ms",
            "unknown" if run.temporary_bytes is None else f"{run.temporary_bytes / 2**20:.2f} MiB",
        )
    return table


def plot(runs: list[Run], path: pathlib.Path) -> None:
    """Loss and loss scale over the steps, skipped steps marked."""
    figure, (loss_axes, scale_axes) = plt.subplots(
        2, 1, sharex=True, figsize=(8, 6), layout="constrained"
    )
    # Runs that agree lie on one another: the first is wide and pale, the last narrow and dark.
    looks = itertools.cycle([("#ddaa33", "-", 4), ("#4477aa", "-", 1.8), ("#111111", "--", 0.9)])
    for run, (colour, style, width) in zip(runs, looks, strict=False):
        (line,) = loss_axes.plot(run.losses, style, color=colour, lw=width, label=run.policy)
        if set(run.loss_scales) != {1.0}:
            scale_axes.step(
                range(len(run.loss_scales)), run.loss_scales, color=line.get_color(), where="post"
            )
            heights = [run.loss_scales[step] for step in run.skipped]
            name = f"{run.policy}, skipped steps: {len(run.skipped)}"
            scale_axes.plot(run.skipped, heights, "x", color="#cc3311", mew=2, label=name)
    loss_axes.set(yscale="log", ylabel="training loss", title="Digits under each policy")
    loss_axes.legend()
    scale_axes.set_yscale("log", base=2)
    scale_axes.set(xlabel="step", ylabel="loss scale")
    if scale_axes.lines:
        scale_axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: list[str] | None = None) -> None:
    """Train under every policy asked for, then print the table and save the figure."""
    options = parse(arguments)
    console = Console()
    columns = TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn()
    loss_column = TextColumn("loss {task.fields[loss]:.4f}")
    runs = []
    with Progress(*columns, loss_column, TimeRemainingColumn(), console=console) as progress:
        for policy in options.policy:
            task = progress.add_task(policy, total=options.steps, loss=float("nan"))

            def on_step(loss: float, task: Any = task) -> None:
                progress.update(task, advance=1, loss=loss)

            directory = None
            if options.checkpoint_dir is not None:
                name = f"{policy}-{options.steps}steps-seed{options.seed}"
                directory = pathlib.Path(options.checkpoint_dir) / name
            run = train(
                policy,
                options.steps,
                options.seed,
                on_step,
                master=options.master,
                checkpoint_dir=directory,
                checkpoint_every=options.checkpoint_every,
            )
            runs.append(run)
    console.print(table_of(runs))
    if jax.default_backend() == "cpu":
        console.print(
            "Step time and memory of a network this small, on a CPU, say nothing about a GPU. "
            "Accuracy, loss and skipped steps are what to look at."
        )
    path = pathlib.Path(options.out) / "digits.png"
    plot(runs, path)
    print(f"Loss and loss scale over the steps: {path}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--policy",
        nargs="+",
        type=policy_name,
        default=POLICIES,
        help="as get_policy reads",
    )
    parser.add_argument("--steps", type=positive, default=400, help="steps per policy")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and the split")
    parser.add_argument(
        "--master",
        type=_master,
        default="float32",
        help="how the precision of 16-bit parameters is kept, as mixed_precision takes it",
    )
    parser.add_argument(
        "--checkpoint-dir", help="folder for checkpoints, from which a stopped run goes on"
    )
    parser.add_argument(
        "--checkpoint-every", type=positive, default=50, help="steps between checkpoints"
    )
    parser.add_argument("--out", default="out", help="folder for the figure")
    return parser.parse_args(arguments)


def policy_name(name: str) -> str:
    """A policy on the command line."""
    try:
        jmp_kit.get_policy(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name


def _master(name: Any) -> str:
    try:
        jmp_kit.mixed_precision(optax.identity(), master=name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name


def positive(text: str) -> int:
    """A number of something on the command line."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


if __name__ == "__main__":
    main()
