"""Decoders: GPT-2, and Llama, whose layers may be scanned, or have experts."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks import gpt as gpts
from benchmarks.models import Attention
from benchmarks.stand_in import stand_in
from benchmarks.zoo.experts import Experts
from benchmarks.zoo.sized import Model, integers, model


def gpt(*, attention: Attention = stand_in, **sizes: Any) -> Model:
    """GPT-2 of 124M parameters."""
    size = dataclasses.replace(gpts.SIZES["gpt 124M"], **{"batch": 16} | sizes)
    tokens = integers(size.batch, size.time)
    return Model(gpts.task(size, attention), (tokens, tokens))


def llama(*, batch: int = 8, time: int = 2048, **sizes: Any) -> Model:
    """TinyLlama's widths, and six of its layers."""
    tokens = integers(batch, time)
    return model(lambda dtype: Llama(dtype, **sizes), tokens, tokens)


class Llama(nn.Module):
    """RMSNorm, rotary positions, grouped queries and SwiGLU or experts."""

    dtype: Any
    layers: int = 6
    width: int = 2048
    heads: int = 32
    groups: int = 4  # of heads that share keys and values
    hidden: int = 5632
    experts: int = 0
    vocabulary: int = 32_000
    scanned: bool = False
    remat: bool = False
    attention: Attention = stand_in

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits [batch, time, vocabulary] of tokens int[batch, time]."""
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)
        block: Any = LlamaBlock
        if self.remat:
            block = nn.remat(block, prevent_cse=not self.scanned)
        if self.scanned:
            axes: dict[str, Any] = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            block = nn.scan(block, length=self.layers, **axes)
        for _ in range(1 if self.scanned else self.layers):
            sizes = self.heads, self.groups, self.hidden, self.experts, self.attention
            x, _ = block(self.dtype, *sizes)(x, None)
        x = nn.RMSNorm(dtype=self.dtype)(x)
        return nn.Dense(self.vocabulary, use_bias=False, dtype=self.dtype)(x)


class LlamaBlock(nn.Module):
    """Attention and a network, each after a norm; with what `nn.scan` asks for."""

    dtype: Any
    heads: int
    groups: int
    hidden: int
    experts: int
    attention: Attention

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        """[batch, time, width] to the same."""
        norm = functools.partial(nn.RMSNorm, dtype=self.dtype)
        dense = functools.partial(nn.DenseGeneral, use_bias=False, dtype=self.dtype)
        width = x.shape[-1]
        y = norm()(x)
        q = dense((self.heads, width // self.heads))(y)
        k, v = (dense((self.groups, width // self.heads))(y) for _ in range(2))
        y = self.attention(rotated(q), rotated(k), v)
        x = x + dense(width, axis=(-2, -1))(y)
        y = norm()(x)
        if self.experts:
            return x + Experts(self.dtype, self.experts, self.hidden)(y), None
        return x + dense(width)(nn.silu(dense(self.hidden)(y)) * dense(self.hidden)(y)), None


def rotated(x: jax.Array) -> jax.Array:
    """By position, of [batch, time, heads, width]; in float32, as it is done by hand too."""
    _, time, _, width = x.shape
    frequencies = 10_000.0 ** -(jnp.arange(width // 2) / (width // 2))
    angles = jnp.arange(time)[:, None, None] * frequencies
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)
