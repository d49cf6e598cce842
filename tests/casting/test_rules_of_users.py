"""Custom derivatives that are called only while JAX differentiates: closures, symbolic zeros."""

import functools

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jmp_kit import autocast
from tests.casting.test_zoo import distance, products_of
from tests.compiling import quick_or_slow

pytestmark = pytest.mark.usefixtures("standard_promotion")  # for diffrax's sake

W = jax.random.normal(jax.random.key(0), (4, 4)) / 2
X = jax.random.normal(jax.random.key(1), (3, 4))


def in_one_line(fun):
    return autocast(jax.grad(fun), "mixed_bfloat16")


def closed_over_in_backward(w, x):
    @jax.custom_vjp
    def f(w):
        return jnp.sum(jnp.tanh(x @ w))

    f.defvjp(
        lambda w: (f(w), w),
        lambda w, g: (g * (x.T @ (1 - jnp.tanh(x @ w) ** 2)),),
    )
    return f(w)


def closed_over_in_forward(w, x):
    @jax.custom_vjp
    def f(w):
        return jnp.sum(jnp.tanh(x @ w))

    f.defvjp(
        lambda w: (f(w), x.T @ (1 - jnp.tanh(x @ w) ** 2)),
        lambda slope, g: (g * slope,),
    )
    return f(w @ w)


def closed_over_in_a_tangent(w, x):
    @jax.custom_jvp
    def f(w):
        return jnp.sum(jnp.tanh(x @ w))

    @f.defjvp
    def rule(primals, tangents):
        return f(*primals), jnp.sum((1 - jnp.tanh(x @ primals[0]) ** 2) * (x @ tangents[0]))

    return f(w)


def asks_what_is_perturbed(w, x):
    """A weight's gradient is computed only where it is asked for."""

    @jax.custom_vjp
    def f(x, w):
        return jnp.tanh(x @ w), jnp.arange(3)

    def forward(x, w):
        assert w.perturbed
        assert not x.perturbed
        return f(x.value, w.value), (x.value, w.value)

    def backward(residuals, cotangents):
        x, w = residuals
        y_bar = cotangents[0]
        return None, x.T @ (y_bar * (1 - jnp.tanh(x @ w) ** 2))

    f.defvjp(forward, backward, symbolic_zeros=True)
    return jnp.sum(f(x, w)[0] ** 2)


def inside_a_jit(w, x):
    return jax.jit(lambda w: asks_what_is_perturbed(w, x))(jnp.sin(w) @ w)


def equinox_rule(w, x):
    @eqx.filter_custom_vjp
    def f(w, x):
        return jnp.tanh(x @ w)

    f.def_fwd(lambda perturbed, w, x: (f(w, x),) * 2)
    f.def_bwd(lambda y, g, perturbed, w, x: x.T @ (g * (1 - y * y)))
    return jnp.sum(f(w, x))


def equinox_loop(w, x):
    def body(carry):
        return carry[0] + 1, jnp.tanh(carry[1] @ w)

    loop = eqx.internal.while_loop
    return jnp.sum(loop(lambda c: c[0] < 4, body, (0, x), max_steps=8, kind="checkpointed")[1])


def solved(w, x, adjoint=None):
    term = diffrax.ODETerm(lambda t, y, w: jnp.tanh(w @ y))
    options = {} if adjoint is None else {"adjoint": adjoint}
    solution = diffrax.diffeqsolve(term, diffrax.Heun(), 0.0, 1.0, 0.1, x[0], args=w, **options)
    return jnp.sum(solution.ys**2)


PROGRAMS = {
    f.__name__: f
    for f in (
        closed_over_in_backward,
        closed_over_in_forward,
        closed_over_in_a_tangent,
        asks_what_is_perturbed,
        inside_a_jit,
        equinox_rule,
        equinox_loop,
        solved,
    )
}
PROGRAMS["backsolve"] = functools.partial(solved, adjoint=diffrax.BacksolveAdjoint())
LONG = {"solved", "backsolve", "equinox_loop"}
programs = pytest.mark.parametrize("name", quick_or_slow(PROGRAMS, PROGRAMS.keys() - LONG))


@programs
def test_the_gradient_is_that_of_float32(name):
    fun = PROGRAMS[name]
    half = autocast(fun, "mixed_bfloat16")
    wanted = jax.grad(fun)(W, X)
    for gradient in (jax.grad(half), jax.jit(jax.grad(half)), autocast(jax.grad(fun), "bfloat16")):
        found = gradient(W, X)
        assert found.dtype == jnp.float32
        assert distance(found, wanted) < 0.05
    np.testing.assert_allclose(half(W, X), fun(W, X), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", ["closed_over_in_backward", "asks_what_is_perturbed"])
def test_products_of_the_rule_are_half_too(name):
    gradient = jax.grad(autocast(PROGRAMS[name], "mixed_bfloat16", reduce_dtype="bfloat16"))
    assert {frozenset(d) for d in products_of(gradient, W, X)} == {
        frozenset({jnp.dtype(jnp.bfloat16)})
    }


def test_it_composes():
    half = autocast(asks_what_is_perturbed, "mixed_bfloat16")
    many = jnp.stack([W, 2 * W])
    wanted = jax.vmap(jax.grad(asks_what_is_perturbed), (0, None))(many, X)
    assert distance(jax.vmap(jax.grad(half), (0, None))(many, X), wanted) < 0.02
    loss, pullback = jax.vjp(lambda w: half(w, X) * 3, W)
    assert distance(pullback(loss)[0], 3 * loss * wanted[0]) < 0.02


def sees_what_moves(w, x):
    """A rule that makes no slope of what does not move."""

    @functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
    def f(x, w, sign):
        return sign * jnp.tanh(x @ w)

    @functools.partial(f.defjvp, symbolic_zeros=True)
    def rule(sign, primals, tangents):
        x, w = primals
        slopes = [
            0 if type(t) is SymbolicZero else t @ w if t.shape == x.shape else x @ t
            for t in tangents
        ]
        MOVED.append([type(t) is not SymbolicZero for t in tangents])
        y = f(x, w, sign)
        return y, sign * (1 - y**2) * sum(slopes)

    return jnp.sum(f(x, w, -1.0) ** 2)


def loops_in_its_rule(w, x):
    """There is no way back through such a loop."""

    def loop(w, x):
        def step(state):
            return state[0] + 1, jnp.tanh(state[1] @ w)

        return jnp.sum(lax.while_loop(lambda state: state[0] < 4, step, (0, x))[1] ** 2)

    f = jax.custom_jvp(loop)
    f.defjvp(functools.partial(jax.jvp, loop))
    return f(w, x)


MOVED: list[list[bool]] = []
FORWARD = {
    "jvp": lambda f: lambda w, x: jax.jvp(lambda w: f(w, x), (w,), (w,))[1],
    "jacfwd": jax.jacfwd,
    "compiled": lambda f: jax.jit(jax.jacfwd(f)),
    "mapped": lambda f: lambda w, x: jax.vmap(jax.jacfwd(f), (0, None))(jnp.stack([w, -w]), x),
    "by the other": lambda f: jax.jacfwd(f, 1),
}


@pytest.mark.parametrize("way", FORWARD.values(), ids=FORWARD)
@pytest.mark.parametrize("fun", [sees_what_moves, loops_in_its_rule])
def test_a_rule_for_slopes_leaves_forward_mode(fun, way):
    half = autocast(fun, "mixed_bfloat16")
    assert distance(way(half)(W / 4, X), way(fun)(W / 4, X)) < 0.02


def solved_densely(curvature, slope):
    size = slope.size
    matrix = jax.vmap(curvature)(jnp.eye(size).reshape(size, *slope.shape)).reshape(size, size)
    return jnp.linalg.solve(matrix.T, slope.reshape(-1)).reshape(slope.shape)


def solved_by_lineax(curvature, slope):
    like = jax.ShapeDtypeStruct(slope.shape, slope.dtype)
    operator = lx.FunctionLinearOperator(curvature, like, lx.positive_semidefinite_tag)
    return lx.linear_solve(operator, slope, lx.AutoLinearSolver(well_posed=None)).value


@pytest.mark.parametrize("solve", [solved_densely, solved_by_lineax])
@pytest.mark.parametrize("way", [lambda f: jax.grad(autocast(f, "mixed_bfloat16")), in_one_line])
def test_where_an_inner_optimum_lies_has_a_gradient(solve, way):
    """The rule differentiates a gradient, and JAX transposes what it makes of tangents."""
    w = jax.random.normal(jax.random.key(2), (8, 32)) / 2
    x = jax.random.normal(jax.random.key(3), (16, 8))

    def cost(v, h):
        return jnp.mean((h @ v - x[:, :2]) ** 2) + 0.1 * jnp.sum(v**2)

    @jax.custom_jvp
    def optimum(h):
        step = jax.grad(cost)
        return lax.fori_loop(0, 50, lambda _, v: v - 0.3 * step(v, h), jnp.zeros((h.shape[-1], 2)))

    @optimum.defjvp
    def rule(primals, tangents):
        (h,), (moving,) = primals, tangents
        v = optimum(h)
        _, slope = jax.jvp(lambda h: jax.grad(cost)(v, h), (h,), (moving,))
        _, curvature = jax.linearize(lambda v: jax.grad(cost)(v, h), v)
        return v, -solve(curvature, slope)

    def loss_fn(w, x):
        return jnp.sum(optimum(jnp.tanh(x @ w)) ** 2)

    exact = jax.grad(loss_fn)(w, x)
    assert distance(way(loss_fn)(w, x), exact) < 3e-2


def test_a_rule_is_told_what_moves():
    half = autocast(sees_what_moves, "mixed_bfloat16")
    jax.jvp(lambda w: half(w, X), (W,), (W,))
    assert MOVED[-1] == [False, True]  # and before, to see whether it can be called


def test_a_rule_for_slopes_has_second_derivatives():
    half = autocast(sees_what_moves, "mixed_bfloat16")
    assert distance(jax.hessian(half)(W, X), jax.hessian(sees_what_moves)(W, X)) < 0.05
    assert distance(jax.grad(half)(W, X), jax.grad(sees_what_moves)(W, X)) < 0.02


def test_outputs_of_several_dtypes_and_arguments_that_have_no_derivative():
    @functools.partial(autocast, policy="p=f32,c=bf16,o=bf16", rules={"w": "bfloat16"})
    def fun(w, x, count, key, name):
        y = asks_what_is_perturbed(w, x)
        noise = jax.random.normal(key, ()) * 0
        return {"y": y + noise, "half": y.astype(jnp.float16), "count": count + 1, "name": name}

    def loss(w):
        found = fun(w, X, jnp.int32(3), jax.random.key(0), "layer")
        assert (found["y"].dtype, found["count"].dtype) == (jnp.bfloat16, jnp.int32)
        assert found["name"] == "layer"
        return found["y"].astype(jnp.float32)

    assert distance(jax.grad(loss)(W), jax.grad(asks_what_is_perturbed)(W, X)) < 0.02
    assert not jax.grad(lambda w: fun(w, X, 1, jax.random.key(0), "")["count"] * 1.0)(W).any()


def test_a_rule_that_fails_says_so_when_it_is_called():
    @jax.custom_vjp
    def f(w):
        return jnp.sum(w @ w)

    def fails(residuals, g):
        raise ZeroDivisionError("of the user")

    f.defvjp(lambda w: (f(w), None), fails)
    half = autocast(f, "mixed_bfloat16")
    np.testing.assert_allclose(half(W), f(W), rtol=0.02)
    with pytest.raises(ZeroDivisionError, match="of the user"):
        jax.grad(half)(W)
