"""Functions of nnx models: what they change in them is kept.

Flax is not imported: where there are models, it has been.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jmp_kit._tree import at_least_float32, cast_like, is_array
from jmp_kit.programs._arguments import names_of

Leaves = dict[Any, list[Any]]  # the arrays of variables, by path


def _nnx() -> Any:
    return sys.modules.get("flax.nnx")


def holds_models(tree: Any) -> bool:
    """Whether there is an nnx object in it that a function may change; a state of one is none."""
    nnx = _nnx()
    if nnx is None:
        return False
    objects = nnx.Pytree, nnx.Variable

    def is_one(node: Any) -> bool:
        return isinstance(node, (*objects, nnx.State))

    nodes = jax.tree.leaves(tree, is_leaf=is_one)
    return any(isinstance(node, objects) and not isinstance(node, nnx.State) for node in nodes)


def on_models(fun: Callable[..., Any], run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """`fun(*args, **kwargs)` by way of a function of arrays, and what it changes set afterwards.

    Variables are read in float32, whatever dtype they are stored in, but where an optimizer is
    among the arguments: its masters are those of the parameters as they are.

    Args:
      run: `run(function, paths, variables, rest)` evaluates `function(variables, rest)`, whose
        arrays have these paths.
    """
    nnx = _nnx()
    nodes = args, kwargs
    parts: Any = nnx.split(nodes, nnx.Variable, ...)
    graphdef, variables, rest = parts
    optimizers = [n for _, n in nnx.iter_graph(nodes) if isinstance(n, nnx.Optimizer)]
    found = []

    def pure(variables: Any, rest: Any) -> tuple[Any, list[Any]]:
        if not optimizers:
            variables = jax.tree.map(at_least_float32, variables)
        before = arrays_of(variables)
        inner = nnx.merge(graphdef, variables, rest)
        attributes = _attributes(inner)
        outputs = fun(*inner[0], **inner[1])
        _refuse_new(before, inner)
        values, structure = jax.tree.flatten(changed(before, inner))
        found.append((structure, _changed_attributes(attributes, inner)))
        return outputs, values

    names = names_of(fun, args)
    paths = [
        "/".join(map(str, (names[int(key)] if which == "0" else key, *inside)))
        for which, key, *inside in (
            jax.tree_util.keystr(path, simple=True, separator="/").split("/")
            for part in (variables, rest)
            for path, x in jax.tree_util.tree_leaves_with_path(part)
            if is_array(x)
        )
    ]
    outputs, values = run(pure, paths, variables, rest)
    structure, attributes = found.pop(0)
    set_arrays(nodes, jax.tree.unflatten(structure, values))
    objects = dict(nnx.iter_graph(nodes))
    for (path, name), value in attributes.items():
        setattr(objects[path], name, value)
    return outputs


def arrays_of(variables: Any) -> Leaves:
    """The arrays of variables, as they are now."""
    return {path: jax.tree.leaves(v) for path, v in _nnx().to_flat_state(variables)}


def changed(before: Leaves, nodes: Any) -> Leaves:
    """The arrays of the variables that were set since."""
    now = arrays_of(_nnx().state(nodes, _nnx().Variable))
    return {
        path: now[path]
        for path, old in before.items()
        if any(a is not b for a, b in zip(now[path], old, strict=True))
    }


def set_arrays(nodes: Any, values: Leaves) -> None:
    """Give variables these arrays, in the dtypes that they have."""
    nnx = _nnx()
    state = nnx.to_flat_state(nnx.state(nodes, nnx.Variable))
    changed = [
        (
            path,
            jax.tree.unflatten(jax.tree.structure(v), cast_like(values[path], jax.tree.leaves(v))),
        )
        for path, v in state
        if path in values
    ]
    if changed:
        nnx.update(nodes, nnx.from_flat_state(changed))


def _refuse_new(before: Leaves, nodes: Any) -> None:
    new = arrays_of(_nnx().state(nodes, _nnx().Variable)).keys() - before.keys()
    if new:
        raise ValueError(
            f"The function adds variables to its model ({_named(new)}), which cannot leave the "
            "program that autocast traces. Return such values, or make the variables before the "
            "call."
        )


def _attributes(nodes: Any) -> dict[tuple[Any, str], Any]:
    """What objects hold beside variables and other objects, by their paths and its names."""
    nnx = _nnx()
    return {
        (path, name): value
        for path, node in nnx.iter_graph(nodes)
        if isinstance(node, nnx.Pytree) and not isinstance(node, nnx.State)
        for name, value in vars(node).items()
        if not name.startswith("_pytree__") and not isinstance(value, nnx.Variable | nnx.Pytree)
    }


def _changed_attributes(before: dict[tuple[Any, str], Any], nodes: Any) -> dict[Any, Any]:
    found = {}
    for key, value in _attributes(nodes).items():
        if key in before and value is before[key]:
            continue
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(value)):
            raise ValueError(
                f"The function sets the attribute {key[1]!r} of its model to an array, which "
                "cannot leave the program that autocast traces: make it an nnx.Variable."
            )
        found[key] = value
    return found


def _named(paths: Sequence[Any] | set[Any]) -> str:
    return ", ".join(sorted("/".join(map(str, path[2:])) for path in paths))
