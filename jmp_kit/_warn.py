"""Warnings at the line that their reader has written."""

import inspect
import os
import pathlib
import warnings

import jax
import optax

_PACKAGE = pathlib.Path(__file__).parent
_LIBRARIES = tuple(str(path) + os.sep for path in (_PACKAGE, *jax.__path__, *optax.__path__))


def warn(message: str) -> None:
    """At the user's line, however deep in this library, JAX and optax it is found."""
    level, frame = 1, inspect.currentframe()
    while frame and frame.f_code.co_filename.startswith(_LIBRARIES):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
