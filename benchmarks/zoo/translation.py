"""An encoder and a decoder, as T5 has them."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.zoo.sized import Model, integers, model


def t5(*, batch: int = 32, time: int = 512, **sizes: Any) -> Model:
    """T5's base widths, six layers each."""
    tokens = integers(batch, time)
    return model(lambda dtype: T5(dtype, **sizes), (tokens, tokens), tokens)


class T5(nn.Module):
    """RMSNorm, gated GELU, and attention with a bias of relative positions."""

    dtype: Any
    layers: int = 6
    width: int = 768
    heads: int = 12
    hidden: int = 2048
    vocabulary: int = 32_128

    @nn.compact
    def __call__(self, texts: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Logits [batch, time, vocabulary] of two texts int[batch, time]."""
        embed = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)
        source, target = map(embed, texts)
        norm = functools.partial(nn.RMSNorm, dtype=self.dtype)
        attention = functools.partial(Attention, self.dtype, self.heads)
        network = functools.partial(Network, self.dtype, self.hidden)

        bias = RelativePositions(self.dtype, self.heads)(source.shape[1])
        for _ in range(self.layers):
            y = norm()(source)
            source = source + attention()(y, y, bias)
            source = source + network()(norm()(source))
        source = norm()(source)

        bias = RelativePositions(self.dtype, self.heads)(target.shape[1])
        mask = nn.make_causal_mask(texts[1])
        for _ in range(self.layers):
            y = norm()(target)
            target = target + attention()(y, y, bias, mask)
            target = target + attention()(norm()(target), source)
            target = target + network()(norm()(target))
        return nn.Dense(self.vocabulary, use_bias=False, dtype=self.dtype)(norm()(target))


class Attention(nn.Module):
    """Of a text to itself or to another."""

    dtype: Any
    heads: int

    @nn.compact
    def __call__(
        self, x: jax.Array, y: jax.Array, bias: jax.Array | None = None, mask: Any = None
    ) -> jax.Array:
        """[batch, time, width] from x to y."""
        width = x.shape[-1]
        dense = functools.partial(nn.DenseGeneral, use_bias=False, dtype=self.dtype)
        heads = functools.partial(dense, (self.heads, width // self.heads))
        q, k, v = heads()(x), heads()(y), heads()(y)
        found = nn.dot_product_attention(q, k, v, bias=bias, mask=mask, dtype=self.dtype)
        return dense(width, axis=(-2, -1))(found)


class Network(nn.Module):
    """A gated GELU."""

    dtype: Any
    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, time, width] to the same."""
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        return dense(x.shape[-1])(nn.gelu(dense(self.hidden)(x)) * dense(self.hidden)(x))


class RelativePositions(nn.Module):
    """What is added to attention for a distance, near ones one by one and far ones in groups."""

    dtype: Any
    heads: int
    near: int = 16
    far: int = 128

    @nn.compact
    def __call__(self, time: int) -> jax.Array:
        """[1, heads, time, time]."""
        distance = jnp.arange(time) - jnp.arange(time)[:, None]
        size = jnp.abs(distance)
        share = jnp.log(jnp.maximum(size, 1) / self.near) / jnp.log(self.far / self.near)
        group = jnp.minimum(self.near + (share * self.near).astype(jnp.int32), 2 * self.near - 1)
        index = jnp.where(size < self.near, size, group) + 2 * self.near * (distance > 0)
        bias = nn.Embed(4 * self.near, self.heads, dtype=self.dtype)(index)
        return bias.transpose(2, 0, 1)[None]
