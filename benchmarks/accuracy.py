"""Is mixed precision as good as float32, on real data, and what is saved?

The tables of the paper (float32 against mixed, task by task) and of the tutorial (float32, TF32,
mixed, half only: time, memory, accuracy) on small tasks whose data is already on the machine.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.progress import track
from sklearn import datasets
from sklearn.model_selection import train_test_split

import jmp_kit
from benchmarks import corpus
from benchmarks.compiled import program_bytes
from benchmarks.models import GPTBlock, causal_attention
from benchmarks.results import Column, Options, Row, number

COLUMNS = [
    Column("precision", lambda row: row["contender"]),
    Column("test accuracy", number("accuracy", ".2%")),
    Column("of each seed", lambda row: ", ".join(f"{x:.1%}" for x in row["accuracies"])),
    Column("training, s", number("train_s", ",.2f"), timed=True),
    Column("compiled, MiB", number("program_mib", ",.1f")),
]


class Dense(nn.Module):
    """Two hidden layers."""

    classes: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits of features [batch, n]."""
        for _ in range(2):
            x = nn.gelu(nn.LayerNorm(dtype=self.dtype)(nn.Dense(128, dtype=self.dtype)(x)))
        return nn.Dense(self.classes, dtype=self.dtype)(x)


class Convolutions(nn.Module):
    """Three convolutions with group norms."""

    classes: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits of images [batch, 8, 8, 1]."""
        for width, strides in ((32, 1), (64, 2), (64, 1)):
            x = nn.Conv(width, (3, 3), strides=strides, dtype=self.dtype)(x)
            x = nn.relu(nn.GroupNorm(8, dtype=self.dtype)(x))
        return nn.Dense(self.classes, dtype=self.dtype)(x.mean((1, 2)))


class Reader(nn.Module):
    """Transformer blocks and the mean of what they say; 6 of width 768 are DistilBERT's shape."""

    classes: int
    vocabulary: int
    layers: int
    heads: int
    width: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits of words int[batch, time]."""
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(x)
        for _ in range(self.layers):
            x = GPTBlock(self.heads, self.dtype, causal_attention)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x.mean(1))
        return nn.Dense(self.classes, dtype=self.dtype)(x)


@dataclasses.dataclass(frozen=True)
class Task:
    """Inputs and labels, and a model in any dtype."""

    module: Callable[[Any], nn.Module]
    inputs: np.ndarray
    labels: np.ndarray
    steps: int
    batch: int = 64
    learning_rate: float = 1e-3


@dataclasses.dataclass(frozen=True)
class Precision:
    """How to train."""

    policy: str = "float32"
    products: str | None = None  # jax_default_matmul_precision
    only: bool = False  # parameters, optimizer and norms as well


PRECISIONS = {
    "float32, highest": Precision(products="highest"),
    "float32, default": Precision(),
    "float16, mixed": Precision("mixed_float16"),
    "bfloat16, mixed": Precision("mixed_bfloat16"),
    "float16 only": Precision("float16", only=True),
    "bfloat16 only": Precision("bfloat16", only=True),
}


def tasks(tiny: bool) -> dict[str, Task]:
    """Digits twice, two tables of scikit-learn's, and whose source text is it."""
    steps = 3 if tiny else 600
    digits, cancer, wine = (
        getattr(datasets, f"load_{name}")() for name in ("digits", "breast_cancer", "wine")
    )
    found = {
        "digits, dense": Task(
            lambda dtype: Dense(10, dtype), _scaled(digits.data), digits.target, steps
        ),
        "digits, convolutions": Task(
            lambda dtype: Convolutions(10, dtype),
            _scaled(digits.data).reshape(-1, 8, 8, 1),
            digits.target,
            steps,
        ),
        "tumours, dense": Task(
            lambda dtype: Dense(2, dtype), _scaled(cancer.data), cancer.target, steps
        ),
        "wines, dense": Task(lambda dtype: Dense(3, dtype), _scaled(wine.data), wine.target, steps),
    }
    # On a CPU of width 64: of DistilBERT's it would take days.
    on_cpu = jax.default_backend() == "cpu"
    shape = (128, 1, 2, 32) if tiny else (4000, 2, 4, 64) if on_cpu else (30000, 6, 12, 768)
    length = 16 if tiny else 64 if on_cpu else 256
    words, packages = _packages(vocabulary=shape[0], length=length, tiny=tiny)
    found["source text, transformer"] = Task(
        lambda dtype: Reader(int(packages.max()) + 1, *shape, dtype),
        words,
        packages,
        steps,
        batch=4 if tiny else 32,
        learning_rate=1e-3 if on_cpu else 1e-4,
    )
    chosen = ("wines, dense", "source text, transformer") if tiny else found
    return {name: found[name] for name in chosen}


def _scaled(x: np.ndarray) -> np.ndarray:
    return ((x - x.mean(0)) / (x.std(0) + 1e-6)).astype(np.float32)


def _packages(vocabulary: int, length: int, tiny: bool) -> tuple[np.ndarray, np.ndarray]:
    """Pieces of the ten packages of the standard library with the most text, and which it is."""
    by_package = corpus.packages(vocabulary, 60 if tiny else None)
    largest = sorted(by_package, key=lambda name: (-len(by_package[name]), name))[:10]
    pieces = 8 if tiny else 400  # as many of each
    found = [by_package[name][: pieces * length] for name in largest]
    words = [text[: len(text) // length * length].reshape(-1, length) for text in found]
    return np.concatenate(words), np.repeat(np.arange(len(words)), [len(w) for w in words])


def run(options: Options) -> list[Row]:
    """Every task in every precision."""
    seeds = 1 if options.tiny else 3
    rows: list[Row] = []
    for name, task in tasks(options.tiny).items():
        for contender, precision in PRECISIONS.items():
            if not options.takes(contender):
                continue
            found = [
                train(task, precision, seed)
                for seed in track(range(seeds), f"{name}, {contender}: seeds")
            ]
            accuracies = [row["accuracy"] for row in found]
            rows.append(
                {
                    "group": name,
                    "contender": contender,
                    "accuracy": statistics.mean(accuracies),
                    "accuracies": accuracies,
                    "train_s": statistics.median(row["train_s"] for row in found),
                    "program_mib": found[0]["program_mib"],
                }
            )
    return rows


def train(task: Task, precision: Precision, seed: int) -> dict[str, float]:
    """Accuracy on a quarter that was not trained on, and what it took."""
    split = train_test_split(
        task.inputs, task.labels, test_size=0.25, random_state=seed, stratify=task.labels
    )
    inputs, test_inputs, labels, test_labels = map(jnp.asarray, split)
    policy = jmp_kit.get_policy(precision.policy)
    half = policy.compute_dtype if precision.only else None
    module = task.module(half)

    def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = module.apply({"params": params}, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def half_step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    def step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        params, opt_state = state
        scale = jmp_kit.loss_scale_of(opt_state)
        scaled = jmp_kit.value_and_grad(jmp_kit.autocast(loss_fn, policy), scale)
        loss, grads = scaled(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    optimizer = optax.adamw(optax.cosine_decay_schedule(task.learning_rate, task.steps))
    if not precision.only:
        float16 = policy.compute_dtype == jnp.float16
        scale = jmp_kit.DynamicLossScale() if float16 else jmp_kit.NoOpLossScale()
        optimizer = jmp_kit.mixed_precision(optimizer, scale)
    params = jax.jit(task.module(None).init)(jax.random.key(seed), inputs[:1])["params"]
    if precision.only:
        params = jmp_kit.get_policy(precision.policy).cast_to_param(params)
    state = params, optimizer.init(params)
    batch = min(task.batch, len(inputs))
    with jax.default_matmul_precision(precision.products):
        jitted = jax.jit(half_step if precision.only else step, donate_argnums=0)
        program = jitted.lower(state, inputs[:batch], labels[:batch]).compile()
    generator = np.random.default_rng(seed)
    order = [generator.choice(len(inputs), batch, replace=False) for _ in range(task.steps)]
    batches = [(inputs[rows], labels[rows]) for rows in order]
    start = time.perf_counter()
    for x, y in batches:
        state, _ = program(state, x, y)
    jax.block_until_ready(state)
    seconds = time.perf_counter() - start

    @jax.jit
    def predicted(params: Any, x: jax.Array) -> jax.Array:
        logits: Any = module.apply({"params": params}, x)
        return jnp.argmax(logits, axis=-1)

    hits = [
        predicted(state[0], test_inputs[i : i + 256]) == test_labels[i : i + 256]
        for i in range(0, len(test_labels), 256)
    ]
    return {
        "accuracy": float(jnp.concatenate(hits).mean()),
        "train_s": seconds,
        "program_mib": program_bytes(program) / 2**20,
    }
