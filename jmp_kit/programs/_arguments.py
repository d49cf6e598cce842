"""A function's arguments and results: which are arrays, and what their paths are."""

import contextlib
import enum
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jmp_kit._tree import is_array

# Which hold no array.
_STATIC = (bool, int, float, complex, str, bytes, type, np.dtype, enum.Enum)


def flattened(
    fun: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Callable[..., list[Any]], list[Any], Callable[[], Callable[[Any], Any]]]:
    """`fun` from arrays to arrays, its array arguments, and, once it ran, what rebuilds its result.

    What is no array is returned as it is: a module's activation functions, say, or a string.
    """
    leaves, treedef = jax.tree.flatten((args, kwargs))
    positions = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
    given = set(map(id, leaves))
    structures = []

    def flat(*arrays: Any) -> list[Any]:
        filled = list(leaves)
        for i, array in zip(positions, arrays, strict=True):
            filled[i] = array
        args, kwargs = jax.tree.unflatten(treedef, filled)
        found, structure = jax.tree_util.tree_flatten_with_path(fun(*args, **kwargs))
        fixed = {}
        for i, (path, x) in enumerate(found):
            if is_array(x):
                continue
            if id(x) not in given and not isinstance(x, _STATIC):
                raise TypeError(
                    f"autocast returns arrays, but {jax.tree_util.keystr(path) or 'the result'} "
                    f"of the function is {x!r}. Return it by another way, or leave it out."
                )
            fixed[i] = x
        structures.append((structure, len(found), fixed))
        return [x for i, (_, x) in enumerate(found) if i not in fixed]

    def structure() -> Callable[[Any], Any]:
        structure, count, fixed = structures.pop()

        def rebuilt(results: Any) -> Any:
            others = iter(results)
            outputs = [fixed[i] if i in fixed else next(others) for i in range(count)]
            return jax.tree.unflatten(structure, outputs)

        return rebuilt

    return flat, [leaves[i] for i in positions], structure


def on_arrays(
    fun: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Callable[[dict[int, Any]], Any], dict[int, Any]]:
    """`fun` of its arrays alone, and these; what is no array stays: flags, strings, functions."""
    leaves, treedef = jax.tree.flatten((args, kwargs))
    arrays = {i: leaf for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype")}

    def call(arrays: dict[int, Any]) -> Any:
        args, kwargs = jax.tree.unflatten(
            treedef, [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
        )
        return fun(*args, **kwargs)

    return call, arrays


def eval_shape(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`jax.eval_shape` that leaves alone what is no array."""
    return jax.eval_shape(*on_arrays(fun, *args, **kwargs))


def paths_of_arrays(fun: Callable[..., Any], args: Any, kwargs: Any) -> list[str]:
    """The path of each array argument, from its argument's name: "params/lm_head/kernel"."""
    named = [*zip(names_of(fun, args), args, strict=False), *sorted(kwargs.items())]
    leaves = [
        ("/".join(filter(None, (name, jax.tree_util.keystr(path, simple=True, separator="/")))), x)
        for name, argument in named
        for path, x in jax.tree_util.tree_leaves_with_path(argument)
    ]
    return [path for path, x in leaves if is_array(x)]


def names_of(fun: Callable[..., Any], args: Sequence[Any]) -> list[str]:
    """What the positional arguments are called, at least as many; numbers where nobody knows."""
    names: list[str] = []
    with contextlib.suppress(ValueError):  # some functions written in C have no signature
        for parameter in inspect.signature(fun).parameters.values():
            several = parameter.kind is parameter.VAR_POSITIONAL
            rest = range(len(args) - len(names)) if several else ()
            names += [f"{parameter.name}/{i}" for i in rest] or [parameter.name]
    return names + list(map(str, range(len(names), len(args))))
