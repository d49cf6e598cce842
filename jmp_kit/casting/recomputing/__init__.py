"""What of a forward pass its backward pass takes from memory, and what it computes again.

`_taken` reads both passes, `_again` decides by a minimal cut, `_peak` keeps what is there in any
case, `_stacked` decides for scans, and `_repeat` writes the equations.
"""
