"""Images as patches: a vision transformer and an MLP-Mixer."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.zoo.sized import Model, floats, integers, model


def vit(*, batch: int = 128, pixels: int = 224, **sizes: Any) -> Model:
    """ViT-B/16."""
    images, labels = floats(batch, pixels, pixels, 3), integers(batch)
    return model(lambda dtype: ViT(dtype, **sizes), images, labels)


def mixer(*, batch: int = 256, pixels: int = 224, **sizes: Any) -> Model:
    """Mixer-S/16."""
    images, labels = floats(batch, pixels, pixels, 3), integers(batch)
    return model(lambda dtype: Mixer(dtype, **sizes), images, labels)


class MLP(nn.Module):
    """A GELU between two layers."""

    dtype: Any
    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., width] to the same."""
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        return dense(x.shape[-1])(nn.gelu(dense(self.hidden)(x)))


class ViT(nn.Module):
    """Flax's attention over patches and a token for the class."""

    dtype: Any
    layers: int = 12
    width: int = 768
    heads: int = 12
    patch: int = 16
    classes: int = 1000

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits [batch, classes] of images [batch, height, width, 3]."""
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
        x = patches(x, self.patch, self.width, self.dtype)
        token = self.param("token", nn.initializers.zeros, (1, 1, self.width)).astype(x.dtype)
        x = jnp.concatenate([jnp.broadcast_to(token, (len(x), 1, self.width)), x], axis=1)
        shape = 1, x.shape[1], self.width
        x = x + self.param("position", nn.initializers.normal(0.02), shape).astype(x.dtype)
        for _ in range(self.layers):
            x = x + nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(norm()(x))
            x = x + MLP(self.dtype, 4 * self.width)(norm()(x))
        return nn.Dense(self.classes, dtype=self.dtype)(norm()(x)[:, 0])


class Mixer(nn.Module):
    """Networks along patches and along channels by turns."""

    dtype: Any
    layers: int = 8
    width: int = 512
    hidden: int = 256  # along patches
    patch: int = 16
    classes: int = 1000

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits [batch, classes] of images [batch, height, width, 3]."""
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
        x = patches(x, self.patch, self.width, self.dtype)
        for _ in range(self.layers):
            y = MLP(self.dtype, self.hidden)(norm()(x).swapaxes(1, 2))
            x = x + y.swapaxes(1, 2)
            x = x + MLP(self.dtype, 4 * self.width)(norm()(x))
        return nn.Dense(self.classes, dtype=self.dtype)(norm()(x).mean(axis=1))


def patches(x: jax.Array, size: int, width: int, dtype: Any) -> jax.Array:
    """[batch, patches, width] of images."""
    x = nn.Conv(width, (size, size), strides=size, padding="VALID", dtype=dtype)(x)
    return x.reshape(len(x), -1, width)
