"""A network of messages along the edges of a graph."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.zoo.sized import Model, floats, integers, model


def graph(*, batch: int = 8, nodes: int = 2048, edges: int = 16_384, **sizes: Any) -> Model:
    """A graph network that classifies nodes, of several graphs at once."""
    inputs = floats(batch * nodes, 64), integers(batch * edges, 2)
    return model(lambda dtype: GraphNetwork(dtype, **sizes), inputs, integers(batch * nodes))


class GraphNetwork(nn.Module):
    """Edges change by what is at their ends, nodes by the sum of the edges that lead to them."""

    dtype: Any
    layers: int = 5
    width: int = 256
    classes: int = 64

    @nn.compact
    def __call__(self, inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Logits [node, class] of features [node, feature] and the ends int[edge, 2] of edges."""
        x, ends = inputs
        sources, targets = ends.T
        x = nn.Dense(self.width, dtype=self.dtype)(x)
        edges = nn.Dense(self.width, dtype=self.dtype)(x[sources] - x[targets])
        for _ in range(self.layers):
            edges = edges + self._mlp(x[sources], x[targets], edges)
            x = x + self._mlp(x, jax.ops.segment_sum(edges, targets, len(x)))
        return nn.Dense(self.classes, dtype=self.dtype)(x)

    def _mlp(self, *parts: jax.Array) -> jax.Array:
        y = nn.LayerNorm(dtype=self.dtype)(jnp.concatenate(parts, axis=-1))
        y = nn.relu(nn.Dense(self.width, dtype=self.dtype)(y))
        return nn.Dense(self.width, dtype=self.dtype)(y)
