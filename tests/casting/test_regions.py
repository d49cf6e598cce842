"""Kernels and functions that are called in half, and regions that stay in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas

from benchmarks.stand_in import stand_in
from jmp_kit import (
    DynamicLossScale,
    autocast,
    full_precision,
    half_precision,
    numerics,
    value_and_grad,
)

HALVES = {"mixed_bfloat16": jnp.bfloat16, "mixed_float16": jnp.float16}
W, X = (jax.random.normal(jax.random.key(i), (4, 4)) for i in range(2))


def doubled_in(*dtypes):
    """A function that refuses what is in none of these dtypes."""

    @jax.custom_vjp
    def doubled(x, *, scale=2):
        return forward(x, scale=scale)[0]

    def forward(x, *, scale=2):
        assert x.dtype in dtypes, x.dtype
        return scale * x, None

    def backward(_, change):
        assert change.dtype in dtypes, change.dtype
        return (2 * change,)

    doubled.defvjp(forward, backward)
    return doubled


@pytest.mark.parametrize("policy", HALVES)
def test_a_kernel_takes_what_the_autocast_around_it_computes_in(policy):
    kernel = half_precision(doubled_in(HALVES[policy]))

    def loss_fn(w, x):
        return jnp.sum(kernel(x @ w) ** 2)

    loss_fn = autocast(loss_fn, policy)
    expected, grads = jax.value_and_grad(lambda w, x: jnp.sum((2 * (x @ w)) ** 2))(W, X)
    scale = DynamicLossScale(2.0**4)
    for derive in (jax.value_and_grad(loss_fn), value_and_grad(loss_fn, scale)):
        for step in (derive, jax.jit(derive)):
            value, found = step(W, X)
            assert value.dtype == found.dtype == jnp.float32
            np.testing.assert_allclose(value, expected, rtol=0.02)
            np.testing.assert_allclose(found, grads, rtol=0.05, atol=0.1)
    step = jax.jit(autocast(jax.value_and_grad(lambda w: jnp.sum(kernel(X @ w) ** 2)), policy))
    if policy == "mixed_bfloat16":
        np.testing.assert_allclose(step(W)[1], grads, rtol=0.05, atol=0.1)


def test_elsewhere_it_changes_nothing():
    def fun(x, **kwargs):
        return jnp.tanh(x @ x), kwargs

    traced = str(jax.make_jaxpr(lambda x: fun(x)[0])(X))
    assert str(jax.make_jaxpr(lambda x: half_precision(fun)(x)[0])(X)) == traced
    in_float32 = autocast(lambda x: half_precision(doubled_in(jnp.float32))(x @ W), "float32")
    assert in_float32(X).dtype == jnp.float32

    @full_precision
    def region(x):
        return half_precision(doubled_in(jnp.float32))(x)

    assert autocast(lambda x: region(x @ W), "mixed_bfloat16")(X).dtype == jnp.float32


def test_what_jit_traced_for_one_policy_is_not_used_for_another():
    seen = []

    @jax.jit
    @half_precision
    def kernel(x):
        seen.append(x.dtype)
        return x

    def fun(x):
        return kernel(x @ W)

    assert fun(X).dtype == jnp.float32
    for policy in (*HALVES, *HALVES):
        assert autocast(fun, policy)(X).dtype == jnp.float32
    assert seen == [jnp.float32, *HALVES.values()]


def test_the_innermost_autocast_decides():
    inner = autocast(lambda x: half_precision(doubled_in(jnp.float16))(x @ W), "mixed_float16")
    outer = autocast(lambda x: half_precision(doubled_in(jnp.bfloat16))(inner(x) @ W), "bfloat16")
    assert outer(X).dtype == jnp.float32


def test_only_float32_arrays_are_cast_wherever_they_are():
    @half_precision
    def kernel(tree, name, *, factor):
        dtypes = {key: value.dtype for key, value in tree.items()}
        assert dtypes == {"x": jnp.bfloat16, "n": jnp.int32, "h": jnp.float16, "b": jnp.bool_}
        assert (name, factor.dtype) == ("kernel", jnp.bfloat16)
        return tree, name

    tree = {"x": X, "n": jnp.arange(3), "h": jnp.ones(2, jnp.float16), "b": jnp.array(True)}
    found, name = autocast(kernel, "bfloat16")(tree, "kernel", factor=jnp.float32(2))
    assert {key: value.dtype for key, value in found.items()} == {
        key: value.dtype for key, value in tree.items()
    }
    assert name == "kernel"


def product(w, x):
    """By a kernel of our own."""

    def kernel(w, x, out):
        assert w.dtype == x.dtype == jnp.bfloat16
        out[...] = jnp.dot(x[...], w[...])

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pallas.pallas_call(kernel, out_shape=shape, interpret=True)(w, x)


def test_a_kernel_in_pallas_is_as_it_is_and_audited():
    def fun(w, x):
        return jnp.tanh(half_precision(product)(w, x @ w)) @ w  # kernel

    half = autocast(fun, "mixed_bfloat16")  # warnings are errors here
    np.testing.assert_allclose(half(W, X), jnp.tanh(X @ W @ W) @ W, atol=0.1)
    found = numerics.audit(half, W, X)
    [kernel] = (p for p in found.products if p.is_kernel)
    assert (kernel.primitive, kernel.lhs_dtype, kernel.flops) == ("pallas_call", "bfloat16", 128)
    assert kernel.source.startswith("test_regions.py:")
    assert (found.half_fraction, found.opaque) == (1.0, ())
    assert "kernel, bfloat16→bfloat16" in str(found)
    found.assert_half()


def fused_by_hand(q, k, v, half):
    """As one had to write it."""
    return stand_in(*(x.astype(half) for x in (q, k, v))).astype(jnp.float32)


@pytest.mark.parametrize("policy", HALVES)
def test_fused_attention_is_the_program_by_hand(policy):
    shape = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.float32)
    weights = jax.ShapeDtypeStruct((64, 64), jnp.float32)

    def lowered(attend):
        def loss_fn(w, q, k, v):
            return jnp.mean(attend(q @ w, k @ w, v @ w) @ w)

        half = autocast(loss_fn, policy)
        step = jax.jit(value_and_grad(half, DynamicLossScale()))
        args = (weights, *3 * [shape])
        return step.trace(*args).lower(lowering_platforms=("cuda",)).as_text()

    by_hand = lowered(lambda *operands: fused_by_hand(*operands, HALVES[policy]))
    assert lowered(stand_in) == by_hand
    assert by_hand.count("attention_") == 2


@pytest.mark.parametrize("region", [full_precision, half_precision])
def test_a_result_is_no_function(region):
    with pytest.raises(TypeError, match=rf"{region.__name__} takes a function, .*\(fun\)\(x\)"):
        region(X)
