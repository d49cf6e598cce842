"""Facts about a program that autocast plans by, none of which is a decision.

`_parts` splits it at its products; `_state` finds what is updated, `_accumulated` the gradients
that a loop adds up; `_worth` tells what is worth computing twice; `_joined` the sums that are as
good in half; `_extrema` what must be one value for all, `_places` what comes to which places of a
scatter, `_rounding` which equations round to float8. `programs` knows the rest.
"""
