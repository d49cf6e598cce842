"""Digits in float16 with Flax nnx. A skipped step leaves the batch statistics as they were."""

import jax.numpy as jnp
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jmp_kit

digits = load_digits()
x, y = jnp.asarray(digits.data / 16, jnp.float32), jnp.asarray(digits.target)


class Network(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(64, 128, rngs=rngs), nnx.Linear(128, 10, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(128, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def loss_fn(model, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


model = jmp_kit.nnx.apply_policy(Network(nnx.Rngs(0)), "mixed_float16")
transform = jmp_kit.mixed_precision(optax.adam(1e-2), jmp_kit.DynamicLossScale())
optimizer = nnx.Optimizer(model, transform, wrt=nnx.Param)


@nnx.jit
def train_step(model, optimizer, x, y):
    loss_scale = jmp_kit.loss_scale_of(optimizer.opt_state)
    loss, grads = jmp_kit.nnx.value_and_grad(loss_fn, loss_scale)(model, x, y)
    optimizer.update(model, grads)
    return loss


for _ in range(100):
    loss = train_step(model, optimizer, x, y)
model.eval()
accuracy = jnp.mean(model(x).argmax(-1) == y)
print(f"loss {loss:.4f}, accuracy {accuracy:.1%}, {jmp_kit.metrics(optimizer.opt_state)}")
