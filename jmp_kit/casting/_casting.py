"""A function under a policy: traced, planned and evaluated."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive, Var, jaxpr_as_fun, primitives

from jmp_kit._dtypes import FLOAT8, stored_dtype
from jmp_kit._policy import Policy
from jmp_kit._tree import is_array
from jmp_kit.casting._models import holds_models, on_models
from jmp_kit.casting._regions import computing_in, full_precision
from jmp_kit.casting._warned import warn_of, warn_of_unscaled
from jmp_kit.casting.evaluating._differentiated import differentiated_first, has_bound_rules
from jmp_kit.casting.evaluating._evaluate import evaluated
from jmp_kit.casting.planning._plan import Known, Plan
from jmp_kit.casting.planning._planner import Planner
from jmp_kit.casting.reading._state import STATE, States
from jmp_kit.casting.rewriting._float8 import why_half
from jmp_kit.programs._arguments import flattened, paths_of_arrays
from jmp_kit.programs._flow import PRODUCTS, Flow
from jmp_kit.programs._jaxpr import cast, every_equation, is_float32, opened, primitive_names
from jmp_kit.programs._rules import Rules


class Casting(NamedTuple):
    """A function and how it is to be evaluated."""

    fun: Callable[..., Any]
    policy: Policy
    dtypes: Mapping[re.Pattern[str], np.dtype]
    flow: Flow
    price: float | None  # see Planner
    of_module: bool = False  # see Rules
    is_gradient: bool = False  # taken by jmp_kit, after rules were applied and with a scale chosen
    is_summed_wide: bool = True  # see Planner

    @property
    def halves(self) -> list[np.dtype]:
        """What is stored between products and has 16 bits, the policy's first."""
        dtypes = map(stored_dtype, (self.policy.compute_dtype, *self.dtypes.values()))
        return [dtype for dtype in dtypes if jnp.finfo(dtype).bits == 16]

    @property
    def float8_by_size(self) -> bool | None:
        """Whether products without a rule are in float8, if they are large; None: none is."""
        if self.policy.compute_dtype == FLOAT8:
            return True
        return False if FLOAT8 in self.dtypes.values() else None

    def evaluated(
        self,
        args: Any,
        kwargs: Any,
        plans: list[Plan] | None = None,
        paths_of: Callable[[], list[str]] | None = None,
    ) -> Any:
        """The function's results.

        Args:
          args, kwargs: what it is called with.
          plans: takes the plans that are made.
          paths_of: gives the paths of its arrays, if they are not its own.
        """
        fun, policy = self.fun, self.policy
        if holds_models((args, kwargs)):
            internal = policy.with_output_dtype(jnp.float32)

            def run(function: Callable[..., Any], paths: list[str], tree: Any) -> Any:
                inner = self._replace(fun=function, policy=internal)
                return inner.evaluated((tree,), {}, plans, lambda: paths)

            return self._leaving(on_models(fun, run, args, kwargs))
        if not self.halves:
            with full_precision():  # within another autocast, the innermost policy wins
                return self._leaving(fun(*args, **kwargs))
        if jnp.float16 in self.halves and jax.default_backend() == "tpu":
            raise ValueError(_NO_FLOAT16)
        flat, arrays, structure = flattened(fun, args, kwargs)
        paths_of = paths_of or functools.partial(paths_of_arrays, fun, args, kwargs)
        paths = paths_of() if self.dtypes else []
        program = self._program(flat, arrays, paths)
        rebuilt = structure()
        warn_of(program[0], self.flow, self.halves, arrays, paths_of)
        if not self.is_gradient:
            warn_of_unscaled(program[0], self.flow, self.halves)

        def results(*values: Any) -> list[Any]:
            return self._results(program, values, 0, plans)

        def derivative(function: Any, values: Any, cotangents: Any, once: bool) -> list[Any]:
            internal = self._replace(policy=policy.with_output_dtype(jnp.float32))
            return internal._derivative(function, values, cotangents, once, paths, plans)

        if has_bound_rules(program[0]):
            return rebuilt(differentiated_first(flat, arrays, results, derivative, self._leaving))
        return rebuilt(self._differentiable(program, arrays, 0, plans))

    def differentiated(self, derive: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """`derive(fun)(*args, **kwargs)`, its forward and backward pass planned as one program."""
        if holds_models((args, kwargs)) or not self.halves:
            return derive(lambda *args, **kwargs: self.evaluated(args, kwargs))(*args, **kwargs)

        @functools.wraps(self.fun)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self.dtypes:
                return self._leaving(self.fun(*args, **kwargs))
            # A rule names a product of the forward pass; its mark goes on to those of the backward.
            flat, arrays, structure = flattened(self.fun, args, kwargs)
            jaxpr, consts = self._program(flat, arrays, paths_of_arrays(self.fun, args, kwargs))
            results = jaxpr_as_fun(ClosedJaxpr(jaxpr, consts))(*arrays)
            return self._leaving(structure()(results))

        internal = self.policy.with_output_dtype(jnp.float32)
        whole = self._replace(fun=derive(forward), policy=internal, is_gradient=True)
        return whole.evaluated(args, kwargs)

    def _leaving(self, outputs: Any) -> Any:
        """What the function gives, in the policy's dtype."""

        def leaving(x: Any) -> Any:
            is_wide = is_array(x) and x.dtype == jnp.float32
            return cast(x, self.policy.output_dtype) if is_wide else x

        is_same = self.policy.output_dtype == jnp.float32
        return outputs if is_same else jax.tree.map(leaving, outputs)  # which copies nnx models

    def _program(
        self, function: Callable[..., list[Any]], arrays: Any, paths: list[str]
    ) -> tuple[Jaxpr, list[Any]]:
        with computing_in(stored_dtype(self.policy.compute_dtype)):
            jaxpr, consts = opened(jax.make_jaxpr(function)(*arrays))
        _require_primitives(self.flow.products, jaxpr)
        if self.dtypes and not self.is_gradient:
            otherwise = None if self.float8_by_size else self.policy.compute_dtype
            unmarked = None if self.float8_by_size else self.halves[0]
            rules = Rules(self.dtypes, otherwise, unmarked, self.flow, self.of_module)
            jaxpr = rules.marked(jaxpr, paths)
        return jaxpr, consts

    def _differentiable(
        self,
        program: tuple[Jaxpr, list[Any]],
        values: Sequence[Any],
        cotangents: int,
        plans: list[Plan] | None,
    ) -> list[Any]:
        """`_results`, whose derivatives JAX makes, or of float8 products programs like this one.

        These may be of any order. The program's marks go on to the products of its derivatives.
        """
        jaxpr, consts = program
        if not self._rounds(jaxpr):
            return self._results(program, values, cotangents, plans)
        # Of what the function closes over there may be a derivative, too.
        jaxpr = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
        policy = self.policy.with_output_dtype(jnp.float32)
        internal = self._replace(policy=policy, is_gradient=True)

        def results(*given: Any) -> list[Any]:
            return self._results((jaxpr, []), given, cotangents, plans)

        def derivative(function: Any, values: Any, cotangents: Any, once: bool) -> list[Any]:
            return internal._derivative(function, values, cotangents, once, [], plans)

        function = jaxpr_as_fun(ClosedJaxpr(jaxpr, []))
        arrays = [*consts, *values]
        return differentiated_first(function, arrays, results, derivative, self._leaving)

    def _derivative(
        self,
        function: Any,
        values: Sequence[Any],
        cotangents: Sequence[Any],
        once: bool,
        paths: list[str],
        plans: list[Plan] | None,
    ) -> list[Any]:
        """Of a program with a backward pass in it; once and for all, or with derivatives."""
        given, paths = [*values, *cotangents], [*paths, *("" for _ in cotangents)]
        program = self._program(function, given, paths)
        if once:
            return self._results(program, given, len(cotangents), plans, once)
        return self._differentiable(program, given, len(cotangents), plans)

    def _rounds(self, jaxpr: Jaxpr) -> bool:
        """Whether products in it are in float8, whose derivatives are not JAX's.

        What rounds to float8 would round its cotangent to float8, too, and without a scale.
        """
        by_size = self.float8_by_size
        if by_size is None:
            return False
        products = (e for e, _ in every_equation(jaxpr) if self.flow.is_product(e))
        return not all(why_half(e, by_size) for e in products)

    def _results(
        self,
        program: tuple[Jaxpr, list[Any]],
        values: Sequence[Any],
        cotangents: int,
        plans: list[Plan] | None,
        once: bool = False,
    ) -> list[Any]:
        """Of these values, the last of which are cotangents: made of products, and no state.

        Args:
          once: whether nobody differentiates them.
        """
        jaxpr, consts = program
        made = [i >= len(values) - cotangents for i in range(len(values))]
        known = Known(
            depends=made,
            origins=[0 if flag else STATE for flag in made],
            reaches=[False] * len(jaxpr.outvars),
            whole=[True] * len(jaxpr.outvars),
        )
        states, wide = States(self.flow), self.is_summed_wide
        by_size = self.float8_by_size
        planner = Planner(self.halves[0], self.flow, self.price, states, wide, by_size, once)
        closed = dict(_integers(jaxpr, consts))
        plan = dataclasses.replace(planner, closed=closed).plan(jaxpr, known)
        if plans is not None:
            plans.append(plan)
        results = evaluated(plan, consts, values)
        return [
            cast(x, self.policy.output_dtype) if is_float32(atom) else x
            for x, atom in zip(results, jaxpr.outvars, strict=True)
        ]


def _integers(jaxpr: Jaxpr, consts: Sequence[Any]) -> Iterator[tuple[Var, np.ndarray]]:
    """Of what it closes over, NumPy's: positions, say, which are there while it is planned."""
    for v, x in zip(jaxpr.constvars, consts, strict=True):
        holds_values = isinstance(v.aval, jax.core.ShapedArray)  # and is no reference
        if holds_values and not isinstance(x, jax.Array) and np.asarray(x).dtype.kind in "iub":
            yield v, np.asarray(x)


def _require_primitives(names: frozenset[str], jaxpr: Jaxpr) -> None:
    exported = {p.name for p in vars(primitives).values() if isinstance(p, Primitive)}
    if unknown := names - PRODUCTS - exported:
        used = primitive_names(jaxpr)
        for name in sorted(unknown - used):
            raise ValueError(
                f"products holds {name!r}, which is no primitive that JAX exports, nor one that "
                f"this function uses, so it changes nothing. It uses {', '.join(sorted(used))}."
            )


_NO_FLOAT16 = (
    "TPUs do not multiply in float16: products would be computed in another format, slowly, with a "
    'loss scale for nothing. Write "mixed_bfloat16" for "mixed_float16"; it needs no loss scale.'
)
