"""What this machine computes in half, how fast, and the policy to start with."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jmp_kit._dtypes import FLOAT8
from jmp_kit.numerics._audit import audit
from jmp_kit.numerics._progress import line
from jmp_kit.numerics._tables import table

_HIGHEST = "float32, highest"
_DTYPES = (_HIGHEST, "float32", "bfloat16", "float16", FLOAT8.name)
_LARGEST = 8192  # rows of a matrix; 1.1 TFLOP
_WORTH = 1.2  # times as fast is worth a change
_SHORTENED = 1.5  # times as fast is more than two runs of the same product differ by


@dataclasses.dataclass(frozen=True)
class Rate:
    """How fast matrices of a dtype are multiplied."""

    dtype: str
    computed_in: str  # the dtype of the operands in the compiled program
    tflops: float  # 1e12 operations a second: the best of several

    @property
    def is_native(self) -> bool:
        """Whether the compiler leaves the operands in this dtype."""
        return self.dtype.startswith(self.computed_in)


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What `doctor` found. Print it for a report."""

    jax: str  # its version
    backend: str
    devices: tuple[str, ...]
    size: int  # rows and columns of the matrices that were multiplied
    rates: tuple[Rate, ...]
    policy: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        kinds = {kind: self.devices.count(kind) for kind in self.devices}
        devices = ", ".join(f"{n} × {kind}" for kind, n in kinds.items())
        exact = self.rates[0].tflops
        rows = [("dtype", "computed in", "TFLOP/s", "of float32, highest")]
        for rate in self.rates:
            shown = (f"{rate.tflops:.3g}", f"{rate.tflops / exact:.2f}×")
            rows.append((rate.dtype, rate.computed_in, *shown))
        return "\n".join(
            [
                f"JAX {self.jax} on {self.backend}: {devices}",
                f"products of {self.size} × {self.size} matrices:",
                table(rows),
                f"policy to start with: {self.policy}",
                *(f"- {reason}" for reason in self.reasons),
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        rates = [{**dataclasses.asdict(r), "is_native": r.is_native} for r in self.rates]
        return {**dataclasses.asdict(self), "rates": rates}


def doctor(seconds: float = 0.5, on_progress: Callable[[str], None] | None = None) -> Diagnosis:
    """The devices, the rate of matrix products in each dtype, and which policy follows from it.

        rate = 2 n^3 / time        n: doubled from 256 until float32 takes 20 ms, at most 8192

    Args:
      seconds: for each of the dtypes, at most; every one is timed three times at least.
      on_progress: told what is being done; by default a line on a terminal's standard error.

    Returns:
      A `Diagnosis`, which prints as a report.

    Raises:
      ValueError: if `seconds` is not positive and finite.

    Example:
      >>> import jmp_kit
      >>> found = jmp_kit.numerics.doctor(seconds=0.01)
      >>> [rate.dtype for rate in found.rates]
      ['float32, highest', 'float32', 'bfloat16', 'float16', 'float8_e4m3fn']
      >>> found.policy in ("float32", "mixed_bfloat16", "mixed_float16")
      True
    """
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds is {seconds}, but measuring takes some, and ends: write 0.5.")
    tell = on_progress or line
    size = 256
    while size < _LARGEST and _best_time(_compiled("float32", size)[0], 0) < 0.02:
        tell(f"choosing a size: {size}")
        size *= 2
    rates = []
    for dtype in _DTYPES:
        tell(f"multiplying {size} × {size} matrices in {dtype}")
        run, computed_in = _compiled(dtype, size)
        rates.append(Rate(dtype, computed_in, 2e-12 * size**3 / _best_time(run, seconds)))
    tell("")
    policy, reasons = recommend(rates)
    devices = tuple(device.device_kind for device in jax.devices())
    backend = jax.default_backend()
    return Diagnosis(jax.__version__, backend, devices, size, tuple(rates), policy, reasons)


def recommend(rates: Sequence[Rate]) -> tuple[str, tuple[str, ...]]:
    """The policy that these rates speak for, and why."""
    rate = {r.dtype: r for r in rates}
    full, bf16, f16 = rate["float32"], rate["bfloat16"], rate["float16"]
    reasons = []
    if full.tflops > _SHORTENED * rate[_HIGHEST].tflops:
        reasons.append(
            f"float32 products are shortened here (TF32): {full.tflops / rate[_HIGHEST].tflops:.1f}"
            " times as fast as exact ones. Compare half precision with both."
        )
    faster = bf16.tflops / full.tflops
    if faster >= _WORTH and bf16.tflops * _WORTH >= f16.tflops:
        reasons.append(
            f"bfloat16 multiplies {faster:.1f} times as fast as float32, and has its range: no "
            "loss scale is needed."
        )
        eight = rate.get(FLOAT8.name)
        if eight and eight.is_native and eight.tflops >= _WORTH * bf16.tflops:
            reasons.append(
                f"float8 multiplies {eight.tflops / bf16.tflops:.1f} times as fast as bfloat16: "
                'for models 2,048 wide or wider, compare "mixed_float8" with it.'
            )
        return "mixed_bfloat16", tuple(reasons)
    if f16.tflops >= _WORTH * full.tflops:
        reasons.append(
            f"float16 multiplies {f16.tflops / full.tflops:.1f} times as fast as float32, and "
            f"bfloat16 {faster:.1f} times. float16 needs a loss scale: DynamicLossScale()."
        )
        return "mixed_float16", tuple(reasons)
    reasons.append(
        f"Neither half dtype multiplies much faster here: bfloat16 {faster:.2f} and float16 "
        f"{f16.tflops / full.tflops:.2f} times as fast as float32. mixed_bfloat16 still stores "
        "activations in half the memory."
    )
    return "float32", tuple(reasons)


def _compiled(dtype: str, size: int) -> tuple[Callable[[], Any], str]:
    """A product to run, and the dtype that it is computed in."""
    key = jax.random.key(0)
    given = jnp.dtype(dtype.partition(",")[0])
    drawn = jnp.dtype(jnp.bfloat16) if given == FLOAT8 else given
    operand = jax.random.normal(key, (size, size), drawn).astype(given)
    product = functools.partial(jnp.matmul, preferred_element_type=drawn)
    with jax.default_matmul_precision("highest" if dtype == _HIGHEST else "default"):
        program = jax.jit(product).lower(operand, operand).compile()
    found = audit(program).products
    return lambda: program(operand, operand), found[0].lhs_dtype if found else "a library"


def _best_time(run: Callable[[], Any], seconds: float) -> float:
    """Of three runs at least; the first warms up."""
    end = time.perf_counter() + seconds
    times: list[float] = []
    jax.block_until_ready(run())
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - start)
    return min(times)
