"""Will half precision be faster for me, and is it accurate? Asked of a user's own function."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_kit._grad import value_and_grad
from jmp_kit._loss_scale import LossScale, NoOpLossScale, StaticLossScale
from jmp_kit._policy import Policy, as_policy
from jmp_kit._tree import path_names
from jmp_kit.autocast import autocast
from jmp_kit.numerics._exponents import recommend_loss_scale
from jmp_kit.numerics._progress import line
from jmp_kit.numerics._tables import table

POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")


@dataclasses.dataclass(frozen=True)
class Compared:
    """What the loss and the gradient cost under one policy, and how far off they are."""

    policy: str
    step_ms: float  # median of a compiled loss and gradient
    memory_mib: float | None  # arguments and temporaries, where the compiler tells
    loss: float
    loss_error: float  # relative
    gradient_error: float  # |g - g32| / |g32|
    worst_error: float  # the same of the leaf where it is largest
    worst_leaf: str
    cosine: float  # of the angle between the gradients
    loss_scale: float


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A row for each policy, float32 with the highest precision first. Print it for a table."""

    device: str
    rows: tuple[Compared, ...]

    def __str__(self) -> str:
        head = ("policy", "ms", "faster", "MiB", "loss error", "gradient error", "cosine", "worst")
        first = self.rows[0]
        cells = [
            (
                row.policy,
                f"{row.step_ms:.3g}",
                f"{first.step_ms / row.step_ms:.2f}×",
                mebibytes(row.memory_mib),
                f"{row.loss_error:.1e}",
                f"{row.gradient_error:.1e}",
                f"{row.cosine:.6f}",
                f"{row.worst_error:.1e} {row.worst_leaf}",
            )
            for row in self.rows
        ]
        return f"on {self.device}\n{table([head, *cells])}"

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return dataclasses.asdict(self)


def compare(
    loss_fn: Callable[..., Any],
    params: Any,
    *batch: Any,
    policies: Sequence[Policy | str] = POLICIES,
    steps: int = 10,
    on_progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Step time, memory and accuracy of a loss and its gradient under each policy, on this device.

        error = |g - g32| / |g32|        g32: float32 products in the highest precision

    Each policy is compiled once, and then they take turns, so that what else the machine does
    meets all of them. float16 gets the loss scale that `recommend_loss_scale` gives.

    Args:
      loss_fn: (params, *batch) -> a scalar; written in float32.
      params, batch: what it is called with.
      policies: what `autocast` takes.
      steps: how often each is timed.
      on_progress: told what is being done; by default a line on a terminal's standard error.

    Returns:
      A `Comparison`, which prints as a table.

    Raises:
      ValueError: if `steps` is not positive, or a policy cannot be read.

    Example:
      >>> import jax.numpy as jnp, jmp_kit
      >>> def loss_fn(params, x):
      ...     return jnp.mean(jnp.tanh(x @ params["w"]) ** 2)
      >>> found = jmp_kit.numerics.compare(loss_fn, {"w": jnp.eye(8)}, jnp.ones((4, 8)), steps=1)
      >>> [row.policy for row in found.rows]
      ['float32, highest', 'float32', 'mixed_bfloat16', 'mixed_float16']
      >>> found.rows[2].gradient_error < 0.02
      True
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}, but a median needs at least 1.")
    read = {str(policy): as_policy(policy) for policy in policies}
    tell = on_progress or line
    tell("compiling float32, highest")
    with jax.default_matmul_precision("highest"):
        programs = {HIGHEST: _compiled(loss_fn, "float32", NoOpLossScale(), params, batch)}
    loss, grads = programs[HIGHEST](params, *batch)
    scales: dict[str, LossScale] = {HIGHEST: NoOpLossScale()}
    for name, policy in read.items():
        tell(f"compiling {name}")
        scales[name] = NoOpLossScale()
        if policy.compute_dtype == jnp.float16:
            scales[name] = StaticLossScale(recommend_loss_scale(grads, jnp.float16))
        programs[name] = _compiled(loss_fn, policy, scales[name], params, batch)
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for i in range(steps + 1):  # the first warms up
        tell(f"timing, {i} of {steps}")
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(params, *batch))
            seconds[name].append(time.perf_counter() - start)
    rows = []
    for name, program in programs.items():
        memory = program.memory_analysis()
        needed = memory and memory.argument_size_in_bytes + memory.temp_size_in_bytes
        found_loss, found = program(params, *batch)
        error, worst, leaf, cosine = _errors(found, grads)
        rows.append(
            Compared(
                policy=name,
                step_ms=1e3 * statistics.median(seconds[name][1:]),
                memory_mib=None if needed is None else needed / 2**20,
                loss=float(found_loss),
                loss_error=abs(float(found_loss) - float(loss)) / max(abs(float(loss)), 1e-30),
                gradient_error=error,
                worst_error=worst,
                worst_leaf=leaf,
                cosine=cosine,
                loss_scale=float(scales[name].loss_scale),
            )
        )
    tell("")
    return Comparison(jax.devices()[0].device_kind, tuple(rows))


HIGHEST = "float32, highest"


def mebibytes(number: float | None) -> str:
    """In as many digits as tell something."""
    if number is None:
        return "unknown"
    return f"{number:,.1f}" if number >= 10 else f"{number:.2g}"


def _compiled(
    loss_fn: Callable[..., Any], policy: Any, loss_scale: LossScale, params: Any, batch: Any
) -> Any:
    run = value_and_grad(autocast(loss_fn, policy), loss_scale)
    return jax.jit(run).lower(params, *batch).compile()


def _errors(found: Any, grads: Any) -> tuple[float, float, str, float]:
    """Of a gradient: relative, of the worst leaf and which that is, and the cosine."""
    leaves = {
        "/".join(path_names(path)): (np.asarray(a, np.float64), np.asarray(b, np.float64))
        for (path, a), b in zip(
            jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(grads), strict=True
        )
    }
    each = {name: _distance([a], [b]) for name, (a, b) in leaves.items()}
    worst = max(each, key=lambda name: each[name])
    all_a, all_b = ([pair[i] for pair in leaves.values()] for i in (0, 1))
    inner = sum(float(np.vdot(a, b)) for a, b in leaves.values())
    cosine = inner / max(_norm(all_a) * _norm(all_b), 1e-300)
    return _distance(all_a, all_b), each[worst], worst, cosine


def _norm(arrays: Sequence[np.ndarray]) -> float:
    return float(np.sqrt(sum(float(np.vdot(a, a)) for a in arrays)))


def _distance(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> float:
    distance = _norm([x - y for x, y in zip(a, b, strict=True)])
    return distance / max(_norm(b), 1e-300) if distance else 0.0
