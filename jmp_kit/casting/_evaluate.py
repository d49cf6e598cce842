"""Evaluating a jaxpr: products in half, segments between them in float32 and stored in half."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit.casting._biases import bias_of, carrying_bias
from jmp_kit.casting._calls import CALLS
from jmp_kit.casting._evaluator import ANEW, LEADS, MULTIPLIED, UPDATED, Known, Site, Stored
from jmp_kit.casting._inline import inlined
from jmp_kit.casting._parts import acts, is_barrier, parts_of, split_at
from jmp_kit.casting._repeat import repeating
from jmp_kit.casting._scans import repeating_scans
from jmp_kit.casting._state import STATE, Origins, States
from jmp_kit.casting._worth import costly, is_costly, is_kept, is_linear, reduced, spread, summed
from jmp_kit.programs._flow import Flow, bodies_of
from jmp_kit.programs._jaxpr import (
    cast,
    cut_out,
    is_complex,
    is_float32,
    is_small,
    is_var,
    retyped,
    rounded,
    size_of,
    uses_of,
    widen,
)
from jmp_kit.programs._marks import is_backward, marked, marked_dtype, scope_of, stack_of

# What solves to the precision that it was asked for, which half has not.
_SOLVERS = ("custom_linear_solve",)


class Program(NamedTuple):
    """A jaxpr and what is known of its variables."""

    jaxpr: Jaxpr
    arguments: set[Var]
    depending: set[Var]  # on a product
    reaching: set[Var]  # a product
    origins: Mapping[Var, Origins]  # of what it is an update
    whole: set[Var]  # not to be rounded
    taken: set[Var]  # by something that is no product
    costly: set[Var]  # see `_worth`
    summed: set[Var]
    spread: set[Var]
    uses: Mapping[Var, Sequence[JaxprEqn | None]]  # in order; None for a result of the jaxpr

    def leaving(self, eqns: Sequence[JaxprEqn]) -> list[Var]:
        """What others take of the results of these equations."""
        these = set(map(id, eqns))
        made = (v for e in eqns for v in e.outvars)
        return [v for v in made if any(id(use) not in these for use in self.uses.get(v, ()))]


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """How to evaluate: in which 16-bit dtype, with which products, recomputing or not."""

    half: np.dtype
    flow: Flow
    recompute: bool
    states: States
    notes: dict[Var, Stored] | None = dataclasses.field(default=None, compare=False, repr=False)
    calls: tuple[JaxprEqn, ...] = dataclasses.field(default=(), compare=False, repr=False)

    def note(self, eqn: JaxprEqn, var: Var, dtype: Any, why: str) -> None:
        """Takes down what was decided."""
        if self.notes is not None:
            self.notes[var] = Stored(eqn, self.calls, var, np.dtype(dtype), why)

    def run(
        self, jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], known: Known
    ) -> list[Any]:
        """The results of a jaxpr.

        What was float32 when the program was traced may come in, and go out, in half.
        """
        depends = known.depends
        repeats = self.recompute and any(is_backward(stack_of(e)) for e in jaxpr.eqns)
        if repeats:
            jaxpr = repeating_scans(inlined(jaxpr, self.flow), self.flow, depends)
        parts = parts_of(jaxpr.eqns, self.flow)
        if repeats:
            depending = self.flow.depending(jaxpr, depends)
            parts = list(repeating(parts, self.flow, depending, uses_of(jaxpr)))
            jaxpr = jaxpr.replace(eqns=[eqn for part in parts for eqn in part])
        depending = self.flow.depending(jaxpr, depends)
        origins = self.states.origins(jaxpr, known.origins, depending)
        states = self.states.mirrored(jaxpr, origins, depending)
        if states.shapes != self.states.shapes:
            origins = states.origins(jaxpr, known.origins, depending)
        steps = states.steps(jaxpr)
        program = Program(
            jaxpr,
            {*jaxpr.invars, *jaxpr.constvars},
            depending,
            self.flow.reaching(jaxpr, known.reaches),
            origins,
            states.whole(jaxpr, known.whole, origins, depending),
            self.flow.taken_by_others(jaxpr),
            costly(jaxpr, self.flow),
            summed(jaxpr, self.flow),
            spread(jaxpr, self.flow),
            uses_of(jaxpr),
        )
        env: dict[Var, Any] = {}
        env.update(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))

        for part in parts:
            if is_barrier(part):
                operands = [env[a] if is_var(a) else a.val for a in part[0].invars]
                results = lax.optimization_barrier(operands)
                env.update(zip(part[0].outvars, results, strict=True))
            elif not self.flow.is_product(part[0]) and self.flow.holds_product(part[0]):
                stepping = not steps.isdisjoint(part[0].outvars)
                inside = dataclasses.replace(states, stepping=stepping)
                results = dataclasses.replace(self, states=inside)._call(program, part[0], env)
                env.update(zip(part[0].outvars, results, strict=True))
            else:
                self._fixed(program, part, env)
                self._part(program, [e for e in part if self._moves(program, e)], env)
        return [env[atom] if is_var(atom) else atom.val for atom in jaxpr.outvars]

    def _product(self, jaxpr: Jaxpr, eqn: JaxprEqn, env: Mapping[Var, Any]) -> Sequence[Any]:
        half = marked_dtype(eqn) or self.half
        operands = [env[a] if is_var(a) else a.val for a in eqn.invars]

        def half_of(atom: Any) -> Var:
            return retyped(atom, half if is_float32(atom) else atom.aval.dtype)

        invars, outvars = ([half_of(a) for a in atoms] for atoms in (eqn.invars, eqn.outvars))
        params = dict(eqn.params)
        if "preferred_element_type" in params and is_float32(eqn.outvars[0]):
            params["preferred_element_type"] = half
        halved = eqn.replace(invars=invars, outvars=outvars, params=params)
        if marked_dtype(eqn) is None:  # for an autocast around this one
            halved = marked(halved, half)
        function, _ = cut_out(jaxpr, [halved], outvars)
        return function(*(cast(x, v.aval.dtype) for x, v in zip(operands, invars, strict=True)))

    def _as_traced(self, jaxpr: Jaxpr, eqn: JaxprEqn, env: Mapping[Var, Any]) -> Sequence[Any]:
        function, invars = cut_out(jaxpr, [eqn], eqn.outvars)
        return function(*(widen(env[v], v) for v in invars))

    def _call(self, program: Program, eqn: JaxprEqn, env: dict[Var, Any]) -> Sequence[Any]:
        if not bodies_of(eqn):
            if eqn.primitive.name not in _SOLVERS:
                where = " in ".join(filter(None, (eqn.primitive.name, scope_of(eqn))))
                warnings.warn(_UNKNOWN.format(where=where), stacklevel=2)
            return self._as_traced(program.jaxpr, eqn, env)
        operands = [env[a] if is_var(a) else a.val for a in eqn.invars]
        known = Known(
            depends=[is_var(a) and a in program.depending for a in eqn.invars],
            origins=[program.origins.get(a, 0) if is_var(a) else 0 for a in eqn.invars],
            reaches=[v in program.reaching for v in eqn.outvars],
            whole=[v in program.whole for v in eqn.outvars],
        )
        multiplied = [
            v in program.depending and v not in program.taken and is_float32(v) for v in eqn.outvars
        ]
        half, calls = marked_dtype(eqn) or self.half, (*self.calls, eqn)
        evaluator = dataclasses.replace(self, half=half, calls=calls)
        return CALLS[eqn.primitive.name](Site(evaluator, eqn, operands, known, multiplied))

    def _moves(self, program: Program, eqn: JaxprEqn) -> bool:
        depends = any(is_var(a) and a in program.depending for a in eqn.invars)
        return depends or self.flow.is_product(eqn)

    def _fixed(self, program: Program, part: list[JaxprEqn], env: dict[Var, Any]) -> None:
        """What depends on no product (masks, positions, random bits): computed once, as traced."""
        eqns = [e for e in part if not self._moves(program, e)]
        outvars = program.leaving(eqns)
        function, invars = cut_out(program.jaxpr, eqns, outvars)
        env.update(zip(outvars, function(*(env[v] for v in invars)), strict=True))

    def _part(self, program: Program, moving: list[JaxprEqn], env: dict[Var, Any]) -> None:
        """Evaluates a segment and the products after it; the backward pass repeats the segment."""
        jaxpr = program.jaxpr
        outvars = program.leaving(moving)
        leaving = set(outvars)
        products = [e for e in moving if self.flow.closes(e)]
        segment = moving[: len(moving) - len(products)]
        taken = {a for e in products for a in e.invars if is_var(a)}
        made = [v for e in segment for v in e.outvars if v in leaving or v in taken]
        stored = self._stored(program, segment, made)
        head, rest = split_at(segment, stored.keys())
        if head and rest:
            self._part(program, head, env)  # the rest reads what is stored
            self._part(program, [*rest, *products], env)
            return
        function, needed = cut_out(jaxpr, segment, made)
        _, invars = cut_out(jaxpr, moving, outvars)

        def part(*args: Any) -> list[Any]:
            values = dict(zip(invars, args, strict=True))
            results = function(*(widen(values[v], v) for v in needed))
            values.update(
                (v, stored[v](x) if v in stored else x) for v, x in zip(made, results, strict=True)
            )
            for eqn in products:
                closed = self._product if self.flow.is_product(eqn) else self._as_traced
                values.update(zip(eqn.outvars, closed(jaxpr, eqn, values), strict=True))
            return [values[v] for v in outvars]

        repeated = products or program.reaching.intersection(outvars)
        # JAX's checkpoint cannot keep what is complex, the result of an FFT say.
        once = any(acts(e) or any(map(is_complex, e.outvars)) for e in moving)
        if self.recompute and repeated and not is_linear(segment) and not once:
            part = jax.checkpoint(part, policy=self._is_kept)
        # What only products take is kept in half, but for arguments: they are there anyway.
        unmarked = [a for e in products if not marked_dtype(e) for a in e.invars]
        halved = {a for a in unmarked if is_var(a) and is_float32(a)}
        args = [
            cast(env[v], self.half)
            if v in halved
            and v not in needed
            and (v not in program.arguments or v in program.depending)
            else env[v]
            for v in invars
        ]
        env.update(zip(outvars, part(*args), strict=True))
        for result in (v for e in products for v in e.outvars if v in leaving & program.costly):
            bias = bias_of(result, program.uses)
            if bias in env and bias not in program.depending:
                env[result] = carrying_bias(env[result], env[bias])
                env[bias] = lax.stop_gradient(env[bias])

    def _is_kept(self, primitive: Any, *_: Any, **__: Any) -> bool:
        # A product in a segment is one of a full-precision region.
        return primitive.name in self.flow.products or is_kept(primitive.name)

    def _stored(
        self, program: Program, segment: list[JaxprEqn], made: list[Var]
    ) -> dict[Var, Callable[[Any], Any]]:
        """What of a segment's results is stored in half, and how it gets there."""
        # XLA fuses a sum with what it is a sum of, unless it had to compute something costly twice.
        largest_costly = max(
            (size_of(v) for e in segment if is_costly(e) for v in e.outvars), default=0
        )

        def only_closing(v: Var) -> bool:
            return all(use is not None and self.flow.closes(use) for use in program.uses[v])

        def stored(v: Var) -> Callable[[Any], Any]:
            if only_closing(v):
                return lambda x: cast(x, self.half)
            return lambda x: rounded(
                x, self.half, apart=size_of(v) <= largest_costly or v not in program.summed
            )

        found = {v for v in made if v in program.depending and v in program.reaching}
        found -= reduced(segment) & program.spread
        found = {v for v in found if is_float32(v) and not is_small(v, segment)}
        kept = {v for v in found & program.whole if not only_closing(v)}
        for eqn in segment:
            for v in found.intersection(eqn.outvars):
                if v in kept:
                    is_state = program.origins.get(v, 0) & STATE
                    self.note(eqn, v, np.float32, UPDATED if is_state else LEADS)
                else:
                    self.note(eqn, v, self.half, MULTIPLIED if only_closing(v) else ANEW)
        return {v: stored(v) for v in found - kept}


_UNKNOWN = (
    "autocast does not know how {where} calls what is inside it, so the products there run as they "
    "were traced. If that is meant, say so: with jmp_kit.full_precision(): …"
)
