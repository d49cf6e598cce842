"""A function's arguments and results: which are arrays, and what their paths are."""

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import jax

from jmp_kit._tree import is_array


def flattened(
    fun: Callable[..., Any], args: Any, kwargs: Any
) -> tuple[Callable[..., list[Any]], list[Any], Callable[[], Any]]:
    """`fun` from arrays to arrays, its array arguments, and its result's structure once it ran."""
    leaves, treedef = jax.tree.flatten((args, kwargs))
    positions = [i for i, leaf in enumerate(leaves) if is_array(leaf)]
    structures = []

    def flat(*arrays: Any) -> list[Any]:
        filled = list(leaves)
        for i, array in zip(positions, arrays, strict=True):
            filled[i] = array
        args, kwargs = jax.tree.unflatten(treedef, filled)
        outputs = fun(*args, **kwargs)
        for path, x in jax.tree_util.tree_leaves_with_path(outputs):
            if not (is_array(x) or isinstance(x, bool | int | float | complex)):
                raise TypeError(
                    f"autocast returns arrays, but {jax.tree_util.keystr(path) or 'the result'} "
                    f"of the function is {x!r}. Return it by another way, or leave it out."
                )
        results, structure = jax.tree.flatten(outputs)
        structures.append(structure)
        return results

    return flat, [leaves[i] for i in positions], structures.pop


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
    names: list[str] = []
    with contextlib.suppress(ValueError):  # some functions written in C have no signature
        for parameter in inspect.signature(fun).parameters.values():
            several = parameter.kind is parameter.VAR_POSITIONAL
            rest = range(len(args) - len(names)) if several else ()
            names += [f"{parameter.name}/{i}" for i in rest] or [parameter.name]
    names += map(str, range(len(names), len(args)))
    named = [*zip(names, args, strict=False), *sorted(kwargs.items())]
    leaves = [
        ("/".join(filter(None, (name, jax.tree_util.keystr(path, simple=True, separator="/")))), x)
        for name, argument in named
        for path, x in jax.tree_util.tree_leaves_with_path(argument)
    ]
    return [path for path, x in leaves if is_array(x)]
