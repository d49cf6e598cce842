"""What of the forward pass a backward pass takes from memory, and what it computes again.

A value that is kept costs memory until it is taken. One that is computed again costs its bytes once
more where it has to be written, for a product to take it, and needs others that are kept. The
cheapest choice of all is a minimal cut of a network, and how much memory may cost, a price.
"""

from collections.abc import Hashable, Mapping, Sequence, Set
from typing import NamedTuple, TypeVar

import numpy as np

Name = TypeVar("Name", bound=Hashable)

# The part by which one of two choices costs more that would cost the same: memory that is there in
# any case is still not taken for nothing, nor is a value rounded for nothing.
LITTLE = 2**-10


class Value(NamedTuple):
    """Of the forward pass.

    Attributes:
      operands: the values that it is made of; None if it is not to be made again.
      nbytes: what it takes in memory.
      is_stored: whether the forward pass writes it in any case.
      is_rounded: whether it would be rounded to be kept, and is not before.
      read: whether the backward pass computes with it.
      multiplied: whether a product of the backward pass takes it, which reads memory in any case.
      nbytes_again: what is moved to make it again, beside what is read by others in any case.
    """

    operands: Sequence[Hashable] | None
    nbytes: int
    is_stored: bool
    is_rounded: bool
    read: bool
    multiplied: bool
    nbytes_again: int


def kept(values: Mapping[Name, Value], price: float, free: Set[Name] = frozenset()) -> set[Name]:
    """The values to keep, for the fewest bytes kept and moved.

        cost = price · bytes kept + bytes read + bytes written

    Args:
      values: what the backward pass takes, and what that is made of.
      price: of a byte in memory, in bytes moved.
      free: the values whose bytes in memory cost next to nothing.
    """
    # It takes a while to import.
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    index = {v: i for i, v in enumerate(values)}
    # Each value is an edge from its first node to its second: cut, it is kept. What lies behind the
    # cut is there in the backward pass.
    first, last = 2 * len(values), 2 * len(values) + 1
    edges: dict[tuple[int, int], float] = {}
    for v, value in values.items():
        made, there = 2 * index[v], 2 * index[v] + 1
        edges[made, there] = np.inf
        if not value.is_rounded:
            moved = (not value.is_stored) + (value.read or not value.multiplied)
            held = price * LITTLE if v in free else price
            edges[made, there] = (held + moved) * value.nbytes
        if value.operands is None:
            edges[first, made] = np.inf
        elif value.nbytes_again:
            edges[first, made] = value.nbytes_again
        for operand in value.operands or ():
            if operand in index:
                edges[2 * index[operand] + 1, made] = np.inf
        if value.read or value.multiplied:
            edges[there, last] = np.inf
    total = sum(cost for cost in edges.values() if cost < np.inf)
    unit = max(total, 1) / 2**29
    costs = [2**30 if c == np.inf else int(np.ceil(c / unit)) for c in edges.values()]
    rows, columns = zip(*edges, strict=True) if edges else ((), ())
    size = 2 * len(values) + 2
    network = csr_array((np.array(costs, np.int32), (rows, columns)), shape=(size, size))
    flow = maximum_flow(network, first, last).flow
    rest = csr_array(network - flow)
    rest.eliminate_zeros()
    # Of cuts that cost the same, the last: what is behind it has less to be made again.
    behind = set(breadth_first_order(rest.T.tocsr(), last, return_predecessors=False).tolist())
    return {v for v, i in index.items() if 2 * i not in behind and 2 * i + 1 in behind}
