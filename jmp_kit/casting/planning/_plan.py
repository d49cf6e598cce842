"""The plan: what is to become of a program, as data. Nothing here decides, and nothing computes."""

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit.casting.reading._state import Origins
from jmp_kit.programs._flow import Body


class Known(NamedTuple):
    """What is known of a program's arguments and results where it is called."""

    depends: Sequence[bool]  # of each argument, whether it depends on a product
    origins: Sequence[Origins]  # of each argument, of what it is an update
    reaches: Sequence[bool]  # of each result, whether a product can be reached from it
    whole: Sequence[bool]  # of each result, whether it is not to be rounded


# Why a value is stored as it is.
ANEW = "made anew"
MULTIPLIED = "products take it"
GIVEN = "a product gives it"
UPDATED = "state"
LEADS = "a result or state is made of it"
WOVEN = "cut and joined over and over"
SMALL = "small"
CARRIED = "carried by a loop"
COMPARED = "compared with its extrema"


class Form(enum.Enum):
    """How a value gets into memory in its dtype."""

    CAST = enum.auto()  # only products take it, so nobody casts it back
    FUSED = enum.auto()  # in the kernel of a sum that takes it too
    APART = enum.auto()  # in a kernel of its own
    ADDED = enum.auto()  # in the kernel of a product, which adds halves to what it gives
    PUT = enum.auto()  # scattered in it, among zeros


class Stored(NamedTuple):
    """What was decided of a value that leaves a segment, or that a loop carries."""

    eqn: JaxprEqn  # that makes it, or the loop
    calls: tuple[JaxprEqn, ...]  # that it is inside of, the outermost first
    var: Var
    dtype: np.dtype
    why: str
    form: Form | None = None  # None of what is not rounded on its way


class Barrier(NamedTuple):
    """Values that XLA is to take as they are stored."""

    eqn: JaxprEqn
    on_cpus: bool  # only: elsewhere nothing would be made of them before


class Piece(NamedTuple):
    """Equations that run as they were traced, and what is taken of their results."""

    eqns: Sequence[JaxprEqn]
    results: Sequence[Var]
    apart: Sequence[Var] = ()  # of what they take, what XLA is not to share with others
    where_it_lies: bool = False  # whether XLA reads that so; what it cuts, a barrier has it copy
    is_dear: bool = False  # whether to compute it twice is to be preferred to sharing it
    moved: Sequence[JaxprEqn] = ()  # before them, in the dtype that what they move is stored in
    matrices: "Matrices | None" = None  # what runs instead


class Matrices(NamedTuple):
    """A piece with one axis in place of several, for XLA to compile in less time."""

    piece: Piece
    names: Mapping[Var, Var]  # what the variables of the other are in it


class Fixed(NamedTuple):
    """What depends on no product (masks, positions, random bits): computed once, as traced."""

    piece: Piece


class Part(NamedTuple):
    """A segment and the products after it."""

    segment: Sequence[Piece]  # each takes what those before it stored
    stored: Mapping[Var, Stored]
    products: Sequence[tuple[JaxprEqn, np.dtype | None]]  # what each computes in; a kernel as it is
    results: Sequence[Var]  # of segment and products, what others take
    summed: Mapping[Var, np.dtype]  # of results of products, what is float32 in them, summed up by
    # devices, and then in this dtype
    halved: Mapping[Var, np.dtype]  # what only products take of its arguments, to be kept so
    saveable: Callable[..., bool] | None  # by which primitives what is made is kept for a backward
    # pass that JAX makes, and the rest is computed again; None: nothing is
    biases: Mapping[Var, Var]  # of results, what is added: its gradient is a sum over a half one
    # Of results of products, of their operands, behind how many barriers they are taken.
    alone: Mapping[Var, Mapping[Var, int]]


class Call(NamedTuple):
    """A call, loop or branch that holds products."""

    eqn: JaxprEqn
    bodies: Sequence[tuple[Body, "Plan"]]  # none if this library does not know how they are called
    known: Known
    half: np.dtype
    carried: Sequence[np.dtype]  # what a loop carries its variables in
    stored: Sequence[Stored]  # of these, what was decided
    constant: Sequence[bool]  # of each operand, whether it is cast to half once for all rounds
    multiplied: Sequence[bool]  # of each result, whether only products take it, and take it in half
    plan_of: Callable[[Jaxpr, Known], "Plan"]  # what a rule makes when it is differentiated


Step = Barrier | Fixed | Part | Call


class Plan(NamedTuple):
    """A program, step by step. Of its equations some may be there twice: computed again."""

    jaxpr: Jaxpr
    steps: Sequence[Step]

    def every_stored(self) -> Iterator[Stored]:
        """What was decided of every value, however deep."""
        for step in self.steps:
            if isinstance(step, Part):
                yield from step.stored.values()
            elif isinstance(step, Call):
                yield from step.stored
                for _, plan in step.bodies:
                    yield from plan.every_stored()
