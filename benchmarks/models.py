"""Flax models with a `dtype` for writing them by hand in half; None is float32."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import jmp_kit


def causal_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Of [batch, time, heads, width]."""
    return nn.dot_product_attention(q, k, v, mask=nn.make_causal_mask(q[:, :, 0, 0]))


def fused_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The same by cuDNN's kernel, where there is a GPU."""
    return _by_cudnn(q, k, v) if jax.default_backend() == "gpu" else causal_attention(q, k, v)


@jmp_kit.half_precision
def _by_cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    if q.dtype == jnp.float32:  # which it refuses
        return causal_attention(q, k, v)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


Attention = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class GPTBlock(nn.Module):
    """Causal attention and a GELU network, each after a norm."""

    heads: int
    dtype: Any
    attention: Attention = fused_attention

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, time, width] to the same."""
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        *shape, width = x.shape
        qkv = dense(3 * width)(norm()(x)).reshape(*shape, 3, self.heads, width // self.heads)
        y = self.attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2])
        x = x + dense(width)(y.reshape(x.shape))
        return x + dense(width)(nn.gelu(dense(4 * width)(norm()(x))))


class GPT(nn.Module):
    """A decoder in GPT-2's shape: 12 layers, 12 heads and width 768 are the 124M one."""

    vocabulary: int
    layers: int
    heads: int
    width: int
    dtype: Any = None
    attention: Attention = fused_attention

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits [batch, time, vocabulary] of tokens int[batch, time]."""
        initialise = nn.initializers.normal(0.02)
        embed = nn.Embed(self.vocabulary, self.width, dtype=self.dtype, embedding_init=initialise)
        position = self.param("position", initialise, (tokens.shape[1], self.width))
        x = embed(tokens) + position.astype(self.dtype or jnp.float32)
        for _ in range(self.layers):
            x = GPTBlock(self.heads, self.dtype, self.attention)(x)
        return embed.attend(nn.LayerNorm(dtype=self.dtype)(x))


class ResNet(nn.Module):
    """Bottleneck blocks with batch statistics; stages (3, 4, 6, 3) of width 64 are ResNet-50."""

    stages: tuple[int, ...]
    width: int
    classes: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits [batch, classes] of images [batch, height, width, 3]."""
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.BatchNorm, use_running_average=False, dtype=self.dtype)
        x = nn.relu(norm()(conv(self.width, (7, 7), strides=2)(x)))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for stage, blocks in enumerate(self.stages):
            for block in range(blocks):
                width = self.width * 2**stage
                strides = 2 if stage and not block else 1
                y = nn.relu(norm()(conv(width, (1, 1))(x)))
                y = nn.relu(norm()(conv(width, (3, 3), strides=strides)(y)))
                y = norm()(conv(4 * width, (1, 1))(y))
                if x.shape != y.shape:
                    x = norm()(conv(4 * width, (1, 1), strides=strides)(x))
                x = nn.relu(x + y)
        return nn.Dense(self.classes, dtype=self.dtype)(x.mean((1, 2)))
