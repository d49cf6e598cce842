"""What a backward pass takes of its forward pass, where both are one program."""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from jax.extend.core import JaxprEqn, Var

from jmp_kit.casting.reading._extrema import compared
from jmp_kit.casting.reading._joined import streams, sums_of_halves
from jmp_kit.casting.reading._parts import ahead, is_whole
from jmp_kit.casting.reading._rounding import is_rounding
from jmp_kit.casting.reading._worth import CUTS, is_kept, normed, woven
from jmp_kit.casting.recomputing._again import LITTLE, Value
from jmp_kit.programs._axes import reduces
from jmp_kit.programs._flow import MOVED, Flow
from jmp_kit.programs._jaxpr import (
    constants_of,
    is_along_rows,
    is_float32,
    is_small,
    is_var,
    largest_size,
    names_within,
    shape_of,
    traced_back,
)
from jmp_kit.programs._marks import is_backward, stack_of

Part = list[JaxprEqn]


class Rounded(NamedTuple):
    """A value as products take it."""

    var: Var


class ForwardPass:
    """What is known of the values of the forward pass.

    Attributes:
      largest: the size of the largest value of each part.
      maker: what may be made again, and the equation that does so: what only its own segment and
        the backward pass take; what others take is stored anyway.
      early: what the forward pass makes that depends on a product.
      results: what may be computed with as it is stored for products, that is rounded.
      streams: what is stored for what takes it in its own segment.
      cut: what is cut from something larger, and may be made again.
      woven: what may be kept in float32, for XLA writes it so in any case.
      ahead: by identity, the equations that the forward pass takes itself.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        flow: Flow,
        depending: Set[Var],
        uses: Mapping[Var, Sequence[JaxprEqn | None]],
        results: Set[Var],
    ) -> None:
        self.parts, self.flow, self.depending = parts, flow, depending
        self.largest = [largest_size(part) for part in parts]
        self.uses, self.results = uses, results
        self.eqns = [e for part in parts for e in part]
        self.backward = {id(e) for e in self.eqns if is_backward(stack_of(e))}
        self.early = depending - {v for e in self.eqns if self.is_late(e) for v in e.outvars}
        self.compared = compared(self.eqns).values
        self.part_of = {id(e): i for i, part in enumerate(parts) for e in part}
        self.made_in = {v: i for i, part in enumerate(parts) for e in part for v in e.outvars}
        self.maker = makers(parts, flow, self._is_made_again)
        cuts = (e for e in self.maker.values() if e.primitive.name in {"slice", "split"})
        self.cut = {v for e in cuts for v in e.outvars}
        products = {v for e in self.eqns if flow.is_product(e) for v in e.outvars}
        self.sums = {v for part in parts for v in sums_of_halves(part, products)}
        self.streams = {v for part in parts for v in streams(part, flow, products, uses)}
        self.constant = constants_of(self.eqns)
        self.woven = {v for part in parts for v in woven(part)}
        self.ahead = ahead(self.eqns, flow, uses, self.is_late)

    def is_late(self, eqn: JaxprEqn) -> bool:
        """Whether it is one of the backward pass."""
        return id(eqn) in self.backward

    def _is_made_again(self, v: Var, part: int) -> bool:
        is_free = v in self.early and v not in self.compared
        return is_free and all(self._is_spared(use, part) for use in self.uses[v])

    def _is_spared(self, use: JaxprEqn | None, part: int) -> bool:
        if use is None:
            return False
        is_computed = self.flow.closes(use) or not is_whole(use, self.flow)
        return self.part_of[id(use)] == part or (self.is_late(use) and is_computed)

    def from_memory(self, eqn: JaxprEqn) -> bool:
        """Whether it takes its operands from memory."""
        return is_whole(eqn, self.flow) or (_is_kept(eqn, self.flow) and not reduces(eqn))

    def values(self) -> dict[Hashable, Value]:
        """What the backward pass takes of the forward pass, and what that is made of."""
        values: dict[Hashable, Value] = {}
        of_rows = {v for part in self.parts for v in normed(part)}
        product_of = {v for e in self.eqns if self.flow.is_product(e) for v in e.outvars}
        late = filter(self.is_late, self.eqns)
        pairs = ((a, self.part_of[id(e)]) for e in late for a in e.invars if is_var(a))
        waiting = [a for a, part in pairs if self.made_in.get(a, part) != part]
        while waiting:
            v = waiting.pop()
            if v in self.early and v in self.made_in and v not in values:
                found = dict(self._values_of(v, v in of_rows, v in product_of))
                values |= found
                waiting += found[v].operands or ()
        return values

    def _values_of(
        self, v: Var, is_normed: bool, is_product: bool
    ) -> Iterator[tuple[Hashable, Value]]:
        """A value to compute with, and where they differ the same as products take it, rounded."""
        here = self.made_in[v]
        takers = [e for e in self.uses[v] if e is None or self.part_of[id(e)] != here]
        late = [e for e in takers if e is not None and self.is_late(e)]
        closing = [e for e in self.uses[v] if e is not None and self.flow.closes(e)]
        is_written = not all(map(_multiplies_a_vector, closing))
        is_read = not all(map(self.from_memory, late))
        is_summed = any(map(_multiplies_a_vector, late))
        is_multiplied = any(self.from_memory(e) and not _multiplies_a_vector(e) for e in late)
        is_stored = v not in self.maker or v in self.streams or len(late) < len(takers)
        # Beside its products, its own segment takes it as it is stored for them.
        own = [e for e in self.uses[v] if id(e) in self.ahead and self.part_of[id(e)] == here]
        is_stored |= 0 < sum(map(self.flow.closes, own)) < len(own)
        is_woven = v in self.woven and not closing
        is_half = bool(closing) or is_product or not (is_woven or is_small(v, self.largest[here]))
        is_half &= is_float32(v)
        nbytes = 2 * count_of(v) if is_half else nbytes_of(v)
        # A norm is made again in a pass of its own, which reads what it is a norm of.
        again = nbytes * (2 if is_normed else 1) if is_multiplied else 0
        # Of a gate and of what it lets through, cut from one product, XLA makes another kernel of
        # what is let through than of their cotangents, which are joined.
        cut = sum(map(count_of, self._cut_before(v))) if is_multiplied and is_half else 0
        again += 2 * cut if cut > count_of(v) else 0
        # What was looked up for it, say, is looked up again.
        again += sum(map(nbytes_of, self._given(v))) if is_multiplied else 0
        again += self._read_for_it(v)
        if is_woven and self._is_written_again(v):
            again = nbytes + 2 * sum(map(count_of, self._sources(v)))
        operands = [a for a in self.maker[v].invars if is_var(a)] if v in self.maker else None
        if closing and is_half and not is_stored and v not in self.results:
            yield v, Value(operands, nbytes, False, True, is_read, False, 0)
            nbytes += int(nbytes * LITTLE)
            yield Rounded(v), Value([v], nbytes, is_written, False, is_summed, is_multiplied, again)
        else:
            stored = is_stored or bool(closing) or is_woven
            is_rounded = is_half and not stored and v not in self.sums
            stored &= not (is_product and self._is_added(v))
            yield v, Value(operands, nbytes, stored, is_rounded, is_read, is_multiplied, again)

    def _is_written_again(self, v: Var) -> bool:
        """Whether XLA writes it where it is made again, as it does what is cut and joined."""
        eqn = self.maker.get(v)
        if eqn is None or v not in self.cut:
            return eqn is not None and eqn.primitive.name in CUTS
        [whole, *_] = eqn.invars  # if that is not written, it is cut where it is taken
        return whole in self.woven and (whole not in self.cut or self._is_written_again(whole))

    def _sources(self, v: Var) -> set[Var]:
        """What it is made again of."""
        _, sources = traced_back([v], self.maker)
        return {a for a in sources if a in self.early}

    def _read_for_it(self, v: Var) -> int:
        """What a pass of its own reads to make it again: a maximum along other axes than rows."""
        eqn = self.maker.get(v)
        if eqn is None or not reduces(eqn) or is_along_rows(eqn):
            return 0
        return 2 * sum(count_of(a) for a in eqn.invars if is_var(a))

    def _cut_before(self, v: Var) -> set[Var]:
        """What it is made of that is cut from something larger."""
        _, sources = traced_back([v], self.maker, self.cut)
        return self.cut.intersection(sources)

    def _given(self, v: Var) -> set[Var]:
        """What else it is made of that is read: what depends on no product."""
        _, sources = traced_back([v], self.maker)
        return sources.keys() - self.depending - self.constant

    def _is_added(self, v: Var) -> bool:
        """Whether XLA adds to it in its product's kernel, and writes the sum alone."""
        early = [e for e in self.uses[v] if e is None or not self.is_late(e)]
        return bool(early) and all(e is not None and self._adds(e) for e in early)

    def _adds(self, eqn: JaxprEqn) -> bool:
        v = eqn.outvars[0]
        return v in self.streams or (eqn.primitive.name in MOVED and self._is_added(v))


def count_of(v: Var) -> int:
    """How many elements it has, symbolic dimensions each as good as one."""
    return math.prod(n for n in shape_of(v) if isinstance(n, int))


def nbytes_of(v: Var) -> int:
    """What it takes in memory as it was traced."""
    itemsize: int = v.aval.dtype.itemsize
    return count_of(v) * itemsize


def makers(
    parts: Sequence[Part], flow: Flow, is_made_again: Callable[[Var, int], bool]
) -> dict[Var, JaxprEqn]:
    """What may be made again, and the equation that does so."""
    return {
        v: e
        for i, part in enumerate(parts)
        for e in part
        if not is_whole(e, flow) and not _is_kept(e, flow)
        for v in e.outvars
        if is_made_again(v, i)
    }


def _multiplies_a_vector(eqn: JaxprEqn) -> bool:
    """Whether it is a product with a vector: XLA sums it up in a kernel that makes its operand."""
    if eqn.primitive.name != "dot_general":
        return False
    sides = zip(eqn.invars, *eqn.params["dimension_numbers"], strict=True)
    shapes = ((shape_of(a), {*contracted, *batch}) for a, contracted, batch in sides)
    return any(all(n == 1 for i, n in enumerate(s) if i not in axes) for s, axes in shapes)


def _is_kept(eqn: JaxprEqn, flow: Flow) -> bool:
    # A product that is no end of a segment is one of a full-precision region.
    is_kept_by_name = any(name in flow.products or is_kept(name) for name in names_within(eqn))
    return is_kept_by_name or (reduces(eqn) and is_rounding(eqn))
