"""What does each piece of jmp_kit cost, switched on alone?

On the train step of the 124M GPT: scaling, checking and skipping, growing, masters, recomputation,
autocast. The aim is that none is to be seen: at most 1% of a step of 10 ms or more, together.
"""

from typing import Any

import jax.numpy as jnp
import optax

import jmp_kit
from benchmarks import corpus, gpt
from benchmarks.measuring import Contender, measure
from benchmarks.results import Column, Options, Row, number
from benchmarks.training import Task, four_lines, plain_state, plain_step

COLUMNS = [
    Column("piece", lambda row: row["contender"]),
    Column("compared with", lambda row: row.get("base", "")),
    Column("step, ms", number("step_ms", ",.2f")),
    Column("cost", number("cost", "+.2%")),
    Column("compiled, GiB", number("program_mib", ",.2f", 1 / 1024)),
]

# Each piece, and what is the same but for it.
BASES = {
    "autocast": "by hand",
    "autocast, kept": "autocast",
    "check and skip": "autocast",
    "dynamic scaling": "autocast, float16",
    "static scaling": "autocast, float16",
    "half parameters, float32 masters": "half parameters",
    "half parameters, checked": "half parameters",
}


def contenders(task: Task) -> list[Contender]:
    """Each piece alone, and what it is compared with."""
    half, state, optimizer = jnp.bfloat16, plain_state(task), task.optimizer
    loss = task.loss()
    kept = jmp_kit.autocast(loss, "mixed_bfloat16", recompute=False)
    nothing, static = jmp_kit.NoOpLossScale(), jmp_kit.StaticLossScale(2.0**15)
    float16 = jmp_kit.autocast(task.loss(), "mixed_float16")
    bfloat16 = jmp_kit.autocast(loss, "mixed_bfloat16")
    unscaled = plain_step(float16, optimizer)
    return [
        Contender("by hand", plain_step(task.loss(half), optimizer), state),
        Contender("autocast", plain_step(bfloat16, optimizer), state),
        Contender("autocast, kept", plain_step(kept, optimizer), state),
        four_lines("check and skip", task, "mixed_bfloat16", nothing),
        Contender("autocast, float16", unscaled, state),
        four_lines("static scaling", task, "mixed_float16", static),
        four_lines("dynamic scaling", task, "mixed_float16", jmp_kit.DynamicLossScale()),
        _half_parameters("half parameters", task, optimizer),
        _half_parameters(
            "half parameters, checked", task, jmp_kit.mixed_precision(optimizer, master="none")
        ),
        _half_parameters(
            "half parameters, float32 masters", task, jmp_kit.mixed_precision(optimizer)
        ),
    ]


def _half_parameters(name: str, task: Task, optimizer: optax.GradientTransformation) -> Contender:
    loss = jmp_kit.autocast(task.loss(), "mixed_bfloat16")
    policy = jmp_kit.get_policy("params=bfloat16,compute=bfloat16,output=float32")

    def state() -> Any:
        params, rest = task.variables
        params = policy.cast_to_param(params)
        return params, rest, optimizer.init(params)

    return Contender(name, plain_step(loss, optimizer), state)


def run(options: Options) -> list[Row]:
    """Every piece on the 124M step, and its cost as a share of the step without it."""
    size = (gpt.TINY if options.tiny else gpt.SIZES)["gpt 124M"]
    batches = corpus.batches(2, size.batch, size.time, size.vocabulary, 20)
    field = [c for c in contenders(gpt.task(size)) if options.takes(c.name)]
    rows = measure(field, batches, steps=options.steps, title="pieces")
    by_name = {row["contender"]: row for row in rows}
    return [_with_cost(row, by_name) for row in rows]


def _with_cost(row: Row, by_name: dict[str, Row]) -> Row:
    base = BASES.get(row["contender"], "")
    if "step_ms" not in row or "step_ms" not in by_name.get(base, {}):
        return row
    return {**row, "base": base, "cost": row["step_ms"] / by_name[base]["step_ms"] - 1}
