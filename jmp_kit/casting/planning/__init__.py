"""Planning: from a program to a `Plan`, which is data.

`_planner` plans, of what `_program` reads; `_plan` is what comes out. `_loops` decides what loops
carry, `_biases` gradients by biases where JAX makes the backward pass, `_alone` which products
XLA is not to join. `_segment` says where passes end, `_passes` which there are, and `_written` what
is evaluated for each; `_shapes`, `_matrices`, `_convolved` and `_kernels` write that so that XLA
makes one kernel of it.
"""
