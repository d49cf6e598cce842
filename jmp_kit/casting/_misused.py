"""Calls of `autocast` that cannot be what is meant, and what to write instead."""

import inspect
import sys
from typing import Any

from jax.typing import DTypeLike

from jmp_kit._policy import Policy, policy_to_compute

NO_CONTEXT = (
    "autocast is no context: what runs inside a with statement is run at once, and there is no "
    'program to rewrite. Write autocast(loss_fn, "mixed_bfloat16"), or @autocast("mixed_bfloat16") '
    "above the function."
)


def policy_alone(policy: Policy | str | DTypeLike) -> Policy:
    """The policy that `autocast` was given instead of a function."""
    try:
        return policy_to_compute(policy)
    except (TypeError, ValueError):
        if not callable(policy):
            raise
        name = getattr(policy, "__name__", repr(policy))
        raise TypeError(
            f'autocast was given {name} and no policy. Write @autocast("mixed_bfloat16") above the '
            f'function, or autocast({name}, "mixed_bfloat16").'
        ) from None


def check_function(fun: Any) -> None:
    """Raise where something else than a function is wrapped."""
    if inspect.isclass(fun):
        raise TypeError(
            f"autocast wraps a function, but {fun.__name__} is a class, whose call makes an "
            "object. Wrap the loss function that uses it, or put @autocast above its __call__."
        )
    for framework, what in (("linen", "model.init, model.apply"), ("nnx", "model")):
        kind = getattr(sys.modules.get(f"flax.{framework}"), "Module", None)
        if kind and isinstance(fun, kind):
            raise TypeError(
                f"autocast wraps a function, but got a {framework} module. Write model = "
                f"jmp_kit.{framework}.apply_policy(model, policy) and call {what} as before, or "
                "wrap the loss function that uses it."
            )
    if not callable(fun):
        raise TypeError(
            f"autocast wraps a function, but got {fun!r}. Write autocast(loss_fn, "
            '"mixed_bfloat16"), or @autocast("mixed_bfloat16") above the function.'
        )
