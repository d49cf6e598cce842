"""Programs of every kind, each a loss of (params, x): the ones that autocast is tried on."""

import functools

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

KEYS = jax.random.split(jax.random.key(0), 8)
X = jax.random.normal(KEYS[0], (8, 16))
IMAGES = jax.random.normal(KEYS[1], (2, 8, 8, 4)) + 1.0


def weights(*shapes):
    keys = jax.random.split(KEYS[2], len(shapes))
    return [jax.random.normal(k, s) / s[-2] ** 0.5 for k, s in zip(keys, shapes, strict=True)]


SQUARE = weights((16, 16), (16, 16))


def mean_square(y):
    return jnp.mean(y.astype(jnp.float32) ** 2)


def mlp(w, x):
    h = jax.nn.gelu(x @ w[0])
    h = h * lax.rsqrt(jnp.mean(h**2, axis=-1, keepdims=True) + 1e-6)
    return mean_square(jax.nn.softmax(h @ w[1]) - x)


def jitted(w, x):
    inner = jax.jit(lambda w, x: jnp.tanh(x @ w), donate_argnums=1)
    return mean_square(inner(w[1], inner(w[0], 2.0 * x)))


def scanned(w, x):
    def step(carry, scale):
        h, total = carry
        h = h + jnp.tanh(h @ w[0]) @ w[1] * scale
        return (h, total + jnp.sum(h**2) / h.size), jnp.mean(h, axis=0)

    carry, means = lax.scan(step, (x, jnp.float32(0)), jnp.arange(1.0, 5.0) / 4, reverse=True)
    return carry[1] + mean_square(means)


def rematerialised(w, x):
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def block(h, w):
        return h + jnp.tanh(h @ w[0]) @ w[1], None

    stacked = [jnp.stack([v] * 3) for v in w]
    return mean_square(lax.scan(block, x, stacked, unroll=3)[0])


def branching(w, x):
    y = lax.cond(x[0, 0] > 0, lambda x: x @ w[0], lambda x: 2 * x, x)
    return mean_square(lax.switch(1, [jnp.sin, lambda y: y @ w[1], jnp.cos], y))


def looping(w, x):
    return mean_square(lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h @ w[0]) @ w[1], x))


def custom_forward(w, x):
    @jax.custom_jvp
    def layer(x, w, n):
        return jnp.tanh(x @ w) * n

    @layer.defjvp
    def rule(primals, tangents):
        (x, w, n), (dx, dw, _) = primals, tangents
        y = jnp.tanh(x @ w)
        return y * n, (1 - y**2) * (dx @ w + x @ dw) * n

    return mean_square(layer(layer(x, w[0], jnp.float32(2)), w[1], jnp.float32(1)))


def custom_backward(w, x):
    @jax.custom_vjp
    def layer(x, w, index):
        return jnp.tanh(x @ w) * index.astype(jnp.float32)

    def forward(x, w, index):
        y = jnp.tanh(x @ w)
        n = index.astype(jnp.float32)
        return y * n, (x, w, y, n)

    def backward(residuals, cotangent):
        x, w, y, n = residuals
        d = cotangent * n * (1 - y**2)
        return d @ w.T, x.T @ d, None

    layer.defvjp(forward, backward)
    return mean_square(layer(layer(x, w[0], jnp.int32(2)), w[1], jnp.arange(2)[1]))


def sharded(w, x):
    mesh = jax.make_mesh((4,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(jax.P(), jax.P("batch")), out_specs=jax.P("batch")
    )
    def model(w, x):
        h = jnp.tanh(x @ w[0])
        return (h - lax.pmean(h, "batch")) @ w[1]

    return mean_square(model(w, x))


def experts(w, x):
    gate = jax.nn.softmax(x @ w[0][:, :2])
    chosen = jnp.argmax(gate, axis=-1)
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=2)
    y = lax.ragged_dot(x[order], jnp.stack(w), sizes)
    return mean_square(jnp.tanh(y)[jnp.argsort(order)] * jnp.max(gate, axis=-1, keepdims=True))


def attention(w, x):
    """Causal, with rotary positions far out, and -1e9 for a mask."""
    position = jnp.arange(x.shape[0], dtype=jnp.float32) * 512.0
    angle = position[:, None] / 10000 ** (jnp.arange(8.0) / 8.0)
    half = jnp.split(x @ w[0], 2, axis=-1)
    q = jnp.concatenate(
        [
            half[0] * jnp.cos(angle) - half[1] * jnp.sin(angle),
            half[0] * jnp.sin(angle) + half[1] * jnp.cos(angle),
        ],
        axis=-1,
    )
    mask = jnp.where(jnp.tri(x.shape[0]) > 0, 0.0, -1e9)
    return mean_square(jax.nn.softmax(q @ (x @ w[1]).T / 4 + mask) @ x)


def convolutions(w, x):
    dilated = lax.conv_general_dilated(
        x, w[0], (1, 1), "SAME", rhs_dilation=(2, 2), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    depthwise = lax.conv_general_dilated(
        jax.nn.relu(dilated),
        w[1],
        (2, 2),
        "SAME",
        feature_group_count=8,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    transposed = lax.conv_transpose(jax.nn.silu(depthwise), w[2], (2, 2), "SAME")
    return mean_square(transposed)


def dropout(w, x):
    keep = jax.random.bernoulli(jax.random.key(3), 0.5, x.shape)
    return mean_square(jnp.where(keep, jnp.tanh(x @ w[0]), 0.0) @ w[1])


class Recurrent(nn.Module):
    cell: type

    @nn.compact
    def __call__(self, x):
        return nn.RNN(self.cell(16))(x[None])


class Scanned(nn.Module):
    """nn.scan over nn.remat blocks."""

    @nn.compact
    def __call__(self, x):
        class Block(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                y = nn.LayerNorm()(x)
                y = nn.MultiHeadDotProductAttention(2)(y[None], y[None])[0]
                return x + nn.Dense(16)(nn.gelu(nn.Dense(32)(y))), None

        scan = nn.scan(
            nn.remat(Block, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
        )
        return scan()(x, None)[0]


class UNet(nn.Module):
    """With a time embedding, as in diffusion."""

    @nn.compact
    def __call__(self, x):
        frequency = jnp.exp(-jnp.arange(8.0) * 0.5) * 500.0
        time = nn.Dense(8)(jnp.concatenate([jnp.sin(frequency), jnp.cos(frequency)]))
        down = nn.relu(nn.GroupNorm(4)(nn.Conv(8, (3, 3))(x)) + time)
        low = nn.relu(nn.Conv(16, (3, 3), strides=2)(down))
        up = nn.ConvTranspose(8, (3, 3), strides=(2, 2))(low)
        return nn.Conv(4, (1, 1))(jnp.concatenate([up, down], axis=-1))


class Normalised(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Conv(8, (3, 3))(x) + 30.0)
        return nn.Dense(3)(nn.relu(x).mean((1, 2)))


def linen(module, x, mutable=False):
    variables = jax.jit(module.init)(KEYS[3], x)
    rest = {k: v for k, v in variables.items() if k != "params"}

    def loss(params, x):
        outputs = module.apply({"params": params, **rest}, x, mutable=mutable)
        return mean_square(outputs[0] if mutable else outputs)

    return loss, variables["params"], x


def from_nnx():
    graph, state = nnx.split(
        nnx.Sequential(
            nnx.Linear(16, 32, rngs=nnx.Rngs(0)),
            jax.nn.gelu,
            nnx.LayerNorm(32, rngs=nnx.Rngs(0)),
            nnx.Linear(32, 4, rngs=nnx.Rngs(1)),
        )
    )
    return lambda state, x: mean_square(nnx.merge(graph, state)(x)), state, X


def from_equinox():
    model = eqx.nn.MLP(16, 4, 32, 2, key=KEYS[4])
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    return lambda a, x: mean_square(jax.vmap(eqx.combine(a, static))(x)), arrays, X


def from_haiku():
    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([32, 4])(x)))
    return lambda params, x: mean_square(net.apply(params, x)), jax.jit(net.init)(KEYS[5], X), X


PLAIN = {
    f.__name__: (f, SQUARE, X)
    for f in (
        *(mlp, jitted, scanned, rematerialised, branching, looping, custom_forward),
        *(custom_backward, sharded, experts, attention, dropout),
    )
} | {"convolutions": (convolutions, weights((3, 3, 4, 8), (3, 3, 1, 8), (3, 3, 8, 4)), IMAGES)}

ZOO = PLAIN | {
    "lstm": linen(Recurrent(nn.OptimizedLSTMCell), X),
    "gru": linen(Recurrent(nn.GRUCell), X),
    "scan_of_remat": linen(Scanned(), X),
    "unet": linen(UNet(), IMAGES),
    "batch_norm": linen(Normalised(), IMAGES, mutable=["batch_stats"]),
    "nnx": from_nnx(),
    "equinox": from_equinox(),
    "haiku": from_haiku(),
}
