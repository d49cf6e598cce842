"""A network of one image, channels first, that is mapped over a batch, as Equinox writes them."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.zoo.sized import Model, floats, integers, model


def mapped(
    *, widths: tuple[int, ...] = (64, 128, 256), blocks: int = 3, batch: int = 128, pixels: int = 64
) -> Model:
    """A residual network."""
    images, labels = floats(batch, 3, pixels, pixels), integers(batch)
    over_batch = nn.vmap(OfOneImage, variable_axes={"params": None}, split_rngs={"params": False})
    return model(lambda dtype: over_batch(dtype, widths, blocks), images, labels)


class OfOneImage(nn.Module):
    """Residual blocks with norms of groups of channels."""

    dtype: Any
    widths: tuple[int, ...]
    blocks: int
    classes: int = 1000

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits [classes] of an image [3, height, width]."""
        x = Convolution(self.dtype, self.widths[0])(x)
        for stage, width in enumerate(self.widths):
            for block in range(self.blocks):
                stride = 2 if stage and not block else 1
                y = Convolution(self.dtype, width, 3, stride)(nn.silu(GroupNorm(self.dtype)(x)))
                y = Convolution(self.dtype, width)(nn.silu(GroupNorm(self.dtype)(y)))
                x = (x if x.shape == y.shape else Convolution(self.dtype, width, 1, stride)(x)) + y
        x = GroupNorm(self.dtype)(x).mean(axis=(1, 2))
        return nn.Dense(self.classes, dtype=self.dtype)(x)


class Convolution(nn.Module):
    """Of one image, with a bias."""

    dtype: Any
    width: int
    size: int = 3
    stride: int = 1

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[channels, height, width] to as many channels as this is wide."""
        shape = self.width, len(x), self.size, self.size
        initialise = nn.initializers.lecun_normal(in_axis=1, out_axis=0)
        x, filters = nn.dtypes.promote_dtype(
            x, self.param("filters", initialise, shape), dtype=self.dtype
        )
        strides = self.stride, self.stride
        [y] = jax.lax.conv_general_dilated(x[None], filters, strides, "SAME")
        bias = self.param("bias", nn.initializers.zeros, (self.width, 1, 1))
        return y + bias.astype(y.dtype)


class GroupNorm(nn.Module):
    """Of one image: each group of channels as one row, in float32 by hand too."""

    dtype: Any
    groups: int = 8

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[channels, height, width] to the same."""
        rows = x.astype(jnp.float32).reshape(self.groups, -1)
        mean = rows.mean(axis=1, keepdims=True)
        variance = rows.var(axis=1, keepdims=True)
        y = ((rows - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape)
        scale = self.param("scale", nn.initializers.ones, (len(x), 1, 1))
        bias = self.param("bias", nn.initializers.zeros, (len(x), 1, 1))
        return (y * scale + bias).astype(x.dtype)
