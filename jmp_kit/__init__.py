"""Mixed-precision training for JAX.

    loss_fn   = jmp_kit.autocast(loss_fn, "mixed_float16")              # compute in half
    optimizer = jmp_kit.mixed_precision(optax.adamw(3e-4),              # masters, skipped steps,
                                        jmp_kit.DynamicLossScale())     # and the loss scale
    ...
    loss, grads = jmp_kit.value_and_grad(loss_fn, jmp_kit.loss_scale_of(opt_state))(params, batch)

Compute: `autocast`, `full_precision`, `half_precision`, `PRODUCTS`.
Dtypes: `Policy`, `get_policy`, `half_dtype`, `cast_to_half`, `cast_to_full`.
Gradients: `value_and_grad`, `grad`, `all_finite`, `select_tree`.
Loss scales: `LossScale`, `DynamicLossScale`, `StaticLossScale`, `NoOpLossScale`.
Steps: `mixed_precision`, `MixedPrecisionState`, `loss_scale_of`, `metrics`, `raise_if_diverged`.
Runs: `master_params`, `convert_precision`, `state_shardings`, `gather_params`.
Rounding: `rounding`, `split_float32`, `join_float32`, `stochastic_round`.

Modules: `numerics` shows what runs in half and what it loses; `linen` and `nnx` apply a policy to
Flax models; `checkpoint` restores a run at another precision. The last three import Flax or Orbax
when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from jmp_kit import numerics, rounding
from jmp_kit._dtypes import half_dtype
from jmp_kit._gather import gather_params
from jmp_kit._grad import grad, value_and_grad
from jmp_kit._loss_scale import DynamicLossScale, LossScale, NoOpLossScale, StaticLossScale
from jmp_kit._policy import Policy, cast_to_full, cast_to_half, get_policy
from jmp_kit._tree import all_finite, select_tree
from jmp_kit._version import __version__
from jmp_kit.casting import autocast, full_precision, half_precision
from jmp_kit.optim import (
    MixedPrecisionState,
    convert_precision,
    loss_scale_of,
    master_params,
    metrics,
    mixed_precision,
    raise_if_diverged,
    state_shardings,
)
from jmp_kit.programs import PRODUCTS
from jmp_kit.rounding import join_float32, split_float32, stochastic_round

_ON_FIRST_USE = ("checkpoint", "linen", "nnx")

if TYPE_CHECKING:
    from jmp_kit import checkpoint, linen, nnx
else:  # or a type checker takes any name

    def __getattr__(name: str) -> Any:
        if name in _ON_FIRST_USE:
            return importlib.import_module(f"jmp_kit.{name}")
        raise AttributeError(f"module 'jmp_kit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


__all__ = [
    "PRODUCTS",
    "DynamicLossScale",
    "LossScale",
    "MixedPrecisionState",
    "NoOpLossScale",
    "Policy",
    "StaticLossScale",
    "__version__",
    "all_finite",
    "autocast",
    "cast_to_full",
    "cast_to_half",
    "checkpoint",
    "convert_precision",
    "full_precision",
    "gather_params",
    "get_policy",
    "grad",
    "half_dtype",
    "half_precision",
    "join_float32",
    "linen",
    "loss_scale_of",
    "master_params",
    "metrics",
    "mixed_precision",
    "nnx",
    "numerics",
    "raise_if_diverged",
    "rounding",
    "select_tree",
    "split_float32",
    "state_shardings",
    "stochastic_round",
    "value_and_grad",
]
