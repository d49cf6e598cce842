"""Functions of nnx models: what they change in them is kept.

Flax is not imported: where there are models, it has been. Its own machinery takes models apart and
puts them together again, as for `nnx.jit`: what a function sets, adds or removes in them goes on,
arrays or not.
"""

import sys
from collections.abc import Callable
from typing import Any

import jax

from jmp_kit._tree import at_least_float32, cast_like, is_array
from jmp_kit.programs._arguments import names_of

_CONTEXT = "jmp_kit"


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

    Parameters are read in float32, whatever dtype they are stored in, but where an optimizer is
    among the arguments: its masters are those of the parameters as they are.

    Args:
      run: `run(function, paths, tree)` evaluates `function(tree)`, whose arrays have these paths.
    """
    nnx = _nnx()
    nodes = args, kwargs
    widens = not any(isinstance(n, nnx.Optimizer) for _, n in nnx.iter_graph(nodes))

    def is_model(node: Any) -> bool:
        return isinstance(node, nnx.NodeStates)

    def is_variable(node: Any) -> bool:
        return isinstance(node, nnx.Variable)

    def wide(variable: Any) -> Any:
        is_param = isinstance(variable, nnx.Param)
        return jax.tree.map(at_least_float32, variable) if is_param else variable

    def widened(node: Any) -> Any:
        is_wide = widens and is_model(node)
        return jax.tree.map(wide, node, is_leaf=is_variable) if is_wide else node

    with nnx.update_context(_CONTEXT):
        given = nnx.to_tree(nodes, ctxtag=_CONTEXT)
        before = dict(jax.tree_util.tree_leaves_with_path(given))
        names = names_of(fun, args)
        for path, x in before.items():
            if isinstance(x, jax.Ref):
                raise TypeError(_REFERENCE.format(path=_named(path, names)))
        found = []

        def pure(given: Any) -> list[Any]:
            computed = jax.tree.map(widened, given, is_leaf=is_model)
            args, kwargs = inner = nnx.from_tree(computed, ctxtag=_CONTEXT, is_inner=True)
            graph = nnx.graphdef(inner)
            outputs = fun(*args, **kwargs)
            _refuse_static_arrays(inner)
            is_same = nnx.graphdef(inner) == graph
            changed = nnx.extract.clear_non_graph_nodes(inner)
            tree = nnx.to_tree((changed, outputs), ctxtag=_CONTEXT)
            leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
            # Of what a model holds, what is not set goes back as it was given.
            had = {id(x): p for p, x in jax.tree_util.tree_leaves_with_path(computed)}
            kept = [had.get(id(x)) if _is_of_models(path) else None for path, x in leaves]
            set_ = [x for (_, x), path in zip(leaves, kept, strict=True) if path is None]
            places = [path for path, _ in leaves]
            untouched = is_same and all(
                was or not _is_of_models(path) for path, was in zip(places, kept, strict=True)
            )
            found.append((structure, places, kept, untouched))
            return set_

        paths = [_named(path, names) for path, x in before.items() if is_array(x)]
        set_ = iter(run(pure, paths, given))
        structure, places, kept, untouched = found.pop(0)
        leaves = [
            _as_before(before[was] if was else next(set_), path, before)
            for path, was in zip(places, kept, strict=True)
        ]
        changed, outputs = jax.tree.unflatten(structure, leaves)
        # What is closed over by a function that JAX traces cannot be set.
        if not untouched or any(map(is_model, jax.tree.leaves(outputs, is_leaf=is_model))):
            _, outputs = nnx.from_tree((changed, outputs), ctxtag=_CONTEXT, is_inner=False)
    return outputs


_REFERENCE = (
    "The variable {path} holds a reference (jax.Ref), and nnx would copy it: what the function "
    "sets there would be lost. Make the model without ref=True, in nnx.var_defaults too."
)


def _refuse_static_arrays(nodes: Any) -> None:
    nnx = _nnx()
    held = set(map(id, jax.tree.leaves(nnx.state(nodes))))
    for _, node in nnx.iter_graph(nodes):
        attributes = vars(node).items() if isinstance(node, nnx.Pytree) else ()
        for name, value in attributes:
            arrays = [x for x in jax.tree.leaves(value) if isinstance(x, jax.core.Tracer)]
            if any(id(x) not in held for x in arrays):
                raise ValueError(
                    f"The function sets the attribute {name!r} of its model to an array, which "
                    "cannot leave the program that autocast traces: make it an nnx.Variable."
                )


def _is_of_models(path: Any) -> bool:
    """Of the pair of what models hold and what a function returns."""
    return bool(path[0].idx == 0)


def _as_before(x: Any, path: Any, before: Any) -> Any:
    """What a variable is set to, in the dtype it had."""
    was = before.get(path[1:]) if _is_of_models(path) else None
    return x if was is None else cast_like(x, was)


def _named(path: Any, names: list[str]) -> str:
    """The path of an array in `(args, kwargs)`, whose models are taken apart."""
    which, key, *inside = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
    if len(path) > 2 and getattr(path[2], "name", "") == "states":  # an attribute, of a model
        inside = inside[2:]
    return "/".join((names[int(key)] if which == "0" else key, *inside))
