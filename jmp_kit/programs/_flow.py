"""Which values of a program depend on a product, and from which a product can be reached."""

import dataclasses
from collections.abc import Sequence, Set
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit.programs._algebra import SOLVES
from jmp_kit.programs._jaxpr import (
    is_float32,
    is_var,
    opened,
    scan_counts,
    subjaxprs,
)
from jmp_kit.programs._marks import is_in_full_precision
from jmp_kit.programs._once import walked_once

# By name, because JAX does not export all of them.
PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})
"""The names of the primitives that `autocast` takes for products: matrix products, convolutions and
ragged products."""

# What libraries compute as one, attention say.
KERNELS = ("dot_product_attention", "cudnn_fusion", "pallas_call", "ffi_call")

# Calls that only call, what `jax.checkpoint` wraps in a forward pass say: of JAX 0.10, and later.
OPEN_CALLS = ("closed_call", "eval_jaxpr")

# What adds two values, or their difference.
ADDS = {"add", "add_any"}
SUMS = ADDS | {"sub"}

# What a value goes through as it is.
MOVES = {"reshape", "transpose", "neg", "convert_element_type", "squeeze"}
# What XLA adds in the kernel of a product, and what may be between.
MOVED = {"reshape", "squeeze"}

# What moves values as they are: all of them, or some.
_TURNS = {"reshape", "transpose", "squeeze", "expand_dims", "rev", "concatenate", "pad"}
_PICKS = {"slice", "split", "gather", "dynamic_slice", "broadcast_in_dim"}

# Each result is made of the operand in the same place.
PAIRED = {"optimization_barrier", "psum", "psum_invariant", "pmax", "pmin", "ppermute", "pvary"}


class Body(NamedTuple):
    """A jaxpr inside a higher-order equation, and how values get in and out of it."""

    jaxpr: Jaxpr
    consts: list[object]
    inputs: Sequence[int]  # which operand of the equation each of its variables is
    outputs: Sequence[int]  # which result each of its results is; empty for a loop's condition
    carried: Sequence[tuple[int, int]] = ()  # (result, variable): what goes round in a loop


def bodies_of(eqn: JaxprEqn) -> list[Body]:
    """The jaxprs inside an equation; none if this library does not know how they are called."""
    name, params = eqn.primitive.name, eqn.params
    n_in, n_out = len(eqn.invars), len(eqn.outvars)
    if name in ("jit", "pjit", "remat2", "checkpoint", "shard_map"):
        return [Body(*opened(params["jaxpr"]), range(n_in), range(n_out))]
    if name in ("custom_jvp_call", "custom_vjp_call", "composite", *OPEN_CALLS):
        inside = params.get("call_jaxpr") or params["jaxpr"]  # of a composite up to JAX 0.11
        return [Body(*opened(inside), range(n_in), range(n_out))]
    if name == "custom_vmap_call":
        return [Body(*opened(params["call"]), range(n_in), range(n_out))]
    if name == "cond":
        return [
            Body(*opened(branch), range(1, n_in), range(n_out)) for branch in params["branches"]
        ]
    if name == "scan":
        n_consts, n_carry = scan_counts(eqn)
        carried = [(i, n_consts + i) for i in range(n_carry)]
        return [Body(*opened(params["jaxpr"]), range(n_in), range(n_out), carried)]
    if name == "while":
        n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
        carry = range(n_cond + n_body, n_in)
        carried = [(i, n_body + i) for i in range(n_out)]
        return [
            Body(*opened(params["cond_jaxpr"]), [*range(n_cond), *carry], []),
            Body(*opened(params["body_jaxpr"]), range(n_cond, n_in), range(n_out), carried),
        ]
    return []


@dataclasses.dataclass(frozen=True)
class Flow:
    """The analysis, for one set of products."""

    products: frozenset[str]
    every: bool = False  # those too that half cannot serve, that are to run as written, or kernels

    def is_product(self, eqn: JaxprEqn) -> bool:
        """Whether the equation is a product that half can serve: of floats of at most 32 bits."""
        if eqn.primitive.name not in self.products or self.every:
            return eqn.primitive.name in self.products or (self.every and is_kernel(eqn))
        return not is_in_full_precision(eqn) and all(
            jnp.issubdtype(var.aval.dtype, jnp.floating) and var.aval.dtype.itemsize <= 4
            for var in eqn.outvars
        )

    def holds_product(self, eqn: JaxprEqn) -> bool:
        """Whether there is a product in a jaxpr inside the equation, however deep."""
        is_there = any(map(self._has_product, subjaxprs(eqn)))
        is_as_traced = eqn.primitive.name in SOLVES or is_in_full_precision(eqn) or is_kernel(eqn)
        return is_there and (self.every or not is_as_traced)

    @walked_once
    def _has_product(self, jaxpr: Jaxpr) -> bool:
        return any(self.is_product(eqn) or self.holds_product(eqn) for eqn in jaxpr.eqns)

    def is_call(self, eqn: JaxprEqn) -> bool:
        """Whether it is planned by what is inside: it holds a product, or is a scan.

        A recurrence without products reads and stacks slices of what products give.
        """
        is_scan = eqn.primitive.name == "scan" and not is_in_full_precision(eqn)
        return is_scan or self.holds_product(eqn)

    def closes(self, eqn: JaxprEqn) -> bool:
        """Whether it ends a segment and its operands are kept: a product, or a kernel of half."""
        is_half_kernel = self._holds_kernel(eqn) and _takes_halves(eqn)
        return self.is_product(eqn) or (is_half_kernel and not self.holds_product(eqn))

    def _holds_kernel(self, eqn: JaxprEqn) -> bool:
        is_one = eqn.primitive.name.startswith(KERNELS)
        return is_one or any(map(self._has_kernel, subjaxprs(eqn)))

    @walked_once
    def _has_kernel(self, jaxpr: Jaxpr) -> bool:
        return any(map(self._holds_kernel, jaxpr.eqns))

    @walked_once
    def depending(self, jaxpr: Jaxpr, inputs: Sequence[bool]) -> Set[Var]:
        """The variables that depend on a product, if these of its inputs do."""
        marked = {var for var, flag in zip(jaxpr.invars, inputs, strict=True) if flag}
        for eqn in jaxpr.eqns:
            operands = [is_var(atom) and atom in marked for atom in eqn.invars]
            if self.is_product(eqn):
                results = [True] * len(eqn.outvars)
            elif self.is_call(eqn):
                results = self._depending_results(eqn, operands)
            elif eqn.primitive.name in PAIRED:
                results = operands
            else:
                results = [any(operands)] * len(eqn.outvars)
            marked |= {var for var, flag in zip(eqn.outvars, results, strict=True) if flag}
        return marked

    @walked_once
    def reaching(self, jaxpr: Jaxpr, outputs: Sequence[bool]) -> Set[Var]:
        """The variables from which a product can be reached, if from these outputs it can."""
        marked = {
            atom for atom, flag in zip(jaxpr.outvars, outputs, strict=True) if flag and is_var(atom)
        }
        for eqn in reversed(jaxpr.eqns):
            results = [var in marked for var in eqn.outvars]
            if self.is_product(eqn):
                operands = [True] * len(eqn.invars)
            elif self.is_call(eqn):
                operands = self._reaching_operands(eqn, results)
            elif eqn.primitive.name in PAIRED:
                operands = results
            else:
                operands = [any(results)] * len(eqn.invars)
            marked |= {
                a for a, flag in zip(eqn.invars, operands, strict=True) if flag and is_var(a)
            }
        return marked

    def taken_by_others(self, jaxpr: Jaxpr) -> set[Var]:
        """The variables that are results, or that anything but a product takes, moved or not."""
        marked = {atom for atom in jaxpr.outvars if is_var(atom)}
        for eqn in reversed(jaxpr.eqns):
            is_turned = is_exact(eqn) and eqn.primitive.name in _TURNS
            if self.is_product(eqn) or (is_turned and marked.isdisjoint(eqn.outvars)):
                continue
            bodies = bodies_of(eqn)
            operands = [not bodies] * len(eqn.invars)
            if eqn.primitive.name == "optimization_barrier":
                operands = [v in marked for v in eqn.outvars]
            for body in bodies:
                inside = self.taken_by_others(body.jaxpr)
                for var, i in zip(body.jaxpr.invars, body.inputs, strict=True):
                    operands[i] |= var in inside
            marked |= {
                a for a, flag in zip(eqn.invars, operands, strict=True) if flag and is_var(a)
            }
        return marked

    def body_inputs(self, body: Body, operands: Sequence[bool]) -> list[bool]:
        """Which of a body's variables depend on a product, in any round of a loop."""
        inputs = [operands[i] for i in body.inputs]
        while True:
            marked = self.depending(body.jaxpr, inputs)
            before = list(inputs)
            for result, variable in body.carried:
                atom = body.jaxpr.outvars[result]
                inputs[variable] |= is_var(atom) and atom in marked
            if inputs == before:
                return inputs

    def body_outputs(self, body: Body, results: Sequence[bool]) -> list[bool]:
        """From which of a body's results a product can be reached, in any round of a loop."""
        outputs = [results[i] for i in body.outputs] or [False] * len(body.jaxpr.outvars)
        while True:
            marked = self.reaching(body.jaxpr, outputs)
            before = list(outputs)
            for result, variable in body.carried:
                outputs[result] |= body.jaxpr.invars[variable] in marked
            if outputs == before:
                return outputs

    def _depending_results(self, eqn: JaxprEqn, operands: Sequence[bool]) -> list[bool]:
        bodies = bodies_of(eqn)
        if not bodies:
            return [True] * len(eqn.outvars)
        results = [False] * len(eqn.outvars)
        for body in bodies:
            inputs = self.body_inputs(body, operands)
            marked = self.depending(body.jaxpr, inputs)
            for atom, i in zip(body.jaxpr.outvars, body.outputs, strict=False):
                results[i] |= is_var(atom) and atom in marked
            for result, variable in body.carried:
                results[body.outputs[result]] |= inputs[variable]
        return results

    def _reaching_operands(self, eqn: JaxprEqn, results: Sequence[bool]) -> list[bool]:
        bodies = bodies_of(eqn)
        if not bodies:
            return [True] * len(eqn.invars)
        operands = [False] * len(eqn.invars)
        for body in bodies:
            outputs = self.body_outputs(body, results)
            marked = self.reaching(body.jaxpr, outputs)
            for var, i in zip(body.jaxpr.invars, body.inputs, strict=True):
                operands[i] |= var in marked
            for result, variable in body.carried:
                operands[body.inputs[variable]] |= outputs[result]
        return operands


def is_exact(eqn: JaxprEqn) -> bool:
    """Whether it moves values as they are, beside what every dtype has."""
    beside = [a.val for a in eqn.invars if not is_var(a) and is_float32(a)]
    beside += [x for x in [eqn.params.get("fill_value")] if x is not None]
    has_them = all(x == 0 or not np.isfinite(x) for x in beside)
    return has_them and eqn.primitive.name in _TURNS | _PICKS


def is_kernel(eqn: JaxprEqn) -> bool:
    """Whether it is a kernel of half operands, which runs as it is."""
    return eqn.primitive.name.startswith(KERNELS) and _takes_halves(eqn)


def _takes_halves(eqn: JaxprEqn) -> bool:
    dtypes = [a.aval.dtype for a in eqn.invars if hasattr(a.aval, "dtype")]
    floats = [d for d in dtypes if jnp.issubdtype(d, jnp.floating)]
    return bool(floats) and all(d.itemsize <= 2 for d in floats)
