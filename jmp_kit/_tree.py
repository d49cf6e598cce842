"""Pytrees: casting, finiteness, selection, and how state classes are registered."""

import collections
import dataclasses
import functools
import re
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

T = TypeVar("T")

_ARRAYS = (jax.Array, np.ndarray, np.generic)
_AT_ONCE = 32  # arrays; XLA fuses no more than 96 operands


def is_array(x: Any, kind: type = jnp.generic) -> bool:
    """Whether `x` is a JAX or NumPy array or scalar whose dtype is of the given kind."""
    return isinstance(x, _ARRAYS) and jnp.issubdtype(x.dtype, kind)


def cast_floating(tree: T, dtype: np.dtype) -> T:
    """The tree with its floating-point arrays in `dtype`; NumPy arrays stay NumPy arrays."""

    def cast(x: Any) -> Any:
        return x.astype(dtype, copy=False) if is_array(x, jnp.floating) else x

    return jax.tree.map(cast, tree)


def all_finite(tree: Any, axis_name: str | tuple[str, ...] | None = None) -> jax.Array:
    """Whether all elements of all leaves are finite: none is infinite or NaN.

        all_finite(tree) = all(isfinite(x) for leaf in tree for x in leaf)

    Args:
      tree: a pytree. Leaves without infinities (integers, bools, keys, `None`, non-arrays) count
        as finite, and so does an empty tree.
      axis_name: under `shard_map` and `pmap`, the axes along which devices hold different trees.
        All devices then get the same answer.

    Returns:
      bool[], computed on the device; it can be used under jit.

    Example:
      >>> import jax.numpy as jnp, jmp_kit
      >>> bool(jmp_kit.all_finite({"w": jnp.ones(3), "step": 7}))
      True
      >>> bool(jmp_kit.all_finite({"w": jnp.array([1.0, jnp.inf])}))
      False
    """
    alike = collections.defaultdict(list)
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(x, float | complex) or is_array(x, jnp.inexact):
            # Layers are alike but for their numbers, sharded alike too, and checked by one kernel.
            name = re.sub(r"\d+", "", jax.tree_util.keystr(path))
            alike[name, jax.typeof(x)].append(jnp.isfinite(x))
    several = alike.values()
    checks = (same[i : i + _AT_ONCE] for same in several for i in range(0, len(same), _AT_ONCE))
    finite = (functools.reduce(jnp.logical_and, check).all() for check in checks)
    found = functools.reduce(jnp.logical_and, finite, jnp.asarray(True))
    return found if axis_name is None else lax.pmin(found.astype(jnp.int32), axis_name) == 1


def at_least_float32(x: Any) -> Any:
    """A floating-point array of fewer than 32 bits in float32; anything else as it is."""
    narrow = is_array(x, jnp.floating) and jnp.finfo(x.dtype).bits < 32
    return x.astype(jnp.float32) if narrow else x


def cast_like(tree: T, like: Any) -> T:
    """The tree with its floating-point arrays in the dtypes of the other's, leaf for leaf."""

    def cast(x: Any, y: Any) -> Any:
        floating = is_array(x, jnp.floating) and is_array(y, jnp.floating)
        return x.astype(y.dtype, copy=False) if floating else x

    return jax.tree.map(cast, tree, like)


def boolean_scalar(name: str, value: ArrayLike) -> jax.Array:
    """`value` as bool[].

    Raises:
      ValueError: if it is anything else.
    """
    array = jnp.asarray(value)
    if array.shape != () or array.dtype != jnp.bool_:
        raise ValueError(
            f"{name} must be one boolean that says whether gradients are finite, but it is "
            f"{_describe(array)}: write all_finite(grads)."
        )
    return array


def select_tree(pred: ArrayLike, on_true: T, on_false: T) -> T:
    """One of two trees, chosen on the device. Every bit of it is kept.

        select_tree(pred, a, b) = a if pred else b

    Use it where a step whose gradients are not finite must change nothing: for batch statistics, a
    moving average, a random key.

    Args:
      pred: bool[].
      on_true: a pytree of arrays and numbers. Other leaves must be the same in both trees.
      on_false: a pytree of the same structure, shapes and dtypes.

    Returns:
      A pytree of that structure.

    Raises:
      ValueError: if `pred` is not a boolean scalar, or a leaf differs between the trees in shape,
        dtype, or (where it is no array) value.

    Example:
      >>> import jax.numpy as jnp, jmp_kit
      >>> new, old = {"mean": jnp.float32(jnp.nan)}, {"mean": jnp.float32(0.5)}
      >>> float(jmp_kit.select_tree(jnp.asarray(False), new, old)["mean"])
      0.5
    """
    chosen = boolean_scalar("pred", pred)

    def select(path: Any, a: Any, b: Any) -> Any:
        if a is b:
            return a
        if _describe(a) == _describe(b):
            return lax.select(chosen, a, b) if _is_selectable(a) else a
        raise ValueError(
            f"select_tree: the leaf {jax.tree_util.keystr(path) or '(the whole tree)'} is "
            f"{_describe(a)} in one tree and {_describe(b)} in the other, and a compiled program "
            "has one shape and one dtype. Cast them to the same first, or leave the leaf out."
        )

    return jax.tree_util.tree_map_with_path(select, on_true, on_false)


def _is_selectable(x: Any) -> bool:
    return isinstance(x, (*_ARRAYS, bool, int, float, complex))


def _describe(x: Any) -> str:
    if not _is_selectable(x):
        return repr(x)
    return f"{jnp.result_type(x)}{list(jnp.shape(x))}"


def path_names(path: Any) -> tuple[str, ...]:
    """A key path as plain names: the same for a NamedTuple and for the dict made of it."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def chosen_sharding(leaf: Any) -> Any:
    """The sharding that somebody gave an array, or None where JAX may place it as it likes."""
    given = getattr(leaf, "committed", isinstance(leaf, jax.ShapeDtypeStruct))
    return leaf.sharding if given else None


def register_state(cls: type[T]) -> type[T]:
    """Register a dataclass as a pytree: fields marked `metadata={"static": True}` are structure.

    Unlike `jax.tree_util.register_dataclass`, rebuilding one does not run `__init__`, which
    validates what a user writes and must not see the tracers, specs and placeholders that JAX
    puts in place of leaves: https://docs.jax.dev/en/latest/custom_pytrees.html
    """
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    leaves = [f.name for f in fields if not f.metadata.get("static")]
    static = [f.name for f in fields if f.metadata.get("static")]

    def flatten_with_keys(node: T) -> Any:
        keyed = [(jax.tree_util.GetAttrKey(name), getattr(node, name)) for name in leaves]
        return keyed, tuple(getattr(node, name) for name in static)

    def unflatten(static_values: Any, leaf_values: Any) -> T:
        node = object.__new__(cls)
        for names, values in ((leaves, leaf_values), (static, static_values)):
            for name, value in zip(names, values, strict=True):
                object.__setattr__(node, name, value)
        return node

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten)
    return cls
