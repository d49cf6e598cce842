"""What autocast makes of a function: what it stores in half, what is state, and in which parts."""

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jax.typing import DTypeLike

from jmp_kit._dtypes import FLOAT8
from jmp_kit._policy import Policy, policy_to_compute
from jmp_kit.casting import Stored, plans_of
from jmp_kit.numerics._planned import PlannedPart, parts_of
from jmp_kit.numerics._sources import source_of
from jmp_kit.numerics._tables import Cells, count, of_layers, pass_of, table
from jmp_kit.programs import is_backward, names_in, stack_of


@dataclasses.dataclass(frozen=True)
class StoredValue:
    """A value on its way from one product to the next."""

    source: str  # "model.py:41", the user's line; empty if it is not known
    path: str  # name scopes, in Flax linen the module
    primitive: str  # that makes it, or the loop that carries it
    shape: tuple[int, ...]
    dtype: str  # that it is stored in
    why: str  # "made anew", "state", …
    nbytes: int
    backward: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """A row for each part of a function, and for each value that was decided about. Print it."""

    values: tuple[StoredValue, ...]
    parts: tuple[PlannedPart, ...]

    @property
    def state(self) -> tuple[StoredValue, ...]:
        """What stays float32, for it is updated, or something that is updated is made of it."""
        return tuple(value for value in self.values if value.dtype == "float32")

    @property
    def kept(self) -> int:
        """The bytes that the forward pass leaves in memory for the backward pass."""
        return sum(part.kept for part in self.parts)

    def __str__(self) -> str:
        whole = sum(value.nbytes for value in self.state)
        half = sum(value.nbytes for value in self.values) - whole
        stored = (
            f"{len(self.values) - len(self.state)} values stored in half, {count(half)}B; "
            f"{len(self.state)} in float32, {count(whole)}B\n{table(self._value_cells())}"
        )
        if not any(part.products for part in self.parts):
            return stored
        again = sum(part.again for part in self.parts)
        return (
            f"{stored}\n{len(self.parts)} parts; {count(self.kept)}B kept for a backward pass, "
            f"{again} operations computed again\n{table(self._part_cells())}"
        )

    def _value_cells(self) -> list[Cells]:
        rows = ((_told_of_value(value), value.path, value) for value in self.values)
        cells: list[Cells] = [
            ("stored in", "bytes", "times", "why", "shape", "operation", "line", "path")
        ]
        for (dtype, *told), path, values in of_layers(rows):
            nbytes = f"{count(sum(value.nbytes for value in values))}B"
            cells.append((dtype, nbytes, str(len(values)), *told, path))
        return cells

    def _part_cells(self) -> list[Cells]:
        rows = ((_told_of_part(part), part.path, part) for part in self.parts)
        cells: list[Cells] = [
            ("pass", "times", "products", "kernels before", "kept", "again", "line", "path")
        ]
        for (which, products, passes, source), path, parts in of_layers(rows):
            kept, again = sum(p.kept for p in parts), sum(p.again for p in parts)
            numbers = f"{count(kept)}B" if kept else "", str(again or "")
            cells.append((which, str(len(parts)), products, passes, *numbers, source, path))
        return cells

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return dataclasses.asdict(self)


def _told_of_value(value: StoredValue) -> Cells:
    shape = "×".join(map(str, value.shape))
    operation = f"{value.primitive}{', backward' if value.backward else ''}"
    return value.dtype, value.why, shape, operation, value.source


def _told_of_part(part: PlannedPart) -> Cells:
    names = collections.Counter(part.products).items()
    products = ", ".join(f"{n} × {name}" if n > 1 else name for name, n in names)
    return pass_of(part.backward), products, str(part.passes), part.source


def plan(
    fun: Callable[..., Any],
    policy: Policy | str | DTypeLike,
    *args: Any,
    rules: Mapping[str, Policy | str | DTypeLike] | None = None,
    recompute: bool | float | str = True,
    **kwargs: Any,
) -> Plan:
    """What `autocast(fun, policy)` stores in half, keeps for a backward pass, and computes again.

    Values that are made anew are stored in half between two products. Values that are updated are
    state: weights in an optimizer, positions in a solver. They stay float32, and products take them
    in half. A value has no row if it stays as it is: if it depends on no product, if no product
    follows it, or if it is small beside others.

    A part is a run of operations and the products after it. If the function holds its backward
    pass, as a train step or a gradient does, then a part says what the backward pass takes from
    memory and what it computes again. Else it says what JAX's backward pass would take.

    Args:
      fun: a function that autocast has not been applied to.
      policy: a policy, as `autocast` takes it.
      *args: its arguments, or `jax.ShapeDtypeStruct`s: nothing is computed.
      rules, recompute: as `autocast` takes them.
      **kwargs: further arguments.

    Returns:
      A `Plan`, which prints as a table.

    Raises:
      ValueError: if `policy`, `rules` or `recompute` cannot be read, or a rule matches nothing.

    Example:
      >>> import jax, jax.numpy as jnp, jmp_kit
      >>> def solve(w, y):  # 10 steps of Euler's
      ...     return jax.lax.fori_loop(0, 10, lambda _, y: y + 0.1 * (y @ w), y)
      >>> found = jmp_kit.numerics.plan(solve, "mixed_bfloat16", jnp.eye(2), jnp.ones((4, 2)))
      >>> [(value.shape, value.why, value.dtype) for value in found.values][0]
      ((4, 2), 'carried by a loop, state', 'float32')
    """
    plans = plans_of(fun, policy, *args, rules=rules, recompute=recompute, **kwargs)
    in_float8 = policy_to_compute(policy).compute_dtype == FLOAT8
    return Plan(
        values=tuple(_row(stored) for made in plans for stored in made.every_stored()),
        parts=tuple(part for made in plans for part in parts_of(made, in_float8)),
    )


def _row(stored: Stored) -> StoredValue:
    aval, stack = stored.var.aval, stack_of(stored.eqn, stored.calls)
    return StoredValue(
        source=str(source_of(stored.eqn, stored.calls)),
        path=names_in(stack),
        primitive=stored.eqn.primitive.name,
        shape=tuple(aval.shape),
        dtype=str(stored.dtype),
        why=stored.why,
        nbytes=aval.size * stored.dtype.itemsize,
        backward=is_backward(stack),
    )
