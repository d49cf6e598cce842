"""Walks over jaxprs, each done once.

A body is looked at by every analysis of every program around it. If each walked it again, one more
level of nesting would multiply the time to trace.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Concatenate, TypeVar

from jax.extend.core import Jaxpr

Analysis = TypeVar("Analysis")
Found = TypeVar("Found")


def walked_once(
    walk: Callable[Concatenate[Analysis, Jaxpr, ...], Found],
) -> Callable[Concatenate[Analysis, Jaxpr, ...], Found]:
    """The method, which finds in a jaxpr what it found there before, of the same flags.

    What it found goes with the jaxpr, and is read, not changed.
    """
    known: weakref.WeakKeyDictionary[Jaxpr, dict[object, Found]] = weakref.WeakKeyDictionary()

    @functools.wraps(walk)
    def walked(analysis: Analysis, jaxpr: Jaxpr, *flags: Sequence[object]) -> Found:
        found = known.setdefault(jaxpr, {})
        key = (analysis, *map(tuple, flags))
        if key not in found:
            found[key] = walk(analysis, jaxpr, *flags)
        return found[key]

    return walked
