"""A training state at one precision, made into one at another."""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_kit._tree import chosen_sharding, is_array, path_names
from jmp_kit.optim._master import full_value, is_narrow, keep_like
from jmp_kit.optim._mixed_precision import MixedPrecisionState

Path = tuple[str, ...]

# In the name of a leaf, before what `mixed_precision` keeps beside the inner optimizer's state.
_OWN = "(mixed_precision)"

_FIELDS = MixedPrecisionState._fields


def convert_precision(
    state: Any, like: Any, *, params: str | Iterable[str] = "params", exact: bool = True
) -> Any:
    """A training state in the precision of another, with the same weights, moments and counts.

        for every parameter:
            full = parameter completed by its master                           # float32
            parameter, master = round(full), what the rounding lost            # as `like` keeps it
        everything else as in `state`, in the dtypes of `like`

    Both states are pytrees: a dict, a NamedTuple, a Flax `TrainState`. One entry holds the
    parameters, and the state that an optimizer's `init` gave for them is anywhere else. Leaves are
    matched by path, so `state` may also be the dicts and lists that a checkpoint library gives
    back. Either state may be without `mixed_precision`: a float32 run with plain optax can go on
    with it, and the other way round.

    Args:
      state: what to convert.
      like: a state with the structure, dtypes and shardings that you want. It may be abstract
        (`jax.eval_shape`) if `state` has everything that it has.
      params: the entry that holds the parameters, or the path to it: ("variables", "params").
      exact: whether to refuse what cannot be kept exactly. float32 and remainder masters become
        each other exactly. "kahan" keeps about 16 bits; "stochastic" and "none" keep 8 bits in
        bfloat16, and 11 in float16. With `exact=False` values are rounded to nearest.

    Returns:
      A pytree with the structure of `like`. The loss scale, the seed and the counts of skipped
      steps come from `like` if `state` has none. The result shares arrays with both states, so
      what is donated afterwards is gone in all three. It reads values: call it outside jit.

    Raises:
      ValueError: if the two are not states of the same training, with what is missing, unexpected
        or of another shape; if `params` does not lead to what the masters belong to (convert the
        parts of a state with several sets of parameters one by one); or if `exact` and something
        would be lost.

    Example:
      >>> import jax.numpy as jnp, jmp_kit, optax
      >>> def start(dtype, master):
      ...     optimizer = jmp_kit.mixed_precision(optax.adamw(1e-3), master=master)
      ...     params = {"w": jnp.full(2, 0.1, dtype)}
      ...     return {"params": params, "opt_state": optimizer.init(params)}
      >>> full = start(jnp.float32, "float32")
      >>> half = jmp_kit.convert_precision(full, start(jnp.bfloat16, "remainder"))
      >>> half["params"]["w"], half["opt_state"].master["w"]
      (Array([0.100098, 0.100098], dtype=bfloat16), Array([-13107, -13107], dtype=int16))
      >>> back = jmp_kit.convert_precision(half, full)
      >>> back["params"]["w"] == full["params"]["w"]
      Array([ True,  True], dtype=bool)
    """
    where = (params,) if isinstance(params, str) else tuple(params)
    found, _ = named(state)
    wanted, treedef = named(like)
    _check_same_training(found, wanted)
    if _same_form(found, wanted):
        leaves = [_placed(name, found[name], leaf) for name, leaf in wanted.items()]
        return jax.tree.unflatten(treedef, leaves)

    paths = {n[len(where) :] for n in wanted if n[: len(where)] == where}
    kept, wanted_kept = _masters(found, where, paths), _masters(wanted, where, paths)
    converted, masters, lost = {}, {}, []
    for name, leaf in wanted.items():
        if _master_of(name) is not None:
            continue
        if name[: len(where)] == where and hasattr(leaf, "dtype"):
            path = name[len(where) :]
            value, masters[path], is_exact = _parameter(
                found[name], kept.get(path), leaf, wanted_kept.get(path)
            )
        else:
            value, is_exact = _cast(found.get(name, leaf), leaf)
        if not is_exact:
            beyond = ", beyond its range" if _is_beyond(found[name], leaf.dtype) else ""
            lost.append(f"{_join(name)} ({found[name].dtype} to {leaf.dtype}{beyond})")
        converted[name] = value
    if lost and exact:
        raise ValueError(
            f"{len(lost)} of {len(wanted)} arrays cannot be kept exactly: {_some(lost)}. Convert "
            'to master="float32" or "remainder" and to moments in float32, which lose nothing, and '
            "to bfloat16 what is beyond float16's range, or pass exact=False to round to nearest."
        )
    values = {n: masters[p] if (p := _master_of(n)) is not None else converted[n] for n in wanted}
    leaves = [_placed(name, values[name], leaf) for name, leaf in wanted.items()]
    return jax.tree.unflatten(treedef, leaves)


def named(tree: Any) -> tuple[dict[Path, Any], Any]:
    """The leaves by what they are called, with and without `mixed_precision` around them alike."""
    with_path, treedef = jax.tree_util.tree_flatten_with_path(tree)
    leaves = {_without_value(path_names(path)): leaf for path, leaf in with_path}
    # By their fields, for a checkpoint library makes dicts of MixedPrecisionStates.
    fields = ("finite", "skipped", "consecutive_skipped")
    roots = set.intersection(*({p[:-1] for p in leaves if p[-1:] == (f,)} for f in fields))
    others = {p[:i] for p in leaves for i in range(len(p)) if p[i] not in _FIELDS}
    roots -= others

    def name_of(path: Path) -> Path:
        for root in roots:
            if path[: len(root)] == root:
                field, rest = path[len(root)], path[len(root) + 1 :]
                return root + rest if field == "inner_state" else (*root, _OWN, field, *rest)
        return path

    return {name_of(path): leaf for path, leaf in leaves.items()}, treedef


def _without_value(name: Path) -> Path:
    """An nnx variable is a node with one leaf, which is what it is all about."""
    return name[:-1] if name[-1:] == ("value",) else name


def _master_of(name: Path) -> Path | None:
    """The path, within the parameters, of the one whose master is called so."""
    if _OWN in name and name[name.index(_OWN) + 1] == "master":
        return name[name.index(_OWN) + 2 :]
    return None


def _masters(leaves: dict[Path, Any], where: Path, paths: AbstractSet[Path]) -> dict[Path, Any]:
    """What is kept of the parameters, by their paths."""
    named = [(p, leaf) for name, leaf in leaves.items() if (p := _master_of(name)) is not None]
    kept = dict(named)
    if paths and kept.keys() <= paths and len(kept) == len(named):
        return kept
    entries = sorted({name[0] for name in leaves if name})
    theirs = kept.keys() & paths
    reason = f"of {len(paths)} arrays there {len(theirs)} have one of {len(kept)} masters"
    if len(kept) < len(named):
        reason = f"of {len(named)} masters {len(named) - len(kept)} have the path of another"
    raise ValueError(
        f"The parameters to convert are not at {_join(where)!r}: {reason}. The entries are "
        f"{_some(entries)}. Write params= and the one that the optimizer was initialised with. "
        "Where there are several sets of parameters, each with an optimizer, convert them one by "
        'one, as {"params": …, "opt_state": …}.'
    )


def _same_form(found: dict[Path, Any], wanted: dict[Path, Any]) -> bool:
    """Whether there is nothing to convert; a number has no dtype to keep."""
    return found.keys() == wanted.keys() and all(
        getattr(found[name], "dtype", None) == leaf.dtype
        for name, leaf in wanted.items()
        if hasattr(leaf, "dtype")
    )


def _parameter(param: Any, kept: Any, like: Any, like_kept: Any) -> tuple[Any, Any, bool]:
    """A parameter and what is kept of it, in the form of another, and whether that is exact."""

    def form(param: Any, kept: Any) -> tuple[Any, Any]:
        return param.dtype, getattr(kept, "dtype", None)

    if form(param, kept) == form(like, like_kept):
        return param, kept, True
    full = param
    if is_narrow(param):
        full = full_value(jnp.asarray(param), None if kept is None else jnp.asarray(kept))
    if not is_narrow(like):
        value, is_exact = _cast(full, like)
        return value, None, is_exact
    full, in_float32 = _cast(full, np.empty(0, np.float32))
    full = jnp.asarray(full)
    rounded, new_kept = keep_like(like_kept)(full, like.dtype, None)
    value = rounded.astype(like.dtype)
    overflown = jnp.any(jnp.isinf(rounded) & ~jnp.isinf(full))
    is_exact = in_float32 and not overflown and _same(full_value(value, new_kept), full)
    return value, new_kept, is_exact


def _cast(value: Any, like: Any) -> tuple[Any, bool]:
    """A value in the dtype of another, and whether that is exact."""
    if not is_array(value) or not hasattr(like, "dtype") or value.dtype == like.dtype:
        return value, True
    # NumPy stays NumPy: JAX may have no 64 bits to compare in.
    with np.errstate(over="ignore"):
        cast = value.astype(like.dtype)
        return cast, _same(cast.astype(value.dtype), value)


def _is_beyond(value: Any, dtype: np.dtype) -> bool:
    """Whether finite values are too large for this floating-point dtype."""
    if not jnp.issubdtype(dtype, jnp.inexact):
        return False
    known = np.asarray(value)[np.isfinite(np.asarray(value))]
    return bool(np.abs(known).max(initial=0) > jnp.finfo(dtype).max)


def _same(a: Any, b: Any) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _placed(name: Path, value: Any, like: Any) -> Any:
    """The value as an array if `like` is one, and on its devices if it was put there."""
    if isinstance(value, jax.ShapeDtypeStruct):
        raise ValueError(
            f"{_join(name)} is in neither state: `like` has only its shape and dtype. Pass one "
            "with values, such as optimizer.init gives."
        )
    if isinstance(like, bool | int | float):
        return type(like)(value)
    if not hasattr(like, "dtype"):
        return value
    if isinstance(like, np.ndarray | np.generic):
        array = np.asarray(value)
        return array if isinstance(like, np.ndarray) else array[()]
    sharding = chosen_sharding(like)
    return jnp.asarray(value) if sharding is None else jax.device_put(value, sharding)


def _check_same_training(found: dict[Path, Any], wanted: dict[Path, Any]) -> None:
    problems = {
        "missing": [_join(name) for name in wanted if name not in found and _OWN not in name],
        "unexpected": [_join(name) for name in found if name not in wanted and _OWN not in name],
        "different": [
            f"{_join(name)} ({_kind(found[name])}, not {_kind(leaf)})"
            for name, leaf in wanted.items()
            if name in found and _master_of(name) is None and _kind(found[name]) != _kind(leaf)
        ],
    }
    if any(problems.values()):
        listed = [f"{what}: {_some(names)}" for what, names in problems.items() if names]
        code = any(callable(wanted[name]) for name in wanted.keys() - found.keys())
        arrays = "Functions are not saved: leave them out, with eqx.filter(model, eqx.is_array). "
        raise ValueError(
            f"These are not states of the same training; {'; '.join(listed)}. Make `like` with the "
            "model and the optimizer that the other was made with: only dtypes, `master`, "
            f"`moment_dtype` and the loss scale may differ. {arrays if code else ''}".rstrip()
        )


def _kind(leaf: Any) -> str:
    """What conversion does not change."""
    if isinstance(leaf, bool | int | float):
        leaf = np.asarray(leaf)
    dtype = getattr(leaf, "dtype", None)
    if dtype is None:
        return type(leaf).__name__
    kinds = {"float": jnp.floating, "int": jnp.integer}
    kind = next((k for k, t in kinds.items() if jnp.issubdtype(dtype, t)), str(dtype))
    return f"{kind}{list(leaf.shape)}"


def _join(path: Path) -> str:
    return "/".join(path)


def _some(items: list[str], most: int = 4) -> str:
    rest = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + rest
