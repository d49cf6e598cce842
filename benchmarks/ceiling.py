"""What can this device do at most: products a second, bytes a second?

Square matrices of random numbers, and a copy of 1 GiB in device memory. All else is to be quoted
as a share of these.
"""

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.measuring import matrix_rate, timed
from benchmarks.results import Column, Options, Row, number

# float32 on a GPU is TF32 unless JAX is told otherwise.
DTYPES: dict[str, tuple[Any, str | None]] = {
    "float32, highest": (jnp.float32, "highest"),
    "float32, default": (jnp.float32, None),
    "bfloat16": (jnp.bfloat16, None),
    "float16": (jnp.float16, None),
    "float8_e4m3fn": (jnp.float8_e4m3fn, None),
}

COLUMNS = [
    Column("what", lambda row: row["contender"]),
    Column("size", lambda row: f"{row['size']:,}"),
    Column("TFLOP/s", number("operations_per_s", ",.2f", 1e-12)),
    Column("GB/s", number("bytes_per_s", ",.1f", 1e-9)),
]


def run(options: Options) -> list[Row]:
    """Products of each dtype and size, then the copy."""
    rows: list[Row] = []
    for name, (dtype, precision) in DTYPES.items():
        for size in (64, 128) if options.tiny else (1024, 2048, 4096, 8192, 16384):
            if not options.takes(name):
                continue
            row: dict[str, Any] = {"contender": name, "size": size}
            try:
                rate = matrix_rate(size, dtype, precision=precision, repeats=options.steps)
                row["operations_per_s"] = rate
            except jax.errors.JaxRuntimeError as error:  # a device without this dtype
                row["failed"] = str(error).split("\n")[0][:200]
            rows.append(row)
    if options.takes("copy"):
        x = jnp.ones(2**16 if options.tiny else 2**28, jnp.float32)  # 1 GiB
        copy = jax.jit(jnp.negative)
        rate = 2 * x.nbytes / timed(copy, x, repeats=options.steps)
        rows.append({"contender": "copy", "size": x.nbytes, "bytes_per_s": rate})
    return rows
