"""How the tests' programs are compiled. Thousands of small ones: compiling is most of what they do.

XLA's optimisations are a user's; LLVM's are left out, but for programs that run for long. What took
a while to compile is kept for the next run.
"""

import pathlib

QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
OPTIMISED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}

CACHE = {
    "JAX_COMPILATION_CACHE_DIR": str(pathlib.Path(__file__).parents[1] / ".cache" / "xla"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
}
