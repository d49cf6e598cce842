"""Will half precision be faster for me, and is it accurate? Asked of a user's own function."""

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmp_kit._grad import value_and_grad
from jmp_kit._loss_scale import LossScale, NoOpLossScale, StaticLossScale
from jmp_kit._policy import Policy, policy_to_compute
from jmp_kit._tree import is_array, path_names
from jmp_kit.casting import autocast
from jmp_kit.numerics._exponents import recommend_loss_scale
from jmp_kit.numerics._progress import line
from jmp_kit.numerics._tables import table
from jmp_kit.programs import eval_shape, marked_dtype, products_in, traced

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
        lost = [row.policy for row in self.rows if not math.isfinite(row.gradient_error)]
        notes = [
            f"the gradient in {policy} is not finite: locate_nonfinite says where, of the loss "
            "under autocast"
            for policy in lost
        ]
        return "\n".join([f"on {self.device}", table([head, *cells]), *notes])

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return dataclasses.asdict(self)


def compare(
    loss_fn: Callable[..., Any],
    params: Any,
    *batch: Any,
    policies: Policy | str | Sequence[Policy | str | DTypeLike] = POLICIES,
    steps: int = 10,
    on_progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Step time, memory and accuracy of a loss and its gradient under each policy, on this device.

        error = |g - g32| / |g32|        g32: float32 products in the highest precision

    Each policy is compiled once, and then they take turns, so that what else the machine does
    meets all of them. float16 gets the loss scale that `recommend_loss_scale` gives.

    Args:
      loss_fn: (params, *batch) -> a scalar; written in float32.
      params, batch: what it is called with. What is no array (a flag) is constant.
      policies: what `autocast` takes, one or several.
      steps: how often each is timed.
      on_progress: told what is being done; by default a line on a terminal's standard error.

    Returns:
      A `Comparison`, which prints as a table.

    Raises:
      ValueError: if `steps` is not positive, a policy cannot be read, the loss is under `autocast`
        already, there are no parameters, or the gradient is not finite in float32.
      TypeError: if `loss_fn` gives something else than a scalar.

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
    several = [policies] if isinstance(policies, str | Policy) else policies
    read = {_name(policy): policy_to_compute(policy) for policy in several}
    tell = on_progress or line
    _check_loss(loss_fn, params, batch)
    loss_of, variables, rest = _on_arrays(loss_fn, params, batch)
    tell("compiling float32, highest")
    with jax.default_matmul_precision("highest"):
        programs = {HIGHEST: _compiled(loss_of, "float32", NoOpLossScale(), variables, rest)}
    loss, grads = programs[HIGHEST](variables, rest)
    _check_finite(loss, grads)
    scales: dict[str, LossScale] = {HIGHEST: NoOpLossScale()}
    for name, policy in read.items():
        tell(f"compiling {name}")
        scales[name] = NoOpLossScale()
        if policy.compute_dtype == jnp.float16:
            with contextlib.suppress(ValueError):  # it has none: the row shows what comes of it
                scales[name] = StaticLossScale(recommend_loss_scale(grads, jnp.float16))
        programs[name] = _compiled(loss_of, policy, scales[name], variables, rest)
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for i in range(steps + 1):  # the first warms up
        tell(f"timing, {i} of {steps}")
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(variables, rest))
            seconds[name].append(time.perf_counter() - start)
    rows = []
    for name, program in programs.items():
        memory = program.memory_analysis()
        needed = memory and memory.argument_size_in_bytes + memory.temp_size_in_bytes
        found_loss, found = program(variables, rest)
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


def _name(policy: Policy | str | DTypeLike) -> str:
    return str(policy if isinstance(policy, str | Policy) else np.dtype(policy))


def mebibytes(number: float | None) -> str:
    """In as many digits as tell something."""
    if number is None:
        return "unknown"
    return f"{number:,.1f}" if number >= 10 else f"{number:.2g}"


def _compiled(
    loss_of: Callable[..., Any], policy: Any, loss_scale: LossScale, variables: Any, rest: Any
) -> Any:
    run = value_and_grad(autocast(loss_of, policy), loss_scale)
    return jax.jit(run).lower(variables, rest).compile()


def _on_arrays(
    loss_fn: Callable[..., Any], params: Any, batch: Any
) -> tuple[Callable[..., Any], dict[str, Any], dict[int, Any]]:
    """The loss of its parameters by path and of other arrays; what is no array stays."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path((params, batch))
    paths = {
        i: path[1:]
        for i, (path, x) in enumerate(leaves)
        if path[0].idx == 0 and is_array(x, jnp.inexact)
    }
    names = {i: "/".join(path_names(path)) for i, path in paths.items()}
    if len({*names.values()}) < len(names):  # a key may have a slash in it
        names = {i: jax.tree_util.keystr(path) for i, path in paths.items()}
    rest = {i: x for i, (_, x) in enumerate(leaves) if i not in names and is_array(x)}
    if not names:
        raise ValueError(
            f"The parameters, a {type(params).__name__}, hold no floating-point array, so there "
            "is no gradient to compare: write compare(loss_fn, params, *batch)."
        )

    def loss_of(variables: dict[str, Any], rest: dict[int, Any]) -> Any:
        filled = {**rest, **{i: variables[name] for i, name in names.items()}}
        values = [filled.get(i, x) for i, (_, x) in enumerate(leaves)]
        params, batch = jax.tree.unflatten(treedef, values)
        return loss_fn(params, *batch)

    return loss_of, {name: leaves[i][1] for i, name in names.items()}, rest


def _check_loss(loss_fn: Callable[..., Any], params: Any, batch: Any) -> None:
    jaxpr, paths = traced(loss_fn, params, *batch)
    found = eval_shape(loss_fn, params, *batch)
    shape = getattr(found, "shape", () if isinstance(found, int | float) else None)
    if shape != ():
        what = f"{found.dtype}{list(shape)}" if shape else f"a {type(found).__name__}"
        raise TypeError(
            f"compare takes a loss, (params, *batch) -> a scalar, but this function gives {what}. "
            "Pass the loss function itself and not a train step; of a loss with something beside "
            "it, lambda params, *batch: loss_fn(params, *batch)[0]."
        )
    for product in products_in(jaxpr, paths):
        dtype = marked_dtype(product.eqn)
        if dtype is not None and dtype.itemsize == 2:
            raise ValueError(
                f"The loss is under autocast already: it multiplies in {dtype}, whatever the "
                "policy, so that all rows would be the same. Pass the function as it is written, "
                "in float32; under jit, its __wrapped__."
            )


def _check_finite(loss: Any, grads: dict[str, Any]) -> None:
    bad = [name for name, grad in grads.items() if not np.isfinite(np.asarray(grad)).all()]
    if bad or not np.isfinite(float(loss)):
        names = ", ".join(name or "params" for name in bad[:4])  # one array has no name
        where = f"the gradient of {names}" if bad else "the loss"
        raise ValueError(
            f"In float32 {where} is not finite, so there is nothing to compare with: "
            "numerics.locate_nonfinite(jax.grad(loss_fn), params, *batch) says where it comes from."
        )


def _errors(found: dict[str, Any], grads: dict[str, Any]) -> tuple[float, float, str, float]:
    """Of a gradient: relative, of the worst leaf and which that is, and the cosine."""
    leaves = {name: (_in_double(found[name]), _in_double(grad)) for name, grad in grads.items()}
    each = {name: _distance([a], [b]) for name, (a, b) in leaves.items()}
    worst = max(each, key=lambda name: math.inf if math.isnan(each[name]) else each[name])
    all_a, all_b = ([pair[i] for pair in leaves.values()] for i in (0, 1))
    inner = sum(float(np.vdot(a, b).real) for a, b in leaves.values())
    error = _distance(all_a, all_b)
    cosine = inner / max(_norm(all_a) * _norm(all_b), 1e-300) if error else 1.0
    return error, each[worst], worst, cosine


def _in_double(x: Any) -> np.ndarray:
    return np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64)


def _norm(arrays: Sequence[np.ndarray]) -> float:
    return float(np.sqrt(sum(float(np.vdot(a, a).real) for a in arrays)))


def _distance(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> float:
    distance = _norm([x - y for x, y in zip(a, b, strict=True)])
    return distance / max(_norm(b), 1e-300) if distance else 0.0
