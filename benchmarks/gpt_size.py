"""How large a GPT is, in JAX and in PyTorch."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Size:
    """A GPT and its batch."""

    layers: int
    heads: int
    width: int
    batch: int
    time: int = 1024
    vocabulary: int = 50304  # GPT-2's, rounded up to a multiple of 128

    @property
    def operations(self) -> float:
        """Of the products of one step: two a multiplication, thrice over, causal attention half."""
        weights = 12 * self.layers * self.width**2 + self.vocabulary * self.width
        attention = self.layers * self.time * self.width
        return 6.0 * self.batch * self.time * (weights + attention)
