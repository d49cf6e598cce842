"""Serve in half: cast the weights once, for half the memory and the same answers.

    python examples/inference.py
    python examples/inference.py --steps 1000 --dtype float16

Trains the digits network in float32, casts a copy of its weights once, and compares what both take
and what they say of the test images. `cast_once` is the part to copy.
"""

import argparse
import dataclasses
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jmp_kit
from examples import digits

DTYPES = ("bfloat16", "float16")


def cast_once(params: Any, dtype: str) -> tuple[Any, jax.stages.Wrapped]:
    """Weights of a dtype, and what takes them: it computes in that dtype and returns float32."""
    policy = jmp_kit.Policy(dtype, dtype, jnp.float32)
    return policy.cast_to_param(params), jax.jit(jmp_kit.autocast(digits.predict, policy))


@dataclasses.dataclass(frozen=True)
class Served:
    """What serving takes, and what it says."""

    dtype: str
    weight_bytes: int
    program_bytes: int | None  # weights, images and what lies in between, if the compiler tells
    logits: np.ndarray  # float32[images, 10]


def serve(params: Any, dtype: str, images: np.ndarray) -> Served:
    """The logits of images, and what they took."""
    weights, predict = cast_once(params, dtype)
    program = predict.lower(weights, images).compile()
    memory = program.memory_analysis()
    needed = memory and memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return Served(
        dtype=dtype,
        weight_bytes=sum(w.nbytes for w in jax.tree.leaves(weights)),
        program_bytes=needed,
        logits=np.asarray(program(weights, images)),
    )


def table_of(served: list[Served], labels: np.ndarray) -> Table:
    """The comparison; the first is what the others are to agree with."""
    table = Table(title=f"Serving digits on {jax.devices()[0].device_kind}", box=SIMPLE_HEAD)
    table.add_column("weights", no_wrap=True)
    for heading in ("weights\nKiB", "program\nKiB", "accuracy", "same\nanswer", "largest\nerror"):
        table.add_column(heading, justify="right")
    full = served[0].logits
    for one in served:
        answers = one.logits.argmax(-1)
        table.add_row(
            one.dtype,
            f"{one.weight_bytes / 2**10:,.1f}",
            "unknown" if one.program_bytes is None else f"{one.program_bytes / 2**10:,.1f}",
            f"{np.mean(answers == labels):.2%}",
            f"{np.mean(answers == full.argmax(-1)):.2%}",
            f"{np.abs(one.logits - full).max() / np.abs(full).max():.2%}",
        )
    return table


def main(arguments: list[str] | None = None) -> None:
    """Train, cast, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=DTYPES, help="to serve in")
    parser.add_argument("--steps", type=digits.positive, default=400, help="of training")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and the split")
    options = parser.parse_args(arguments)
    console = Console()
    with console.status(f"Training {options.steps} steps in float32 …"):
        run = digits.train("float32", options.steps, options.seed)
    _, (images, labels) = digits.load_data(options.seed)
    dtypes = ["float32", *options.dtype]
    served = [serve(run.state["params"], dtype, images) for dtype in dtypes]
    console.print(table_of(served, labels))
    if jax.default_backend() == "cpu":
        console.print(
            "A CPU widens half operands before it multiplies, so its program takes no less memory. "
            "The weights are what to look at here."
        )


if __name__ == "__main__":
    main()
