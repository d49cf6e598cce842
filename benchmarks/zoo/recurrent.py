"""What goes along time: LSTMs, and a state space by an associative scan."""

import functools
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


class Mamba(nn.Module):
    """Selective state spaces between an embedding and a head."""

    dtype: Any
    layers: int = 4
    width: int = 768
    states: int = 8  # of a channel
    vocabulary: int = 32_000

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits [batch, time, vocabulary] of tokens int[batch, time]."""
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)
        for _ in range(self.layers):
            y = nn.RMSNorm(dtype=self.dtype)(x)
            x = x + StateSpace(self.dtype, 2 * self.width, self.states)(y)
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


def _after(first: Any, second: Any) -> Any:
    (decay, change), (next_decay, next_change) = first, second
    return decay * next_decay, change * next_decay + next_change
