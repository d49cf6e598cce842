"""Convolutions: ResNet-50 and ConvNeXt."""

import functools
from typing import Any

import flax.linen as nn
import jax

from benchmarks import resnet as resnets
from benchmarks.zoo.sized import Model, floats, integers, model


def resnet(
    *,
    stages: tuple[int, ...] = (3, 4, 6, 3),
    width: int = 64,
    batch: int = 128,
    pixels: int = 224,
) -> Model:
    """ResNet-50."""
    images, labels = floats(batch, pixels, pixels, 3), integers(batch)
    return Model(resnets.task(stages, width, pixels), (images, labels))


def convnext(
    *, stages: tuple[int, ...] = (3, 3, 9, 3), width: int = 128, batch: int = 64, pixels: int = 224
) -> Model:
    """The depth of ConvNeXt-T and the widths of ConvNeXt-B."""
    images, labels = floats(batch, pixels, pixels, 3), integers(batch)
    return model(lambda dtype: ConvNeXt(dtype, stages, width), images, labels)


class ConvNeXt(nn.Module):
    """Depthwise convolutions, each before a norm and a GELU network."""

    dtype: Any
    stages: tuple[int, ...]
    width: int
    classes: int = 1000

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits [batch, classes] of images [batch, height, width, 3]."""
        norm = functools.partial(nn.LayerNorm, epsilon=1e-6, dtype=self.dtype)
        for stage, blocks in enumerate(self.stages):
            x = norm()(x) if stage else x
            size = 2 if stage else 4
            width = self.width * 2**stage
            x = nn.Conv(width, (size, size), strides=size, padding="VALID", dtype=self.dtype)(x)
            x = x if stage else norm()(x)
            for _ in range(blocks):
                x = ConvNeXtBlock(self.dtype)(x)
        return nn.Dense(self.classes, dtype=self.dtype)(norm()(x.mean(axis=(1, 2))))


class ConvNeXtBlock(nn.Module):
    """What it adds is scaled by channel."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, height, width, channels] to the same."""
        width = x.shape[-1]
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        y = nn.Conv(width, (7, 7), feature_group_count=width, dtype=self.dtype)(x)
        y = nn.LayerNorm(epsilon=1e-6, dtype=self.dtype)(y)
        y = dense(width)(nn.gelu(dense(4 * width)(y)))
        scale = self.param("scale", nn.initializers.constant(1e-6), (width,))
        return x + y * scale.astype(y.dtype)
