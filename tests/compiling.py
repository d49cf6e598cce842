"""How the tests' programs are compiled. Thousands of small ones: compiling is most of what they do.

XLA's optimisations are a user's; LLVM's are left out, but for programs that run for long. What was
compiled is kept for the next run, the smallest too: most are single operations.
"""

import pathlib
from collections.abc import Container, Iterable
from typing import Any

import pytest

QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
OPTIMISED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}

CACHE = {
    "JAX_COMPILATION_CACHE_DIR": str(pathlib.Path(__file__).parents[1] / ".cache" / "xla"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    # Lines and names are part of what is looked for, so that they are those of the test.
    "JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY": "true",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
}


def quick_or_slow(cases: Iterable[Any], quick: Container[Any]) -> list[Any]:
    """Cases of a test, of which these show in `make test` what all show in `make test-all`."""
    return [pytest.param(c, marks=[] if c in quick else [pytest.mark.slow]) for c in cases]


# Both halves say much the same.
POLICIES = quick_or_slow(["mixed_bfloat16", "mixed_float16"], ["mixed_bfloat16"])
