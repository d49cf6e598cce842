"""Every program of the zoo, in both half formats."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

from jmp_kit import PRODUCTS, autocast
from jmp_kit.programs import pruned
from tests.casting.zoo import PLAIN, ZOO
from tests.compiling import POLICIES, quick_or_slow

pytestmark = pytest.mark.usefixtures("standard_promotion")  # for Flax's sake

HALVES = {"mixed_bfloat16": jnp.bfloat16, "mixed_float16": jnp.float16}

policies = pytest.mark.parametrize("policy", POLICIES)
programs = pytest.mark.parametrize("name", ZOO)
# Of those, some of each kind.
some = pytest.mark.parametrize(
    "name", quick_or_slow(ZOO, ("mlp", "scanned", "sharded", "custom_backward", "gru", "nnx"))
)


def products_of(fun, *args):
    """The dtypes of all operands and results of every product that is run, however deep."""
    found = []

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in PRODUCTS:
                atoms = (*eqn.invars, *eqn.outvars)
                found.append({a.aval.dtype for a in atoms if a.aval.dtype != jnp.int32})
            for value in eqn.params.values():
                for item in value if isinstance(value, tuple | list) else (value,):
                    if isinstance(item, ClosedJaxpr | Jaxpr):
                        visit(item.jaxpr if isinstance(item, ClosedJaxpr) else item)

    visit(pruned(jax.make_jaxpr(fun)(*args).jaxpr))
    return found


def distance(a, b):
    """The relative distance of two trees; in NumPy, which compiles nothing."""
    a, b = (np.concatenate([np.ravel(x).astype(float) for x in jax.tree.leaves(t)]) for t in (a, b))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


@programs
@policies
def test_products_are_half_and_as_many(name, policy):
    fun, params, x = ZOO[name]
    half = autocast(fun, policy, reduce_dtype=HALVES[policy])
    for take in (lambda f: f, jax.grad) if name != "looping" else (lambda f: f,):
        products = products_of(take(half), params, x)
        assert products
        assert all(dtypes == {jnp.dtype(HALVES[policy])} for dtypes in products)
        assert len(products) == len(products_of(take(fun), params, x))


@some
@policies
def test_the_loss_and_the_gradient_are_those_of_float32(name, policy):
    fun, params, x = ZOO[name]
    half = autocast(fun, policy)
    eps = float(jnp.finfo(HALVES[policy]).eps)
    loss, grads = jax.jit(jax.value_and_grad(fun))(params, x)
    half_loss, half_grads = jax.jit(jax.value_and_grad(half))(params, x)
    np.testing.assert_allclose(half_loss, loss, rtol=8 * eps)
    assert distance(half_grads, grads) < 16 * eps
    dtypes = functools.partial(jax.tree.map, lambda x: (x.shape, x.dtype))
    assert dtypes(half_grads) == dtypes(grads)
    assert half_loss.dtype == jnp.float32


@pytest.mark.parametrize("name", quick_or_slow(PLAIN, ("mlp", "scanned", "attention")))
def test_it_need_not_be_compiled(name):
    fun, params, x = PLAIN[name]
    half = autocast(fun, "mixed_bfloat16")
    np.testing.assert_allclose(half(params, x), jax.jit(half)(params, x), rtol=0.06)


@some
def test_without_recomputation_the_numbers_are_the_same(name):
    fun, params, x = ZOO[name]
    recomputed, kept = (
        jax.jit(jax.grad(autocast(fun, "mixed_bfloat16", recompute=recompute)))(params, x)
        for recompute in (True, False)
    )
    assert distance(recomputed, kept) < 0.02


@some
def test_a_whole_train_step_may_be_wrapped(name):
    fun, params, x = ZOO[name]

    def step(params, x):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(fun)(params, x))

    half = autocast(step, "mixed_bfloat16", reduce_dtype="bfloat16")
    products = products_of(half, params, x)
    assert all(dtypes == {jnp.dtype(jnp.bfloat16)} for dtypes in products)
    assert len(products) == len(products_of(step, params, x))
    updated = jax.jit(autocast(step, "mixed_bfloat16"))(params, x)
    assert distance(updated, jax.jit(step)(params, x)) < 0.01


# JAX itself has no vmap of a ragged product over its groups, in float32 either.
@pytest.mark.parametrize("name", [name for name in PLAIN if name != "experts"])
def test_vmap_on_either_side(name):
    fun, params, x = PLAIN[name]
    many = jnp.stack([x, 2 * x])
    outside = jax.jit(jax.vmap(autocast(fun, "mixed_bfloat16"), in_axes=(None, 0)))
    inside = jax.jit(autocast(jax.vmap(fun, in_axes=(None, 0)), "mixed_bfloat16"))
    want = jnp.stack([jax.jit(fun)(params, x), jax.jit(fun)(params, 2 * x)])
    np.testing.assert_allclose(outside(params, many), want, rtol=0.06)
    np.testing.assert_allclose(inside(params, many), want, rtol=0.06)


@pytest.mark.parametrize(
    "name",
    quick_or_slow(
        ("mlp", "scanned", "attention", "branching", "custom_forward"), ("mlp", "custom_forward")
    ),
)
def test_forward_mode_and_a_hessian(name):
    fun, params, x = PLAIN[name]
    half = autocast(fun, "mixed_float16")
    slopes, hessians = [], []
    for f in (fun, half):
        slopes.append(jax.jit(lambda *a, f=f: jax.jvp(f, a, a)[1])(params, x))
        hessians.append(jax.jit(jax.hessian(lambda s, f=f: f(params, s * x)))(1.0))
    np.testing.assert_allclose(*slopes, rtol=0.02)
    np.testing.assert_allclose(*hessians, rtol=0.1)


@some
def test_twice_is_once(name):
    fun, params, x = ZOO[name]
    once = autocast(fun, "mixed_bfloat16")
    assert products_of(autocast(once, "mixed_bfloat16"), params, x) == products_of(once, params, x)
    twice = jax.jit(autocast(once, "mixed_bfloat16"))(params, x)
    np.testing.assert_allclose(twice, jax.jit(once)(params, x), rtol=1e-2)


@programs
def test_a_float32_policy_is_the_identity(name):
    fun, params, x = ZOO[name]
    same = jax.make_jaxpr(autocast(fun, "float32"))(params, x)
    assert str(same) == str(jax.make_jaxpr(fun)(params, x))
