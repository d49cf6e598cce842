"""The line of a user's program that an equation comes from."""

import functools
import importlib.util
import pathlib
import sysconfig
from typing import Any, NamedTuple

# Whose lines tell a user little.
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "haiku", "equinox", "keras", "jmp_kit")


class Source(NamedTuple):
    """A line of a file; empty if none is known."""

    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{pathlib.Path(self.file).name}:{self.line}" if self.file else ""


def source_of(eqn: Any) -> Source:
    """The innermost line around an equation that is the user's own, not a library's.

    Of the rules of a custom derivative JAX keeps the line of the call.
    """
    traceback = eqn.source_info.traceback
    frames = [(f.file_name, f.line_num) for f in traceback.frames] if traceback else []
    for name, line in frames:
        if not _is_aside(name):
            return Source(name, line)
    return Source(*frames[0]) if frames else Source()


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
