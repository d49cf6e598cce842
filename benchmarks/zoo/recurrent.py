"""What goes along time: LSTMs, and linear recurrences by an associative scan and in chunks."""

import functools
import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.zoo.sized import Model, integers, model


def lstm(*, batch: int = 128, time: int = 256, **sizes: Any) -> Model:
    """A language model of two LSTMs."""
    tokens = integers(batch, time)
    return model(lambda dtype: LSTM(dtype, **sizes), tokens, tokens)


def mamba(*, batch: int = 8, time: int = 1024, **sizes: Any) -> Model:
    """A language model whose state decays as its inputs say."""
    tokens = integers(batch, time)
    return model(lambda dtype: Mamba(dtype, **sizes), tokens, tokens)


def mamba2(*, batch: int = 8, time: int = 1024, **sizes: Any) -> Model:
    """The same, its state in heads, and its time in chunks."""
    tokens = integers(batch, time)
    return model(lambda dtype: Mamba(dtype, **{"heads": 24, "states": 64} | sizes), tokens, tokens)


def mingru(*, batch: int = 16, time: int = 1024, **sizes: Any) -> Model:
    """A language model of gates that see no state."""
    tokens = integers(batch, time)
    return model(lambda dtype: MinGRU(dtype, **sizes), tokens, tokens)


class LSTM(nn.Module):
    """Between an embedding and a head."""

    dtype: Any
    layers: int = 2
    width: int = 1024
    vocabulary: int = 10_000

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits [batch, time, vocabulary] of tokens int[batch, time]."""
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)
        for _ in range(self.layers):
            x = nn.RNN(nn.OptimizedLSTMCell(self.width, dtype=self.dtype))(x)
        return nn.Dense(self.vocabulary, dtype=self.dtype)(x)


class MinGRU(nn.Module):
    """h' = (1 - gate) h + gate candidate, between norms and with MLPs; float32 by hand too."""

    dtype: Any
    layers: int = 4
    width: int = 1024
    vocabulary: int = 8192

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits [batch, time, vocabulary] of tokens int[batch, time]."""
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)
        for _ in range(self.layers):
            y = nn.RMSNorm(dtype=self.dtype)(x)
            gate = nn.sigmoid(dense(self.width)(y).astype(jnp.float32))
            change = gate * dense(self.width)(y)
            _, state = jax.lax.associative_scan(_after, (1 - gate, change), axis=1)
            x = x + dense(self.width)(state.astype(x.dtype))
            y = dense(4 * self.width)(nn.RMSNorm(dtype=self.dtype)(x))
            x = x + dense(self.width)(nn.gelu(y))
        return dense(self.vocabulary)(nn.RMSNorm(dtype=self.dtype)(x))


class Mamba(nn.Module):
    """Selective state spaces between an embedding and a head."""

    dtype: Any
    layers: int = 4
    width: int = 768
    states: int = 8  # of a channel, or of a head
    heads: int = 0  # in chunks, if there are any
    vocabulary: int = 32_000

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits [batch, time, vocabulary] of tokens int[batch, time]."""
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)
        for _ in range(self.layers):
            y = nn.RMSNorm(dtype=self.dtype)(x)
            sizes = self.dtype, 2 * self.width, self.states
            x = x + (Chunked(*sizes, self.heads) if self.heads else StateSpace(*sizes))(y)
        x = nn.RMSNorm(dtype=self.dtype)(x)
        return nn.Dense(self.vocabulary, use_bias=False, dtype=self.dtype)(x)


class StateSpace(nn.Module):
    """Mamba's: h' = exp(-step rate) h + step u in; its state is float32 by hand too."""

    dtype: Any
    inner: int
    states: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, time, width] to the same."""
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        u, gate = jnp.split(dense(2 * self.inner)(x), 2, axis=-1)
        conv = nn.Conv(
            self.inner, (4,), padding="CAUSAL", feature_group_count=self.inner, dtype=self.dtype
        )
        u = nn.silu(conv(u))
        enter, leave = jnp.split(dense(2 * self.states)(u), 2, axis=-1)  # [batch, time, states]
        step = nn.softplus(nn.Dense(self.inner, dtype=self.dtype)(u).astype(jnp.float32))
        rate = jnp.exp(self.param("rate", nn.initializers.zeros, (self.inner, self.states)))
        decay = jnp.exp(-step[..., None] * rate)  # [batch, time, inner, states]
        change = (step * u)[..., None] * enter[..., None, :]
        _, state = jax.lax.associative_scan(_after, (decay, change), axis=1)
        y = jnp.einsum("btis,bts->bti", state.astype(leave.dtype), leave)
        skip = self.param("skip", nn.initializers.ones, (self.inner,)).astype(u.dtype)
        return dense(x.shape[-1])((y + u * skip) * nn.silu(gate))


class Chunked(nn.Module):
    """Mamba-2's: one decay for each head, so that within a chunk all are products.

    From chunk to chunk it is a scan. Decays and states are float32 by hand too.
    """

    dtype: Any
    inner: int
    states: int
    heads: int
    chunk: int = 128

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, time, width] to the same."""
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        sizes = self.inner, self.inner + 2 * self.states, self.heads
        gate, u, step = _cut(dense(sum(sizes))(x), sizes)
        width = u.shape[-1]
        conv = nn.Conv(width, (4,), padding="CAUSAL", feature_group_count=width, dtype=self.dtype)
        u, enter, leave = _cut(nn.silu(conv(u)), (self.inner, self.states, self.states))
        rate = jnp.exp(self.param("rate", nn.initializers.zeros, (self.heads,)))
        step = nn.softplus(step.astype(jnp.float32))  # [batch, time, heads]

        chunk = min(self.chunk, x.shape[1])
        u = u.reshape(*x.shape[:2], self.heads, -1)
        chunks = (a.reshape(len(x), -1, chunk, *a.shape[2:]) for a in (u, enter, leave, step))
        y = _in_chunks(rate, *chunks).reshape(u.shape)
        skip = self.param("skip", nn.initializers.ones, (self.heads, 1)).astype(u.dtype)
        y = (y + u * skip).reshape(*x.shape[:2], self.inner)
        return dense(x.shape[-1])(nn.RMSNorm(dtype=self.dtype)(y * nn.silu(gate)))


def _in_chunks(
    rate: jax.Array, u: jax.Array, enter: jax.Array, leave: jax.Array, step: jax.Array
) -> jax.Array:
    """What is left of inputs [batch, chunk, time, head, width] at each later time, of all chunks.

    Args:
      enter, leave: [batch, chunk, time, state].
      step: [batch, chunk, time, head].
      rate: [head].
    """
    passed = jnp.cumsum(jnp.moveaxis(step * rate, -1, 1), axis=-1)  # [batch, head, chunk, time]
    between = passed[..., None, :] - passed[..., :, None]
    is_before = jnp.tril(jnp.ones(between.shape[-2:], bool))
    decay, to_end, from_start = (
        jnp.exp(x).astype(u.dtype)
        for x in (jnp.where(is_before, between, -jnp.inf), passed - passed[..., -1:], -passed)
    )
    u = u * step[..., None].astype(u.dtype)
    scores = jnp.einsum("bcln,bcsn->bcls", leave, enter)[:, None] * decay
    within = jnp.einsum("bhcls,bcshp->bclhp", scores, u)
    states = jnp.einsum("bcsn,bhcs,bcshp->cbhpn", enter, to_end, u).astype(jnp.float32)
    whole = jnp.moveaxis(jnp.exp(-passed[..., -1]), -1, 0)  # [chunk, batch, head]

    def after(state: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        decay, entered = chunk
        return decay[..., None, None] * state + entered, state

    _, before = jax.lax.scan(after, jnp.zeros_like(states[0]), (whole, states))
    return within + jnp.einsum("bcln,cbhpn,bhcl->bclhp", leave, before.astype(u.dtype), from_start)


def _cut(x: jax.Array, sizes: tuple[int, ...]) -> list[jax.Array]:
    """The last axis in pieces of these sizes."""
    return jnp.split(x, list(itertools.accumulate(sizes))[:-1], axis=-1)


def _after(first: Any, second: Any) -> Any:
    (decay, change), (next_decay, next_change) = first, second
    return decay * next_decay, change * next_decay + next_change
