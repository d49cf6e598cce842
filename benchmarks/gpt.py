"""How fast does a GPT train, in how much memory, and as well as by hand?

The 124M and the 350M parameter shapes of GPT-2, and a width for which float8 is meant, on the
sources of Python's standard library, AdamW, 1,024 words at a time.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import corpus, torch_gpt
from benchmarks.gpt_size import Size
from benchmarks.measuring import Contender, matrix_rate, measure
from benchmarks.models import GPT, Attention, causal_attention, fused_attention
from benchmarks.results import Column, Options, Row, number
from benchmarks.training import Task, beside_float8, contenders

Batches = list[tuple[np.ndarray, np.ndarray]]


WIDE = "gpt 1.3B"
SIZES = {
    "gpt 124M": Size(12, 12, 768, batch=32),
    "gpt 350M": Size(24, 16, 1024, batch=16),
    WIDE: Size(24, 16, 2048, batch=16),
}
TINY = dict.fromkeys(("gpt 124M", WIDE), Size(1, 2, 32, batch=2, time=16, vocabulary=64))

COLUMNS = [
    Column("contender", lambda row: row["contender"]),
    Column("words/s", number("words_per_s", ",.0f")),
    Column("step, ms", number("step_ms", ",.2f")),
    Column("MFU", number("mfu", ".1%")),
    Column("peak, GiB", number("peak_mib", ",.2f", 1 / 1024)),
    Column("compiled, GiB", number("program_mib", ",.2f", 1 / 1024)),
    Column("last loss", lambda row: f"{row['losses'][-1]:.4f}" if "losses" in row else ""),
]


def task(size: Size, attention: Attention = fused_attention) -> Task:
    """A GPT of this size."""

    def module(dtype: Any) -> GPT:
        shape = size.vocabulary, size.layers, size.heads, size.width
        return GPT(*shape, dtype, attention)

    return Task(module, jnp.zeros((1, size.time), jnp.int32), optax.adamw(3e-4))


def unfused(size: Size) -> list[Contender]:
    """Attention as plain JAX."""
    names = "jmp_kit, bfloat16", "by hand, bfloat16"
    return [
        dataclasses.replace(c, name=f"{c.name}, plain attention")
        for c in contenders(task(size, causal_attention))
        if c.name in names
    ]


def run(options: Options) -> list[Row]:
    """All sizes."""
    rate = matrix_rate(256 if options.tiny else 8192, jnp.bfloat16)
    sizes = TINY if options.tiny else SIZES
    rows: list[Row] = []
    # PyTorch first: JAX gives no memory of the device back while its process lives.
    for ways in (_in_torch, _in_jax):
        for model, size in sizes.items():
            batches = corpus.batches(
                8, size.batch, size.time, size.vocabulary, 20 if options.tiny else None
            )
            found = ways(model, size, batches, options)
            rows += [_with_rates(row, model, size, rate) for row in found]
    return sorted(rows, key=lambda row: list(sizes).index(row["group"]))


def _in_torch(model: str, size: Size, batches: Batches, options: Options) -> list[Row]:
    names = torch_gpt.BESIDE_FLOAT8 if model == WIDE else torch_gpt.AMP
    return torch_gpt.measure(names, size, batches, options)


def _in_jax(model: str, size: Size, batches: Batches, options: Options) -> list[Row]:
    is_wide = model == WIDE
    ways = beside_float8(task(size)) if is_wide else contenders(task(size)) + unfused(size)
    field = [c for c in ways if options.takes(c.name)]
    return measure(field, batches, steps=options.steps, title=model)


def _with_rates(row: Row, model: str, size: Size, rate: float) -> Row:
    if "step_ms" not in row:
        return {"group": model, **row}
    seconds = row["step_ms"] / 1e3
    mfu = size.operations / seconds / rate
    words = size.batch * size.time / seconds
    return {"group": model, **row, "words_per_s": words, "mfu": mfu, "bfloat16_rate": rate}
