"""Equations marked with the dtype they are to compute in.

A mark is a name scope. It travels with the program through jit, grad and vmap, and needs no state
of ours.
"""

import re
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

OURS = "jmp_kit_"
_MARK = f"{OURS}in_"
_TRANSFORM = re.compile(r"\w+\(|\)")  # jvp(…), transpose(jvp(…)), vmap(…)


def mark(dtype: np.dtype) -> str:
    """The name scope that marks what is to be computed in this dtype."""
    return f"{_MARK}{dtype}"


def marked(eqn: JaxprEqn, dtype: np.dtype) -> JaxprEqn:
    """The equation, marked."""
    stack = eqn.source_info.name_stack.extend(mark(dtype))
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))


def marked_dtype(eqn: JaxprEqn) -> np.dtype | None:
    """The dtype of the innermost mark around an equation; None if there is none."""
    _, found, name = str(eqn.source_info.name_stack).rpartition(_MARK)
    return jnp.dtype(re.split(r"\W", name)[0]) if found else None


def is_in_full_precision(eqn: JaxprEqn) -> bool:
    """Whether an equation runs as it was written."""
    dtype = marked_dtype(eqn)
    return dtype is not None and dtype.itemsize >= 4


def names_in(stack: str) -> str:
    """Of a stack of names ("jvp(Decoder)/lm_head"), those without transformations and marks."""
    names = _TRANSFORM.sub("", stack).split("/")
    return "/".join(name for name in names if name and not name.startswith(OURS))


def stack_of(eqn: JaxprEqn, calls: Sequence[JaxprEqn] = ()) -> str:
    """The names and transformations around an equation inside these calls."""
    return "/".join(filter(None, (str(e.source_info.name_stack) for e in (*calls, eqn))))


def called(eqn: JaxprEqn, call: JaxprEqn) -> JaxprEqn:
    """The equation with the names and transformations around this call before its own."""
    stack = call.source_info.name_stack + eqn.source_info.name_stack
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))


def is_backward(stack: str) -> bool:
    """Whether an operation of these names belongs to a backward pass."""
    return "transpose(" in stack


def is_rematerialised(eqn: JaxprEqn) -> bool:
    """Whether it is of a forward pass that `jax.checkpoint` computes again."""
    return "rematted_computation" in stack_of(eqn)


def as_backward(eqn: JaxprEqn) -> JaxprEqn:
    """The equation, named as one of a backward pass."""
    stack = eqn.source_info.name_stack.extend("transpose()")
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))


def is_differentiated(stack: str) -> bool:
    """Whether an operation of these names belongs to a forward or a backward pass."""
    return "jvp(" in stack or is_backward(stack)


def scope_of(eqn: JaxprEqn) -> str:
    """The names around an equation ("Decoder/lm_head")."""
    return names_in(str(eqn.source_info.name_stack))
