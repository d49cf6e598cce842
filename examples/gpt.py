"""A GPT on the source text of Python's standard library, byte by byte, under each policy.

    python examples/gpt.py
    python examples/gpt.py --policy mixed_float16 --seed 0 1 2 --steps 1000 --accumulate 4
    python examples/gpt.py --size 124m --policy mixed_bfloat16 --checkpoint-dir checkpoints

Trains the same nnx model on the same bytes once per policy and seed, tells how many bits it needs
for a byte of files that it has not seen, and lets it write. The model says nothing about precision:
`make_model`, `make_optimizer` and `train_step` are all there is to it. `--size 124m` is for a GPU.
"""

import argparse
import contextlib
import dataclasses
import itertools
import math
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jmp_kit
import jmp_kit.checkpoint
import jmp_kit.nnx
from examples import digits
from examples.gpt_model import GPT, SIZES, Config
from examples.gpt_runs import Run, plot, table_of
from examples.stdlib_text import load_text, pieces, printable

POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")


def make_model(
    config: Config, policy: jmp_kit.Policy, seed: int, rules: Mapping[str, str] | None = None
) -> GPT:
    """A GPT with parameters, products and logits in the dtypes of a policy."""
    return jmp_kit.nnx.apply_policy(GPT(config, nnx.Rngs(seed)), policy, rules)


def make_optimizer(config: Config, policy: jmp_kit.Policy, model: nnx.Module) -> nnx.Optimizer[Any]:
    """AdamW, clipped and warmed up; batches that overflow are left out, in float16 rescaled."""
    schedule = optax.warmup_cosine_decay_schedule(
        0, config.learning_rate, config.warmup, max(config.steps, config.warmup + 1)
    )
    inner: Any = optax.chain(
        optax.clip_by_global_norm(config.clip), optax.adamw(schedule, b2=0.98, weight_decay=0.1)
    )
    if config.accumulate > 1:
        inner = optax.MultiSteps(inner, config.accumulate)
    loss_scale: jmp_kit.LossScale = jmp_kit.NoOpLossScale()
    if policy.compute_dtype == jnp.float16:
        loss_scale = jmp_kit.DynamicLossScale(period=config.period)
    return nnx.Optimizer(model, jmp_kit.mixed_precision(inner, loss_scale), wrt=nnx.Param)


def loss_fn(model: nnx.Module, text: Any) -> jax.Array:
    """Mean of -log p of every byte but the first, in nats; text is uint8[batch, time + 1]."""
    logits = model(text[:, :-1])
    targets = text[:, 1:].astype(jnp.int32)
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(targets, logits.shape[-1])).mean()


@nnx.jit(donate_argnums=(0, 1))
def train_step(model: nnx.Module, optimizer: nnx.Optimizer[Any], text: Any) -> jax.Array:
    """The loss of a batch, by which model and optimizer are changed."""
    loss_scale = jmp_kit.loss_scale_of(optimizer.opt_state)
    loss, grads = jmp_kit.nnx.value_and_grad(loss_fn, loss_scale)(model, text)
    optimizer.update(model, grads)
    return loss


def batches(text: np.ndarray, config: Config, seed: int, step: int) -> Iterator[np.ndarray]:
    """The batches of a step, from random places: the same ones for every policy, and resumed."""
    generator = np.random.default_rng([seed, step])
    for _ in range(config.accumulate):
        starts = generator.integers(len(text) - config.time, size=config.batch)
        yield pieces(text, starts, config.time + 1)


def bits_per_byte(model: nnx.Module, text: np.ndarray, config: Config, count: int = 16) -> float:
    """What the model needs for a byte of a text, from `count` batches all over it."""
    starts = np.linspace(0, len(text) - config.time - 1, count * config.batch, dtype=int)
    model.eval()
    losses = [_loss(model, pieces(text, part, config.time + 1)) for part in np.split(starts, count)]
    model.train()
    return statistics.fmean(map(float, losses)) / math.log(2)


_loss = nnx.jit(loss_fn)


def write(
    model: nnx.Module, prompt: bytes, key: jax.Array, count: int, window: int, heat: float
) -> bytes:
    """What the model writes after a prompt, each byte from the `window` bytes before it."""
    # A byte has to be there for the first one to follow.
    known = np.frombuffer(prompt[-window:] or b"\n", np.uint8)
    text = np.zeros(window, np.uint8)
    text[: len(known)] = known
    model.eval()
    return np.asarray(_write(model, text, len(known), jax.random.split(key, count), heat)).tobytes()


@nnx.jit
def _write(model: nnx.Module, text: Any, length: Any, keys: jax.Array, heat: float) -> jax.Array:
    def next_byte(carry: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        text, length = carry
        logits = model(text[None])[0, length - 1]
        byte = jax.random.categorical(key, logits / heat).astype(jnp.uint8)
        full = length == len(text)
        text = jnp.where(full, jnp.roll(text, -1), text).at[length - full].set(byte)
        return (text, length + ~full), byte

    return jax.lax.scan(next_byte, (text, length), keys)[1]


def train(
    config: Config,
    policy_name: str,
    seed: int = 0,
    on_step: Callable[..., None] = lambda *progress: None,
    *,
    rules: Mapping[str, str] | None = None,
    checkpoint_dir: pathlib.Path | None = None,
    checkpoint_every: int = 100,
    prompt: str = "def ",
    sample: int = 300,
    heat: float = 0.7,
) -> Run:
    """Train under one policy; `on_step` is told of each its number, loss, bytes/s and metrics."""
    start = time.perf_counter()
    training, validation = load_text()
    policy = jmp_kit.get_policy(policy_name)
    model = make_model(config, policy, seed, rules)
    optimizer = make_optimizer(config, policy, model)
    looks = [*range(config.evaluate, config.steps, config.evaluate), config.steps]
    curve = np.full(len(looks), np.nan)
    seconds = []

    def state(step: int) -> dict[str, Any]:
        parts = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
        return {**parts, "step": step, "curve": curve.copy()}

    with checkpoints_in(checkpoint_dir, checkpoint_every) as manager:
        done = 0
        if manager and manager.latest_step() is not None:
            restored = jmp_kit.checkpoint.restore(checkpoint_dir, state(0), params="model")
            nnx.update(model, restored["model"])
            nnx.update(optimizer, restored["optimizer"])
            done, curve = restored["step"], restored["curve"]
        for step in range(done + 1, config.steps + 1):
            began = time.perf_counter()
            for batch in batches(training, config, seed, step):
                loss = train_step(model, optimizer, batch)
            jax.block_until_ready(loss)
            seconds.append(time.perf_counter() - began)
            on_step(
                step, float(loss), config.bytes / seconds[-1], jmp_kit.metrics(optimizer.opt_state)
            )
            if step in looks:
                jmp_kit.raise_if_diverged(optimizer.opt_state)
                curve[looks.index(step)] = bits_per_byte(model, validation, config)
            if manager:
                manager.save(step, args=ocp.args.StandardSave(state(step)))
    metrics = jmp_kit.metrics(optimizer.opt_state)
    written = write(model, prompt.encode(), jax.random.key(seed), sample, config.time, heat)
    return Run(
        policy=policy_name,
        seed=seed,
        parameters=sum(p.size for p in jax.tree.leaves(nnx.state(model, nnx.Param))),
        looks=looks,
        curve=curve.tolist(),
        skipped=metrics["skipped"],
        loss_scale=metrics["loss_scale"],
        bytes_per_second=config.bytes / statistics.median(seconds) if seconds else math.nan,
        minutes=(time.perf_counter() - start) / 60,
        written=prompt + printable(written),
    )


def checkpoints_in(directory: pathlib.Path | None, every: int) -> Any:
    """Orbax's manager, which saves every few steps in the background; of None without a folder."""
    if directory is None:
        return contextlib.nullcontext()
    options = ocp.CheckpointManagerOptions(max_to_keep=3, save_interval_steps=every)
    return ocp.CheckpointManager(directory.absolute(), options=options)


def main(arguments: list[str] | None = None) -> None:
    """Train under every policy and seed asked for, then print the table and save the figure."""
    options, config = parse(arguments)
    console = Console()
    columns = (
        TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        BarColumn(None),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TextColumn("{task.fields[shown]}", table_column=Column(no_wrap=True)),
        TimeRemainingColumn(),
    )
    runs = []
    with Progress(*columns, console=console, expand=True) as progress:
        for policy, seed in itertools.product(options.policy, options.seed):
            task = progress.add_task(f"{policy}, {seed}", total=config.steps, shown="")

            def on_step(
                step: int, loss: float, rate: float, metrics: Any, task: Any = task
            ) -> None:
                scale = f"2^{math.log2(metrics['loss_scale']):g}"
                counts = f"scale {scale:4} skips {int(metrics['skipped'])}"
                shown = f"loss {loss:.2f} {rate / 1e3:,.1f} kB/s {counts}"
                progress.update(task, completed=step, shown=shown)

            folder = None
            if options.checkpoint_dir is not None:
                folder = (
                    pathlib.Path(options.checkpoint_dir)
                    / f"{policy}-{config.steps}steps-seed{seed}"
                )
            run = train(
                config,
                policy,
                seed,
                on_step,
                rules=dict(options.rule),
                checkpoint_dir=folder,
                checkpoint_every=options.checkpoint_every,
                prompt=options.prompt,
                sample=options.sample,
                heat=options.heat,
            )
            runs.append(run)
            progress.update(task, completed=config.steps)
    console.print(table_of(runs))
    for run in runs:
        console.rule(f"written by {run.policy}, seed {run.seed}")
        console.print(run.written, markup=False, highlight=False)
    console.rule()
    path = pathlib.Path(options.out) / "gpt.png"
    plot(runs, path)
    print(f"Bits per byte over the steps: {path}")


def rule(text: str) -> tuple[str, str]:
    """A pattern for paths, and what its products compute in."""
    path, equals, dtype = text.rpartition("=")
    if not (path and equals and dtype):
        raise argparse.ArgumentTypeError(f"{text!r} is no rule: write blocks=float8")
    return path, dtype


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, Config]:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--policy",
        nargs="+",
        type=digits.policy_name,
        default=POLICIES,
        help="as get_policy reads",
    )
    parser.add_argument(
        "--rule",
        nargs="+",
        type=rule,
        default=[],
        metavar="PATH=DTYPE",
        help="other dtypes for some products: blocks=float8",
    )
    parser.add_argument("--seed", nargs="+", type=int, default=[0], help="of weights and batches")
    parser.add_argument("--checkpoint-dir", help="folder from which a stopped run goes on")
    parser.add_argument("--checkpoint-every", type=digits.positive, default=100, help="steps")
    parser.add_argument("--prompt", default="def ", help="what the model goes on writing")
    parser.add_argument("--sample", type=digits.positive, default=300, help="bytes that it writes")
    parser.add_argument("--heat", type=float, default=0.7, help="temperature of the writing")
    parser.add_argument("--out", default="out", help="folder for the figure")
    parser.add_argument("--size", choices=SIZES, default="small", help="what the rest start from")
    for field in dataclasses.fields(Config):
        values = ", ".join(f"{getattr(size, field.name):g} {name}" for name, size in SIZES.items())
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=type(getattr(SIZES["small"], field.name)),
            default=argparse.SUPPRESS,
            help=values,
        )
    options = parser.parse_args(arguments)
    if not options.heat > 0:
        parser.error(f"--heat is {options.heat}, but has to be positive: what it divides by")
    names = [field.name for field in dataclasses.fields(Config) if field.name in options]
    given = {name: getattr(options, name) for name in names}
    try:
        return options, dataclasses.replace(SIZES[options.size], **given)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
