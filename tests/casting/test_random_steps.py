"""Gradients of random networks, large enough for passes, beside the same written by hand."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_kit import autocast
from tests.casting.test_zoo import distance
from tests.compiling import OPTIMISED, quick_or_slow

pytestmark = pytest.mark.usefixtures("standard_promotion")

SHAPE = 4, 64, 64
X = jax.random.normal(jax.random.key(0), SHAPE)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape) / 8


WEIGHTS = {
    **{name: normal(i, 64, 64) for i, name in enumerate("qkvo", 1)},
    "up": normal(5, 64, 128),
    "down": normal(6, 128, 64),
    "scale": 1 + normal(7, 64),
    "kernel": normal(8, 3, 64, 64) / 2,
    "rows": normal(9, 64, 64),
}


def normalised(x, axes):
    mean = x.mean(axes, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.square(x - mean).mean(axes, keepdims=True) + 0.1)


def attention(x, w):
    q, k, v = ((x @ w[name]).reshape(4, 64, 4, 16) for name in "qkv")
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / 4
    y = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
    return y.reshape(SHAPE) @ w["o"]


def convolved(x, w):
    numbers = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(x, w["kernel"], (1,), "SAME", dimension_numbers=numbers)


def in_steps(x, w):
    def step(carry, row):
        carry = jnp.tanh(carry + row)
        return carry, carry - carry.max(-1, keepdims=True) / 2

    return lax.scan(step, x[:, 0], jnp.swapaxes(x, 0, 1))[1].swapaxes(0, 1)


def groups(x):
    return normalised(x.reshape(4, 64, 4, 16), (1, 3)).reshape(SHAPE)


def linear_recurrence(x):
    def after(one, other):
        return one[0] * other[0], other[0] * one[1] + other[1]

    return lax.associative_scan(after, (jax.nn.sigmoid(x), x), axis=1)[1] / 4


def gate(x):
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * jax.nn.sigmoid(b), b], -1)


# Each makes an activation of the last one, of one before, and of the weights.
LAYERS = {
    "dense": lambda x, y, w: x @ w["q"],
    "mlp": lambda x, y, w: jax.nn.gelu(x @ w["up"]) @ w["down"],
    "attention": lambda x, y, w: attention(x, w),
    "convolution": lambda x, y, w: convolved(x, w),
    "product of two": lambda x, y, w: jax.nn.softmax(x @ y.swapaxes(1, 2) / 8) @ y,
    "scale": lambda x, y, w: x * w["scale"] + w["rows"],
    "rows": lambda x, y, w: normalised(x, -1),
    "channels": lambda x, y, w: normalised(x, (0, 1)),
    "groups": lambda x, y, w: groups(x),
    "add": lambda x, y, w: x + y,
    "multiply": lambda x, y, w: jnp.tanh(x) * jax.nn.sigmoid(y),
    "larger": lambda x, y, w: jnp.maximum(x, y),
    "gate": lambda x, y, w: gate(x),
    "relu": lambda x, y, w: jax.nn.leaky_relu(x),
    "softplus": lambda x, y, w: jax.nn.softplus(x),
    "abs": lambda x, y, w: jnp.abs(jnp.tanh(x)),
    "below the largest": lambda x, y, w: jnp.tanh(x) - x.max(1, keepdims=True) / 2,
    "of the largest": lambda x, y, w: x / (jnp.abs(x).max(-1, keepdims=True) + 1),
    "above the least": lambda x, y, w: x - x.min((0, 1)) / 2,
    "pool": lambda x, y, w: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 1), (1, 1, 1), "SAME"),
    "turn": lambda x, y, w: jnp.swapaxes(x, 1, 2),
    "roll": lambda x, y, w: jnp.roll(x, 3, 1)[:, ::-1],
    "shuffle": lambda x, y, w: jax.random.permutation(jax.random.key(0), x, 1),
    "sum": lambda x, y, w: jnp.cumsum(x, 1) / 16,
    "recurrence": lambda x, y, w: linear_recurrence(x),
    "steps": lambda x, y, w: in_steps(x, w),
    "checkpoint": lambda x, y, w: jax.checkpoint(lambda x: jnp.sin(jnp.tanh(x @ w["v"])))(x),
}


def network_of(seed, most=9):
    """A function of weights and an activation, of as many random layers at most."""
    draw = random.Random(seed)
    # Their names, and how long ago the other activation was made.
    layers = [(draw.choice(list(LAYERS)), draw.randint(1, 3)) for _ in range(draw.randint(2, most))]

    def network(w, x):
        values = [x]
        for name, ago in layers:
            values.append(LAYERS[name](values[-1], values[-1 - min(ago, len(values) - 1)], w))
        return values[-1] @ w["o"]

    return network


def loss_of(y):
    """Whose gradient knows a sign."""
    return jnp.mean(jnp.square(y.astype(jnp.float32)) + y.astype(jnp.float32))


@pytest.mark.parametrize("seed", quick_or_slow(range(48), range(2)))
def test_gradients_of_random_networks(seed):
    network = network_of(seed)

    def loss_fn(w, x):
        return loss_of(network(w, x))

    def by_hand(w, x):
        return loss_fn(*jax.tree.map(lambda x: x.astype(jnp.bfloat16), (w, x)))

    one_line = autocast(jax.grad(loss_fn), "mixed_bfloat16")
    ways = one_line, jax.grad(by_hand), jax.grad(loss_fn)
    # Not optimised, XLA itself makes 0 / 0 of what an extremum is compared with.
    programs = [jax.jit(way).lower(WEIGHTS, X).compile(OPTIMISED) for way in ways]
    errors = []
    for draw in range(5):  # one value that takes the place of a maximum is all of an error
        x = jax.random.normal(jax.random.key(draw), SHAPE)
        *others, exact = (program(WEIGHTS, x) for program in programs)
        errors.append([distance(found, exact) for found in others])
    found, hand = np.median(errors, axis=0)
    assert found <= 1.5 * hand + 0.01
