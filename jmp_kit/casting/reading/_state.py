"""State: values that are updated rather than made anew. They are never rounded.

Rounding a value that is made anew costs its last digits, once. Rounding a value that is updated,
`w - lr * g`, costs the update: 1e-3 is nothing to a bfloat16 of 1.

State begins with a value that depends on no product (an argument, a constant, what is made of
them), or with the carry of a loop. It goes on through operations that are linear in it, or that
choose, at its own size. A bias that is broadcast and added is no state, because its size changes; a
residual stream is none, because it begins with a product or an embedding. A stream that begins with
an argument cannot be told from state, so it is taken for state: that costs memory, not the result.
"""

import dataclasses
import functools
import operator
from collections.abc import Iterable, Mapping, Sequence

from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit.casting.reading._worth import is_costly
from jmp_kit.programs._algebra import ALGEBRA, is_algebra
from jmp_kit.programs._flow import PAIRED, SUMS, Body, Flow, bodies_of
from jmp_kit.programs._jaxpr import is_float32, is_var, scan_counts, shape_of, size_of
from jmp_kit.programs._marks import is_backward, is_differentiated, stack_of
from jmp_kit.programs._once import walked_once

# What a value is an update of, as the bits of an integer. STATE: of state from outside. LOOKED_UP:
# of rows of a table, with which an activation begins. UNIFORM: of one constant, broadcast, such as
# the zeros that a sum begins with. From VARIABLE on, a bit for each variable of the loop under
# analysis.
Origins = int
STATE, LOOKED_UP, UNIFORM, VARIABLE = 1, 2, 4, 8

# What makes values anew, beside functions that are not linear. An unknown primitive is taken to
# move values: then they stay float32.
_ANEW = (
    *("reduce_", "arg", "select_and", "cumprod", "cumlogsumexp", "random_"),
    *("sign", "floor", "ceil", "round", "square", "integer_pow", *ALGEBRA),
)
# The operands that the results are updates of, where it is not all of them.
_FIRST = slice(1)
_TAKEN = {"div": _FIRST, "rem": _FIRST, "select_n": slice(1, None), "clamp": slice(1, 2)}
# What is put into the first operand of these is no update of it, whatever its size.
_PUT_IN = ("dynamic_update_slice", "scatter", "gather")
_PIECES = {"slice", "split", "dynamic_slice"}

# Scans of more rounds are no stacks of layers.
_MOST_LAYERS = 256


@dataclasses.dataclass(frozen=True)
class States:
    """The analysis, where a program is called.

    Attributes:
      shapes: the shapes of the state of the forward pass. In the backward pass the cotangent of
        state is state, and nothing but its shape tells it from others.
      stepping: whether the program is part of an optimizer's step. All that such a step makes is
        float32: some optimizers multiply matrices.
    """

    flow: Flow
    shapes: frozenset[tuple[int, ...]] = frozenset()
    stepping: bool = False

    def mirrored(
        self, jaxpr: Jaxpr, inputs: Sequence[Origins], depends: Sequence[bool]
    ) -> "States":
        """The analysis for a program that holds its backward pass, and of what is called in it."""
        depending = self.flow.depending(jaxpr, depends)
        origins = self.origins(jaxpr, inputs, depends)
        state = [v for v in depending if origins.get(v, 0) & STATE and is_float32(v)]
        forward = [e for e in jaxpr.eqns if not is_backward(stack_of(e))] if state else jaxpr.eqns
        if len(forward) == len(jaxpr.eqns):
            return self
        reaching = self.flow.reaching(jaxpr.replace(eqns=forward), [False] * len(jaxpr.outvars))
        shapes = {shape_of(v) for v in state if v in reaching}
        return dataclasses.replace(self, shapes=self.shapes | shapes)

    def steps(self, jaxpr: Jaxpr) -> set[Var]:
        """What the program makes of gradients, and does not differentiate."""
        if self.stepping:
            return {v for e in jaxpr.eqns for v in e.outvars}
        after: set[Var] = set()
        found: set[Var] = set()
        for eqn in jaxpr.eqns:
            stack = stack_of(eqn)
            if eqn.primitive.name == "optimization_barrier":
                for a, v in zip(eqn.invars, eqn.outvars, strict=True):
                    after |= {v} if a in after else set()
                    found |= {v} if a in found else set()
            elif is_backward(stack) or not after.isdisjoint(filter(is_var, eqn.invars)):
                after.update(eqn.outvars)
                if not is_differentiated(stack):
                    found.update(eqn.outvars)
        return found

    @walked_once
    def origins(
        self, jaxpr: Jaxpr, inputs: Sequence[Origins], depends: Sequence[bool]
    ) -> Mapping[Var, Origins]:
        """What each variable is an update of.

        Args:
          inputs: what each argument is an update of.
          depends: of each argument, whether it depends on a product.
        """
        depending = self.flow.depending(jaxpr, depends)
        found = dict(zip(jaxpr.invars, inputs, strict=True))
        found |= dict.fromkeys(jaxpr.constvars, STATE)
        for eqn in jaxpr.eqns:
            operands = [found.get(a, 0) if is_var(a) else 0 for a in eqn.invars]
            if self.flow.closes(eqn):
                continue
            if eqn.primitive.name in PAIRED:
                results = operands
            elif bodies_of(eqn):
                flags = [is_var(a) and a in depending for a in eqn.invars]
                results = self._called(eqn, operands, flags)
            elif any(is_var(a) and a in depending for a in eqn.invars):
                results = self._updated(eqn, operands)
            else:
                results = _given(eqn, operands)
            found |= {v: o for v, o in zip(eqn.outvars, results, strict=True) if o}
        return found

    def _updated(self, eqn: JaxprEqn, operands: Sequence[Origins]) -> list[Origins]:
        """What the results are updates of, where they depend on a product."""
        name = eqn.primitive.name
        if _makes_anew(eqn):
            is_of_table = name == "gather" and operands[0] & ~UNIFORM
            return [LOOKED_UP if is_of_table else 0] * len(eqn.outvars)
        taken = _FIRST if name.startswith(_PUT_IN) else _TAKEN.get(name, slice(None))
        atoms, origins = eqn.invars[taken], operands[taken]
        results = []
        for v in eqn.outvars:
            found = _union(
                o for a, o in zip(atoms, origins, strict=True) if size_of(a) >= size_of(v)
            )
            if sum(map(size_of, atoms)) == size_of(v) and all(origins):  # they are joined
                found = _union(origins)
            if name in SUMS and found & UNIFORM:
                found |= STATE
            if shape_of(v) in self.shapes and is_backward(stack_of(eqn)):
                found |= STATE
            results.append(found & ~UNIFORM)
        return results

    def _called(
        self, eqn: JaxprEqn, operands: Sequence[Origins], depends: Sequence[bool]
    ) -> list[Origins]:
        results = [0] * len(eqn.outvars)
        for body in bodies_of(eqn):
            inputs = self.body_inputs(eqn, body, operands, depends)
            found = self.origins(body.jaxpr, inputs, self.flow.body_inputs(body, depends))
            for atom, i in zip(body.jaxpr.outvars, body.outputs, strict=False):
                results[i] |= found.get(atom, 0) if is_var(atom) else 0
        return results

    def body_inputs(
        self, eqn: JaxprEqn, body: Body, operands: Sequence[Origins], depends: Sequence[bool]
    ) -> list[Origins]:
        """What a body's variables are updates of, in any round of a loop.

        A variable is state if it becomes, in one round or several, an update of itself, or of such
        a variable. A variable that the loop hands on unchanged is what it was before the loop.
        """
        inputs = [operands[i] for i in body.inputs]
        if not body.carried:
            return inputs
        results = [body.jaxpr.outvars[result] for result, _ in body.carried]
        variables = [variable for _, variable in body.carried]
        given = [inputs[variable] for variable in variables]

        bits = {variable: VARIABLE << n for n, variable in enumerate(variables)}
        alone = [bits.get(i, 0) for i in range(len(inputs))]
        found = self.origins(body.jaxpr, alone, self.flow.body_inputs(body, depends))
        from_ = [found.get(a, 0) if is_var(a) else 0 for a in results]
        unchanged = [body.jaxpr.invars[i] is a for a, i in zip(results, variables, strict=True)]
        from_ = [0 if same else o for o, same in zip(from_, unchanged, strict=True)]
        for middle in range(len(from_)):  # in several rounds
            bit = VARIABLE << middle
            from_ = [o | from_[middle] if o & bit else o for o in from_]
        round_again = _union(VARIABLE << n for n, o in enumerate(from_) if o & VARIABLE << n)

        layers = self._layers(eqn, body, operands, depends)
        for n, variable in enumerate(variables):
            if unchanged[n]:
                continue
            reached = from_[n] & round_again
            begun = (given[m] for m, o in enumerate(from_) if from_[n] & VARIABLE << m)
            is_state = reached and variable not in layers
            inputs[variable] = STATE | given[n] | _union(begun) if is_state else 0
        return inputs

    def _layers(
        self, eqn: JaxprEqn, body: Body, operands: Sequence[Origins], depends: Sequence[bool]
    ) -> set[int]:
        """The variables that are residual streams of scanned layers, which may be half.

        Such a stream begins with an activation. Each round multiplies it by matrices of its own:
        slices of a value that depends on no product. Two other loops look alike: the steps of an
        optimizer, which hold a backward pass, and those of a solver, whose slices are vectors.
        """
        if eqn.primitive.name != "scan" or eqn.params["length"] > _MOST_LAYERS:
            return set()
        backward = is_backward(stack_of(eqn))
        if not backward and any(is_backward(stack_of(e)) for e in body.jaxpr.eqns):
            return set()
        sliced = range(sum(scan_counts(eqn)), len(eqn.invars))
        own = {i for i in sliced if not depends[i] or operands[i] & STATE}
        found = set()
        for _, variable in body.carried:
            shape = shape_of(body.jaxpr.invars[variable])
            begins = operands[variable] & ~LOOKED_UP
            if not begins and shape not in self.shapes:
                flags = [(i == variable, i in own) for i in range(len(eqn.invars))]
                if self._multiplies(body.jaxpr, flags):
                    found.add(variable)
        return found

    def _multiplies(self, jaxpr: Jaxpr, inputs: Sequence[tuple[bool, bool]]) -> bool:
        """Whether a product takes one of the first and, not as a batch, a matrix of the second."""
        first = {v for v, (flag, _) in zip(jaxpr.invars, inputs, strict=True) if flag}
        second = {v for v, (_, flag) in zip(jaxpr.invars, inputs, strict=True) if flag}
        for eqn in jaxpr.eqns:
            flags = [(a in first, a in second) if is_var(a) else (False, False) for a in eqn.invars]
            if self.flow.is_product(eqn):
                if _is_batched(eqn):
                    continue
                for (a, b), other in ((flags[:2], eqn.invars[1]), (flags[1::-1], eqn.invars[0])):
                    if a[0] and b[1] and not b[0] and len(shape_of(other)) > 1:
                        return True
                continue
            for body in bodies_of(eqn):
                if self._multiplies(body.jaxpr, [flags[i] for i in body.inputs]):
                    return True
            first |= set(eqn.outvars) if any(a for a, _ in flags) else set()
            second |= set(eqn.outvars) if any(b for _, b in flags) else set()
        return False

    def whole(
        self,
        jaxpr: Jaxpr,
        outputs: Sequence[bool],
        inputs: Sequence[Origins],
        depends: Sequence[bool],
    ) -> set[Var]:
        """The variables that are not to be rounded.

        These are state, and what state and the flagged results are reached from at their own size,
        with no product in between. A cotangent that is summed up to a bias's gradient is none of
        them, because its size changes. And what linear algebra takes and gives.
        """
        depending = self.flow.depending(jaxpr, depends)
        origins = self.origins(jaxpr, inputs, depends)
        found = {a for a, flag in zip(jaxpr.outvars, outputs, strict=True) if flag and is_var(a)}
        found |= {v for v in depending if origins.get(v, 0) & STATE} | self.steps(jaxpr)
        algebra = (e for e in jaxpr.eqns if not self.flow.is_call(e) and is_algebra(e))
        found |= {a for e in algebra for a in (*e.invars, *e.outvars) if is_var(a)}
        for eqn in reversed(jaxpr.eqns):
            results = [v in found for v in eqn.outvars]
            flags = [is_var(a) and a in depending for a in eqn.invars]
            if not any(flags) or self.flow.closes(eqn):
                continue
            if eqn.primitive.name in PAIRED:
                operands = results
            elif bodies_of(eqn):
                given = [origins.get(a, 0) if is_var(a) else 0 for a in eqn.invars]
                operands = self._whole_operands(eqn, results, given, flags)
            else:
                sizes = {size_of(v) for v, flag in zip(eqn.outvars, results, strict=True) if flag}
                operands = [size_of(a) in sizes for a in eqn.invars]
                if sum(map(size_of, eqn.invars)) in sizes or eqn.primitive.name in _PIECES:
                    operands = [bool(sizes)] * len(eqn.invars)
                if eqn.primitive.name.startswith(_PUT_IN):
                    operands[1:] = [False] * len(operands[1:])
                if eqn.primitive.name == "scatter" and any(results):
                    operands[2] = _is_put_back(eqn, origins)
            found |= {a for a, flag in zip(eqn.invars, operands, strict=True) if flag and is_var(a)}
        return found

    def body_outputs(
        self, body: Body, results: Sequence[bool], inputs: Sequence[Origins]
    ) -> list[bool]:
        """Which of a body's results are not to be rounded."""
        outputs = [results[i] for i in body.outputs] or [False] * len(body.jaxpr.outvars)
        for result, variable in body.carried:
            outputs[result] |= bool(inputs[variable] & STATE)
        return outputs

    def _whole_operands(
        self,
        eqn: JaxprEqn,
        results: Sequence[bool],
        given: Sequence[Origins],
        depends: Sequence[bool],
    ) -> list[bool]:
        operands = [False] * len(eqn.invars)
        for body in bodies_of(eqn):
            inputs = self.body_inputs(eqn, body, given, depends)
            within = self.flow.body_inputs(body, depends)
            outputs = self.body_outputs(body, results, inputs)
            found = self.whole(body.jaxpr, outputs, inputs, within)
            for var, i in zip(body.jaxpr.invars, body.inputs, strict=True):
                operands[i] |= var in found
        return operands


def _given(eqn: JaxprEqn, operands: Sequence[Origins]) -> list[Origins]:
    """What the results are updates of, where they depend on no product: state may begin here."""
    name = eqn.primitive.name
    if name == "gather":
        return [LOOKED_UP] * len(eqn.outvars)
    if name == "broadcast_in_dim" and not is_var(eqn.invars[0]):
        return [UNIFORM]
    results = []
    for v in eqn.outvars:
        pairs = zip(eqn.invars, operands, strict=True)
        origins = _union(o for a, o in pairs if size_of(a) >= size_of(v))
        results.append(LOOKED_UP if origins & LOOKED_UP else origins)
    return results


def _makes_anew(eqn: JaxprEqn) -> bool:
    name = eqn.primitive.name
    if name == "gather":
        return shape_of(eqn.invars[0]) != shape_of(eqn.outvars[0])
    return name != "reduce_precision" and (name.startswith(_ANEW) or is_costly(eqn))


def _is_put_back(scatter: JaxprEqn, origins: Mapping[Var, Origins]) -> bool:
    """Whether rows of state are replaced by what is an update of rows that were looked up."""
    table, _, rows = (origins.get(a, 0) if is_var(a) else 0 for a in scatter.invars)
    return bool(table & STATE and rows & LOOKED_UP)


def _is_batched(eqn: JaxprEqn) -> bool:
    numbers = eqn.params.get("dimension_numbers")
    return eqn.primitive.name == "dot_general" and any(numbers[1])


def _union(origins: Iterable[Origins]) -> Origins:
    return functools.reduce(operator.or_, origins, 0)
