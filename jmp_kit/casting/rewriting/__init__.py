"""A program rewritten as one that gives the same, and is cheaper: `_rewritten` has the order.

Each file is one rewriting, of a jaxpr to a jaxpr. `_factored` is what those of sums share, and
`_ragged` is part of `_float8`.
"""
