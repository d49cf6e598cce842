"""Biases and ReLUs that the kernel of a convolution adds on GPUs."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_kit
from jmp_kit import autocast
from jmp_kit.casting.planning import _program
from tests.casting.planning.test_passes import is_shape
from tests.casting.states import normal
from tests.casting.stream import step_of
from tests.casting.zoo import mean_square

CHANNELS = 8
W = normal(CHANNELS, 4)
H200 = jmp_kit.numerics.TARGETS["h200"]


def sizes(channels):
    """Of filters and biases."""
    return [((3, 3, n, channels), (channels,)) for n in (3, channels, channels)]


PARAMS = [(normal(*w, scale=0.2), normal(*b)) for w, b in sizes(CHANNELS)]
X = normal(2, 20, 24, 3)


def convolved(w, x, groups=1):
    layout = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=layout, feature_group_count=groups
    )


def network(params, x, activation=jax.nn.relu):
    """Convolutions with biases, and a product."""
    *hidden, (w, b) = params
    for weights, bias in hidden:
        x = activation(convolved(weights, x) + bias)
    return (convolved(w, x) + b) @ jnp.eye(b.shape[0], 4, dtype=x.dtype)


def residual(params, x):
    """Shortcuts around convolutions, the last of which has a convolution, too."""
    (w, b), *hidden = params
    x = convolved(w, x) + b
    for weights, bias in hidden:
        x = x + (convolved(weights, jax.nn.relu(x)) + bias)
    one, other = (convolved(weights, jnp.tanh(x)) + bias for weights, bias in hidden)
    return jax.nn.relu(one + other) @ jnp.eye(b.shape[0], 4, dtype=x.dtype)


def of_images(params, x):
    """The same of each image: what a convolution gives loses its axis of images."""
    alone = jax.vmap(lambda x: residual(params, x[None])[0])
    return alone(x)


def moved(params, x):
    """Each image alone, of which a bias and a shortcut are taken."""
    (w, b), (v, c), _ = params

    def one(x):
        y = convolved(w, x[None])[0] + b
        return (y + (convolved(v, jnp.tanh(y)[None])[0] + c)) @ W

    return jax.vmap(one)(x)


def loss_fn(params, x):
    return mean_square(network(params, x))


def residual_loss(params, x):
    return mean_square(residual(params, x))


def lowered(fun, *args, half="mixed_bfloat16", platform="cuda"):
    """The program for a GPU, or another platform."""
    traced = jax.jit(autocast(fun, half)).trace(*args)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def count(text, operation, dtype, channels=CHANNELS):
    """How often an operation gives an image of such."""
    image = rf"tensor<2x(?:1x)?20x24x{channels}x{dtype}>"
    return len(re.findall(rf"stablehlo\.{operation} .*{image}$", text, re.M))


@pytest.mark.parametrize("fun", [network, jax.grad(loss_fn)], ids=["forward", "gradient"])
@pytest.mark.parametrize(("half", "dtype"), [("mixed_bfloat16", "bf16"), ("mixed_float16", "f16")])
@pytest.mark.filterwarnings("ignore:Gradients are computed in float16")
def test_biases_are_added_in_half_on_gpus_alone(fun, half, dtype):
    on_gpu, on_cpu = (lowered(fun, PARAMS, X, half=half, platform=p) for p in ("cuda", "cpu"))
    assert count(on_gpu, "add", dtype) == 3
    assert count(on_cpu, "add", dtype) == 0
    assert count(on_cpu, "add", "f32") >= count(on_gpu, "add", "f32") + 3


@pytest.mark.parametrize(("fun", "adds"), [(residual, 6), (of_images, 6), (moved, 3)])
def test_shortcuts_are_added_too(fun, adds):
    """A bias to each convolution, and then what the sum is to be added to."""
    on_gpu, on_cpu = (lowered(fun, PARAMS, X, platform=p) for p in ("cuda", "cpu"))
    assert count(on_gpu, "add", "bf16") == adds
    assert count(on_cpu, "add", "bf16") == 0


@pytest.mark.usefixtures("as_on_gpus")
@pytest.mark.parametrize("fun", [network, residual, of_images, moved])
def test_what_is_added_in_half_is_as_near(fun):
    """Here it is rounded after each sum; the kernel rounds once."""
    wanted, found = fun(PARAMS, X), autocast(fun, "mixed_bfloat16")(PARAMS, X)
    assert jnp.linalg.norm(found - wanted) <= 0.02 * jnp.linalg.norm(wanted)


OTHERS = {
    "spread": lambda z, b: (
        (z + b) + lax.broadcast_in_dim(z.mean((1, 2)) @ jnp.eye(8), z.shape, (0, 3))
    ),
    "computed here": lambda z, b: (z + b) + jnp.tanh(b) * jnp.ones_like(z),
    "taken twice": lambda z, b: jax.nn.relu(z + b) + z.mean(),
    "another activation": lambda z, b: jax.nn.gelu(z + b),
    "a function of several": lambda z, b: jax.jit(lambda y: y * jnp.tanh(y))(z + b),
    "no bias": lambda z, b: jax.nn.relu(z + b * jnp.ones((20, 24, 1))),
    "a number": lambda z, b: jax.nn.relu(z + 1.0),
    "itself": lambda z, b: jax.nn.relu(z + z),
    "nothing": lambda z, b: jax.nn.relu(z),
}


@pytest.mark.parametrize("other", OTHERS)
def test_whatever_else_is_added_is_added_in_float32(other):
    text = lowered(lambda w, b, x: OTHERS[other](convolved(w, x), b) @ W, *PARAMS[0], X)
    assert count(text, "add", "bf16") == 0


def test_kernels_of_many_groups_add_nothing():
    w = normal(3, 3, 1, 6)
    text = lowered(lambda w, b, x: (convolved(w, x, groups=3) + b) @ W[:6], w, normal(6), X)
    assert count(text, "add", "bf16", channels=6) == 0


WAYS = {
    "forward": autocast(network, "mixed_bfloat16"),
    "of the function": jax.grad(autocast(loss_fn, "mixed_bfloat16")),
    "around the gradient": autocast(jax.grad(loss_fn), "mixed_bfloat16"),
    "with shortcuts": autocast(residual, "mixed_bfloat16"),
    "of shortcuts": jax.grad(autocast(residual_loss, "mixed_bfloat16")),
    "around that of shortcuts": autocast(jax.grad(residual_loss), "mixed_bfloat16"),
}


@pytest.mark.parametrize("way", WAYS)
def test_elsewhere_nothing_changes(way, monkeypatch):
    found = jax.jit(WAYS[way])(PARAMS, X)
    monkeypatch.setattr(_program, "convolved", lambda *_: {})
    jax.tree.map(np.testing.assert_array_equal, found, jax.jit(lambda *a: WAYS[way](*a))(PARAMS, X))


def test_derivatives_are_those_of_what_was_written():
    """Where an operand is 0, too: JAX's ReLU has no slope there."""
    fun = autocast(lambda b: jax.nn.relu(convolved(PARAMS[0][0], X * 0) + b) @ W, "mixed_bfloat16")
    bias, change = jnp.zeros(CHANNELS), normal(CHANNELS)
    _, tangent = jax.jvp(fun, [bias], [change])
    np.testing.assert_array_equal(tangent, 0)
    np.testing.assert_array_equal(jax.jacrev(fun)(bias), 0)


def by_hand(fun):
    def in_half(params, x):
        half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, x))
        return fun(*half).astype(jnp.float32)

    return in_half


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_an_h200_does_it_in_the_kernel_of_the_convolution():
    args = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        (sizes(64), (16, 64, 64, 3)),
        is_leaf=is_shape,
    )

    def moved(fun):
        return jmp_kit.numerics.traffic(fun, *args, target="h200").nbytes

    assert moved(autocast(network, "mixed_bfloat16")) <= moved(by_hand(network))
    steps = [autocast(step_of(loss_fn), "mixed_bfloat16"), step_of(by_hand(loss_fn))]
    ours, hand = map(moved, steps)
    assert ours < 0.9 * hand
