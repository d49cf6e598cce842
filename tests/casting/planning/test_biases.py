"""Gradients of what is added to products come from the half cotangent, and are right."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from jmp_kit import autocast
from jmp_kit.casting.planning._biases import with_nothing_of
from jmp_kit.programs._jaxpr import primitive_names
from tests.casting.rewritten import farthest
from tests.casting.zoo import SQUARE, X, mean_square

HALF = "mixed_bfloat16"
BIAS = jnp.linspace(-1, 1, 16)


def added(p, x):
    return jnp.tanh(x @ p["w"][0] + p["b"]) @ p["w"][1] + 2 * p["b"]


def shared(p, x):
    return (x @ p["w"][0] + p["b"]) @ p["w"][1] + p["b"]


def result_taken_twice(p, x):
    y = x @ p["w"][0]
    return jnp.tanh(y + p["b"]) @ p["w"][1] + y


def bias_taken_twice(p, x):
    b = jnp.sin(p["b"])[None]
    return jnp.tanh(x @ p["w"][0] + b) * b @ p["w"][1]


def doubled(p, x):
    y = x @ p["w"][0]
    return jnp.tanh((y + y) @ p["w"][1]) + p["b"]


def larger_than_the_result(p, x):
    return jnp.tanh(lax.add(x @ p["w"][0][:, :1], p["b"][None] * jnp.ones((8, 1)))) @ p["w"][1]


def whole_matrix(p, x):
    return jnp.tanh(x @ p["w"][0] + x * p["b"]) @ p["w"][1]


def masked(p, x):
    scores = x @ p["w"][0] + jnp.where(BIAS > 0, 0.0, -jnp.inf) + p["b"]
    return jax.nn.softmax(scores) @ p["w"][1]


def in_a_loop(p, x):
    def step(h, w):
        return jnp.tanh(h @ w + p["b"]), None

    return jax.lax.scan(step, x, jnp.stack(p["w"]))[0]


MODELS = [
    *(added, shared, result_taken_twice, bias_taken_twice, doubled, whole_matrix, masked),
    *(larger_than_the_result, in_a_loop),
]


@pytest.mark.parametrize("model", MODELS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("recompute", [True, False])
def test_forward_and_backward_the_derivatives_are_those_of_float32(model, recompute):
    params = {"w": SQUARE, "b": BIAS}

    def loss(params):
        return mean_square(model(params, X))

    half = autocast(loss, "mixed_float16", recompute=recompute)
    want, got = jax.grad(loss)(params), jax.grad(half)(params)
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(want))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-3 * scale), got, want)
    tangents = jax.tree.map(jnp.cos, params)
    slope = sum(
        jnp.vdot(a, b)
        for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(tangents), strict=True)
    )
    np.testing.assert_allclose(
        jax.jvp(half, (params,), (tangents,))[1], slope, atol=2e-2 * scale * 16
    )


def along(loss, params):
    """The gradient's derivative along the parameters, reverse over reverse."""
    gradient = jax.grad(loss)
    return jax.grad(lambda p: optax.tree.vdot(gradient(p), params))(params)


def along_forward(loss, params):
    """The same, forward over reverse."""
    return jax.jvp(jax.grad(loss), (params,), (params,))[1]


def after_a_step(loss, params):
    """As meta-learning has it."""
    step = lambda p: jax.tree.map(lambda a, g: a - 0.1 * g, p, jax.grad(loss)(p))  # noqa: E731
    return jax.grad(lambda p: loss(step(p)))(params)


@pytest.mark.parametrize("model", [added, shared, bias_taken_twice, in_a_loop])
@pytest.mark.parametrize("second", [along, along_forward, after_a_step])
def test_so_are_derivatives_of_derivatives(second, model):
    params = {"w": SQUARE, "b": BIAS}

    def loss(params):
        return mean_square(jnp.sin(model(params, X)))

    wanted = second(loss, params)
    for recompute in (True, False):
        found = second(autocast(loss, HALF, recompute=recompute), params)
        assert farthest(found, wanted) < 0.03


def test_what_carries_nothing_of_a_bias_carries_its_derivatives():
    result, bias = jnp.ones(4, jnp.bfloat16), jnp.array([-jnp.inf, -1e30, 0, 2.5])
    found, change = jax.jvp(lambda b: with_nothing_of(result, b), (bias,), (jnp.ones(4),))
    np.testing.assert_array_equal(found, result)
    np.testing.assert_array_equal(change.astype(float), [0, 1, 1, 1])


def test_the_gradient_of_a_penalty_on_slopes():
    """A critic's, by what it takes: the bias is in the derivative of the function behind it."""

    def loss(critic, params):
        slopes = jax.grad(lambda x: critic(params, x).sum())(X)
        return jnp.mean((jnp.linalg.norm(slopes, axis=1) - 1) ** 2)

    params = {"w": SQUARE, "b": BIAS}
    half, full = (
        jax.grad(lambda p, f=f: loss(f, p))(params) for f in (autocast(added, HALF), added)
    )
    assert farthest(half, full) < 0.03


def test_the_bias_sums_what_the_product_takes():
    """The sum itself is float32's."""

    def loss(w, b):
        return mean_square(jnp.tanh(X @ w[0] + b) @ w[1])

    half = jax.grad(autocast(loss, "mixed_bfloat16"), argnums=1)
    eqns = jax.make_jaxpr(half)(SQUARE, BIAS).jaxpr.eqns
    made = {id(v): e for e in eqns for v in e.outvars}
    summed = [e.invars[0] for e in eqns if e.primitive.name == "reduce_sum"]
    summed = [v for v in summed if v.aval.shape == X.shape][-1]
    widened = made[id(summed)]
    assert (widened.primitive.name, summed.aval.dtype) == ("convert_element_type", jnp.float32)
    barrier = made[id(widened.invars[0])]
    assert barrier.primitive.name == "optimization_barrier"
    assert barrier.outvars[0].aval.dtype == jnp.bfloat16


def test_a_residual_stream_is_read_as_it_is_stored():
    """What follows a stored value takes it from memory: what it was made of is not kept."""

    def block(x, w):
        x = x + jnp.tanh(x @ w[0]) @ w[1]
        y = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
        return x + jnp.tanh(y @ w[0]) @ w[1]

    def loss(w, x):
        x = x @ w[1]  # begun with an argument, the stream would be state
        for _ in range(2):
            x = block(x, w)
        return mean_square(x @ w[0])

    jaxpr = jax.make_jaxpr(autocast(loss, "mixed_bfloat16"))(SQUARE, X).jaxpr
    made = {v: e for e in jaxpr.eqns for v in e.outvars}
    norms = [e for e in jaxpr.eqns if "rsqrt" in str(e.params.get("jaxpr", ""))]
    assert len(norms) == 2
    for eqn in norms:
        [stream] = [v for v in eqn.invars if v.aval.shape == X.shape]
        assert stream.aval.dtype == jnp.bfloat16
        # The cast to half is behind a choice that XLA cannot make: it would keep float32, too.
        chosen = made[stream]
        assert chosen.primitive.name == "select_n"
        assert made[chosen.invars[0]].primitive.name == "optimization_barrier"


def relu(x):
    return jnp.maximum(x, 0)


@pytest.mark.parametrize(
    ("function", "costly"),
    [
        *((jnp.tanh, True), (jax.nn.gelu, True), (jax.nn.silu, True), (jax.nn.softmax, True)),
        *((relu, False), (jnp.square, False), (jnp.transpose, False)),
        (lambda x: x - jnp.exp(x.mean(-1, keepdims=True)), False),
    ],
)
def test_a_bias_is_summed_apart_only_where_xla_would_not_sum_it_beside(function, costly):
    def loss(params):
        hidden = function(X @ params["w"][0][:, :8] + params["b"][:8])
        return mean_square(hidden @ jnp.ones((8, 4)))

    jaxpr = jax.make_jaxpr(autocast(loss, "mixed_bfloat16"))({"w": SQUARE, "b": BIAS})
    assert ("custom_jvp_call" in primitive_names(jaxpr.jaxpr)) == (
        costly or "custom_jvp_call" in primitive_names(jax.make_jaxpr(function)(X[:, :8]).jaxpr)
    )
