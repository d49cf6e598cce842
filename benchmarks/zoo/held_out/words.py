"""Held out: models of words that are no plain transformer, and one of which little is trained."""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.zoo.sized import Model, integers, model


def language(module: Any, *, batch: int = 8, time: int = 1024, **sizes: Any) -> Model:
    """The next word of texts, by a module of this file."""
    tokens = integers(batch, time)
    return model(lambda dtype: Language(dtype, module, **sizes), tokens, tokens)


def albert(*, batch: int = 32, time: int = 512, hidden: int = 76, **sizes: Any) -> Model:
    """The words that were masked, by one layer that is used again and again."""
    inputs = integers(batch, time), integers(batch, hidden)
    return model(lambda dtype: Albert(dtype, **sizes), inputs, integers(batch, hidden))


class Language(nn.Module):
    """Layers of a kind and gated MLPs by turns, between an embedding and a head."""

    dtype: Any
    mixer: Any
    layers: int = 4
    width: int = 1024
    vocabulary: int = 16_000

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits [batch, time, vocabulary] of tokens int[batch, time]."""
        norm = functools.partial(nn.RMSNorm, dtype=self.dtype)
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)
        for _ in range(self.layers):
            x = x + self.mixer(self.dtype)(norm()(x))
            y = norm()(x)
            y = nn.gelu(dense(2 * self.width)(y)) * dense(2 * self.width)(y)
            x = x + dense(self.width)(y)
        return dense(self.vocabulary)(norm()(x))


class GatedRecurrence(nn.Module):
    """Griffin's: a short convolution and a recurrence, gated; it decays in float32 by hand too."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, time, width] to the same."""
        width = x.shape[-1]
        dense = functools.partial(nn.Dense, width, dtype=self.dtype)
        branch = nn.gelu(dense()(x))
        conv = nn.Conv(width, (4,), padding="CAUSAL", feature_group_count=width, dtype=self.dtype)
        y = conv(dense()(x))
        recall, enter = nn.sigmoid(dense()(y)), nn.sigmoid(dense()(y))
        rate = self.param("rate", nn.initializers.normal(0.5), (width,))
        log_decay = -8 * nn.softplus(rate) * recall.astype(jnp.float32)
        change = jnp.sqrt(1 - jnp.exp(2 * log_decay) + 1e-6) * (enter * y)

        def after(first: Any, second: Any) -> Any:
            return first[0] * second[0], first[1] * second[0] + second[1]

        _, state = jax.lax.associative_scan(after, (jnp.exp(log_decay), change), axis=1)
        return dense()(branch * state.astype(branch.dtype))


class MatrixMemory(nn.Module):
    """xLSTM's matrix memory in its parallel form; gates are float32 by hand too."""

    dtype: Any
    heads: int = 4

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, time, width] to the same."""
        width = x.shape[-1]
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        q, k, v = (_heads(dense(width)(x), self.heads) for _ in range(3))
        enter, keep = (
            jnp.moveaxis(dense(self.heads)(x).astype(jnp.float32), -1, 1) for _ in range(2)
        )
        kept = jnp.cumsum(nn.log_sigmoid(keep), axis=-1)  # [batch, head, time]
        weights = kept[..., :, None] - kept[..., None, :] + enter[..., None, :]
        weights = jnp.where(_is_before(x.shape[1]), weights, -jnp.inf)
        most = jax.lax.stop_gradient(weights.max(axis=-1, keepdims=True))
        scores = jnp.einsum("bqhc,bkhc->bhqk", q, k) / math.sqrt(q.shape[-1])
        scores = scores * jnp.exp(weights - most)
        total = jnp.maximum(jnp.abs(scores.sum(axis=-1, keepdims=True)), jnp.exp(-most))
        y = jnp.einsum("bhqk,bkhc->bqhc", (scores / total).astype(v.dtype), v)
        y = nn.LayerNorm(dtype=self.dtype)(y).reshape(x.shape)
        return dense(width)(y * nn.silu(dense(width)(x)))


class LinearAttention(nn.Module):
    """elu(q) + 1 by elu(k) + 1 in place of a softmax: products within chunks, sums between."""

    dtype: Any
    heads: int = 16
    chunk: int = 128

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, time, width] to the same."""
        width, chunk = x.shape[-1], min(self.chunk, x.shape[1])
        dense = functools.partial(nn.Dense, width, use_bias=False, dtype=self.dtype)
        q, k, v = (_heads(dense()(x), self.heads) for _ in range(3))
        q, k = nn.elu(q) + 1, nn.elu(k) + 1
        q, k, v = (a.reshape(len(x), -1, chunk, *a.shape[2:]) for a in (q, k, v))
        states, keys = jnp.einsum("bnshc,bnshd->bnhcd", k, v), k.sum(axis=2)
        states, keys = (jnp.cumsum(a, axis=1) - a for a in (states, keys))
        scores = jnp.einsum("bnthc,bnshc->bnhts", q, k)
        scores = jnp.where(_is_before(chunk), scores, 0)
        y = jnp.einsum("bnhts,bnshd->bnthd", scores, v)
        y = y + jnp.einsum("bnthc,bnhcd->bnthd", q, states)
        total = jnp.moveaxis(scores.sum(axis=-1), 2, 3) + jnp.einsum("bnthc,bnhc->bnth", q, keys)
        return dense()((y / (total[..., None] + 1e-6)).reshape(x.shape))


class LongConvolution(nn.Module):
    """Hyena's: gates around a filter as long as the text, by Fourier transforms in float32."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, time, width] to the same."""
        _, time, width = x.shape
        conv = nn.Conv(
            3 * width, (3,), padding="CAUSAL", feature_group_count=3 * width, dtype=self.dtype
        )
        enter, leave, v = jnp.split(conv(nn.Dense(3 * width, dtype=self.dtype)(x)), 3, axis=-1)
        at = jnp.linspace(0, 1, time)[:, None]
        waves = jnp.concatenate([at, *(f(math.pi * n * at) for n in range(1, 9) for f in WAVES)], 1)
        hidden = jnp.sin(nn.Dense(64)(jnp.sin(nn.Dense(64)(waves))))
        rates = jnp.linspace(2, 20, width)
        filters = nn.Dense(width)(hidden) * jnp.exp(-rates * at)  # float32 by hand too
        signal = jnp.fft.rfft((v * enter).astype(jnp.float32), n=2 * time, axis=1)
        y = jnp.fft.irfft(signal * jnp.fft.rfft(filters, n=2 * time, axis=0), axis=1)[:, :time]
        skip = self.param("skip", nn.initializers.ones, (width,)).astype(v.dtype)
        return nn.Dense(width, dtype=self.dtype)(leave * (y.astype(v.dtype) + skip * v))


class RelativeAttention(nn.Module):
    """Transformer-XL's: of contents, and of distances that are shifted into place."""

    dtype: Any
    heads: int = 16

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, time, width] to the same."""
        batch, time, width = x.shape
        dense = functools.partial(nn.Dense, width, use_bias=False, dtype=self.dtype)
        q, k, v = (_heads(dense()(x), self.heads) for _ in range(3))
        angles = jnp.arange(time - 1, -1, -1)[:, None] / 1e4 ** jnp.linspace(0, 1, width // 2)
        distances = _heads(
            dense()(jnp.concatenate([f(angles) for f in WAVES], -1)[None]), self.heads
        )
        of_content, of_distance = (
            self.param(name, nn.initializers.normal(0.02), q.shape[2:]).astype(q.dtype)
            for name in ("content", "distance")
        )
        near = jnp.einsum("bqhc,dhc->bhqd", q + of_distance, distances[0])
        near = jnp.pad(near, ((0, 0), (0, 0), (0, 0), (1, 0)))
        near = near.reshape(batch, self.heads, time + 1, time)[:, :, 1:]
        scores = jnp.einsum("bqhc,bkhc->bhqk", q + of_content, k) + near
        scores = jnp.where(_is_before(time), scores / math.sqrt(q.shape[-1]), -1e9)
        y = jnp.einsum("bhqk,bkhc->bqhc", nn.softmax(scores), v)
        return dense()(y.reshape(x.shape))


class LowRank(nn.Module):
    """A frozen attention whose projections change by products of low rank, which are trained."""

    dtype: Any
    heads: int = 16

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, time, width] to the same."""
        dense = functools.partial(LowRankDense, self.dtype)
        q, k, v = (_heads(dense()(x), self.heads) for _ in range(3))
        mask = _is_before(x.shape[1])
        y = nn.dot_product_attention(q, k, v, mask=mask, dtype=self.dtype)
        return dense()(y.reshape(x.shape))


class LowRankDense(nn.Module):
    """x W + x A B, of which W is frozen."""

    dtype: Any
    rank: int = 16

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., width] to the same."""
        width = x.shape[-1]
        draw = nn.initializers.lecun_normal()
        shape = width, width
        frozen = self.variable("frozen", "w", lambda: draw(self.make_rng("params"), shape)).value
        a = self.param("a", draw, (width, self.rank))
        b = self.param("b", nn.initializers.zeros, (self.rank, width))
        frozen, a, b = (w.astype(self.dtype or x.dtype) for w in (frozen, a, b))
        return x @ frozen + x @ a @ b


class Albert(nn.Module):
    """A narrow embedding, and one layer many times; logits where words were masked."""

    dtype: Any
    layers: int = 6
    width: int = 768
    heads: int = 12
    narrow: int = 128
    vocabulary: int = 30_000

    @nn.compact
    def __call__(self, inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Logits [batch, hidden, vocabulary] of int[batch, time], at places int[batch, hidden]."""
        tokens, places = inputs
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
        embed = nn.Embed(self.vocabulary, self.narrow, dtype=self.dtype)
        shape = tokens.shape[1], self.narrow
        x = embed(tokens)
        x = x + self.param("position", nn.initializers.normal(0.02), shape).astype(x.dtype)
        x = dense(self.width)(norm()(x))
        attention = nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)
        up, down, first, second = dense(4 * self.width), dense(self.width), norm(), norm()
        for _ in range(self.layers):
            x = first(x + attention(x))
            x = second(x + down(nn.gelu(up(x))))
        x = jnp.take_along_axis(x, places[..., None], axis=1)
        return embed.attend(norm()(nn.gelu(dense(self.narrow)(x))))


WAVES = jnp.sin, jnp.cos


def _heads(x: jax.Array, heads: int) -> jax.Array:
    """[batch, time, width] to [batch, time, head, width of a head]."""
    return x.reshape(*x.shape[:2], heads, -1)


def _is_before(time: int) -> jax.Array:
    return jnp.tril(jnp.ones((time, time), bool))
