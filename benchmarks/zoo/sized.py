"""What a model of the zoo is: a task, the shapes that it is compiled for, and its sizes."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.training import Task


@dataclasses.dataclass(frozen=True)
class Model:
    """A task, and the shapes of its inputs and labels."""

    task: Task
    batch: tuple[Any, Any]


@dataclasses.dataclass(frozen=True)
class Sized:
    """A model with what it has in full size, and with what makes it a toy."""

    make: Callable[..., Model]
    full: dict[str, Any]
    toy: dict[str, Any]

    def at(self, tiny: bool = False, **others: Any) -> Model:
        """The model, in other sizes than these if there are any."""
        return self.make(**self.full | (self.toy if tiny else {}) | others)


def model(module: Callable[[Any], Any], inputs: Any, labels: Any, **others: Any) -> Model:
    """With AdamW and a cross entropy, if no others."""
    example = jax.tree.map(lambda x: jnp.zeros((1, *x.shape[1:]), x.dtype), inputs)
    task = Task(module, example, **{"optimizer": optax.adamw(3e-4)} | others)
    return Model(task, (inputs, labels))


def integers(*shape: int) -> jax.ShapeDtypeStruct:
    """Words or classes."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    """Images, times or noise."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)
