"""Ranks among equals, as of the words that go to one expert, first come, first served.

    one = one_hot(choice, n)                  [word, choice]
    rank = sum(cumsum(one, 0) · one, 1)       of each word, among those of the same choice

No two words have the same choice and the same rank. So what is computed of the two is another
number for each word, if it is another for each pair.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var

from jmp_kit.programs._axes import are_known
from jmp_kit.programs._jaxpr import Atom, is_var, shape_of, size_of

# What moves numbers, each to one place, in the same order.
MOVES = {"reshape", "squeeze", "expand_dims", "broadcast_in_dim", "copy", "convert_element_type"}

# Arrays up to this size are computed while a program is read, of 64 MiB, and as many pairs.
MOST = 2**24

Computes = Mapping[str, Callable[..., Any]]
Numbers = Callable[[Atom], np.ndarray | None]


class Ranked(NamedTuple):
    """Choices and what is made of ranks among equals: the numbers of every possible pair."""

    choices: Var
    choice: np.ndarray
    made: Var
    number: np.ndarray


class _Rows(NamedTuple):
    """What rows hold, one for each choice.

    Attributes:
      choices: the variable that says which column is that of the choice.
      chosen: the number there, for every pair of a choice and a rank.
      other: the number in the other columns; None if that is not known.
    """

    choices: Var | None
    chosen: np.ndarray
    other: np.ndarray | None


def ranked(eqns: Sequence[JaxprEqn], numbers: Numbers, computes: Computes) -> Iterator[Ranked]:
    """The choices in a program, and the first that is made of their ranks and not of rows.

    Args:
      numbers: what an array holds that is made of numbers in the program alone.
      computes: what some primitives compute, in NumPy.
    """
    maker = {v: e for e in eqns for v in e.outvars}
    known: dict[Var, _Rows] = {}
    for eqn in eqns:
        [v, *others] = eqn.outvars
        if others or not is_whole(v) or size_of(v) > MOST:
            continue
        if choices := _compared(eqn, maker, numbers):
            known[v] = _Rows(choices, np.ones(size_of(v), bool), np.zeros((), bool))
        elif all(not is_var(a) or a in known for a in eqn.invars):
            rows = [known[a] if is_var(a) else _everywhere(a.val) for a in eqn.invars]
            chosen = {row.choices for row in rows if row.choices}
            made = _made(eqn, rows, computes) if len(chosen) == 1 else None
            if made is not None and len(shape_of(v)) == 2:
                known[v] = made._replace(choices=chosen.pop())
            elif made is not None:
                words, columns = shape_of(eqn.invars[0])
                yield Ranked(chosen.pop(), np.repeat(np.arange(columns), words), v, made.chosen)


def is_whole(v: Var) -> bool:
    """Whether it is an array of integers, or of booleans, and its sizes are known."""
    dtype = getattr(v.aval, "dtype", None)
    is_exact = dtype is not None and any(jnp.issubdtype(dtype, d) for d in (jnp.integer, jnp.bool_))
    return is_exact and are_known(shape_of(v))


def _everywhere(number: Any) -> _Rows:
    return _Rows(None, np.asarray(number), np.asarray(number))


def _made(eqn: JaxprEqn, rows: Sequence[_Rows], computes: Computes) -> _Rows | None:
    """What an equation makes of rows; None if that is not known."""
    name, [first, *_], dtype = eqn.primitive.name, rows, eqn.outvars[0].aval.dtype
    is_nothing = [row.other is not None and not row.other.any() for row in rows]
    shape = shape_of(eqn.invars[0])
    if name == "reduce_sum":
        return first if eqn.params["axes"] == (1,) and all(is_nothing) else None
    if name == "cumsum":
        is_one_hot = all(is_nothing) and bool((first.chosen == 1).all())
        if not is_one_hot or eqn.params["axis"] != 0 or eqn.params["reverse"]:
            return None
        words, columns = shape
        ranks = np.tile(np.arange(words) + 1, columns)
        return _Rows(None, ranks.astype(dtype), None)
    if shape_of(eqn.outvars[0]) not in ([shape] if shape else map(shape_of, eqn.invars)):
        return None
    function = computes.get(name, (lambda x: x) if name in MOVES else None)
    if function is None:
        return None
    chosen = np.asarray(function(*(row.chosen for row in rows))).astype(dtype)
    others = [row.other for row in rows if row.other is not None]
    if name == "mul" and any(is_nothing):
        return _Rows(None, chosen, np.zeros((), dtype))
    is_known = len(others) == len(rows)
    return _Rows(None, chosen, np.asarray(function(*others)).astype(dtype) if is_known else None)


def _compared(eqn: JaxprEqn, maker: Mapping[Var, JaxprEqn], numbers: Numbers) -> Var | None:
    """The choices, one for each row, that are compared with the number of each column."""
    shape = shape_of(eqn.outvars[0])
    if eqn.primitive.name != "eq" or len(shape) != 2:
        return None
    words, columns = shape
    for a, b in (eqn.invars, eqn.invars[::-1]):
        counted = numbers(b)
        is_counted = counted is not None and counted.shape[-1:] == (columns,)
        if is_var(a) and is_counted and np.all(counted == np.arange(columns)):
            choices = _moved(a, maker, words)
            is_one_each = choices in maker and size_of(choices) == words
            if is_one_each and _most(maker[choices], choices) <= columns:
                return choices
    return None


def _moved(v: Var, maker: Mapping[Var, JaxprEqn], words: int) -> Var:
    """What is moved to give this, or repeated along rows, a number for each word."""
    while v in maker and maker[v].primitive.name in MOVES:
        [operand, *_] = maker[v].invars
        axes = maker[v].params.get("broadcast_dimensions", (0,))
        is_in_order = maker[v].params.get("dimensions") is None and axes[:1] == (0,)
        if not is_var(operand) or size_of(operand) != words or not is_in_order:
            break
        v = operand
    return v


def _most(eqn: JaxprEqn, v: Var) -> float:
    """How many numbers a choice is one of, from 0 on."""
    shape = shape_of(eqn.invars[0]) if eqn.invars else ()
    if eqn.primitive.name == "argmax":
        return shape[eqn.params["axes"][0]]
    if eqn.primitive.name == "top_k" and v is eqn.outvars[1]:
        return shape[eqn.params.get("axis", -1)]
    return math.inf
