"""Flax models that can also be written by hand in half, `dtype=half` on every module."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax


class Block(nn.Module):
    """A transformer block with causal attention."""

    dtype: Any

    @nn.compact
    def __call__(self, x, _=None):
        norm, dense = (functools.partial(m, dtype=self.dtype) for m in (nn.LayerNorm, nn.Dense))
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        y = norm()(x)
        x = x + nn.MultiHeadDotProductAttention(4, dtype=self.dtype)(y, y, mask=mask)
        y = dense(x.shape[-1])(nn.gelu(dense(4 * x.shape[-1])(norm()(x))))
        return x + y, None


class Transformer(nn.Module):
    """Four blocks, unrolled, or scanned and rematerialised."""

    dtype: Any
    scanned: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(64, 64, dtype=self.dtype)(tokens)
        if self.scanned:
            remat = nn.remat(Block, prevent_cse=False)
            axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
            x, _ = nn.scan(remat, length=4, **axes)(self.dtype)(x, None)
        else:
            for _ in range(4):
                x, _ = Block(self.dtype)(x)
        return nn.Dense(64, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))


class ResNet(nn.Module):
    dtype: Any
    batch_norm: bool

    @nn.compact
    def __call__(self, x):
        def norm(x):
            if self.batch_norm:
                return nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x)
            return nn.GroupNorm(8, dtype=self.dtype)(x)

        conv = functools.partial(nn.Conv, dtype=self.dtype)
        x = conv(16, (3, 3))(x)
        for features, strides in ((16, 1), (32, 2), (32, 1), (64, 2)):
            y = nn.relu(norm(x))
            shortcut = conv(features, (1, 1), strides=strides)(y)
            y = nn.relu(norm(conv(features, (3, 3), strides=strides)(y)))
            x = shortcut + conv(features, (3, 3))(y)
        return nn.Dense(10, dtype=self.dtype)(x.mean((1, 2)))


class Recurrent(nn.Module):
    dtype: Any
    cell: type

    @nn.compact
    def __call__(self, x):
        x = nn.RNN(self.cell(32, dtype=self.dtype))(x)
        return nn.Dense(10, dtype=self.dtype)(x)


class UNet(nn.Module):
    """Transposed convolutions and a time embedding."""

    dtype: Any

    @nn.compact
    def __call__(self, x):
        conv = functools.partial(nn.Conv, dtype=self.dtype)
        frequency = jnp.exp(-jnp.arange(16.0) * 0.5) * 500.0
        time = nn.Dense(16, dtype=self.dtype)(
            jnp.concatenate([jnp.sin(frequency), jnp.cos(frequency)])
        )
        down = nn.silu(nn.GroupNorm(4, dtype=self.dtype)(conv(16, (3, 3))(x)) + time)
        low = nn.silu(nn.GroupNorm(4, dtype=self.dtype)(conv(32, (3, 3), strides=2)(down)))
        up = nn.ConvTranspose(16, (3, 3), strides=(2, 2), dtype=self.dtype)(low)
        return conv(10, (1, 1))(jnp.concatenate([up, down], axis=-1))


KEYS = jax.random.split(jax.random.key(7), 3)
TOKENS = jax.random.randint(KEYS[0], (8, 65), 0, 64)
IMAGES = jax.random.normal(KEYS[1], (8, 16, 16, 3)) + 3.0  # with an offset
SERIES = jax.random.normal(KEYS[2], (8, 24, 16))
CLASSES = jnp.arange(8) % 10


@dataclasses.dataclass(frozen=True)
class Model:
    """A model, its inputs and its targets."""

    module: Callable[[Any], nn.Module]  # from dtype=
    inputs: jax.Array
    labels: jax.Array

    @functools.cached_property
    def shapes(self):
        return jax.eval_shape(self.module(None).init, jax.random.key(0), self.inputs)

    def draw(self, seed):
        """Variables and inputs. In NumPy: Flax's initialisers take ten seconds to compile."""
        generator = np.random.default_rng(seed)

        def values(path, like):
            name = path[-1].key
            if name not in ("kernel", "embedding"):
                return jnp.full(like.shape, float(name in ("scale", "var")))
            fan_in = math.prod(like.shape[:-1])
            return jnp.asarray(generator.normal(size=like.shape, scale=fan_in**-0.5), jnp.float32)

        inputs = generator.permutation(np.ravel(self.inputs)).reshape(self.inputs.shape)
        return jax.tree_util.tree_map_with_path(values, self.shapes), jnp.asarray(inputs)

    def loss(self, dtype=None):
        """The loss of (variables, inputs); by hand in `dtype`, or in float32."""

        def loss_fn(variables, inputs):
            logits, _ = self.module(dtype).apply(variables, inputs, mutable=["batch_stats"])
            logits = logits.astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, self.labels).mean()

        return loss_fn


MODELS = {
    "transformer": Model(Transformer, TOKENS[:, :-1], TOKENS[:, 1:]),
    "scanned": Model(lambda d: Transformer(d, scanned=True), TOKENS[:, :-1], TOKENS[:, 1:]),
    "resnet_group": Model(lambda d: ResNet(d, batch_norm=False), IMAGES, CLASSES),
    "resnet_batch": Model(lambda d: ResNet(d, batch_norm=True), IMAGES, CLASSES),
    "lstm": Model(
        lambda d: Recurrent(d, nn.OptimizedLSTMCell), SERIES, CLASSES[:, None].repeat(24, 1)
    ),
    "gru": Model(lambda d: Recurrent(d, nn.GRUCell), SERIES, CLASSES[:, None].repeat(24, 1)),
    "unet": Model(UNet, IMAGES, jnp.zeros(IMAGES.shape[:3], jnp.int32) + 3),
}
