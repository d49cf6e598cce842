"""Which products of a program really run in half."""

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jmp_kit.autocast import PRODUCTS, Flow, names_in, products_in, pruned, stack_of, traced
from jmp_kit.numerics._sources import source_of
from jmp_kit.numerics._tables import table


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product or a convolution of a program."""

    source: str  # "model.py:41", the user's line; empty if it is not known
    path: str  # name scopes, in Flax linen the module; else the parameters that feed it
    primitive: str  # "dot_general", …
    shape: tuple[int, ...]  # of the result
    lhs_dtype: str
    rhs_dtype: str
    out_dtype: str
    flops: int  # two for each multiplication, every time
    backward: bool
    times: int = 1  # how often the loops around it run it; a while loop counts as one

    @property
    def is_half(self) -> bool:
        """Whether both operands have 16 bits or fewer."""
        return all(jnp.dtype(d).itemsize <= 2 for d in (self.lhs_dtype, self.rhs_dtype))


@dataclasses.dataclass(frozen=True)
class Audit:
    """The products of a program. Print it for a table."""

    level: str  # "traced"
    backend: str  # "cpu", "gpu"
    products: tuple[Product, ...]
    opaque: tuple[str, ...]  # what holds products and is run as traced, with its line

    @property
    def half_fraction(self) -> float:
        """The share of FLOPs whose operands have 16 bits or fewer; 1 where there are none."""
        total = sum(p.flops for p in self.products)
        return sum(p.flops for p in self.products if p.is_half) / total if total else 1.0

    def assert_half(self, except_: str | None = None) -> None:
        """For a test suite of your own: every product is half, but those of some paths.

        Args:
          except_: a regular expression (`re.search`) over paths and sources.

        Raises:
          AssertionError: if another product is not half, or a region runs as traced; it lists them.
        """
        allowed = re.compile(except_) if except_ else None
        wide = [
            p
            for p in self.products
            if not p.is_half
            and not (allowed and (allowed.search(p.path) or allowed.search(p.source)))
        ]
        if wide or self.opaque:
            raise AssertionError(
                f"{len(wide)} of {len(self.products)} products do not take half operands, "
                f"{1 - self.half_fraction:.1%} of all FLOPs:\n{_table(wide)}"
                + "".join(f"\nrun as traced: {where}" for where in self.opaque)
            )

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return {"half_fraction": self.half_fraction, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        total = sum(p.flops for p in self.products)
        head = (
            f"{len(self.products)} products, {_count(total)}FLOP, {self.half_fraction:.1%} of it "
            f"half ({self.level}, {self.backend})"
        )
        opaque = [f"run as traced: {where}" for where in self.opaque]
        return "\n".join([head, _table(self.products), *opaque])


def audit(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Audit:
    """Every matrix product and convolution of a function, with its dtypes, as it is traced.

    Nothing is computed. Where `fun` is a gradient or a train step, the products of the backward
    pass are among them. What a loop repeats counts as often as it is repeated, a while loop once.

    Args:
      fun: any JAX function: under `autocast` or not, jitted or not.
      args, kwargs: what it is called with; arrays may be abstract (`jax.ShapeDtypeStruct`).

    Returns:
      An `Audit`, which prints as a table.

    Example:
      >>> import jax, jax.numpy as jnp, jmp_kit
      >>> @jmp_kit.autocast("mixed_bfloat16", rules={"head": "float32"})
      ... def loss_fn(params, x):
      ...     hidden = jnp.tanh(x @ params["body"])
      ...     return jnp.sum(hidden @ params["head"])
      >>> params = {"body": jnp.ones((8, 8)), "head": jnp.ones((8, 2))}
      >>> found = jmp_kit.numerics.audit(jax.grad(loss_fn), params, jnp.ones((4, 8)))
      >>> [p.lhs_dtype for p in found.products if p.backward]
      ['float32', 'float32', 'bfloat16']
      >>> f"{found.half_fraction:.0%}"
      '80%'
      >>> found.assert_half(except_="head")
    """
    flow = Flow(PRODUCTS, every=True)
    jaxpr, arguments = traced(fun, *args, **kwargs)
    # Of the forward products that the gradient does not need, the line and the path still tell.
    forward: dict[str, set[str]] = collections.defaultdict(set)
    for eqn, calls, paths, _ in products_in(jaxpr, arguments, flow):
        stack = stack_of(eqn, calls)
        if not _is_backward(stack):
            forward[str(source_of(eqn, calls))].add(_path(stack, paths))
    products, opaque = [], []
    for eqn, calls, paths, times in products_in(pruned(jaxpr), arguments, flow):
        stack, source, kind = stack_of(eqn, calls), str(source_of(eqn, calls)), eqn.primitive.name
        path, backward = _path(stack, paths), _is_backward(stack)
        if kind not in PRODUCTS:
            opaque.append(f"{kind} {source} {path}".rstrip())
            continue
        # A weight's gradient takes no weight: it is called as the forward product of its line.
        if backward and not names_in(stack) and len(forward[source]) == 1:
            [path] = forward[source]
        out, flops = eqn.outvars[0].aval, times * _flops(eqn)
        shape, (lhs, rhs) = tuple(out.shape), (str(atom.aval.dtype) for atom in eqn.invars[:2])
        dtypes = lhs, rhs, str(out.dtype)
        products.append(Product(source, path, kind, shape, *dtypes, flops, backward, times))
    return Audit("traced", jax.default_backend(), tuple(products), tuple(opaque))


def _is_backward(stack: str) -> bool:
    return "transpose(" in stack


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
    ((contracting, _), _) = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    return 2 * size * math.prod(lhs[i] for i in contracting)


def _table(products: Iterable[Product]) -> str:
    """A row for each kind: the same line, path, dtypes and pass."""
    kinds: dict[tuple[str, ...], list[Product]] = collections.defaultdict(list)
    for p in products:
        dtypes = p.lhs_dtype if p.lhs_dtype == p.rhs_dtype else f"{p.lhs_dtype}×{p.rhs_dtype}"
        which = "backward" if p.backward else "forward"
        kinds[p.source, which, f"{dtypes}→{p.out_dtype}", p.path].append(p)
    rows = [("FLOP", "times", "source", "pass", "dtypes", "path")]
    for (source, which, dtypes, path), group in kinds.items():
        short = path if len(path) <= 40 else f"…{path[-39:]}"
        flops = _count(sum(p.flops for p in group))
        rows.append((flops, str(len(group)), source, which, dtypes, short))
    return table(rows)


def _count(number: float) -> str:
    for prefix in ("", "k", "M", "G", "T"):
        if number < 1000:
            return f"{number:.3g} {prefix}"
        number /= 1000
    return f"{number:.3g} P"
