"""`python -m benchmarks`: how much faster, how much less memory, and as good as by hand?

python -m benchmarks                               all of them
python -m benchmarks gpt pieces --out results.json
python -m benchmarks gpt --only "jmp_kit|by hand"  only contenders that match
"""

import argparse
import os
import pathlib
import re
import sys
from typing import Any

# PyTorch, in a process of its own, needs some of the device's memory too.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
from rich.console import Console

from benchmarks import (
    accuracy,
    ceiling,
    cost,
    gpt,
    gpus,
    gradients,
    held_out,
    language,
    mlp,
    optimizer,
    pieces,
    programs,
    resnet,
    results,
    wire,
)

BENCHMARKS: dict[str, Any] = {
    "programs": programs,
    "held_out": held_out,
    "gpus": gpus,
    "ceiling": ceiling,
    "mlp": mlp,
    "gpt": gpt,
    "resnet": resnet,
    "pieces": pieces,
    "cost": cost,
    "optimizer": optimizer,
    "gradients": gradients,
    "accuracy": accuracy,
    "language": language,
    "wire": wire,
}

IN_FULL_ON_CPUS = (accuracy, gpus, gradients, held_out, language, programs, wire)


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the tables, write the file as each is done."""
    listed = "\n".join(f"  {name:10} {_question(module)}" for name, module in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"{(__doc__ or '').strip()}\n\nWhat there is:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which (default: all)")
    parser.add_argument("--only", default="", help="a regular expression for contenders")
    parser.add_argument("--steps", type=int, default=20, help="blocks of steps to time")
    parser.add_argument("--out", type=pathlib.Path, help="a JSON file for the results")
    parser.add_argument("--tiny", action="store_true", help="toys, as the tests do")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in BENCHMARKS]:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    if options.steps < 1:
        parser.error(f"--steps is {options.steps}, but a median needs at least 1")
    try:
        only = re.compile(options.only)
    except re.error as error:
        parser.error(f"--only {options.only!r} is no regular expression: {error}")
    measure_all(options.names or list(BENCHMARKS), only, options)


def measure_all(names: list[str], only: re.Pattern[str], options: argparse.Namespace) -> None:
    """One benchmark after the other."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    on_cpu = jax.default_backend() == "cpu"
    for name in names:
        module = BENCHMARKS[name]
        tiny = options.tiny or (on_cpu and module not in IN_FULL_ON_CPUS)
        if tiny and not options.tiny:
            console.print(f"{name} takes toys, without a GPU: it shows that it runs, and no speed.")
        rows = module.run(results.Options(tiny, options.steps, only))
        device = getattr(module, "DEVICE", jax.devices()[0].device_kind)
        console.rule(f"{name}: {device}, JAX {jax.__version__}")
        for table in results.tables(name, module.COLUMNS, rows):
            console.print(table)
        if options.out:
            result = {"device": device, "tiny": tiny, "rows": rows}
            results.save(options.out, name, result)


def _question(module: Any) -> str:
    return str(module.__doc__).split("\n")[0]


if __name__ == "__main__":
    main()
