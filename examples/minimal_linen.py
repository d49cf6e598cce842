"""Digits in float16 with Flax linen. A skipped step leaves the batch statistics as they were."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from sklearn.datasets import load_digits

import jmp_kit

digits = load_digits()
x, y = jnp.asarray(digits.data / 16, jnp.float32), jnp.asarray(digits.target)


class Network(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Dense(128)(x)))
        return nn.Dense(10)(nn.Dropout(0.1, deterministic=not train)(x))


model = jmp_kit.linen.apply_policy(Network(), "mixed_float16")
optimizer = jmp_kit.mixed_precision(optax.adam(1e-2), jmp_kit.DynamicLossScale())


@jax.jit
def train_step(params, rest, opt_state, x, y, key):
    def loss_fn(params):
        variables, rngs = {"params": params, **rest}, {"dropout": key}
        logits, new = model.apply(variables, x, True, rngs=rngs, mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), new

    loss_scale = jmp_kit.loss_scale_of(opt_state)
    (loss, new), grads = jmp_kit.value_and_grad(loss_fn, loss_scale, has_aux=True)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    rest = jmp_kit.select_tree(jmp_kit.metrics(opt_state)["finite"], new, rest)
    return optax.apply_updates(params, updates), rest, opt_state, loss


rest = model.init(jax.random.key(0), x, train=False)
opt_state = optimizer.init(params := rest.pop("params"))
for key in jax.random.split(jax.random.key(1), 100):
    params, rest, opt_state, loss = train_step(params, rest, opt_state, x, y, key)
accuracy = jnp.mean(model.apply({"params": params, **rest}, x, train=False).argmax(-1) == y)
print(f"loss {loss:.4f}, accuracy {accuracy:.1%}, {jmp_kit.metrics(opt_state)}")
