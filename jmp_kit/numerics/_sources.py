"""The line of a user's program that an equation comes from."""

import functools
import importlib.util
import pathlib
import sysconfig
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jax.extend.core import JaxprEqn

from jmp_kit.autocast import subjaxprs

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
        traced once, so inside of it are the lines of who called it first: its call's line holds.

    Of the rules of a custom derivative JAX keeps the line of the call.
    """
    for call in calls:
        if any(_is_aside(name) for name in _defined_in(call)):
            eqn = call
            break
    traceback = eqn.source_info.traceback
    frames = [(f.file_name, f.line_num) for f in traceback.frames] if traceback else []
    for name, line in frames:
        if not _is_aside(name):
            return Source(name, line)
    return Source(*frames[0]) if frames else Source()


def _defined_in(call: JaxprEqn) -> Iterator[str]:
    if call.primitive.name in ("jit", "pjit"):
        for jaxpr in subjaxprs(call):
            yield jaxpr.debug_info.func_filename or ""


@functools.cache
def _is_aside(name: str) -> bool:
    path = pathlib.Path(name)
    if name.startswith("<frozen") or any(path.is_relative_to(folder) for folder in _folders()):
        return True
    in_packages = {"site-packages", "dist-packages"}.intersection(path.parts)
    return not in_packages and path.is_relative_to(sysconfig.get_path("stdlib"))


@functools.cache
def _folders() -> list[pathlib.Path]:
    found = map(importlib.util.find_spec, _LIBRARIES)
    return [pathlib.Path(spec.origin).parent for spec in found if spec and spec.origin]
