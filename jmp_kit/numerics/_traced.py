"""The products of a function as JAX traces it."""

import collections
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jmp_kit.numerics._audited import Audit, Product
from jmp_kit.numerics._sources import source_of
from jmp_kit.programs import (
    PRODUCTS,
    Flow,
    every_equation,
    is_backward,
    is_kernel,
    names_in,
    products_in,
    pruned,
    stack_of,
    subjaxprs,
    traced,
)


def audit_traced(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Audit:
    """The products of a function, whose arguments may be abstract arrays."""
    flow = Flow(PRODUCTS, every=True)

    @functools.wraps(fun)
    def whole(*args: Any, **kwargs: Any) -> Any:
        return fun(*args, **kwargs), args, kwargs  # what it sets in nnx models is a result, too

    jaxpr, arguments = traced(whole, *args, **kwargs)
    # Of the forward products that the gradient does not need, the line and the path still tell.
    forward: dict[str, set[str]] = collections.defaultdict(set)
    for eqn, calls, paths, _ in products_in(jaxpr, arguments, flow):
        stack = stack_of(eqn, calls)
        if not is_backward(stack):
            forward[str(source_of(eqn, calls))].add(_path(stack, paths))
    products, opaque = [], []
    for eqn, calls, paths, times in products_in(pruned(jaxpr), arguments, flow):
        stack, source, kind = stack_of(eqn, calls), str(source_of(eqn, calls)), eqn.primitive.name
        path, backward = _path(stack, paths), is_backward(stack)
        if is_kernel(eqn):
            products.append(_kernel(eqn, source, path, backward, times))
            continue
        if kind not in PRODUCTS:
            opaque.append(f"{kind} {source} {path}".rstrip())
            held = _products_within(eqn, times)
            products += [_product(e, source, path, backward, n) for e, n in held]
            continue
        # A weight's gradient takes no weight: it is called as the forward product of its line.
        if backward and not names_in(stack) and len(forward[source]) == 1:
            [path] = forward[source]
        products.append(_product(eqn, source, path, backward, times))
    return Audit("traced", jax.default_backend(), tuple(products), tuple(opaque))


def _product(eqn: Any, source: str, path: str, backward: bool, times: int) -> Product:
    out, kind, flops = eqn.outvars[0].aval, eqn.primitive.name, times * _flops(eqn)
    lhs, rhs = (str(atom.aval.dtype) for atom in eqn.invars[:2])
    shape, dtype = tuple(out.shape), str(out.dtype)
    return Product(source, path, kind, shape, lhs, rhs, dtype, flops, backward, times)


def _products_within(eqn: Any, times: int) -> list[tuple[Any, int]]:
    """Those of what runs as traced, each as often as the kernel's grid tells."""
    rounds = math.prod(getattr(eqn.params.get("grid_mapping"), "grid", ()))
    times *= rounds if isinstance(rounds, int) else 1
    within = (e for jaxpr in subjaxprs(eqn) for e, _ in every_equation(jaxpr))
    return [(e, times) for e in within if e.primitive.name in PRODUCTS]


def _kernel(eqn: Any, source: str, path: str, backward: bool, times: int) -> Product:
    floats = [a.aval for a in eqn.invars if jnp.issubdtype(a.aval.dtype, jnp.floating)]
    lhs, rhs, out = (str(x.dtype) for x in (floats[0], floats[-1], eqn.outvars[0].aval))
    flops = sum(n * _flops(e) for e, n in _products_within(eqn, times))
    kind, shape = eqn.primitive.name, tuple(eqn.outvars[0].aval.shape)
    return Product(source, path, kind, shape, lhs, rhs, out, flops, backward, times, is_kernel=True)


def _path(stack: str, paths: Iterable[str]) -> str:
    return names_in(stack) or " ".join(sorted(filter(None, paths)))


def _flops(eqn: Any) -> int:
    """Two for each multiplication."""
    lhs, rhs = (atom.aval.shape for atom in eqn.invars[:2])
    size = math.prod(eqn.outvars[0].aval.shape)
    if eqn.primitive.name == "dot_general":
        (contracting, _), _ = eqn.params["dimension_numbers"]
        return 2 * size * math.prod(lhs[i] for i in contracting)
    if eqn.primitive.name == "conv_general_dilated":
        features = rhs[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2 * size * math.prod(rhs) // features
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    ((contracting, _), _) = numbers.dot_dimension_numbers
    if not set(contracting).isdisjoint(numbers.lhs_ragged_dimensions):
        size //= eqn.invars[2].aval.shape[-1]  # each row is summed in one group
    return 2 * size * math.prod(lhs[i] for i in contracting)
