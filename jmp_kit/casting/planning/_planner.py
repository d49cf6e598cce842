"""Planning: from a program, and what is known where it is called, to what is to become of it."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit._dtypes import stored_dtype
from jmp_kit._warn import warn
from jmp_kit.casting.planning import _loops as loops
from jmp_kit.casting.planning import _plan
from jmp_kit.casting.planning._alone import with_products_alone
from jmp_kit.casting.planning._biases import bias_of
from jmp_kit.casting.planning._convolved import in_one_kernel
from jmp_kit.casting.planning._passes import passes
from jmp_kit.casting.planning._plan import (
    Barrier,
    Call,
    Fixed,
    Form,
    Known,
    Part,
    Piece,
    Plan,
    Step,
    Stored,
)
from jmp_kit.casting.planning._program import Program, read
from jmp_kit.casting.reading._accumulated import is_accumulated
from jmp_kit.casting.reading._joined import added, joined, streams
from jmp_kit.casting.reading._parts import acts, is_barrier, split_at
from jmp_kit.casting.reading._rounding import is_scaled_at_once, rounded_twice
from jmp_kit.casting.reading._state import STATE, States
from jmp_kit.casting.reading._worth import (
    MOST_SUMS,
    ends_of_woven,
    first_of,
    is_kept,
    is_linear,
    normed,
    reduced,
    woven,
)
from jmp_kit.casting.rewriting._rewritten import (
    is_gradient,
    repeated,
    with_float8,
    with_its_backward_pass,
)
from jmp_kit.programs._flow import Body, Flow, bodies_of, is_exact
from jmp_kit.programs._jaxpr import is_complex, is_float32, is_small, is_var, largest_size
from jmp_kit.programs._marks import is_backward, marked_dtype, scope_of, stack_of

_CHECKPOINTS = ("remat2", "checkpoint")
_LOOPS = ("scan", "while")

# What gives float32 of half operands at the speed of half. A convolution would multiply in it.
_SUMMED_WIDE = ("dot_general", "ragged_dot_general")


@dataclasses.dataclass(frozen=True)
class Planner:
    """How to plan: in which 16-bit dtype, with which products, recomputing or not."""

    half: np.dtype
    flow: Flow
    price: float | None  # of a byte kept, in bytes moved; None: nothing is computed again
    states: States
    is_summed_wide: bool  # gradients of weights, by devices
    # Whether products without a mark are in float8, if they are large; None: none is.
    float8_by_size: bool | None = None
    once: bool = False  # whether nobody differentiates what is planned
    # Whether it is what a rule for `jax.jvp` makes, which JAX transposes as it stands.
    is_transposed: bool = False
    # The integers that the program closes over.
    closed: Mapping[Var, np.ndarray] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )
    # That the program is inside of, the outermost first.
    calls: tuple[JaxprEqn, ...] = dataclasses.field(default=(), compare=False, repr=False)

    def plan(self, jaxpr: Jaxpr, known: Known) -> Plan:
        """What is to become of a program."""
        jaxpr = with_float8(jaxpr, self.flow, self.float8_by_size, self.half)
        jaxpr, parts = repeated(
            jaxpr,
            self.flow,
            self.price,
            known.depends,
            known.reaches,
            self.is_summed_wide,
            self.half,
            self.closed,
        )
        is_whole = self.price is not None and is_gradient(jaxpr)
        program = read(jaxpr, known, self.flow, self.states, self.half, is_whole, self.closed)
        stepping = program.states.steps(jaxpr)
        steps: list[Step] = []
        there = {*jaxpr.constvars, *jaxpr.invars}
        for part in parts:
            if is_barrier(part):
                steps.append(Barrier(part[0], on_cpus="on_cpus" in part[0].params))
            elif not self.flow.is_product(part[0]) and self.flow.is_call(part[0]):
                steps.append(self._call(program, part[0], stepping))
            else:
                fixed, moving = program.apart(part)
                steps.append(Fixed(Piece(fixed, program.leaving(fixed))))
                there.update(v for e in fixed for v in e.outvars)
                steps += self._parts(program, moving, there)
            there.update(v for e in part for v in e.outvars)
        return Plan(jaxpr, list(with_products_alone(steps, program.depends)))

    def _parts(
        self, program: Program, moving: Sequence[JaxprEqn], there: set[Var]
    ) -> Iterator[Part]:
        """A segment and the products after it.

        In two, if the segment takes what it stores and JAX makes the backward pass, which is then
        made of what is stored.
        """
        results = program.leaving(moving)
        products = [e for e in moving if self.flow.closes(e)]
        segment = moving[: len(moving) - len(products)]
        multiplied = {a for e in products for a in e.invars if is_var(a)}
        leaving = multiplied.union(results)
        if program.is_gradient:
            leaving.update(program.put, program.compared.values)
            leaving.update(joined(segment, program.uses, program.depends))
            leaving.update(streams(moving, self.flow, program.products.keys(), program.uses))
            leaving.update(rounded_twice(segment) if self.float8_by_size is not None else ())
        made = [v for e in segment for v in e.outvars if v in leaving]
        stored = self._stored(program, segment, made)
        if not program.is_gradient:
            head, rest = split_at(segment, {v for v, s in stored.items() if s.form})
            if head and rest:
                yield from self._parts(program, head, there)
                yield from self._parts(program, [*rest, *products], there)
                return
        closing = [v for v in results if v in program.reaching]
        # JAX's checkpoint cannot keep what is complex, the result of an FFT say.
        once = self.once or any(acts(e) or any(map(is_complex, e.outvars)) for e in moving)
        is_repeated = bool(products or closing) and not is_linear(segment) and not once
        # What only products take is kept in half, but for arguments: they are there anyway.
        taken = {a for e in segment for a in e.invars if is_var(a)}
        given = {*program.jaxpr.invars, *program.jaxpr.constvars} - program.depending
        unmarked = {a for e in products if not marked_dtype(e) for a in e.invars if is_var(a)}
        pieces = [Piece(segment, made)]
        if program.is_gradient:
            pieces = list(passes(segment, made, stored, program))
        ends = {v: e for v, e in program.convolved.items() if v in stored and stored[v].form}
        yield Part(
            segment=list(in_one_kernel(program.jaxpr, pieces, ends, self.half)),
            stored=stored,
            products=[(e, program.dtype_of(e)) for e in products],
            results=results,
            summed=dict(self._summed(program, products)),
            halved=dict.fromkeys(filter(is_float32, unmarked - taken - given), self.half),
            saveable=self._saveable if self.price is not None and is_repeated else None,
            biases=dict(self._biases(program, products, there)),
            alone={},  # what is, all parts together say
        )

    def _summed(
        self, program: Program, products: Sequence[JaxprEqn]
    ) -> Iterator[tuple[Var, np.dtype]]:
        """Gradients of weights: products of the backward pass that results or state are made of.

        And what is scaled before it is rounded. Others than float32 are what they were traced in.
        """
        if self.is_transposed:
            return
        products = [e for e in products if is_float32(e.outvars[0])]
        yield from ((e.outvars[0], np.dtype(np.float32)) for e in products if is_scaled_at_once(e))
        is_repeated = any(e.primitive.name in _LOOPS for e in self.calls)

        def collects(v: Var) -> bool:
            is_state = bool(program.origins.get(v, 0) & STATE)
            begun = v in program.scattered or v in program.constant  # with zeros, before a loop
            return begun or (is_repeated and is_state)

        for eqn in products if self.is_summed_wide else ():
            v, half = eqn.outvars[0], program.dtype_of(eqn)
            is_gradient = v in program.whole and is_backward(stack_of(eqn, self.calls))
            if half is not None and is_gradient and eqn.primitive.name in _SUMMED_WIDE:
                wide = is_accumulated(v, program.uses, collects)
                yield v, np.dtype(np.float32) if wide else half

    def _saveable(self, primitive: Any, *_: Any, **__: Any) -> bool:
        # A product in a segment is one of a full-precision region.
        return primitive.name in self.flow.products or is_kept(primitive.name)

    def _biases(
        self, program: Program, products: Sequence[JaxprEqn], there: set[Var]
    ) -> Iterator[tuple[Var, Var]]:
        for result in (v for e in products for v in e.outvars if v in program.costly):
            bias = bias_of(result, program.uses)
            if bias in there and bias not in program.depending:
                yield result, bias

    def _stored(
        self, program: Program, segment: Sequence[JaxprEqn], made: Sequence[Var]
    ) -> dict[Var, Stored]:
        """What of a segment's results is stored in half, or is not though it goes to products."""
        made_of_rows = normed(segment)
        sums = added(segment, program.products.keys()) if program.is_gradient else set()
        wide = woven(segment) if program.is_gradient else set()
        found = {v for v in made if v in program.depending and v in program.reaching}
        statistics = reduced(segment, program.depends)
        found -= statistics & program.spread
        statistics |= program.spread  # what is small beside what is gathered of it is none
        largest = largest_size(segment)
        small = {v for v in found & statistics if is_small(v, largest)}
        found = {v for v in found - small - program.compared.extrema if is_float32(v)}
        compared = program.compared.values & program.depending if program.is_gradient else set()
        compared.intersection_update(made)
        moved = self._moved(program, segment)

        def stored(eqn: JaxprEqn, v: Var) -> Stored:
            closing = [use is not None and self.flow.closes(use) for use in program.uses[v]]
            if v in compared:
                is_rounded = v in found and v not in program.whole
                dtype = self.half if is_rounded else np.dtype(np.float32)
                return Stored(eqn, self.calls, v, dtype, _plan.COMPARED, Form.APART)
            if all(closing):
                form = Form.PUT if v in program.put else Form.CAST
                return Stored(eqn, self.calls, v, self.half, _plan.MULTIPLIED, form)
            is_woven = v in wide and not any(closing)
            if v in program.whole and v in moved:
                return Stored(eqn, self.calls, v, self.half, _plan.GIVEN, Form.CAST)
            if v in program.whole or is_woven:
                is_state = program.origins.get(v, 0) & STATE
                why = _plan.UPDATED if is_state else _plan.WOVEN if is_woven else _plan.LEADS
                return Stored(eqn, self.calls, v, np.dtype(np.float32), why)
            is_apart = v not in program.summed or v in made_of_rows
            # XLA fuses no sum of the backward pass with what the forward pass made.
            is_late = [use is None or is_backward(stack_of(use)) for use in program.uses[v]]
            is_apart |= not is_backward(stack_of(eqn)) and any(is_late)
            is_apart |= v in program.convolved  # which no other kernel makes
            alone = Form.APART if is_apart else Form.FUSED
            form = Form.PUT if v in program.put else Form.ADDED if v in sums else alone
            return Stored(eqn, self.calls, v, self.half, _plan.ANEW, form)

        kept = {v: stored(e, v) for e in segment for v in e.outvars if v in found | compared}
        fused = {v for v, s in kept.items() if s.form is Form.FUSED}
        crowded = first_of(ends_of_woven(segment), segment, fused) if program.is_gradient else set()
        if len(crowded) > MOST_SUMS:
            kept |= {v: kept[v]._replace(form=Form.APART) for v in crowded}
        return kept

    def _moved(self, program: Program, segment: Sequence[JaxprEqn]) -> set[Var]:
        """What products gave in half, moved."""
        found: set[Var] = set()

        def is_half(v: Var) -> bool:
            product = program.products.get(v)
            return v in found or (product is not None and self._gives_half(program, product))

        for eqn in filter(is_exact, segment):
            if all(is_half(a) for a in eqn.invars if is_var(a) and is_float32(a)):
                found.update(eqn.outvars)
        return found

    def _gives_half(self, program: Program, product: JaxprEqn) -> bool:
        summed = (dtype for _, dtype in self._summed(program, [product]))
        return all(dtype == self.half for dtype in (program.dtype_of(product), *summed))

    def _call(self, program: Program, eqn: JaxprEqn, stepping: set[Var]) -> Call:
        known = Known(
            depends=[program.depends(a) for a in eqn.invars],
            origins=[program.origins.get(a, 0) if is_var(a) else 0 for a in eqn.invars],
            reaches=[v in program.reaching for v in eqn.outvars],
            whole=[v in program.whole for v in eqn.outvars],
        )
        is_step = not stepping.isdisjoint(eqn.outvars)
        half = stored_dtype(marked_dtype(eqn) or self.half)
        states = dataclasses.replace(program.states, stepping=is_step)
        inside = dataclasses.replace(self, half=half, states=states, calls=(*self.calls, eqn))
        if eqn.primitive.name in _CHECKPOINTS and self.price is not None:
            # Memory is saved by computing all of it again: nothing in it lives for long.
            inside = dataclasses.replace(inside, price=0.0)
        bodies = bodies_of(eqn)
        if eqn.primitive.name in _CHECKPOINTS and is_backward(stack_of(eqn, self.calls)):
            bodies = [body._replace(jaxpr=with_its_backward_pass(body.jaxpr)) for body in bodies]
        found = [(body, inside._inside(eqn, body, known)) for body in bodies]
        if not found:
            where = " in ".join(filter(None, (eqn.primitive.name, scope_of(eqn))))
            warn(_UNKNOWN.format(where=where))
        if eqn.primitive.name == "while":  # the condition gets what the body makes
            (condition, _), (_, within) = found
            first = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
            round_again = known._replace(
                depends=[*known.depends[:first], *within.depends[-len(eqn.outvars) :]],
                origins=[*known.origins[:first], *within.origins[-len(eqn.outvars) :]],
            )
            found[0] = condition, inside._inside(eqn, condition, round_again)
        rule = inside
        if eqn.primitive.name == "custom_jvp_call":
            # What is behind a barrier with a tangent JAX takes for linear in it.
            rule = dataclasses.replace(inside, price=None, is_transposed=True)
        carried = list(loops.carried(inside, eqn, *found[-1])) if found else []
        return Call(
            eqn,
            [(body, inside.plan(body.jaxpr, within)) for body, within in found],
            known,
            half,
            carried=[dtype for dtype, _ in carried],
            stored=[stored for _, stored in carried if stored],
            constant=[program.is_gradient and flag for flag in loops.constant(self.flow, eqn)],
            multiplied=[
                v in program.depending and v not in program.taken and is_float32(v)
                for v in eqn.outvars
            ],
            plan_of=rule.plan,
        )

    def _inside(self, eqn: JaxprEqn, body: Body, known: Known) -> Known:
        """What is known of a body's arguments and results, in any round of a loop."""
        origins = self.states.body_inputs(eqn, body, known.origins, known.depends)
        return Known(
            self.flow.body_inputs(body, known.depends),
            origins,
            self.flow.body_outputs(body, known.reaches),
            self.states.body_outputs(body, known.whole, origins),
        )


_UNKNOWN = (
    "autocast does not know how {where} calls what is inside it, so the products there run as they "
    "were traced. If that is meant, say so: with jmp_kit.full_precision(): …"
)
