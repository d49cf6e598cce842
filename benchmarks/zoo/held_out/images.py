"""Held out: images beside texts, hidden parts of images, volumes, points, an autoencoder."""

import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.training import cross_entropy
from benchmarks.zoo.sized import Model, floats, integers, model
from benchmarks.zoo.vision import MLP, patches


def clip(*, batch: int = 512, pixels: int = 224, time: int = 64, **sizes: Any) -> Model:
    """Which text belongs to which image of a batch."""
    inputs = floats(batch, pixels, pixels, 3), integers(batch, time)

    def error(scores: jax.Array, _: jax.Array) -> jax.Array:
        labels = jnp.arange(len(scores))
        return cross_entropy(scores, labels) + cross_entropy(scores.T, labels)

    return model(lambda dtype: Clip(dtype, **sizes), inputs, integers(batch), error=error)


def masked(*, batch: int = 256, pixels: int = 224, **sizes: Any) -> Model:
    """What is in the three of four patches of an image that are hidden."""
    count = (pixels // 16) ** 2
    inputs, wanted = (
        (floats(batch, pixels, pixels, 3), floats(batch, count)),
        floats(batch, count, 768),
    )
    return model(lambda dtype: Masked(dtype, **sizes), inputs, wanted, error=_squared)


def soft_experts(*, batch: int = 128, pixels: int = 224, **sizes: Any) -> Model:
    """A vision transformer whose experts take weighted sums of patches."""
    images, labels = floats(batch, pixels, pixels, 3), integers(batch)
    return model(lambda dtype: SoftExperts(dtype, **sizes), images, labels)


def volumes(*, batch: int = 4, side: int = 96, **sizes: Any) -> Model:
    """The kind of each place in a volume."""
    space = batch, side, side, side
    return model(lambda dtype: Volumes(dtype, **sizes), floats(*space, 1), integers(*space))


def autoencoder(*, batch: int = 256, pixels: int = 64, latent: int = 128, **sizes: Any) -> Model:
    """A variational one."""
    inputs = floats(batch, pixels, pixels, 3), floats(batch, latent)
    module = functools.partial(Autoencoder, latent=latent, **sizes)
    return model(module, inputs, integers(batch), error=lambda loss, _: loss)


def points(*, batch: int = 8, count: int = 4096, near: int = 16, **sizes: Any) -> Model:
    """The kind of each point of a cloud, by attention to the nearest."""
    inputs = floats(batch, count, 3), integers(batch, count, near)
    return model(lambda dtype: Points(dtype, **sizes), inputs, integers(batch, count))


def _squared(found: jax.Array, wanted: jax.Array) -> jax.Array:
    return (found - wanted) ** 2


class Layers(nn.Module):
    """A transformer's, norms first."""

    dtype: Any
    layers: int
    heads: int = 8

    @nn.compact
    def __call__(self, x: jax.Array, mask: Any = None) -> jax.Array:
        """[batch, time, width] to the same."""
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
        for _ in range(self.layers):
            y = nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(norm()(x), mask=mask)
            x = x + y
            x = x + MLP(self.dtype, 4 * x.shape[-1])(norm()(x))
        return norm()(x)


def _position(module: nn.Module, x: jax.Array, name: str = "position") -> jax.Array:
    return x + module.param(name, nn.initializers.normal(0.02), x.shape[1:]).astype(x.dtype)


class Text(nn.Module):
    """A vector of a text: what its last word came to."""

    dtype: Any
    layers: int
    width: int
    vocabulary: int = 49_408

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """[batch, width] of int[batch, time]."""
        x = _position(self, nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens))
        return Layers(self.dtype, self.layers)(x, nn.make_causal_mask(tokens))[:, -1]


class Image(nn.Module):
    """A vector of an image: the mean of its patches."""

    dtype: Any
    layers: int
    width: int
    patch: int = 32

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """[batch, width] of [batch, height, width, 3]."""
        x = _position(self, patches(images, self.patch, self.width, self.dtype))
        return Layers(self.dtype, self.layers)(x).mean(axis=1)


class Clip(nn.Module):
    """Cosines of images and texts, times a temperature that is learned."""

    dtype: Any
    layers: int = 6
    width: int = 512

    @nn.compact
    def __call__(self, inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Scores [image, text]."""
        images, tokens = inputs
        found = [
            nn.Dense(self.width, use_bias=False, dtype=self.dtype)(x)
            for x in (
                Image(self.dtype, self.layers, self.width)(images),
                Text(self.dtype, self.layers, self.width)(tokens),
            )
        ]
        image, text = (x / (jnp.linalg.norm(x, axis=-1, keepdims=True) + 1e-6) for x in found)
        scale = jnp.exp(self.param("scale", nn.initializers.constant(2.66), ()))
        return scale.astype(image.dtype) * (image @ text.T)


class Masked(nn.Module):
    """A masked autoencoder: an encoder of the patches that are left, and a decoder of all."""

    dtype: Any
    layers: tuple[int, int] = (8, 4)
    widths: tuple[int, int] = (768, 512)

    @nn.compact
    def __call__(self, inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
        """[batch, patch, 768] of images, and of noise [batch, patch] that says what is hidden."""
        images, noise = inputs
        order = jnp.argsort(noise, axis=1)[..., None]
        x = _position(self, patches(images, 16, self.widths[0], self.dtype))
        count = x.shape[1]
        x = jnp.take_along_axis(x, order[:, : max(1, count // 4)], axis=1)
        x = nn.Dense(self.widths[1], dtype=self.dtype)(Layers(self.dtype, self.layers[0])(x))
        hidden = self.param("hidden", nn.initializers.zeros, (1, 1, self.widths[1]))
        missing = len(x), count - x.shape[1], self.widths[1]
        x = jnp.concatenate([x, jnp.broadcast_to(hidden.astype(x.dtype), missing)], axis=1)
        x = jnp.take_along_axis(x, jnp.argsort(order, axis=1), axis=1)
        x = _position(self, x, "place")
        return nn.Dense(768, dtype=self.dtype)(Layers(self.dtype, self.layers[1])(x))


class SoftMixture(nn.Module):
    """Experts of slots: each slot is a mean of tokens, and each token a mean of slots."""

    dtype: Any
    experts: int = 16
    slots: int = 12  # of an expert
    hidden: int = 1536

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, token, width] to the same."""
        width = x.shape[-1]
        scores = nn.DenseGeneral((self.experts, self.slots), use_bias=False, dtype=self.dtype)(x)
        enter, leave = jax.nn.softmax(scores, axis=1), jax.nn.softmax(scores, axis=(2, 3))
        draw = nn.initializers.lecun_normal(batch_axis=0)
        up = self.param("up", draw, (self.experts, width, self.hidden)).astype(x.dtype)
        down = self.param("down", draw, (self.experts, self.hidden, width)).astype(x.dtype)
        y = jnp.einsum("btw,btes->besw", x, enter)
        y = jnp.einsum("besh,ehw->besw", nn.gelu(jnp.einsum("besw,ewh->besh", y, up)), down)
        return jnp.einsum("besw,btes->btw", y, leave)


class SoftExperts(nn.Module):
    """A vision transformer."""

    dtype: Any
    layers: int = 6
    width: int = 768
    heads: int = 12
    classes: int = 1000

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits [batch, classes] of images [batch, height, width, 3]."""
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype)
        x = _position(self, patches(images, 16, self.width, self.dtype))
        for _ in range(self.layers):
            x = x + nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype)(norm()(x))
            x = x + SoftMixture(self.dtype)(norm()(x))
        return nn.Dense(self.classes, dtype=self.dtype)(norm()(x).mean(axis=1))


class Volumes(nn.Module):
    """A U-Net in three dimensions, with instance norms and leaky ReLUs."""

    dtype: Any
    widths: tuple[int, ...] = (32, 64, 128)
    classes: int = 4

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Logits [..., class] of volumes [batch, depth, height, width, 1]."""
        skips = []
        for width in self.widths[:-1]:
            x = self._twice(x, width)
            skips.append(x)
            x = nn.max_pool(x, (2, 2, 2), strides=(2, 2, 2))
        x = self._twice(x, self.widths[-1])
        for width, skip in zip(self.widths[-2::-1], reversed(skips), strict=True):
            x = nn.ConvTranspose(width, (2, 2, 2), strides=(2, 2, 2), dtype=self.dtype)(x)
            x = self._twice(jnp.concatenate([skip, x], axis=-1), width)
        return nn.Conv(self.classes, (1, 1, 1), dtype=self.dtype)(x)

    def _twice(self, x: jax.Array, width: int) -> jax.Array:
        for _ in range(2):
            x = nn.Conv(width, (3, 3, 3), use_bias=False, dtype=self.dtype)(x)
            x = nn.leaky_relu(nn.InstanceNorm(dtype=self.dtype)(x))
        return x


class Autoencoder(nn.Module):
    """Convolutions down, and transposed ones up."""

    dtype: Any
    latent: int = 128
    widths: tuple[int, ...] = (64, 128, 256, 512)

    @nn.compact
    def __call__(self, inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
        """The loss of each image [batch] of images, and of noise [batch, latent]."""
        images, noise = inputs
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        x = images
        for width in self.widths:
            x = nn.silu(nn.Conv(width, (4, 4), strides=(2, 2), dtype=self.dtype)(x))
        shape = x.shape
        x = x.reshape(len(x), -1)
        mean, log_variance = (dense(self.latent)(x).astype(jnp.float32) for _ in range(2))
        x = mean + jnp.exp(log_variance / 2) * noise
        x = nn.silu(dense(math.prod(shape[1:]))(x)).reshape(shape)
        for width in (*self.widths[-2::-1], 3):
            x = nn.ConvTranspose(width, (4, 4), strides=(2, 2), dtype=self.dtype)(x)
            x = nn.silu(x) if width != 3 else x
        wrong = ((x.astype(jnp.float32) - images) ** 2).sum(axis=(1, 2, 3))
        far = (jnp.exp(log_variance) + mean**2 - 1 - log_variance).sum(axis=-1)
        return wrong + far / 2


class Points(nn.Module):
    """A point transformer: attention that weighs each channel, of near points by their places."""

    dtype: Any
    layers: int = 3
    width: int = 64
    classes: int = 16

    @nn.compact
    def __call__(self, inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Logits [batch, point, class] of places [batch, point, 3], and int[batch, point, near]."""
        places, near = inputs
        dense = functools.partial(nn.Dense, dtype=self.dtype)
        gather = jax.vmap(lambda values, at: values[at])
        x = dense(self.width)(places)
        between = places[:, :, None] - gather(places, near)
        for _ in range(self.layers):
            y = nn.LayerNorm(dtype=self.dtype)(x)
            q, k, v = (dense(self.width)(y) for _ in range(3))
            k, v = gather(k, near), gather(v, near)
            position = dense(self.width)(nn.relu(dense(self.width)(between)))
            scores = dense(self.width)(nn.relu(dense(self.width)(q[:, :, None] - k + position)))
            y = (nn.softmax(scores, axis=2) * (v + position)).sum(axis=2)
            x = x + dense(self.width)(y)
        return dense(self.classes)(nn.LayerNorm(dtype=self.dtype)(x))
