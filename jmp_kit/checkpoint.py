"""Restoring a training state that Orbax saved, at the same precision or at another.

Saving needs nothing of ours. Everything that a run goes on from is in its state: parameters, their
masters, moments, loss scale, counts, seeds.

    manager = orbax.checkpoint.CheckpointManager(directory)
    manager.save(step, args=orbax.checkpoint.args.StandardSave(state))  # in the background
    manager.wait_until_finished()
    ...
    state = jmp_kit.checkpoint.restore(directory, like=state)
"""

import itertools
import json
import pathlib
import re
import warnings
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jmp_kit._tree import chosen_sharding
from jmp_kit.optim import convert_precision
from jmp_kit.optim._convert import named


def restore(
    directory: Any,
    like: Any,
    step: int | None = None,
    *,
    params: str | Iterable[str] = "params",
    exact: bool = True,
    fall_back: bool = False,
) -> Any:
    """The state that was saved last, or at one step, in the structure and precision of `like`.

    Where the dtypes are the same, every bit is. Where they differ, `convert_precision` converts: a
    float32 checkpoint into bfloat16 parameters with remainders, to another `master` or to other
    moments, from plain optax or to it.

    Args:
      directory: a local directory: that of an `orbax.checkpoint.CheckpointManager`, or of one
        checkpoint.
      like: a state as the run starts with. It gives the structure, the dtypes and the shardings.
      step: which step; None for the latest.
      params: the entry of the state that holds the parameters, or the path to it.
      exact: whether to refuse a conversion that loses something.
      fall_back: whether to warn and go on with the newest good checkpoint before it, if the
        checkpoint cannot be read. The steps since then are trained again.

    Returns:
      The restored state. Keep the number of the step in your state too, to know where to go on.

    Raises:
      FileNotFoundError: if there is no checkpoint in `directory`, or none of that step.
      ValueError: if `directory` is not local; if the checkpoint cannot be read (it is truncated,
        damaged or of another kind), naming the file; or as `convert_precision`: if it is of another
        model or optimizer, or if something would be lost and `exact` is true.

    Example:
      >>> import tempfile
      >>> import jax.numpy as jnp, jmp_kit, optax, orbax.checkpoint as ocp
      >>> from jmp_kit import checkpoint
      >>> def start(dtype, master):
      ...     optimizer = jmp_kit.mixed_precision(optax.adamw(1e-3), master=master)
      ...     params = {"w": jnp.full(2, 0.1, dtype)}
      ...     return {"params": params, "opt_state": optimizer.init(params), "step": 0}
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     with ocp.CheckpointManager(directory) as manager:
      ...         state = start(jnp.float32, "float32") | {"step": 7}
      ...         saved = manager.save(7, args=ocp.args.StandardSave(state))
      ...     state = checkpoint.restore(directory, start(jnp.bfloat16, "remainder"))
      >>> state["step"], state["params"]["w"].dtype, state["opt_state"].master["w"].dtype
      (7, dtype(bfloat16), dtype('int16'))

    Source: https://orbax.readthedocs.io/en/latest/guides/checkpoint/checkpointing_pytrees.html
    """
    (found, path), *others = _checkpoints(directory, step).items()
    try:
        state = _read(path, like)
    except Exception as error:
        if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
            raise
        if _is_replaced(directory, step, found):
            return restore(directory, like, params=params, exact=exact, fall_back=fall_back)
        problem = f"The checkpoint {path} cannot be read: {_reason(error)}"
        if not fall_back or not others:
            raise ValueError(f"{problem} {_advice(others)}") from error
        before, _ = others[0]
        warnings.warn(f"{problem} Falling back to step {before}.", stacklevel=2)
        return restore(directory, like, before, params=params, exact=exact, fall_back=True)
    return convert_precision(state, like, params=params, exact=exact)


def read(directory: Any, step: int | None = None) -> Any:
    """What was saved last, or at one step, as it was saved: dicts and lists of NumPy arrays.

    This is to look at a checkpoint without the program that saved it. To train on, use `restore`.

    Args:
      directory: as `restore` takes it.
      step: which step; None for the latest.

    Returns:
      The state.

    Raises:
      FileNotFoundError: if there is no checkpoint in `directory`, or none of that step.
      ValueError: if `directory` is not local, or the checkpoint cannot be read.

    Example:
      >>> import tempfile
      >>> import jax.numpy as jnp, orbax.checkpoint as ocp
      >>> from jmp_kit import checkpoint
      >>> with tempfile.TemporaryDirectory() as directory:
      ...     with ocp.CheckpointManager(directory) as manager:
      ...         saved = manager.save(7, args=ocp.args.StandardSave({"w": jnp.ones(2)}))
      ...     checkpoint.read(directory)
      {'w': array([1., 1.], dtype=float32)}
    """
    (found, path), *others = _checkpoints(directory, step).items()
    try:
        return _read(path, {})
    except Exception as error:
        if isinstance(error, MemoryError):
            raise
        if _is_replaced(directory, step, found):
            return read(directory)
        before = f": pass step={others[0][0]} for the one before it" if others else ""
        raise ValueError(
            f"The checkpoint {path} cannot be read: {_reason(error)} It is damaged, or no "
            f"checkpoint of Orbax's{before}."
        ) from error


def _checkpoints(directory: Any, step: int | None) -> dict[int | None, pathlib.Path]:
    """The checkpoint of a step, or the latest, and those before it; or the directory itself."""
    if "://" in str(directory):
        raise ValueError(
            f"The directory is {directory}, but restore reads local ones: copy the checkpoint, or "
            "read it with Orbax and pass what it gave to jmp_kit.convert_precision."
        )
    directory = pathlib.Path(directory).absolute()
    if step is None and _is_checkpoint(directory):
        return {None: directory}
    steps = {}
    for path in directory.iterdir() if directory.is_dir() else ():
        number = re.search(r"(?:^|_)(\d+)$", path.name)
        # A folder of another kind may end in a number too.
        if number and (path.name.isdigit() or _is_checkpoint(path)):
            steps[int(number[1])] = path
    if not steps or (step is not None and step not in steps):
        listed = (
            f"its steps are {', '.join(map(str, sorted(steps)))}" if steps else "it has no steps"
        )
        wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise FileNotFoundError(
            f"There is {wanted} in {directory}: {listed}. Pass the directory that was given to "
            "orbax.checkpoint.CheckpointManager, and wait for a save in the background to finish: "
            "manager.wait_until_finished()."
        )
    return {n: steps[n] for n in sorted(steps, reverse=True) if step is None or n <= step}


def _is_replaced(directory: Any, step: int | None, found: int | None) -> bool:
    """Whether a run that goes on has saved a later one since, and may have deleted what was found.

    It does so while others read.
    """
    return step is None and found is not None and found not in (*_checkpoints(directory, None),)[:1]


def _is_item(path: pathlib.Path) -> bool:
    return (path / "_METADATA").exists()


def _is_checkpoint(path: pathlib.Path) -> bool:
    return _is_item(path) or (path / "_CHECKPOINT_METADATA").exists()


def _item_in(path: pathlib.Path) -> pathlib.Path:
    """The folder of the pytree in a checkpoint, which may have several by name."""
    for item in (path, path / "default"):
        if _is_item(item):
            return item
    items = [item for item in sorted(path.iterdir()) if _is_item(item)]
    if len(items) == 1:
        return items[0]
    if items:
        raise ValueError(
            f"it holds several items, {', '.join(item.name for item in items)}: pass the folder "
            f"of the one that has the whole state, {items[0]} say"
        )
    raise ValueError(f"there is no _METADATA in it, nor in {path / 'default'}")


def _read(path: pathlib.Path, like: Any) -> Any:
    """What was saved, as dicts and lists, each array where `like` has its own."""
    item = _item_in(path)
    structure = item / "_METADATA"
    try:
        json.loads(structure.read_text())
    except ValueError as error:
        raise ValueError(f"{structure} is no JSON: {error}") from error
    there, _ = named(like)

    def how(name: Any, leaf: Any) -> Any:
        place: Any = there.get(name)
        sharding = chosen_sharding(place) if np.shape(place) == tuple(leaf.shape) else None
        if hasattr(place, "dtype") and jnp.issubdtype(place.dtype, jax.dtypes.prng_key):
            # NumPy has no arrays of these.
            sharding = chosen_sharding(place) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
        if sharding is None:
            return ocp.RestoreArgs(restore_type=np.ndarray)
        return ocp.ArrayRestoreArgs(sharding=sharding)

    # The handler itself, for a Checkpointer warns where a manager's item lies one folder down.
    handler, folder = ocp.PyTreeCheckpointHandler(), epath.Path(item)
    try:
        saved, treedef = named(handler.metadata(folder).tree)
        args = jax.tree.unflatten(treedef, itertools.starmap(how, saved.items()))
        return handler.restore(folder, args=ocp.args.PyTreeRestore(restore_args=args))
    finally:
        handler.close()


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split()).partition(" [tensorstore_spec")[0]
    return f"{type(error).__name__}: {text[:600].rstrip('.')}."


def _advice(others: list[tuple[int | None, pathlib.Path]]) -> str:
    if others:
        return (
            "It is damaged, or no checkpoint of Orbax's. Pass fall_back=True to go on with the "
            f"newest good one before it, or step={others[0][0]} to choose."
        )
    return (
        "It is damaged, or no checkpoint of Orbax's, and there is none before it. Start again in "
        "another directory, or copy it from a backup."
    )
