"""Segments in passes: what they compute, and what XLA makes of them for a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_kit
from jmp_kit import autocast
from jmp_kit.casting import plans_of
from jmp_kit.casting._plan import Part
from tests.casting.stream import step_of
from tests.casting.zoo import mean_square

WIDTH = 256
WEIGHTS = [*[jnp.eye(WIDTH)] * 3, jnp.ones((96, WIDTH))]
X = jnp.ones((64, 128, 96))


def layer_norm(x):
    mean = jnp.mean(x, -1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) - mean**2 + 1e-6)


def group_norm(x):
    y = x.reshape(*x.shape[:-1], 8, -1)
    axes = (*range(1, x.ndim - 1), x.ndim)
    mean = jnp.mean(y, axes, keepdims=True)
    y = (y - mean) * jax.lax.rsqrt(jnp.mean(y**2, axes, keepdims=True) - mean**2 + 1e-6)
    return jax.nn.silu(y.reshape(x.shape))


def through(norm):
    def loss_fn(weights, x):
        x = x @ weights[-1]
        for w in weights[:-1]:
            x = x + jax.nn.gelu(norm(x) @ w)
        return mean_square(norm(x) @ weights[0])

    return step_of(loss_fn)


def as_on_gpus(*args, default, **others):
    return others.get("cuda", default)(*args)


NORMS = {"layer norm": layer_norm, "softmax": jax.nn.softmax, "group norm": group_norm}


@pytest.mark.parametrize("device", ["this", "a GPU"])
@pytest.mark.parametrize("name", NORMS)
def test_passes_compute_what_a_segment_computes(name, device, monkeypatch):
    if device == "a GPU":
        monkeypatch.setattr(jax.lax, "platform_dependent", as_on_gpus)
    step = through(NORMS[name])
    weights = [jnp.asarray(np.random.default_rng(i).normal(size=(32, 32)) / 6) for i in range(4)]
    x = jnp.asarray(np.random.default_rng(9).normal(size=(16, 64, 32)))
    weights, x = jax.tree.map(lambda a: a.astype(jnp.float32), (weights, x))
    full, passes, kept = (
        jax.tree.leaves(jax.jit(fun)(weights, x))
        for fun in (
            step,
            autocast(step, "mixed_bfloat16"),
            autocast(step, "mixed_bfloat16", recompute=False),
        )
    )

    def error(found):
        change = [np.asarray(a) - np.asarray(w) for a, w in zip(found[:-1], weights, strict=True)]
        wanted = [np.asarray(a) - np.asarray(w) for a, w in zip(full[:-1], weights, strict=True)]
        norm = np.linalg.norm(np.ravel(wanted))
        return np.linalg.norm(np.ravel(change) - np.ravel(wanted)) / norm

    assert error(passes) <= 1.1 * error(kept) + 1e-6


H200 = jmp_kit.numerics.TARGETS["h200"]


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
@pytest.mark.parametrize("name", NORMS)
def test_kernels_write_fewer_float32_activations(name):
    def wide(recompute):
        step = autocast(through(NORMS[name]), "mixed_bfloat16", recompute=recompute)
        found = jmp_kit.numerics.traffic(step, WEIGHTS, X, target="h200")
        return sum(k.wide for k in found.kernels)

    assert wide(recompute=True) <= 0.85 * wide(recompute=False)


def pieces(norm, *shapes):
    """The passes of a train step, of the backward pass."""

    def loss_fn(params, x):
        return mean_square(norm(x @ params["in"], *params["norm"]) @ params["out"])

    width = shapes[-1][-1]
    shape = jax.ShapeDtypeStruct
    weight, vector = shape((width, width), jnp.float32), shape((width,), jnp.float32)
    params = {"in": weight, "out": weight, "norm": [vector, vector]}
    found = plans_of(jax.grad(loss_fn), "mixed_bfloat16", params, shape(shapes[0], jnp.float32))
    parts = (step for plan in found for step in plan.steps if isinstance(step, Part))
    return [piece for part in parts for piece in part.segment]


def test_sums_over_the_same_values_are_one_pass():
    """The gradients of a norm's scale and bias."""
    found = pieces(lambda x, scale, bias: layer_norm(x) * scale + bias, (64, 128, 64))
    vectors = [[v for v in piece.results if v.aval.shape == (64,)] for piece in found]
    assert max(map(len, vectors)) == 2
