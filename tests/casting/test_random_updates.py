"""Steps of several gradients, of each other even, of random networks."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp_kit import autocast
from tests.casting.test_random_steps import SHAPE, WEIGHTS, X, loss_of, network_of
from tests.casting.test_zoo import distance
from tests.compiling import OPTIMISED, quick_or_slow

pytestmark = pytest.mark.usefixtures("standard_promotion")

OTHERS = jax.tree.map(lambda w: 1.1 * w[::-1], WEIGHTS)


def updated(w, gradients):
    return jax.tree.map(lambda w, g: w - g / 2, w, gradients)


def adversarial(one, other, w, v, x):
    def told_apart(v):
        return loss_of(other(v, x)) + loss_of(-other(v, one(w, x)))

    v = updated(v, jax.grad(told_apart)(v))
    return updated(w, jax.grad(lambda w: loss_of(other(v, one(w, x))))(w)), v


def meta(one, other, w, v, x):
    def after_a_step(w):
        gradients = jax.grad(lambda w: loss_of(one(w, x)))(w)
        return loss_of(one(updated(w, gradients), x[::-1]))

    return updated(w, jax.grad(after_a_step)(w)), v


def followed(one, other, w, v, x):
    wanted = lax.stop_gradient(one(v, x))
    w = updated(w, jax.grad(lambda w: loss_of(one(w, x) - wanted))(w))
    return w, jax.tree.map(lambda w, v: 0.1 * w + 0.9 * v, w, v)


def sharpness_aware(one, other, w, v, x):
    slope = jax.grad(lambda w: loss_of(one(w, x)))
    above = jax.tree.map(lambda w, g: w + g / 8, w, slope(w))
    return updated(w, slope(above)), v


def accumulated(one, other, w, v, x):
    def add(total, x):
        gradients = jax.grad(lambda w: loss_of(one(w, jnp.tile(x, (2, 1, 1)))))(w)
        return jax.tree.map(jnp.add, total, gradients), None

    zeros = jax.tree.map(jnp.zeros_like, w)
    return updated(w, lax.scan(add, zeros, x.reshape(2, 2, *SHAPE[1:]))[0]), v


def by_inputs(one, other, w, v, x):
    def loss_fn(w):
        return loss_of(other(w, x - 100 * jax.grad(lambda x: loss_of(one(w, x)))(x)))

    return updated(w, jax.grad(loss_fn)(w)), v


def twice(one, other, w, v, x):
    for each in (x, x + 1):
        loss_fn = lambda w, v, x=each: loss_of(other(v, one(w, x)))  # noqa: E731
        w, v = map(updated, (w, v), jax.grad(loss_fn, (0, 1))(w, v))
    return w, v


def step_of(way, seed):
    return functools.partial(way, *(network_of(2 * seed + i, most=4) for i in range(2)))


WAYS = [adversarial, meta, followed, sharpness_aware, accumulated, by_inputs, twice]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("seed", quick_or_slow(range(24), range(2)))
def test_every_step_can_be_planned(way, seed):
    step = step_of(way, seed)
    found = jax.eval_shape(autocast(step, "mixed_bfloat16"), WEIGHTS, OTHERS, X)
    assert found == jax.eval_shape(step, WEIGHTS, OTHERS, X)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("seed", range(2))
def test_steps_are_no_farther_from_float32_than_by_hand(way, seed):
    step, args = step_of(way, seed), (WEIGHTS, OTHERS, X)

    def changes(step):
        return lambda *args: jax.tree.map(jnp.subtract, step(*args), args[:2])

    def by_hand(*args):
        return step(*jax.tree.map(lambda x: x.astype(jnp.bfloat16), args))

    ways = map(changes, (autocast(step, "mixed_bfloat16"), by_hand, step))
    *others, exact = (jax.jit(way).lower(*args).compile(OPTIMISED)(*args) for way in ways)
    found, hand = (distance(other, exact) for other in others)
    assert found <= 1.5 * hand + 0.01
