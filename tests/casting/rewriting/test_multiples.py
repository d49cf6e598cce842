"""Sums of what products take a multiple of: taken of what is stored, and the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_kit
from jmp_kit import autocast
from jmp_kit.casting.rewriting import _rewritten
from jmp_kit.casting.rewriting._multiples import summed_as_stored
from jmp_kit.programs import every_equation
from jmp_kit.programs._flow import PRODUCTS, Flow
from jmp_kit.programs._jaxpr import is_var
from tests.casting.rewritten import farthest, gradient_error, rewritten
from tests.casting.stream import step_of

H200 = jmp_kit.numerics.TARGETS["h200"]
HEADS = 2

of_multiples = functools.partial(
    rewritten, rewriting=lambda jaxpr: summed_as_stored(jaxpr, Flow(PRODUCTS), lambda _: True)
)


def attention(q, k, v, bias, x, scale=lambda logits: logits * 4**-0.5):
    """With a learned bias, which is added to what is scaled: of windows of images, of proteins."""
    q, k, v = ((x @ w).reshape(*x.shape[:2], HEADS, -1) for w in (q, k, v))
    logits = scale(jnp.einsum("bqhd,bkhd->bhqk", q, k)) + bias
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), v).reshape(x.shape)


def gradient(scale):
    def loss_fn(*args):
        return jnp.mean((attention(*args, scale=scale) - 1) ** 2)

    return jax.grad(loss_fn, range(4))


def loss_fn(params, x):
    return jnp.mean((attention(*params, x) - 1) ** 2)


def drawn(batch=4, time=8, width=32):
    shapes = 3 * [(width, width)] + [(HEADS, time, time), (batch, time, width)]
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=s) / 4, jnp.float32) for s in shapes]


def sums_of_multiples(fun, *args):
    eqns = [eqn for eqn, _ in every_equation(jax.make_jaxpr(fun)(*args).jaxpr)]
    multiples = [e for e in eqns if e.primitive.name in ("mul", "div")]
    constants = {e.outvars[0] for e in multiples if not all(map(is_var, e.invars))}
    sums = [e for e in eqns if e.primitive.name == "reduce_sum"]
    return sum(e.invars[0] in constants for e in sums if is_var(e.invars[0]))


SCALES = {
    "multiplied": (lambda x: x * 0.25, 1),
    "a multiple": (lambda x: 0.25 * x, 1),
    "divided": (lambda x: x / 8, 1),
    "a divisor": (lambda x: 8 / (x + 40), 0),
    "by one": (lambda x: x * -1.0, 1),
    "by too little": (lambda x: x * 1e-6, 0),
    "by what is learned": (lambda x: x * jnp.sum(x) / x.size, 0),
    "of each": (lambda x: x * jnp.arange(1.0, 9.0), 0),
    "not at all": (lambda x: x, 0),
}


@pytest.mark.parametrize(("scale", "count"), SCALES.values(), ids=SCALES)
def test_the_gradient_of_a_bias_is_summed_of_what_products_take(scale, count):
    args = drawn()
    before, after = gradient(scale), of_multiples(gradient(scale))
    assert sums_of_multiples(after, *args) == sums_of_multiples(before, *args) + count
    assert farthest(after(*args), before(*args)) < 1e-5


def after_others(x, w):
    y = jnp.sin(x) * 3
    return jnp.sum(y, 0), (y * 0.5) @ w, y - 1


def of_an_argument(x, w):
    return jnp.sum(x, 0), (x * 0.5) @ w


@pytest.mark.parametrize("fun", [after_others, of_an_argument])
def test_what_is_there_or_others_take_is_summed_itself(fun):
    args = drawn()[-1], drawn()[0]
    assert sums_of_multiples(of_multiples(fun), *args) == sums_of_multiples(fun, *args)
    assert farthest(of_multiples(fun)(*args), fun(*args)) == 0


def test_the_sum_may_come_before_the_multiple():
    def fun(x, w):
        y = jnp.sin(x)
        total = jnp.sum(y, 0)
        return total, (y * 0.5) @ (w + jnp.max(total))

    args = drawn()[-1], drawn()[0]
    assert sums_of_multiples(of_multiples(fun), *args) == 1
    assert farthest(of_multiples(fun)(*args), fun(*args)) < 1e-6


def test_a_forward_pass_sums_up_itself():
    def fun(x, w):
        y = jnp.sin(x)
        return jnp.sum(y, 0), (y * 0.5) @ w

    args = drawn()[-1], drawn()[0]
    after = rewritten(fun, lambda j: summed_as_stored(j, Flow(PRODUCTS), _rewritten._is_late))
    assert sums_of_multiples(after, *args) == 0 < sums_of_multiples(of_multiples(fun), *args)


def test_gradients_are_as_close():
    *params, x = drawn(batch=64)
    assert gradient_error(loss_fn, params, x) < 1e-2


@pytest.mark.skipif(H200.missing is not None, reason=f"compiles for an H200: {H200.missing}")
def test_a_bias_is_learned_from_what_is_stored_on_an_h200(monkeypatch):
    *params, x = jax.eval_shape(lambda: drawn(4096, 64))

    def bytes_moved():
        step = autocast(step_of(loss_fn), "mixed_bfloat16")
        return jmp_kit.numerics.traffic(step, params, x, target="h200").nbytes

    after = bytes_moved()
    monkeypatch.setattr(_rewritten, "summed_as_stored", lambda jaxpr, *_: jaxpr)
    assert after < 0.93 * bytes_moved()
