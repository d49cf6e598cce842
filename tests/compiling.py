"""How the tests' programs are compiled. Thousands of small ones: compiling is most of what they do.

XLA's optimisations are a user's; LLVM's are left out, but for programs that run for long.
"""

QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
OPTIMISED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
