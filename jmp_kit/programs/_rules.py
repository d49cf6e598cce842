"""Rules by path: which products compute in another dtype.

A rule is turned into marks on equations, so that the evaluation knows of marks alone. One jaxpr may
be called from several places, by several layers say, so every call gets one of its own.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_kit.programs._flow import Flow, bodies_of
from jmp_kit.programs._jaxpr import is_var, with_subjaxprs
from jmp_kit.programs._marks import marked, names_in, stack_of

# The arguments that a value was made of with no product in between, as the bits of an integer; None
# once there was a product.
Origins = int | None


class Product(NamedTuple):
    """A product as it was seen in a program; without paths, a call of unknown kind with some."""

    eqn: JaxprEqn
    calls: tuple[JaxprEqn, ...]  # that it is inside of, the outermost first
    paths: frozenset[str]  # the names around it, and the arguments that feed it
    times: int  # how often its loops run it; of while loops once


class Marked(NamedTuple):
    """A jaxpr whose products are marked, and what was seen on the way."""

    jaxpr: Jaxpr
    origins: list[Origins]  # of its results
    products: list[Product]


@dataclasses.dataclass(frozen=True)
class Rules:
    """Patterns, the first of which to match a path of a product decides its dtype."""

    dtypes: Mapping[re.Pattern[str], np.dtype]
    otherwise: np.dtype | None
    unmarked: np.dtype | None  # what products without a mark compute in; None: by their size
    flow: Flow
    of_module: bool = False  # of which only a part may be called: what is not may be named too

    def marked(self, jaxpr: Jaxpr, paths: Sequence[str]) -> Jaxpr:
        """The program with its products marked.

        Args:
          paths: of each argument of the program.

        Raises:
          ValueError: if a rule matches nothing.
        """
        program = self.seen(jaxpr, paths)
        seen = sorted(frozenset().union(*(product.paths for product in program.products)))
        for pattern in self.dtypes:
            named = (*seen, *paths) if self.of_module else seen
            if not any(map(pattern.search, named)):
                raise ValueError(
                    _MATCHED_NOTHING.format(pattern=pattern.pattern, seen=_lines(seen))
                )
        return program.jaxpr

    def seen(self, jaxpr: Jaxpr, paths: Sequence[str]) -> Marked:
        """The program marked, and what paths its products have."""
        return _Marking(self, paths).jaxpr(jaxpr, (), [1 << i for i in range(len(paths))])

    def dtype_of(self, paths: Iterable[str]) -> np.dtype | None:
        """What a product of these paths computes in."""
        found = (d for p, d in self.dtypes.items() if any(map(p.search, paths)))
        return next(found, self.otherwise)


_MATCHED_NOTHING = """\
The rule {pattern!r} matches no product, so it would change nothing. Rules are regular expressions \
(re.search) over the paths of the parameters that products take, and over name scopes. Seen were:
{seen}"""


def _lines(paths: Sequence[str]) -> str:
    return "\n".join(f"  {path}" for path in paths if path) or "  nothing, for there is no product"


@dataclasses.dataclass(frozen=True)
class _Marking:
    rules: Rules
    paths: Sequence[str]

    def jaxpr(
        self, jaxpr: Jaxpr, calls: tuple[JaxprEqn, ...], origins: Sequence[Origins]
    ) -> Marked:
        """The jaxpr, inside these calls, with arguments of these origins, marked."""
        env: dict[Var, Origins] = dict(zip(jaxpr.invars, origins, strict=True))
        eqns, products = [], []
        for eqn in jaxpr.eqns:
            operands = [_origins(a, env) for a in eqn.invars]
            results: list[Origins] = [_union(operands)] * len(eqn.outvars)
            if self.rules.flow.is_product(eqn):
                paths = self._paths_of(names_in(stack_of(eqn, calls)), operands)
                products.append(Product(eqn, calls, paths, 1))
                eqn = self._marked(eqn, self.rules.dtype_of(paths))
                results = [None] * len(eqn.outvars)
            elif self.rules.flow.holds_product(eqn):
                eqn, results, inner = self._call(eqn, calls, operands)
                products += inner
            env.update(zip(eqn.outvars, results, strict=True))
            eqns.append(eqn)
        return Marked(jaxpr.replace(eqns=eqns), [_origins(a, env) for a in jaxpr.outvars], products)

    def _call(
        self, eqn: JaxprEqn, calls: tuple[JaxprEqn, ...], operands: Sequence[Origins]
    ) -> tuple[JaxprEqn, list[Origins], list[Product]]:
        bodies, times = bodies_of(eqn), eqn.params.get("length", 1)
        results: list[Origins] = [0 if bodies else None] * len(eqn.outvars)
        products = [] if bodies else [Product(eqn, calls, frozenset(), 1)]
        replaced = {}
        for body in bodies:
            inputs = [operands[i] for i in body.inputs]
            while True:
                inner = self.jaxpr(body.jaxpr, (*calls, eqn), inputs)
                before = list(inputs)
                for result, variable in body.carried:
                    inputs[variable] = _union([inputs[variable], inner.origins[result]])
                if inputs == before:
                    break
            for origins, i in zip(inner.origins, body.outputs, strict=False):
                results[i] = _union([results[i], origins])
            products += [p._replace(times=p.times * times) for p in inner.products]
            replaced[id(body.jaxpr)] = inner.jaxpr
        if eqn.primitive.name.startswith("custom_"):
            # Its rules have products of their own, so all of them together take the widest.
            found = {self.rules.dtype_of(product.paths) for product in products if product.paths}
            widest = max(
                found,
                key=lambda d: (d.itemsize if d else 0, d != self.rules.unmarked),
                default=self.rules.unmarked,
            )
            return self._marked(eqn, widest), results, products
        return with_subjaxprs(eqn, replaced), results, products

    def _marked(self, eqn: JaxprEqn, dtype: np.dtype | None) -> JaxprEqn:
        return eqn if dtype is None or dtype == self.rules.unmarked else marked(eqn, dtype)

    def _paths_of(self, scope: str, operands: Iterable[Origins]) -> frozenset[str]:
        bits = _union([origins for origins in operands if origins is not None]) or 0
        return frozenset(p for i, p in enumerate(self.paths) if bits >> i & 1) | {scope}


def _origins(atom: Any, env: Mapping[Var, Origins]) -> Origins:
    return env.get(atom, 0) if is_var(atom) else 0


def _union(origins: Iterable[Origins]) -> Origins:
    union = 0
    for bits in origins:
        if bits is None:
            return None
        union |= bits
    return union
