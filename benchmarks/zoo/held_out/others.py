"""Held out: speech, tables, what a user may want, a flow of splines, and an agent with a memory."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.training import cross_entropy
from benchmarks.zoo.sized import Model, floats, integers, model


def speech(*, batch: int = 16, time: int = 1600, said: int = 100, **sizes: Any) -> Model:
    """Letters of spectra, wherever they are."""

    def error(logits: jax.Array, labels: jax.Array) -> jax.Array:
        all_there = (jnp.zeros(x.shape[:2]) for x in (logits, labels))
        return optax.ctc_loss(logits, next(all_there), labels, next(all_there))

    spectra = floats(batch, time, 80)
    return model(lambda dtype: Speech(dtype, **sizes), spectra, integers(batch, said), error=error)


def tables(*, batch: int = 1024, columns: int = 64, **sizes: Any) -> Model:
    """The kind of a row of numbers."""
    rows = floats(batch, columns)
    return model(lambda dtype: Tables(dtype, **sizes), rows, integers(batch))


def wanted(*, batch: int = 8192, history: int = 16, **sizes: Any) -> Model:
    """Which thing of a batch each user of it took next."""
    inputs = integers(batch, history), integers(batch)
    return model(lambda dtype: Wanted(dtype, **sizes), inputs, integers(batch), error=_own)


def _own(scores: jax.Array, _: jax.Array) -> jax.Array:
    return cross_entropy(scores, jnp.arange(len(scores)))


def splines(*, batch: int = 16_384, width: int = 64, **sizes: Any) -> Model:
    """How likely vectors are."""
    module = functools.partial(Splines, **sizes)
    error = {"error": lambda likely, _: -likely}
    return model(module, floats(batch, width), integers(batch), **error)


def agent(*, batch: int = 32, time: int = 40, **sizes: Any) -> Model:
    """What an agent did, of what it saw."""
    seen = floats(batch, time, 84, 84, 4)
    return model(lambda dtype: Agent(dtype, **sizes), seen, integers(batch, time))


class Speech(nn.Module):
    """Convolutions, and GRUs along time both ways."""

    dtype: Any
    layers: int = 3
    width: int = 512
    letters: int = 32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits [batch, a quarter of time, letter] of spectra [batch, time, pitch]."""
        x = x[..., None]
        for width in (32, 64):
            x = nn.Conv(width, (5, 5), strides=(2, 2), use_bias=False, dtype=self.dtype)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
        x = nn.Dense(self.width, dtype=self.dtype)(x.reshape(*x.shape[:2], -1))
        for _ in range(self.layers):
            forth, back = (nn.RNN(nn.GRUCell(self.width, dtype=self.dtype)) for _ in range(2))
            both: Any = nn.Bidirectional(forth, back)(x)
            x = nn.LayerNorm(dtype=self.dtype)(both)
        return nn.Dense(self.letters, dtype=self.dtype)(x)


class Tables(nn.Module):
    """A transformer of columns."""

    dtype: Any
    layers: int = 3
    width: int = 192
    heads: int = 8
    classes: int = 10

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits [batch, class] of rows [batch, column]."""
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
        shape = x.shape[1], self.width
        scale, shift = (
            self.param(name, nn.initializers.normal(0.1), shape).astype(self.dtype or x.dtype)
            for name in ("scale", "shift")
        )
        x = x.astype(scale.dtype)[..., None] * scale + shift
        for _ in range(self.layers):
            x = x + nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(norm()(x))
            gate, up = jnp.split(dense(8 * self.width // 3 * 2)(norm()(x)), 2, axis=-1)
            x = x + dense(self.width)(nn.relu(gate) * up)
        return dense(self.classes)(nn.relu(norm()(x[:, -1])))


class Wanted(nn.Module):
    """Two towers: one of what a user took before, one of a thing."""

    dtype: Any
    things: int = 200_000
    width: int = 64
    hidden: tuple[int, ...] = (512, 256)

    @nn.compact
    def __call__(self, inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Scores [user, thing] of int[batch, history] and of int[batch]."""
        history, thing = inputs
        embed = nn.Embed(self.things, self.width, dtype=self.dtype)
        user, thing = (self._tower(x) for x in (embed(history).mean(axis=1), embed(thing)))
        return user @ thing.T / 0.1

    def _tower(self, x: jax.Array) -> jax.Array:
        for width in self.hidden:
            x = nn.relu(nn.Dense(width, dtype=self.dtype)(x))
        x = nn.Dense(self.width, dtype=self.dtype)(x)
        return x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-6)


class Splines(nn.Module):
    """A flow: half of the coordinates bend the others, by rational quadratic splines."""

    dtype: Any
    layers: int = 4
    hidden: int = 512
    bins: int = 8
    bound: float = 3.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Log-likelihoods [batch] of [batch, width]; splines are float32 by hand too."""
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        stretched = jnp.zeros(len(x))
        for _ in range(self.layers):
            still, bent = jnp.split(x, 2, axis=-1)
            y = nn.relu(dense(self.hidden)(nn.relu(dense(self.hidden)(still))))
            shape = *bent.shape, 3 * self.bins + 1
            shapes = dense(bent.shape[-1] * shape[-1])(y).astype(jnp.float32).reshape(shape)
            bent, log_slope = self._bend(bent, shapes)
            stretched = stretched + log_slope.sum(axis=-1)
            x = jnp.concatenate([bent, still], axis=-1)
        return stretched - (x**2).sum(axis=-1) / 2

    def _bend(self, x: jax.Array, shapes: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Values and logarithms of slopes, of x [...] by shapes [..., 3 bins + 1]."""
        widths, heights, slopes = jnp.split(shapes, [self.bins, 2 * self.bins], axis=-1)
        slopes = nn.softplus(slopes) + 1e-3
        (xs, widths), (ys, heights) = (self._knots(a) for a in (widths, heights))
        inside = jnp.clip(x, -self.bound + 1e-4, self.bound - 1e-4)
        at = (inside[..., None] >= xs[..., 1:]).sum(axis=-1, keepdims=True)

        def of_bin(values: jax.Array) -> jax.Array:
            return jnp.take_along_axis(values, at, axis=-1)[..., 0]

        left, width, bottom, height = map(of_bin, (xs, widths, ys, heights))
        first, last = of_bin(slopes), of_bin(slopes[..., 1:])
        slope, part = height / width, (inside - left) / width
        both = part * (1 - part)
        below = slope + (last + first - 2 * slope) * both
        y = bottom + height * (slope * part**2 + first * both) / below
        steep = slope**2 * (last * part**2 + 2 * slope * both + first * (1 - part) ** 2)
        log_slope = jnp.log(steep) - 2 * jnp.log(below)
        outside = jnp.abs(x) >= self.bound
        return jnp.where(outside, x, y), jnp.where(outside, 0, log_slope)

    def _knots(self, shares: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Where bins begin, and how wide they are."""
        shares = 1e-3 + (1 - 1e-3 * self.bins) * nn.softmax(shares)
        ends = jnp.cumsum(shares, axis=-1)
        return 2 * self.bound * (ends - shares) - self.bound, 2 * self.bound * shares


class Agent(nn.Module):
    """Convolutions of each image, an LSTM along time, and values beside advantages."""

    dtype: Any
    width: int = 512
    actions: int = 18

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Values [batch, time, action] of images [batch, time, height, width, 4]."""
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        for width, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            conv = nn.Conv(width, (size, size), (stride, stride), "VALID", dtype=self.dtype)
            x = nn.relu(conv(x))
        x = nn.relu(dense(self.width)(x.reshape(*x.shape[:2], -1)))
        y: Any = nn.RNN(nn.OptimizedLSTMCell(self.width, dtype=self.dtype))(x)
        value, advantage = (dense(n)(nn.relu(dense(self.width)(y))) for n in (1, self.actions))
        return value + advantage - advantage.mean(axis=-1, keepdims=True)
