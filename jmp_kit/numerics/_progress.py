"""What is being done, on one line of a terminal."""

import sys


def line(text: str) -> None:
    """Write over the last line of standard error, if it is a terminal's; "" takes it away."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()
