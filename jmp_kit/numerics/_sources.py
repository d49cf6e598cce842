"""The line of a user's program that an equation comes from."""

import functools
import importlib.util
import itertools
import pathlib
import sysconfig
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jax.extend.core import JaxprEqn

from jmp_kit.programs import subjaxprs

# Whose lines tell a user little.
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "haiku", "equinox", "keras", "jmp_kit")


class Source(NamedTuple):
    """A line of a file; empty if none is known."""

    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{pathlib.Path(self.file).name}:{self.line}" if self.file else ""


def source_of(eqn: JaxprEqn, calls: Sequence[JaxprEqn] = ()) -> Source:
    """The innermost line around an equation that is the user's own, not a library's.

    Args:
      eqn: an equation.
      calls: the ones that it is inside of, the outermost first. A jitted function of a library is
        traced once, so inside of it are the lines of who called it first: its call's line holds,
        unless it calls a function of the user's, as `eqx.filter_jit` does.

    Of the rules of a custom derivative JAX keeps the line of the call. Of a call that a library
    makes, it is where the function begins that is called.
    """
    lines: list[Source] = []
    around: set[str] = set()
    for e in (*calls, eqn):
        inside = itertools.takewhile(lambda line: line.file not in around, lines_of(e))
        lines = [*inside, *lines]
        # What autocast calls again holds the lines of a user.
        names = (name for name in _defined_in(e) if not _is_within(name, ("jmp_kit",)))
        around.update(filter(_is_aside, names))
    begin = (jaxpr.debug_info for jaxpr in subjaxprs(eqn))
    lines += [Source(d.func_filename, d.func_lineno or 0) for d in begin if d.func_filename]
    return innermost(lines)


def lines_of(eqn: JaxprEqn) -> list[Source]:
    """Those that called one another where it was traced, the innermost first."""
    traceback = eqn.source_info.traceback
    return [Source(f.file_name, f.line_num) for f in traceback.frames] if traceback else []


def innermost(lines: Sequence[Source]) -> Source:
    """Of lines that called one another, the innermost first: the user's own, or of a framework."""
    for libraries in (_LIBRARIES, ("jax", "jaxlib", "jmp_kit")):
        for line in lines:
            if not _is_aside(line.file, libraries):
                return line
    return Source()


def is_added(lines: Sequence[Source]) -> bool:
    """Whether this library, and no program that it was given, did what comes from these lines."""
    end = innermost(lines)
    inside = itertools.takewhile(lambda line: line != end, lines)
    return any(_is_within(line.file, ("jmp_kit",)) for line in inside)


def _defined_in(call: JaxprEqn) -> Iterator[str]:
    if call.primitive.name in ("jit", "pjit"):
        for jaxpr in subjaxprs(call):
            yield jaxpr.debug_info.func_filename or ""


@functools.cache
def _is_aside(name: str, libraries: Sequence[str] = _LIBRARIES) -> bool:
    if name.startswith("<frozen") or _is_within(name, libraries):
        return True
    in_packages = {"site-packages", "dist-packages"}.intersection(pathlib.Path(name).parts)
    return not in_packages and pathlib.Path(name).is_relative_to(sysconfig.get_path("stdlib"))


@functools.cache
def _is_within(name: str, libraries: Sequence[str]) -> bool:
    folders = (_folder(library) for library in libraries)
    return any(folder and pathlib.Path(name).is_relative_to(folder) for folder in folders)


@functools.cache
def _folder(library: str) -> pathlib.Path | None:
    spec = importlib.util.find_spec(library)
    return pathlib.Path(spec.origin).parent if spec and spec.origin else None
