"""Segments computed again in a backward pass that is part of the program, as of a whole train step.

Where only the loss is wrapped, `jax.checkpoint` does that when the gradient is taken. A program
that holds its backward pass already stores for it what its forward pass made; instead, the parts
of the backward pass are given equations that make it again, of what is stored anyway.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set

from jax.extend.core import JaxprEqn, Var

from jmp_kit.casting.reading._joined import is_sum
from jmp_kit.casting.reading._parts import barrier_of, is_barrier
from jmp_kit.casting.reading._rounding import is_scaled_at_once
from jmp_kit.casting.recomputing._again import kept
from jmp_kit.casting.recomputing._peak import there_at_the_peak
from jmp_kit.casting.recomputing._taken import ForwardPass, Part, Rounded
from jmp_kit.programs._flow import Flow
from jmp_kit.programs._jaxpr import (
    Atom,
    copied,
    in_place,
    is_float32,
    is_var,
    size_of,
    taking,
    traced_back,
)

# What is this much smaller than what is made of it is the same for much of that.
_SMALL = 16


def repeating(
    parts: Sequence[Part],
    flow: Flow,
    depending: Set[Var],
    reaching: Set[Var],
    uses: Mapping[Var, Sequence[JaxprEqn | None]],
    results: Set[Var],
    price: float,
) -> Iterator[Part]:
    """The parts, those of the backward pass after what they make again.

    That is what only its own segment and the backward pass take; what others take is stored anyway.

    Args:
      depending: the variables that depend on a product.
      reaching: those from which a product can be reached.
      uses: the equations that take each variable; None for a result of the program.
      results: what may be computed with as it is stored for products, that is rounded.
      price: of a byte that is kept, in bytes moved.
    """
    program = ForwardPass(parts, flow, depending, uses, results)
    values = program.values()
    keep = kept(values, price)
    if free := there_at_the_peak(program, values, keep):
        keep = kept(values, price, free)
    return _Backward(program, keep, reaching).parts()


class _Backward:
    """The backward pass, with what it makes again."""

    def __init__(self, program: ForwardPass, keep: Set[Hashable], reaching: Set[Var]) -> None:
        self.program = program
        self.maker = {v: e for v, e in program.maker.items() if v not in keep}
        self.rounded = {v.var for v in keep if isinstance(v, Rounded)}
        eqns = [*filter(program.is_late, program.eqns)]
        # Of the products behind, and of sums with these.
        ends = {v for e in eqns for v in _ends(e, program.flow)}
        sums = {v for part in program.parts if is_sum(part) for e in part for v in e.outvars}
        self.ends = (ends | (sums - program.early)) & reaching
        computing = [e for e in eqns if not program.from_memory(e)]
        taken = {a for e in [*computing, *self.maker.values()] for a in e.invars if is_var(a)}
        self.read = taken & program.early
        self.order = {id(e): i for i, e in enumerate(program.eqns)}
        self.behind: dict[Var, Atom] = {}  # a barrier, where XLA cannot tell what it was before

    def parts(self) -> Iterator[Part]:
        """All parts, and barriers before them."""
        for i, part in enumerate(self.program.parts):
            before = self._taken_from_before(i)
            wanted = [a for a, e in before if a in self.maker and not self._is_there(a, e)]
            again, sources = traced_back(wanted, self.maker)
            yield from self._barriers(before, [*again.values()], sources)
            renamed = dict(self.behind)
            ordered = sorted(again, key=self.order.__getitem__)
            copies = [copied(again[n], renamed) for n in ordered]
            yield copies + [self._with_copies(e, renamed) for e in part]

    def _taken_from_before(self, part: int) -> list[tuple[Var, JaxprEqn]]:
        late = filter(self.program.is_late, self.program.parts[part])
        pairs = ((a, e) for e in late for a in e.invars if is_var(a))
        return [(a, e) for a, e in pairs if self.program.made_in.get(a, -1) < part]

    def _is_there(self, v: Var, eqn: JaxprEqn) -> bool:
        return v in self.rounded and self.program.from_memory(eqn)

    def _with_copies(self, eqn: JaxprEqn, renamed: Mapping[Var, Atom]) -> JaxprEqn:
        if not self.program.is_late(eqn):
            return eqn
        taken = [a for a in eqn.invars if is_var(a) and a in renamed]
        return taking(eqn, {a: renamed[a] for a in taken if not self._is_there(a, eqn)})

    def _barriers(
        self,
        before: Sequence[tuple[Var, JaxprEqn]],
        again: Sequence[JaxprEqn],
        sources: Iterable[Var],
    ) -> Iterator[Part]:
        """What keeps from being early what is computed again, and what is kept from being widened.

        XLA makes early, and keeps, what it can; on CPUs what is broadcast as well. So nothing is
        there before what comes from the products behind.
        """
        depending, made_in = self.program.depending, self.program.made_in
        there = [a for a, _ in before if a in self.read and a not in self.maker]
        pairs = [(a, e) for e in again for a in e.invars if is_var(a)]
        spread = [a for a, e in (*pairs, *before) if a not in depending and _is_spread(a, e)]
        arrived = [a for a, _ in before if a in self.ends and a not in self.behind]
        # Of several, what a sum of them begins with: the libraries' products add others to that.
        last = [max(arrived, key=made_in.__getitem__)] if arrived else []
        moving = [v for v in sources if v in depending]
        widened = [v for v in there if v in depending]
        for several, on_cpus in ((moving, False), ([*widened, *spread], True)):
            fresh = [v for v in dict.fromkeys(several) if is_float32(v) and v not in self.behind]
            if fresh:
                taken = [*fresh, *in_place(last, self.behind)]
                made = [Var(v.aval) for v in taken]
                self.behind.update(zip([*fresh, *last], made, strict=True))
                yield [barrier_of(taken, made, on_cpus)]


def _ends(eqn: JaxprEqn, flow: Flow) -> Iterator[Var]:
    """What a product makes, or what there is before it, where nothing may come between."""
    if is_scaled_at_once(eqn):
        yield from filter(is_var, eqn.invars if is_barrier([eqn]) else ())
    elif flow.closes(eqn):
        yield from eqn.outvars


def _is_spread(atom: Var, eqn: JaxprEqn) -> bool:
    return any(size_of(atom) * _SMALL <= size_of(v) for v in eqn.outvars)
