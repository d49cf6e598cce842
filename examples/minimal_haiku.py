"""Digits in float16 with Haiku. A skipped step leaves the batch statistics as they were."""

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

import jmp_kit

digits = load_digits()
x, y = jnp.asarray(digits.data / 16, jnp.float32), jnp.asarray(digits.target)


@hk.transform_with_state
def network(x, train):
    x = hk.BatchNorm(True, True, 0.99)(hk.Linear(128)(x), train)
    x = jax.nn.relu(x)
    return hk.Linear(10)(hk.dropout(hk.next_rng_key(), 0.1, x) if train else x)


@jmp_kit.autocast("mixed_float16")
def loss_fn(params, state, x, y, key):
    logits, state = network.apply(params, state, key, x, True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), state


optimizer = jmp_kit.mixed_precision(optax.adam(1e-2), jmp_kit.DynamicLossScale())


@jax.jit
def train_step(params, state, opt_state, x, y, key):
    scaled = jmp_kit.value_and_grad(loss_fn, jmp_kit.loss_scale_of(opt_state), has_aux=True)
    (loss, new), grads = scaled(params, state, x, y, key)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    state = jmp_kit.select_tree(jmp_kit.metrics(opt_state)["finite"], new, state)
    return optax.apply_updates(params, updates), state, opt_state, loss


params, state = network.init(jax.random.key(0), x, True)
opt_state = optimizer.init(params)
for key in jax.random.split(jax.random.key(1), 100):
    params, state, opt_state, loss = train_step(params, state, opt_state, x, y, key)
accuracy = jnp.mean(network.apply(params, state, key, x, False)[0].argmax(-1) == y)
print(f"loss {loss:.4f}, accuracy {accuracy:.1%}, {jmp_kit.metrics(opt_state)}")
