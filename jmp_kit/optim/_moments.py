"""Moments kept in fewer bits than the update computes them in."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jmp_kit._tree import cast_floating, cast_like, is_array
from jmp_kit.optim._master import is_narrow, widened
from jmp_kit.rounding import stochastic_round

# Fields of optimizer states that hold decaying averages of gradients or of their squares. Other
# float arrays are none: accumulated gradients, the weights of schedule_free or lookahead.
MOMENTS = ("mu", "nu", "trace", "m1", "m2", "exp_avg", "exp_avg_sq", "v_row", "v_col")


def parse_moment_dtype(dtype: DTypeLike | None) -> Any:
    """The dtype for moments, or None to leave them as the inner optimizer makes them.

    Raises:
      ValueError: if it is none in which moments can be kept.
    """
    if dtype is None:
        return None
    try:
        parsed = jnp.dtype(dtype)
    except TypeError:
        parsed = None
    if parsed in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        return parsed
    reason = ""
    if parsed == jnp.float16:
        reason = (
            ": the square of a gradient below 2e-4 is zero in float16, and Adam divides by its root"
        )
    raise ValueError(
        f"moment_dtype is {dtype!r}, in which moments cannot be kept{reason}. Write "
        '"bfloat16" (2 bytes a moment), "float32", or None to leave them as the optimizer '
        "makes them."
    )


def cast_moments(inner_state: Any, dtype: Any, params: Any) -> Any:
    """The state with its moments in `dtype`.

    A container that parameters lie in is theirs in the state too, whatever its fields are called.

    Raises:
      ValueError: if there are none.
    """
    found = []
    theirs: set[type] = set()

    def is_seen(node: Any) -> bool:
        theirs.add(type(node))
        return False

    jax.tree.leaves(params, is_leaf=is_seen)

    def has_moments(node: Any) -> bool:
        named = set(getattr(node, "_fields", ())) & set(MOMENTS)
        return bool(named) and type(node) not in theirs

    def cast(node: Any) -> Any:
        if not has_moments(node):
            return node
        found.append(node)
        fields = [field for field in node._fields if field in MOMENTS]
        return node._replace(**{f: cast_floating(getattr(node, f), dtype) for f in fields})

    state = jax.tree.map(cast, inner_state, is_leaf=has_moments)
    if not found:
        names = sorted(
            jax.tree_util.keystr(path)
            for path, leaf in jax.tree_util.tree_leaves_with_path(inner_state)
            if is_array(leaf, jnp.floating) and leaf.ndim
        )
        raise ValueError(
            f"moment_dtype is {dtype}, but this optimizer's state has no fields known as moments: "
            f"{', '.join(MOMENTS)}. Its float arrays are {', '.join(names) or 'none'}. Leave "
            "moment_dtype out."
        )
    return state


def widen_state(inner_state: Any) -> Any:
    """The state in which an update is computed: 16-bit arrays in float32."""
    return jax.tree.map(lambda x: widened(x) if is_narrow(x) else x, inner_state)


def narrow_state(new: Any, old: Any, key: jax.Array | None) -> Any:
    """The new state in the dtypes of the old; where there is a key, rounded at random.

    To nearest, a second moment in bfloat16 never decays: 0.999 times it rounds back to it.
    """
    if key is None:
        return cast_like(new, old)

    def narrow(x: Any, y: Any, key: jax.Array) -> Any:
        if is_narrow(y) and is_array(x, jnp.floating):
            return stochastic_round(key, x.astype(jnp.float32), y.dtype)
        return x

    return cast_like(jax.tree.map(narrow, new, old, keys_like(key, new)), old)


def keys_like(key: jax.Array | None, tree: Any) -> Any:
    """A key for every leaf, each its own."""
    leaves, treedef = jax.tree.flatten(tree)
    if key is None or not leaves:
        return jax.tree.map(lambda _: None, tree)
    return jax.tree.unflatten(treedef, list(jax.random.split(key, len(leaves))))
