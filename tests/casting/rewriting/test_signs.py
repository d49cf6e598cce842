"""Where the operands of ReLUs are positive, asked of their results."""

import jax
import jax.numpy as jnp
import pytest

import jmp_kit
from jmp_kit.casting.rewriting._signs import signs_of_results
from jmp_kit.programs._jaxpr import is_var, opened
from tests.casting.rewriting.test_undone import assert_same, is_late, rewritten, weighted
from tests.casting.test_zoo import distance


def operands_late(closed):
    """What the backward pass takes of what was there before a choice of the forward pass."""
    jaxpr, _ = opened(closed)
    choice = next(e for e in jaxpr.eqns if e.primitive.name == "select_n" and not is_late(e))
    late = {a for e in jaxpr.eqns if is_late(e) for a in e.invars if is_var(a)}
    return late.intersection(filter(is_var, choice.invars))


LEAKY = {
    "a leaky ReLU": jax.nn.leaky_relu,
    "of another slope": lambda z: jax.nn.leaky_relu(z, 0.2),
    "written out": lambda z: jnp.where(z > 0, z, z * 0.5),
}


@pytest.mark.parametrize("name", LEAKY)
def test_the_derivative_of_a_leaky_relu_asks_for_the_sign_of_its_result(name):
    after, before = rewritten(weighted(LEAKY[name]), signs_of_results)
    assert not operands_late(after)
    assert operands_late(before)
    assert_same(after, before)


OTHERS = {
    "a slope that turns signs": lambda z: jax.nn.leaky_relu(z, -0.2),
    "a slope of each": lambda z: jax.nn.leaky_relu(z, jnp.linspace(0.1, 1, 64)),
    "an exponential": jax.nn.elu,
    "a limit that is not 0": lambda z: jnp.where(z > 1.0, z, z * 0.5),
    "a norm": lambda z: jax.nn.leaky_relu(z / z.std(-1, keepdims=True)),
    "one of three": lambda z: jax.lax.select_n(jnp.sign(z).astype(int) + 1, -z, z, z * 0.5),
    "another value": lambda z: jnp.where(z > 0, z, (z + 1) * 0.5),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_choices_are_left_alone(name):
    after, before = rewritten(weighted(OTHERS[name]), signs_of_results)
    assert operands_late(after)
    assert_same(after, before)


def test_a_relu_asks_for_the_sign_of_its_result_but_of_a_norm():
    after, before = rewritten(weighted(jax.nn.relu), signs_of_results)
    assert str(after) != str(before)
    assert_same(after, before)
    normed = weighted(lambda z: jax.nn.relu(z / z.std(-1, keepdims=True)))
    after, before = rewritten(normed, signs_of_results)
    assert str(after) == str(before)


KEPT = jax.random.bernoulli(jax.random.key(0), 0.9, (32, 64))


def dropped(z, kept=KEPT):
    return jnp.where(kept, z / 0.9, 0)


DROPPED = {
    "dropout": lambda z: dropped(jax.nn.relu(z)),
    "twice": lambda z: dropped(2 * dropped(jax.nn.relu(z)), KEPT[::-1]),
    "scaled": lambda z: 0.5 * dropped(jax.nn.relu(z) * 3),
}


def choices(closed):
    jaxpr, _ = opened(closed)
    return [e for e in jaxpr.eqns if e.primitive.name == "select_n" and is_late(e)]


@pytest.mark.parametrize("name", DROPPED)
def test_what_is_positive_behind_a_dropout_was_kept(name):
    """So the backward pass takes the result of both alone, and chooses once."""
    after, before = rewritten(weighted(DROPPED[name]), signs_of_results)
    assert len(choices(after)) == 1 < len(choices(before))
    assert not any(e.primitive.name == "gt" and is_late(e) for e in opened(after)[0].eqns)
    assert_same(after, before)


@jax.custom_vjp
def shared_cotangent(z):
    return dropped(jax.nn.relu(z))


def _forward(z):
    return shared_cotangent(z), z


def _backward(z, g):
    scaled = jnp.where(KEPT, g, 0) / 0.9
    return (jnp.where(z > 0, scaled, 0) + 0.1 * scaled,)


shared_cotangent.defvjp(_forward, _backward)


def own_relu(backward):
    relu = jax.custom_vjp(jax.nn.relu)
    relu.defvjp(lambda z: (jax.nn.relu(z), z), lambda z, g: (backward(z, g),))
    return relu


BACKWARD = {
    "chosen": lambda z, g: jnp.where(z > 0, g, 0),
    "multiplied": lambda z, g: g * (z > 0).astype(g.dtype),
}


@pytest.mark.parametrize("name", BACKWARD)
def test_a_backward_pass_of_ones_own_asks_the_result_in_its_place(name):
    after, before = rewritten(weighted(own_relu(BACKWARD[name])), signs_of_results)
    assert str(after) != str(before)
    assert_same(after, before)
    late = [is_late(e) for e in opened(after)[0].eqns]
    assert late == sorted(late)  # nothing of the backward pass is in the forward pass


NOT_DROPPED = {
    "a cotangent that others take": shared_cotangent,
    "smaller than its operand": lambda z: 0.5 * dropped(jax.nn.relu(z)),
    "a complex number": lambda z: jnp.real(jax.nn.relu(z).astype(jnp.complex64) * (1 + 1j)),
    "turned round": lambda z: dropped(-jax.nn.relu(z)),
    "another value": lambda z: jnp.where(KEPT, jax.nn.relu(z), 1),
    "the other way": lambda z: jnp.where(KEPT, 0, jax.nn.relu(z)),
    "scaled by each": lambda z: dropped(jax.nn.relu(z)) * jnp.linspace(-1, 1, 64),
    "taken by others": lambda z: (dropped(y := jax.nn.relu(z)), jnp.sin(y)),
    "a norm": lambda z: dropped(jax.nn.relu(z / z.std(-1, keepdims=True))),
}


@pytest.mark.parametrize("name", NOT_DROPPED)
def test_what_is_not_of_the_sign_is_left_alone(name):
    after, before = rewritten(weighted(NOT_DROPPED[name]), signs_of_results)
    assert str(after) == str(before)


def test_a_dropout_of_a_relu_keeps_its_result_alone():
    """Neither what the product gave, nor what was kept."""
    keys = jax.random.split(jax.random.key(1), 3)
    shapes = (64, 128), (128, 64), (32, 64)
    *params, x = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))

    def loss_fn(params, key, x):
        kept = jax.random.bernoulli(key, 0.9, (32, 128))
        y = dropped(jax.nn.relu(x @ params[0]), kept) @ params[1]
        return jnp.mean(jnp.tanh(y) ** 2)

    args = params, jax.random.key(0), x
    found = jmp_kit.numerics.plan(jax.grad(loss_fn), "mixed_bfloat16", *args)
    assert found.kept == 2 * (32 * 128 + 32 * 64)


def small():
    """Parameters of two products, and what they multiply."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (64, 64), (64, 16), (32, 64)
    *params, x = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    return params, x


def test_the_sign_of_a_result_that_is_too_small_for_float16():
    """A hundredth of it is -0 there."""
    params, x = small()

    def loss_fn(params, x):
        y = jax.nn.leaky_relu(1e-4 * (x @ params[0]))
        return 1e-2 * (y @ params[1]).sum()

    half = jmp_kit.autocast(loss_fn, "mixed_float16")
    found = jax.jit(jmp_kit.grad(half, jmp_kit.StaticLossScale(2.0**15)))(params, x)
    for gradient, wanted in zip(found, jax.grad(loss_fn)(params, x), strict=True):
        assert distance(gradient, wanted) < 5e-3


@pytest.mark.parametrize("scaled", [lambda z: 1e-4 * z, lambda z: z / 1e4])
def test_a_result_that_float16_makes_zero_of_is_not_asked(scaled):
    params, x = small()

    def loss_fn(params, x):
        return 1e-2 * (scaled(jax.nn.relu(1e-4 * (x @ params[0]))) @ params[1]).sum()

    half = jmp_kit.autocast(loss_fn, "mixed_float16")
    found, _ = jax.jit(jmp_kit.grad(half, jmp_kit.StaticLossScale(2.0**15)))(params, x)
    wanted, _ = jax.grad(loss_fn)(params, x)  # the other takes what is zero
    assert distance(found, wanted) < 5e-3
