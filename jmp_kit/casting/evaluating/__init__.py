"""Evaluating a plan, which knows no heuristics.

`_evaluate` goes step by step. `_calls` and `_custom_derivatives` rebuild calls, loops, branches and
rules around what is inside them (`_site`); rules that can be called only while JAX differentiates
are `_differentiated`'s. `_wide` writes products as CPUs have them.
"""
