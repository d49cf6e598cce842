"""Products as matrices lie in memory: batch dimensions first, and rows where they were."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_kit
from jmp_kit import autocast
from jmp_kit.casting.rewriting._inline import inlined
from jmp_kit.casting.rewriting._turned import fronted, turned
from jmp_kit.programs import every_equation
from jmp_kit.programs._flow import PRODUCTS, Flow
from jmp_kit.programs._jaxpr import opened
from tests.casting.stream import step_of
from tests.casting.zoo import mean_square

H200 = jmp_kit.numerics.TARGETS["h200"]
FLOW = Flow(PRODUCTS)

EINSUMS = {
    "attention": ("bqhd,bkhd->bhqk", (2, 5, 3, 4), (2, 6, 3, 4)),
    "its values": ("bhqk,bkhd->bqhd", (2, 3, 5, 6), (2, 6, 3, 4)),
    "grouped queries": ("bqhgd,bkhd->bhgqk", (2, 5, 3, 2, 4), (2, 6, 3, 4)),
    "batch last": ("ijb,jkb->ikb", (4, 5, 3), (5, 6, 3)),
    "no batch": ("ij,kj->ki", (4, 5), (6, 5)),
    "all of it batch": ("ab,ba->ab", (4, 5), (5, 4)),
    "two sums": ("bijk,bkjl->bli", (2, 3, 4, 5), (2, 5, 4, 6)),
}


@pytest.mark.parametrize("name", EINSUMS)
def test_products_give_what_they_gave(name):
    """With their derivatives, which have transposed results."""
    formula, *shapes = EINSUMS[name]
    rng = np.random.default_rng(0)
    operands = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]

    step = jax.value_and_grad(lambda xs: mean_square(jnp.einsum(formula, *xs)))
    traced = jax.make_jaxpr(step)(operands)
    program = inlined(opened(traced)[0])
    other = fronted(turned(program, FLOW), FLOW)
    wanted = jax.core.eval_jaxpr(program, traced.consts, *operands)
    found = jax.core.eval_jaxpr(other, traced.consts, *operands)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    for eqn in other.eqns:
        if eqn.primitive.name == "dot_general":
            _, batch = eqn.params["dimension_numbers"]
            assert all(tuple(axes) == tuple(range(len(axes))) for axes in batch)


def rms_norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def attention(is_transposed):
    def heads(x):
        x = x.reshape(*x.shape[:2], 8, -1)
        return x.transpose(0, 2, 1, 3) if is_transposed else x

    scores, values = (
        ("bhqd,bhkd->bhqk", "bhqk,bhkd->bhqd")
        if is_transposed
        else ("bqhd,bkhd->bhqk", "bhqk,bkhd->bqhd")
    )

    def loss_fn(params, x):
        q, k, v = (heads(x @ params[name]) for name in "qkv")
        weights = jax.nn.softmax(jnp.einsum(scores, rms_norm(q), rms_norm(k)))
        y = jnp.einsum(values, weights, v)
        y = y.transpose(0, 2, 1, 3) if is_transposed else y
        return mean_square(y.reshape(x.shape) @ params["out"])

    return autocast(step_of(loss_fn), "mixed_bfloat16")


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_rows_stay_rows_for_an_h200():
    """Attention with norms of its queries, as if it were written in the order of its products."""
    shape = jax.ShapeDtypeStruct
    params = {name: shape((1024, 1024), jnp.float32) for name in ("q", "k", "v", "out")}
    found, best = (
        jmp_kit.numerics.traffic(
            attention(is_transposed), params, shape((8, 1024, 1024), jnp.float32), target="h200"
        ).nbytes
        for is_transposed in (False, True)
    )
    assert found <= 1.05 * best


def strided(params, x):
    def convolved(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    y = convolved(jnp.tanh(convolved(x, params["in"])), params["out"])
    return mean_square(y)


def test_filters_are_reversed_in_half():
    params = {"in": jnp.ones((3, 3, 4, 8)), "out": jnp.ones((3, 3, 8, 8))}
    step = autocast(step_of(strided), "mixed_bfloat16")
    traced = jax.make_jaxpr(step)(params, jnp.ones((2, 16, 16, 4)))
    eqns = [e for e, _ in every_equation(traced.jaxpr) if e.primitive.name == "rev"]
    assert [e.invars[0].aval.dtype for e in eqns] == [jnp.bfloat16]


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_no_zeros_are_put_between_cotangents_for_an_h200():
    """There is a kernel for the gradient by what a strided convolution takes."""
    shape = jax.ShapeDtypeStruct
    params = {
        "in": shape((3, 3, 64, 128), jnp.float32),
        "out": shape((3, 3, 128, 256), jnp.float32),
    }
    step = autocast(step_of(strided), "mixed_bfloat16")
    args = H200.placed((params, shape((32, 64, 64, 64), jnp.float32)))
    compiled = jax.jit(step).lower(*args).compile(H200.compiler_options)
    assert compiled.as_text().count("__cudnn$convBackwardInput") == 1
