"""What takes noise off images: a transformer and a U-Net."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.zoo.sized import Model, floats, integers, model
from benchmarks.zoo.vision import MLP, patches


def dit(*, batch: int = 128, pixels: int = 32, channels: int = 4, **sizes: Any) -> Model:
    """DiT-B/2 on the latents of images of 256 pixels."""
    latents = floats(batch, pixels, pixels, channels)
    inputs = latents, floats(batch), integers(batch)
    return model(lambda dtype: DiT(dtype, **sizes), inputs, latents, error=optax.squared_error)


def unet(*, batch: int = 64, pixels: int = 64, channels: int = 3, **sizes: Any) -> Model:
    """The shape of DDPM's, on images of 64 pixels."""
    images = floats(batch, pixels, pixels, channels)
    return model(
        lambda dtype: UNet(dtype, **sizes),
        (images, floats(batch)),
        images,
        error=optax.squared_error,
    )


class Time(nn.Module):
    """How much noise there is; the angles are float32 by hand too."""

    dtype: Any
    width: int

    @nn.compact
    def __call__(self, time: jax.Array) -> jax.Array:
        """[batch, width] of [batch]."""
        frequencies = jnp.exp(-jnp.log(10_000.0) * jnp.arange(128) / 128)
        angles = 1000.0 * time[:, None] * frequencies
        x = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
        dense = functools.partial(nn.Dense, self.width, dtype=self.dtype)
        return dense()(nn.silu(dense()(x)))


class DiT(nn.Module):
    """A transformer whose norms are scaled and shifted by time and class."""

    dtype: Any
    layers: int = 12
    width: int = 768
    heads: int = 12
    patch: int = 2
    classes: int = 1000

    @nn.compact
    def __call__(self, inputs: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        """Noise like the latents, of latents, times [batch] and classes int[batch]."""
        latents, time, label = inputs
        batch, height, _, channels = latents.shape
        x = patches(latents, self.patch, self.width, self.dtype)
        shape = 1, x.shape[1], self.width
        x = x + self.param("position", nn.initializers.normal(0.02), shape).astype(x.dtype)
        condition = Time(self.dtype, self.width)(time)
        condition += nn.Embed(self.classes, self.width, dtype=self.dtype)(label)
        condition = nn.silu(condition)[:, None]
        norm = functools.partial(
            nn.LayerNorm, epsilon=1e-6, use_scale=False, use_bias=False, dtype=self.dtype
        )
        zeros = nn.initializers.zeros
        dense = functools.partial(nn.Dense, kernel_init=zeros, dtype=self.dtype)
        for _ in range(self.layers):
            changes = jnp.split(dense(6 * self.width)(condition), 6, axis=-1)
            shift, scale, gate, network_shift, network_scale, network_gate = changes
            y = norm()(x) * (1 + scale) + shift
            x = x + gate * nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(y)
            y = norm()(x) * (1 + network_scale) + network_shift
            x = x + network_gate * MLP(self.dtype, 4 * self.width)(y)
        shift, scale = jnp.split(dense(2 * self.width)(condition), 2, axis=-1)
        x = dense(self.patch**2 * channels)(norm()(x) * (1 + scale) + shift)
        side = height // self.patch
        x = x.reshape(batch, side, side, self.patch, self.patch, channels)
        return x.swapaxes(2, 3).reshape(latents.shape)


class UNet(nn.Module):
    """Residual blocks down and up again, with attention at the bottom."""

    dtype: Any
    widths: tuple[int, ...] = (128, 256, 512)
    blocks: int = 2
    heads: int = 8

    @nn.compact
    def __call__(self, inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Noise like the images, of images [batch, height, width, channels] and times [batch]."""
        images, time = inputs
        conv = functools.partial(nn.Conv, kernel_size=(3, 3), dtype=self.dtype)
        time = nn.silu(Time(self.dtype, 4 * self.widths[0])(time))
        x = conv(self.widths[0])(images)
        passed = [x]
        for level, width in enumerate(self.widths):
            if level:
                x = conv(width, strides=2)(x)
                passed.append(x)
            for _ in range(self.blocks):
                x = self._block(x, time, width)
                passed.append(x)
        x = self._block(x, time, self.widths[-1])
        for level, width in reversed(list(enumerate(self.widths))):
            for _ in range(self.blocks + 1):
                x = self._block(jnp.concatenate([x, passed.pop()], axis=-1), time, width)
            if level:
                x = conv(width)(x.repeat(2, axis=1).repeat(2, axis=2))
        x = nn.silu(nn.GroupNorm(dtype=self.dtype)(x))
        return conv(images.shape[-1], kernel_init=nn.initializers.zeros)(x)

    def _block(self, x: jax.Array, time: jax.Array, width: int) -> jax.Array:
        x = ResidualBlock(self.dtype, width)(x, time)
        if width == self.widths[-1]:
            batch, height, across, _ = x.shape
            y = nn.GroupNorm(dtype=self.dtype)(x).reshape(batch, -1, width)
            y = nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(y)
            x = x + y.reshape(batch, height, across, width)
        return x


class ResidualBlock(nn.Module):
    """Two convolutions, each after a norm and SiLU; the time comes between them."""

    dtype: Any
    width: int

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        """[batch, height, width, channels] to other channels."""
        norm = functools.partial(nn.GroupNorm, dtype=self.dtype)
        conv = functools.partial(nn.Conv, self.width, dtype=self.dtype)
        y = conv((3, 3))(nn.silu(norm()(x)))
        y = y + nn.Dense(self.width, dtype=self.dtype)(time)[:, None, None]
        y = conv((3, 3), kernel_init=nn.initializers.zeros)(nn.silu(norm()(y)))
        return y + (x if x.shape == y.shape else conv((1, 1))(x))
