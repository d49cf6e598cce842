"""What `mixed_precision` is given, looked at before anything is lost."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp_kit._tree import is_array
from jmp_kit._warn import warn
from jmp_kit.optim._master import is_narrow


def check_parameters(params: Any, master: str) -> None:
    """Raise where a parameter's precision cannot be kept in this way, or in any."""
    if isinstance(params, optax.LookaheadParams):
        raise ValueError(
            "These are optax.LookaheadParams, two sets of parameters of which only the fast ones "
            "have gradients. Wrap the optimizer of these: optax.lookahead(mixed_precision("
            "optax.adamw(3e-4)), 5, 0.5)."
        )
    for path, param in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path) or "given"
        if is_array(param, jnp.floating) and jnp.finfo(param.dtype).bits < 16:
            raise ValueError(
                f"The parameter {name} is {param.dtype}, to which no update is large enough to be "
                "added, and of which no master is kept. Keep parameters in bfloat16, 2 bytes with "
                'master="stochastic", and cast them to 8 bits where they are multiplied.'
            )
        if master == "remainder" and is_narrow(param) and param.dtype != jnp.bfloat16:
            raise ValueError(
                f'master is "remainder", but the parameter {name} is {param.dtype}, whose bits are '
                "not the upper half of a float32's: use bfloat16 parameters, or "
                'master="float32" (6 bytes a parameter) or "kahan" (4).'
            )


def check_kept(params: Any, masters: Any, master: str) -> None:
    """Raise where what is kept is of other parameters than these."""

    def check(path: Any, param: Any, kept: Any) -> None:
        keeps = is_narrow(param) and master not in ("stochastic", "none")
        if keeps != (kept is not None) or (keeps and kept.shape != param.shape):
            now = f"{param.dtype}{list(param.shape)}"
            then = "nothing" if kept is None else f"{kept.dtype}{list(kept.shape)}"
            raise ValueError(
                f"This state was made for other parameters: {jax.tree_util.keystr(path) or 'one'} "
                f"is {now}, but what is kept of it is {then}. Cast first and then initialise: "
                "opt_state = optimizer.init(policy.cast_to_param(params)); a state of another "
                "precision goes through convert_precision."
            )

    jax.tree_util.tree_map_with_path(check, params, masters)


def not_a_state(state: Any) -> str:
    """What to say of a state that another optimizer made."""
    return (
        f"mixed_precision was given a state of the type {type(state).__name__}, which another "
        "optimizer made: it has no loss scale and no masters. Write opt_state = "
        "optimizer.init(params) with the optimizer that mixed_precision gave; a run that began "
        "without it goes on through convert_precision or jmp_kit.checkpoint.restore."
    )


def refuse_another_within(inner_state: Any, kind: type) -> None:
    """Raise where the inner optimizer is, or holds, a `mixed_precision` itself."""

    def is_one(node: Any) -> bool:
        return isinstance(node, kind)

    if any(map(is_one, jax.tree.leaves(inner_state, is_leaf=is_one))):
        raise ValueError(
            "mixed_precision wraps a mixed_precision, so there would be two loss scales and two "
            "masters, of which the outer ones are never right. Wrap the optimizer once."
        )


def check_around() -> None:
    """Raise where what wraps it would keep an overflow for good, or hide it from the loss scale.

    Only who is calling tells: an optax transformation does not see what is around it.
    """
    frame = inspect.currentframe()
    while frame:
        if frame.f_code is optax.MultiSteps.init.__code__:
            steps = frame.f_locals["self"]._every_k_schedule(np.int32(0))
            if not (isinstance(steps, int) and steps == 1):
                raise ValueError(_ACCUMULATION)
            warn(_ACCUMULATION)  # nothing is lost but by an overflow
        if frame.f_code is _APPLY_IF_FINITE:
            raise ValueError(
                "optax.apply_if_finite wraps mixed_precision, and puts its state back after a step "
                "that overflowed: the loss scale would never fall, and each step overflow again. "
                "Leave apply_if_finite out, for mixed_precision skips such steps itself, or put it "
                "inside: mixed_precision(optax.apply_if_finite(inner, n), loss_scale)."
            )
        frame = frame.f_back


_APPLY_IF_FINITE = optax.apply_if_finite(optax.identity(), 1).init.__code__

_ACCUMULATION = (
    "optax.MultiSteps wraps mixed_precision, so that one gradient that is not finite would stay in "
    "its accumulator, and no step would be taken any more. Write it the other way round: "
    "mixed_precision(optax.MultiSteps(inner, k), loss_scale) leaves that micro-batch out and goes "
    "on."
)
