"""A program rewritten as one that gives the same, and is cheaper: `_rewritten` has the order.

Each file is one rewriting, of a jaxpr or of its parts. `_factored` is what those of sums share;
`_ragged` and `_scaled` are part of `_float8`.
"""
