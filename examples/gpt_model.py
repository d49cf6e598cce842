"""A GPT of bytes, and its sizes; it says nothing about precision."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

import jmp_kit


@dataclasses.dataclass(frozen=True)
class Config:
    """A GPT and how it is trained."""

    layers: int = 3
    heads: int = 4
    width: int = 128
    time: int = 64  # bytes that it looks back
    batch: int = 8  # pieces of text at a time
    accumulate: int = 2  # batches a step
    steps: int = 1500
    warmup: int = 100  # steps
    learning_rate: float = 4e-3
    clip: float = 1.0  # global norm of a gradient
    dropout: float = 0.0  # share
    period: int = 200  # finite batches after which float16's loss scale grows
    evaluate: int = 150  # steps between looks at the validation text

    @property
    def bytes(self) -> int:
        """Of text a step."""
        return self.batch * self.accumulate * self.time

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("warmup", "learning_rate", "clip", "dropout") else 1
            if not least <= value < math.inf:
                raise ValueError(f"{field.name} is {value}, but has to be at least {least}")
        if self.width % self.heads:
            raise ValueError(
                f"width is {self.width}, which {self.heads} heads cannot share: give a multiple"
            )


SIZES = {
    "small": Config(),
    "124m": Config(
        layers=16,
        heads=10,
        width=800,
        time=1024,
        batch=32,
        accumulate=4,
        steps=5000,
        warmup=500,
        learning_rate=6e-4,
        period=2000,
        evaluate=250,
    ),
}


class Block(nnx.Module):
    """Causal attention and a GELU network, each after a norm."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        width = config.width
        self.heads = config.heads
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[batch, time, width] to the same."""
        *shape, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).reshape(*shape, 3, self.heads, width // self.heads)
        attended = attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2])
        x = x + self.dropout(self.out(attended.reshape(x.shape)))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.mlp_norm(x)))))


class GPT(nnx.Module):
    """A decoder of bytes."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        initialise = nnx.initializers.normal(0.02)
        self.embed = nnx.Embed(256, config.width, embedding_init=initialise, rngs=rngs)
        self.position = nnx.Param(initialise(rngs.params(), (config.time, config.width)))
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.head = nnx.Linear(config.width, 256, use_bias=False, rngs=rngs)

    def __call__(self, text: jax.Array) -> jax.Array:
        """Logits [batch, time, 256] of the next bytes of text uint8[batch, time]."""
        x = self.embed(text.astype(jnp.int32)) + self.position[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention, each [batch, time, heads, width]; on a GPU by cuDNN's kernel."""
    on_gpu = jax.default_backend() == "gpu"
    return fused(q, k, v) if on_gpu else jax.nn.dot_product_attention(q, k, v, is_causal=True)


@jmp_kit.half_precision
def fused(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention by cuDNN's kernel, which takes only half; a float32 run does without."""
    if q.dtype == jnp.float32:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
