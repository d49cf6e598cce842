"""Writes the table of errors of `docs/concepts/float8.md`: gradients in bfloat16 and in float8.

python docs/float8.py
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import jmp_kit
from benchmarks.models import GPT
from examples.stdlib_text import load_text

PAGE = ROOT / "docs" / "concepts" / "float8.md"
START, END = "<!-- errors: made by python docs/float8.py -->\n", "<!-- end of errors -->"
# Whatever their size. Of attention, scores and values stay bfloat16, as their sizes decide.
WAYS = {"bfloat16": {}, "float8": {"^(?!.*hqk)": "float8"}}


def mlp_loss(params, x):
    """Of a residual network of two layers."""
    return jnp.mean((x + jax.nn.gelu(x @ params["up"]) @ params["down"]) ** 2)


def mlp(rows=512, width=256):
    """A loss, its parameters and inputs."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "up": jax.random.normal(keys[0], (width, 4 * width)) / width**0.5,
        "down": jax.random.normal(keys[1], (4 * width, width)) / (4 * width) ** 0.5,
    }
    return mlp_loss, params, jax.random.normal(keys[2], (rows, width))


def with_outlier(size):
    """The network, one channel of its inputs so many times as large."""
    loss, params, x = mlp()
    up = params["up"].at[3].divide(size)
    return loss, params | {"up": up}, x.at[:, 3].multiply(size)


def small_rows():
    """The network, every other row with a weight of 1e-4: the gradient of these rows."""
    _, params, x = mlp()
    weights = jnp.where(jnp.arange(len(x)) % 2 == 0, 1.0, 1e-4)[:, None]

    def loss(rows, rest):
        x = jnp.stack([rest, rows], axis=1).reshape(-1, rest.shape[-1])
        return jnp.sum(weights * (x + jax.nn.gelu(x @ params["up"]) @ params["down"]) ** 2)

    return loss, x[1::2], x[::2]


def gpt(width=256, length=128):
    """A GPT of two layers, as it begins, on source text, byte by byte."""
    model = GPT(256, 2, 4, width, jnp.float32)
    text, _ = load_text()
    tokens = jnp.stack([jnp.asarray(text[i : i + length], jnp.int32) for i in range(0, 4000, 1000)])
    params = model.init(jax.random.key(2), tokens)["params"]

    def loss(params, tokens):
        logits = jax.nn.log_softmax(model.apply({"params": params}, tokens).astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], axis=-1))

    return loss, params, tokens


CASES = {
    "GPT of two layers on source text, as it begins": gpt,
    "MLP": mlp,
    "MLP, one input channel 100 times as large": lambda: with_outlier(100),
    "MLP, one input channel 10,000 times as large": lambda: with_outlier(10_000),
    "MLP, the gradient of rows that weigh 1e-4": small_rows,
}


def errors(case):
    """Of each way, |g - g32| / |g32|, of all gradients as one vector."""
    loss, params, x = case()
    with jax.default_matmul_precision("highest"):
        exact = _flat(jax.jit(jax.grad(loss))(params, x))
    found = {}
    for name, rules in WAYS.items():
        half = jmp_kit.autocast(loss, "mixed_bfloat16", rules=rules)
        grads = jax.jit(jmp_kit.grad(half, jmp_kit.NoOpLossScale()))(params, x)
        found[name] = float(np.linalg.norm(_flat(grads) - exact) / np.linalg.norm(exact))
    return found


def _flat(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def table():
    """The table in Markdown."""
    lines = [f"| gradient of | {' | '.join(WAYS)} |", "|---|" + "---|" * len(WAYS)]
    for name, case in CASES.items():
        lines.append(f"| {name} | {' | '.join(f'{e:.4f}' for e in errors(case).values())} |")
    return "\n".join(lines)


if __name__ == "__main__":
    before, rest = PAGE.read_text().split(START)
    PAGE.write_text(f"{before}{START}\n{table()}\n\n{END}{rest.split(END)[1]}")
