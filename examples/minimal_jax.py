"""Digits in float16 with plain JAX: the four numbered lines are all that jmp_kit asks for."""

import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

import jmp_kit

digits = load_digits()
x, y = jnp.asarray(digits.data / 16, jnp.float32), jnp.asarray(digits.target)


def predict(params, x):
    return jax.nn.relu(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def loss_fn(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(predict(params, x), y).mean()


half_loss = jmp_kit.autocast(loss_fn, "mixed_float16")  # 1
optimizer = jmp_kit.mixed_precision(optax.adam(1e-2), jmp_kit.DynamicLossScale())  # 2


@jax.jit
def train_step(params, opt_state, x, y):
    loss_scale = jmp_kit.loss_scale_of(opt_state)  # 3
    loss, grads = jmp_kit.value_and_grad(half_loss, loss_scale)(params, x, y)  # 4
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


keys = jax.random.split(jax.random.key(0))
params = {"w1": jax.random.normal(keys[0], (64, 128)) / 8, "b1": jnp.zeros(128)}
params |= {"w2": jax.random.normal(keys[1], (128, 10)) / 12, "b2": jnp.zeros(10)}
opt_state = optimizer.init(params)
for _ in range(100):
    params, opt_state, loss = train_step(params, opt_state, x, y)
accuracy = jnp.mean(predict(params, x).argmax(-1) == y)
print(f"loss {loss:.4f}, accuracy {accuracy:.1%}, {jmp_kit.metrics(opt_state)}")
