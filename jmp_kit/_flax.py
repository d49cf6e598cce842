"""What Flax is told, where it is loaded; importing it is left to those who use it."""

import sys
from typing import Any

import jax


def told_to_serialize(kind: type) -> None:
    """Let `flax.serialization` save and restore states of this class, by the names of its leaves.

    Source: https://flax.readthedocs.io/en/latest/api_reference/flax.serialization.html
    """
    serialization = sys.modules.get("flax.serialization")
    if serialization is None:
        return

    def to_state_dict(state: Any) -> dict[str, Any]:
        leaves = jax.tree_util.tree_leaves_with_path(state)
        return {jax.tree_util.keystr(path, simple=True): leaf for path, leaf in leaves}

    def from_state_dict(like: Any, found: Any) -> Any:
        wanted = to_state_dict(like)
        if not isinstance(found, dict) or found.keys() != wanted.keys():
            have = ", ".join(found) if isinstance(found, dict) else repr(found)
            raise ValueError(
                f"A {kind.__name__} of these settings has the leaves {', '.join(wanted) or 'none'}"
                f", but what was saved has {have or 'none'}: restore into a state made with the "
                "loss scale that was saved, or go on with another through convert_precision."
            )
        return jax.tree.unflatten(jax.tree.structure(like), [found[name] for name in wanted])

    serialization.register_serialization_state(kind, to_state_dict, from_state_dict, override=True)
