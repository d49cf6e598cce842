"""A residual stream and its train step, and what XLA is given of that, printed.

python -m tests.casting.stream
"""

import jax
import jax.numpy as jnp
from jax import lax

from jmp_kit import autocast

LAYERS = 4
WEIGHTS = [0.3 * jax.random.normal(jax.random.key(i), (16, 16)) for i in range(2 * LAYERS)]
X = jax.random.normal(jax.random.key(100), (8, 16))


def norm(x):
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def block(x, up, down):
    return x + jax.nn.gelu(norm(x) @ up) @ down


def loss_through(block):
    def loss_fn(weights, x):
        for up, down in zip(weights[::2], weights[1::2], strict=True):
            x = block(x, up, down)
        return jnp.mean((norm(x) @ weights[0]) ** 2)

    return loss_fn


def loss_through_scan(block):
    def loss_fn(weights, x):
        stacked = jnp.stack(weights[::2]), jnp.stack(weights[1::2])
        x, _ = lax.scan(lambda x, w: (block(x, *w), None), x, stacked)
        return jnp.mean((norm(x) @ weights[0]) ** 2)

    return loss_fn


def step_of(loss_fn):
    def step(weights, x):
        loss, grads = jax.value_and_grad(loss_fn)(weights, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss

    return step


def printed():
    steps = [
        autocast(step_of(kind(block)), jnp.bfloat16) for kind in (loss_through, loss_through_scan)
    ]
    return "".join(jax.jit(step).lower(WEIGHTS, X).as_text() for step in steps)


if __name__ == "__main__":
    print(printed())
