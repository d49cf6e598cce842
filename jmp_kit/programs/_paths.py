"""What rules are compared with, for a user to look at."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from jmp_kit.programs._arguments import eval_shape, flattened, paths_of_arrays
from jmp_kit.programs._flow import PRODUCTS, Flow
from jmp_kit.programs._jaxpr import opened
from jmp_kit.programs._rules import Product, Rules

_FLOW = Flow(PRODUCTS)


class Paths(tuple[tuple[str, ...], ...]):
    """The paths of each product, or parameter, in order; printed, a table."""

    what: str

    def __new__(cls, what: str, paths: Iterable[Iterable[str]]) -> "Paths":
        """Of what, and the paths of each."""
        self = super().__new__(cls, map(tuple, paths))
        self.what = what
        return self

    def __str__(self) -> str:
        width = len(self.what)
        rows = [f"{i:>{width}}  {'  '.join(paths)}" for i, paths in enumerate(self, start=1)]
        return "\n".join([f"{self.what}  paths", *rows])


def program_of(
    fun: Callable[..., Any], *args: Any, **kwargs: Any
) -> tuple[Jaxpr, list[Any], list[Any], list[str]]:
    """A function's program and its constants, its array arguments, and the paths of these."""
    flat, arrays, _ = flattened(fun, args, kwargs)
    jaxpr, consts = opened(jax.make_jaxpr(flat)(*arrays))
    return jaxpr, consts, arrays, paths_of_arrays(fun, args, kwargs)


def traced(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Jaxpr, list[str]]:
    """A function's program, and the paths of its arguments, which may be abstract arrays."""
    found: list[tuple[Jaxpr, list[str]]] = []

    def trace(*args: Any, **kwargs: Any) -> None:
        jaxpr, _, _, paths = program_of(fun, *args, **kwargs)
        found.append((jaxpr, paths))

    eval_shape(trace, *args, **kwargs)
    return found[0]


def products_in(jaxpr: Jaxpr, paths: Sequence[str], flow: Flow = _FLOW) -> list[Product]:
    """The products of a program."""
    full = jnp.dtype(jnp.float32)
    return Rules({}, full, full, flow).seen(jaxpr, paths).products


def product_paths(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Paths:
    """The paths of the products of a function, whose arguments may be abstract arrays."""
    products = (product.paths for product in products_in(*traced(fun, *args, **kwargs)))
    return Paths("product", (sorted(filter(None, paths)) for paths in products if paths))
