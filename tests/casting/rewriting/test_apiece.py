"""A value that is made of one stored value is made by each part that takes it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_kit
from jmp_kit import autocast
from jmp_kit.casting import plans_of
from jmp_kit.casting.planning._plan import Form
from tests.casting.rewritten import assert_devices_learn_the_same, gradient_error
from tests.casting.states import normals
from tests.casting.stream import norm, step_of
from tests.casting.zoo import mean_square

H200 = jmp_kit.numerics.TARGETS["h200"]

normal = normals(np.random.default_rng(0))
WIDTH = 16
SQUARES = ("in", "up", "down", "out")
PARAMS = {name: normal(WIDTH, WIDTH, scale=0.3) for name in SQUARES}
PARAMS |= {"bias": normal(WIDTH), "filters": normal(3, 3, WIDTH, WIDTH, scale=0.1)}
X = normal(32, WIDTH)


def integrated(params, x):
    """Two steps of an integrator of fourth order: four slopes each, and a sum of all."""
    x = x @ params["in"]

    def slope(x):
        return jnp.tanh(x @ params["up"]) @ params["down"] + params["bias"]

    for _ in range(2):
        a = slope(x)
        b = slope(x + 0.5 * a)
        c = slope(x + 0.5 * b)
        d = slope(x + c)
        x = x + (a + 2 * b + 2 * c + d) / 6
    return mean_square(x @ params["out"])


def shortcut(params, x):
    """What a convolution gives with its bias, in a norm's branch and past it."""
    x = x.reshape(2, 4, 4, WIDTH)
    dimensions = ("NHWC", "HWIO", "NHWC")
    y = jax.lax.conv_general_dilated(x, params["filters"], (1, 1), "SAME", None, None, dimensions)
    y = y + params["bias"]
    return mean_square((y + jnp.tanh(norm(y) @ params["up"]) @ params["down"]) @ params["up"])


def as_before(monkeypatch):
    rewriting = "jmp_kit.casting.rewriting._rewritten.apiece"
    monkeypatch.setattr(rewriting, lambda parts, *_: list(map(list, parts)))


def stored(loss_fn):
    """What is stored in half: the primitives that make it, and how."""
    [plan] = plans_of(jax.value_and_grad(loss_fn), "mixed_bfloat16", PARAMS, X)
    every = (s for s in plan.every_stored() if s.form)
    return [(s.eqn.primitive.name, s.form) for s in every if s.var.aval.size >= X.size]


def test_slopes_are_stored_as_products_give_them(monkeypatch):
    """With a bias they are made of them by each who takes them: the next stage and the sum.

    So sums are stored for products alone: that of each stage but the first, and of each step.
    """

    def sums():
        return sum(name == "add" for name, _ in stored(integrated))

    found = sums()
    as_before(monkeypatch)
    assert (found, sums()) == (8, 14)


def test_a_convolution_adds_its_bias_once(monkeypatch):
    """In its own kernel, which stores the sum."""
    found = stored(shortcut)
    assert ("add", Form.APART) in found
    as_before(monkeypatch)
    assert found == stored(shortcut)


def test_gradients_are_nearer_to_float32(monkeypatch):
    """Slopes are not rounded, but for what products give."""
    normal = normals(np.random.default_rng(0))
    draws = [
        ({name: normal(64, 64, scale=1 / 8) for name in SQUARES} | {"bias": normal(64)}, x)
        for x in normal(6, 128, 64)
    ]

    def error():
        return np.mean([gradient_error(integrated, *draw) for draw in draws])

    found = error()
    as_before(monkeypatch)
    assert found < error()


def test_devices_that_share_a_batch_learn_what_one_learns():
    taken = {name: PARAMS[name] for name in (*SQUARES, "bias")}
    assert_devices_learn_the_same(integrated, taken, X)


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_an_h200_moves_less(monkeypatch):
    shapes = {"in": (256, 256), "up": (256, 512), "down": (512, 256), "out": (256, 16)}
    shapes |= {"bias": (256,)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((8192, 256), jnp.float32)

    def moved():
        step = autocast(step_of(integrated), "mixed_bfloat16")
        return jmp_kit.numerics.traffic(step, params, x, target="h200").nbytes

    found = moved()
    as_before(monkeypatch)
    assert found <= 0.99 * moved()
