"""The command line: `jmp-kit doctor`, `audit`, `compare`, `locate` and `histogram`."""

import argparse
import importlib
import importlib.util
import inspect
import json
import math
import os
import pathlib
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import jax

from jmp_kit import checkpoint, numerics
from jmp_kit._version import __version__

_OK, _FAILED, _CANNOT = 0, 1, 2

_FIGURES = (".png", ".svg", ".pdf")

_EXIT_CODES = """\
exit codes:
  0  done; what was asserted holds
  1  what was asserted does not hold
  2  it could not be done
"""

_ABOUT_PROGRAM = """\
PROGRAM is `module:function` or `file.py:function`. The function takes nothing, and returns what to
call and what with:

  # train.py
  def program():
      return {returns}

"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code tells scripts what came of it."""
    options = _parser().parse_args(arguments)
    try:
        found, code = options.command(options)
    except SystemExit as end:  # the user's module ends here, before there is anything to look at
        sys.stderr.write(
            f"jmp-kit {options.name}: the program called sys.exit({end.code}), and nothing was "
            'done: put what runs behind if __name__ == "__main__":\n'
        )
        return _CANNOT
    except Exception as error:
        # A user's own program may raise anything: where it was not us, its traceback tells.
        *_, innermost = traceback.extract_tb(error.__traceback__)
        if pathlib.Path(innermost.filename).is_relative_to(pathlib.Path(__file__).parent):
            sys.stderr.write(f"jmp-kit {options.name}: {error}\n")
        else:
            traceback.print_exc()
        return _CANNOT
    data = _finite(found.to_dict() if found else {"found": None})
    try:
        sys.stdout.write(f"{json.dumps(data) if options.json else found or 'all is finite'}\n")
        sys.stdout.flush()
    except OSError as error:
        sys.stderr.write(f"jmp-kit {options.name}: the output could not be written: {error}\n")
        # Or Python would try once more when it ends, and exit with a code of its own.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CANNOT
    return int(code)


def _doctor(options: argparse.Namespace) -> tuple[Any, int]:
    return numerics.doctor(options.seconds), _OK


def _audit(options: argparse.Namespace) -> tuple[Any, int]:
    found = numerics.audit(*_program(options.program), level=options.level)
    _save(options, numerics.plot_audit, found)
    if options.assert_half or options.except_:
        try:
            found.assert_half(options.except_)
        except AssertionError as error:
            sys.stderr.write(f"jmp-kit audit: {error}\n")
            return found, _FAILED
    return found, _OK


def _compare(options: argparse.Namespace) -> tuple[Any, int]:
    program = _program(options.program)
    if len(program) == 1:
        raise ValueError(
            f"{options.program} returned a function alone: return with it what its gradient is "
            "taken by, and its other arguments: loss_fn, params, *batch"
        )
    found = numerics.compare(*program, policies=options.policies, steps=options.steps)
    _save(options, numerics.plot_comparison, found)
    # Not finite is within no limit; where there is none, the table says so.
    limited = options.max_error is not None
    too_far = [row for row in found.rows if limited and not row.gradient_error <= options.max_error]
    for row in too_far:
        sys.stderr.write(
            f"jmp-kit compare: the gradient in {row.policy} is off by {row.gradient_error:.1e}, "
            f"more than {options.max_error:g}\n"
        )
    return found, _FAILED if too_far else _OK


def _locate(options: argparse.Namespace) -> tuple[Any, int]:
    found = numerics.locate_nonfinite(*_program(options.program))
    return found, _FAILED if found else _OK


def _histogram(options: argparse.Namespace) -> tuple[Any, int]:
    state = checkpoint.read(options.directory, options.step)
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
    chosen = {path: leaf for path, leaf in leaves.items() if options.only.search(path)}
    if leaves and not chosen:
        raise ValueError(f"--only matches none of the paths {', '.join(leaves)}")
    if options.only.pattern:
        sys.stderr.write(
            f"jmp-kit histogram: {options.only.pattern!r} matches {len(chosen)} of {len(leaves)} "
            f"arrays, in {', '.join(sorted({path.split('/')[0] for path in chosen}))}\n"
        )
    found = numerics.ranges(chosen, options.dtype, options.loss_scale)
    histogram = numerics.exponent_histogram(chosen)
    _save(options, numerics.plot_exponents, histogram, options.dtype, options.loss_scale)
    return found, _OK


def _program(name: str) -> tuple[Any, ...]:
    """What the user's function returns."""
    module, colon, function = name.rpartition(":")
    if not (module and colon and function):
        raise ValueError(f"the program is {name!r}: write module:function, or file.py:function")
    found = _file(pathlib.Path(module)) if module.endswith(".py") else _module(module)
    make = getattr(found, function, None)
    if not callable(make):
        names = ", ".join(n for n, x in vars(found).items() if callable(x) and n[0] != "_")
        raise ValueError(f"{module} has no function {function!r}; it has {names or 'none'}")
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise ValueError(f"{name} is to be called with nothing: {error}") from error
    made = make()
    if not (isinstance(made, tuple) and made and callable(made[0])):
        raise ValueError(
            f"{name} returned {type(made).__name__}, but is to return a tuple: the function to "
            "call, and what to call it with"
        )
    return made


def _file(path: pathlib.Path) -> Any:
    """The module that a file is, whatever else has its name."""
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location("__program__", path.resolve())
    assert spec is not None
    assert spec.loader is not None  # there is one of .py files
    found = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def _module(name: str) -> Any:
    sys.path.insert(0, "")  # as `python -m` does
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            raise ValueError(f"there is no module {error.name!r} here or installed") from error
        raise


def _save(options: argparse.Namespace, plot: Any, *args: Any) -> None:
    if options.plot:
        plot(*args).savefig(options.plot)
        sys.stderr.write(f"jmp-kit {options.name}: saved {options.plot}\n")


def _finite(data: Any) -> Any:
    """JSON has no infinity and no NaN."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jmp-kit",
        description="Mixed precision in JAX: what a machine, a program and a checkpoint say of it.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"jmp-kit {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(run: Any, what: str, about: str, returns: str = "") -> argparse.ArgumentParser:
        name = run.__name__.removeprefix("_")
        if returns:
            about += "\n\n" + _ABOUT_PROGRAM.format(returns=returns)
        added = commands.add_parser(
            name,
            help=what,
            description=about,
            epilog=_EXIT_CODES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(command=run, name=name)
        added.add_argument("--json", action="store_true", help="print one JSON object")
        if returns:
            added.add_argument("program", metavar="PROGRAM", help="module:function")
        return added

    doctor = command(
        _doctor,
        "what this machine computes in half, how fast, and which policy to start with",
        "Multiplies matrices in each dtype for some seconds. A policy is worth it where half\n"
        "precision is faster, or where memory is short.",
    )
    doctor.add_argument("--seconds", type=_positive, default=0.5, help="for each dtype (0.5)")

    audit = command(
        _audit,
        "which products of a program run in half, with their lines",
        "Lists every matrix product and convolution, forward and backward. Nothing is computed.",
        "train_step, params, opt_state, batch",
    )
    audit.add_argument(
        "--level",
        choices=numerics.LEVELS,
        default=numerics.LEVELS[0],
        help="as JAX traces it, as the compiler gets it, or as this device runs it (traced)",
    )
    audit.add_argument("--assert-half", action="store_true", help="exit with 1 if one is not half")
    audit.add_argument(
        "--except", dest="except_", metavar="REGEX", help="assert half but of these paths and lines"
    )

    compare = command(
        _compare,
        "step time, memory and accuracy under each policy",
        "Compiles the loss and its gradient under each policy, lets them take turns on this\n"
        "device, and compares with float32 in the highest precision.",
        "loss_fn, params, *batch",
    )
    compare.add_argument(
        "--policies",
        nargs="+",
        metavar="POLICY",
        default=list(numerics.POLICIES),
        help=f"({' '.join(numerics.POLICIES)})",
    )
    compare.add_argument("--steps", type=int, default=10, help="timed of each (10)")
    compare.add_argument(
        "--max-error",
        type=_positive,
        metavar="E",
        help="exit with 1 if a gradient is off by more: |g - g32| / |g32|",
    )

    command(
        _locate,
        "the first operation whose result is not finite",
        "Computes the program operation by operation, and names the line, the module, the ranges\n"
        "of what went in, and what to do. Exits with 1 if it finds one.",
        "train_step, params, opt_state, batch",
    )

    histogram = command(
        _histogram,
        "where the values of a checkpoint lie, and what a dtype loses of them",
        "Reads a checkpoint that Orbax saved, without the program that saved it.",
    )
    histogram.add_argument(
        "directory", metavar="DIRECTORY", help="of the manager, or one checkpoint"
    )
    histogram.add_argument("--step", type=int, help="(the latest)")
    histogram.add_argument(
        "--only",
        type=_regex,
        default="",
        metavar="REGEX",
        help="paths to look at, ^params say (all)",
    )
    histogram.add_argument("--dtype", default="float16", help="what would be cast to (float16)")
    histogram.add_argument(
        "--loss-scale", type=_positive, default=1.0, metavar="S", help="multiply by it first (1)"
    )
    for plotted in (audit, compare, histogram):
        plotted.add_argument(
            "--plot", type=_figure, metavar="FILE", help="save a figure: .png, .svg or .pdf"
        )
    return parser


def _regex(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from error
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not positive and finite")
    return number


def _figure(text: str) -> pathlib.Path:
    """Asked before anything is computed, which would be lost."""
    path = pathlib.Path(text)
    if path.suffix not in _FIGURES:
        raise argparse.ArgumentTypeError(f"{text!r} ends in none of {', '.join(_FIGURES)}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {str(path.parent)!r}")
    return path


if __name__ == "__main__":
    sys.exit(main())
