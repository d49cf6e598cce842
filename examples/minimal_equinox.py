"""Digits in float16 with Equinox: modules go in and come out whole."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

import jmp_kit

digits = load_digits()
x, y = jnp.asarray(digits.data / 16, jnp.float32), jnp.asarray(digits.target)

keys = jax.random.split(jax.random.key(0))
layers = eqx.nn.Linear(64, 128, key=keys[0]), eqx.nn.Linear(128, 10, key=keys[1])
model = eqx.nn.Sequential(
    [layers[0], eqx.nn.LayerNorm(128), eqx.nn.Lambda(jax.nn.relu), eqx.nn.Dropout(0.1), layers[1]]
)


@jmp_kit.autocast("mixed_float16")
def loss_fn(model, x, y, key):
    logits = jax.vmap(lambda x, key: model(x, key=key))(x, jax.random.split(key, len(x)))
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


optimizer = jmp_kit.mixed_precision(optax.adam(1e-2), jmp_kit.DynamicLossScale())
opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))


@eqx.filter_jit
def train_step(model, opt_state, x, y, key):
    loss_scale = jmp_kit.loss_scale_of(opt_state)
    loss, grads = jmp_kit.value_and_grad(loss_fn, loss_scale)(model, x, y, key)
    params = eqx.filter(model, eqx.is_inexact_array)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return eqx.apply_updates(model, updates), opt_state, loss


for key in jax.random.split(jax.random.key(1), 100):
    model, opt_state, loss = train_step(model, opt_state, x, y, key)
accuracy = jnp.mean(jax.vmap(eqx.nn.inference_mode(model))(x).argmax(-1) == y)
print(f"loss {loss:.4f}, accuracy {accuracy:.1%}, {jmp_kit.metrics(opt_state)}")
