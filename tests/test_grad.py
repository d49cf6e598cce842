"""value_and_grad and grad: jax's own results, with float16 gradients that survive."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_kit import (
    DynamicLossScale,
    NoOpLossScale,
    StaticLossScale,
    autocast,
    grad,
    value_and_grad,
)

SCALES = [NoOpLossScale(), StaticLossScale(2.0**10), DynamicLossScale(2.0**10)]
HALVES = [jnp.float16, jnp.bfloat16]

scales = pytest.mark.parametrize("loss_scale", SCALES, ids=lambda x: type(x).__name__)


def loss_fn(params, x):
    prediction = jnp.tanh(x @ params["w"]) + params["b"]
    return jnp.mean(prediction.astype(jnp.float32) ** 2)


def example(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"w": jax.random.normal(keys[0], (4, 3), dtype), "b": jnp.ones(3, dtype)}
    return params, jax.random.normal(keys[1], (8, 4), dtype)


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)
    assert jax.tree.map(lambda x: x.dtype, a) == jax.tree.map(lambda x: x.dtype, b)


@scales
def test_it_is_jax_s_in_float32(loss_scale):
    # A power of two scales exactly, so not a bit may differ.
    params, x = example()
    want = jax.value_and_grad(loss_fn)(params, x)
    equal(value_and_grad(loss_fn, loss_scale)(params, x), want)
    compiled = jax.jit(value_and_grad(loss_fn, loss_scale))(params, x=x)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), compiled, want)
    equal(grad(loss_fn, loss_scale)(params, x), want[1])


@scales
@pytest.mark.parametrize("argnums", [1, (0, 1), (1,), [0], -1])
@pytest.mark.parametrize("has_aux", [False, True])
def test_it_has_jax_s_structure(loss_scale, argnums, has_aux):
    params, x = example()

    def fun(params, x):
        loss = loss_fn(params, x)
        return (loss, {"x": x, "n": 3}) if has_aux else loss

    equal_trees = jax.tree.map(
        np.array_equal,
        *(
            f(fun, *scale, argnums=argnums, has_aux=has_aux)(params, x)
            for f, scale in ((jax.value_and_grad, ()), (value_and_grad, (loss_scale,)))
        ),
    )
    assert all(jax.tree.leaves(equal_trees))
    ours = grad(fun, loss_scale, argnums, has_aux)(params, x)
    assert jax.tree.structure(ours) == jax.tree.structure(
        jax.grad(fun, argnums, has_aux)(params, x)
    )


@scales
@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_of_half_parameters_are_float32(loss_scale, dtype):
    params, x = example(dtype)
    value, grads = value_and_grad(loss_fn, loss_scale)(params, x)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}
    assert value.dtype == jnp.float32
    want = jax.grad(loss_fn)(*jax.tree.map(lambda x: x.astype(jnp.float32), (params, x)))
    error = max(
        float(jnp.max(jnp.abs(g - w)))
        for g, w in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True)
    )
    assert error < 8 * float(jnp.finfo(dtype).eps)


def test_small_gradients_survive_in_float16():
    def loss(w):
        return 1e-8 * jnp.sum(w.astype(jnp.float32))

    w = jnp.ones(3, jnp.float16)
    assert float(jax.grad(loss)(w)[0]) == 0.0
    np.testing.assert_allclose(grad(loss, StaticLossScale(2.0**20))(w), 1e-8, rtol=1e-3)


def test_gradients_are_exact_on_a_step_where_the_scale_grows():
    params, x = example()

    @jax.jit
    def step(loss_scale, params):
        grads = grad(loss_fn, loss_scale)(params, x)
        return grads, loss_scale.adjust(jnp.asarray(True))

    want, _ = step(DynamicLossScale(1.0, period=2), params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), want, jax.grad(loss_fn)(params, x)
    )
    loss_scale = DynamicLossScale(2.0**10, period=2)
    for scale in (2.0**10, 2.0**10, 2.0**11, 2.0**11, 2.0**12):
        assert float(loss_scale.loss_scale) == scale
        grads, loss_scale = step(loss_scale, params)
        equal(grads, want)


def test_an_overflow_stays_not_finite_and_the_value_is_the_loss():
    def loss(w):
        return jnp.sum((w * jnp.float16(100)).astype(jnp.float32))

    value, grads = value_and_grad(loss, StaticLossScale(2.0**15))(jnp.ones(2, jnp.float16))
    assert float(value) == 200.0
    assert jnp.isinf(grads).all()


def test_integer_none_and_float64_leaves_are_as_in_jax():
    def loss(params, n):
        return params["w"] ** 2 * n["n"].astype(params["w"].dtype)

    params, n = {"w": jnp.float32(3), "none": None}, {"n": jnp.int32(2)}
    grads = grad(loss, SCALES[1])(params, n)
    assert grads["none"] is None
    assert float(grads["w"]) == 12.0
    with pytest.raises(TypeError, match="grad requires real- or complex-valued inputs"):
        grad(loss, SCALES[1], argnums=1)(params, n)
    _, integers = grad(loss, SCALES[1], argnums=(0, 1), allow_int=True)(params, n)
    assert integers["n"].dtype == jax.dtypes.float0
    with jax.enable_x64(True):
        g = grad(lambda w: w**2, SCALES[1])(jnp.float64(1 / 3))
        assert g.dtype == jnp.float64
        assert float(g) == 2 / 3


def test_an_empty_tree_and_a_bare_scalar():
    value, grads = value_and_grad(lambda params: jnp.float32(1), SCALES[1])({})
    assert (float(value), grads) == (1.0, {})
    assert float(grad(lambda w: w * w, SCALES[1])(3.0)) == 6.0


def test_it_composes_with_vmap_and_a_second_derivative():
    scale = SCALES[2]
    per_example = jax.vmap(grad(lambda w, x: jnp.sin(w * x), scale), in_axes=(None, 0))
    x = jnp.arange(4.0)
    np.testing.assert_allclose(per_example(1.0, x), x * jnp.cos(x), rtol=1e-6)
    second = grad(lambda w: grad(lambda w: w**4, scale)(w), scale)
    assert float(second(2.0)) == 48.0


@scales
@pytest.mark.parametrize("has_aux", [False, True])
def test_a_float16_loss_is_refused(loss_scale, has_aux):
    def loss(w):
        value = jnp.sum(w)
        return (value, None) if has_aux else value

    with pytest.raises(TypeError, match=r"loss is float16, which ends at 65504.*astype"):
        value_and_grad(loss, loss_scale, has_aux=has_aux)(jnp.ones(2, jnp.float16))


def test_what_cannot_be_differentiated_or_scaled_is_refused():
    with pytest.raises(TypeError, match=r"3 is not callable. Write value_and_grad\(loss_fn"):
        value_and_grad(3, NoOpLossScale())
    with pytest.raises(TypeError, match=r"loss scale is 1024.0, which cannot scale.*StaticLoss"):
        grad(loss_fn, 1024.0)
    with pytest.raises(TypeError, match=r"announces a pair \(loss, aux\), but the function"):
        value_and_grad(loss_fn, NoOpLossScale(), has_aux=True)(*example())
    with pytest.raises(TypeError, match="scalar-output functions"):
        value_and_grad(lambda w: w, NoOpLossScale())(jnp.ones(2))


def test_the_wrapped_function_keeps_its_name():
    assert value_and_grad(loss_fn, NoOpLossScale()).__name__ == "loss_fn"


class Module(eqx.Module):
    """With leaves of every kind."""

    w: jax.Array
    half: jax.Array
    table: jax.Array
    act: object
    rate: float = 0.5
    flag: bool = True

    def __call__(self, x):
        return self.act(x @ self.w) * self.half.astype(jnp.float32) * self.rate + self.table.sum()


class OnlyArrays(eqx.Module):
    w: jax.Array
    factor: float = 2.0


@pytest.mark.parametrize("policy", [None, "mixed_float16"])
@pytest.mark.parametrize("has_aux", [False, True])
def test_modules_are_taken_as_they_are(policy, has_aux, standard_promotion):
    w = jax.random.normal(jax.random.key(0), (3, 3))
    module = Module(w, jnp.bfloat16(2), jnp.arange(3), jnp.tanh)
    x = jnp.ones((2, 3))

    def loss_fn(module, x, shift=0.0):
        loss = jnp.mean(module(x) ** 2) + shift
        return (loss, {"name": "aux", "x": x}) if has_aux else loss

    half = loss_fn if policy is None else autocast(loss_fn, policy)
    for scale in (NoOpLossScale(), StaticLossScale(2.0**8)):
        value, grads = value_and_grad(half, scale, has_aux=has_aux)(module, x, shift=1.0)
        expected, slopes = eqx.filter_value_and_grad(loss_fn, has_aux=has_aux)(module, x, shift=1.0)
        assert jax.tree.structure((value, grads)) == jax.tree.structure((expected, slopes))
        assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
        assert (grads.table, grads.act, grads.rate, grads.flag) == (None,) * 4
        np.testing.assert_allclose(grads.w, slopes.w, rtol=0.02, atol=0.01)
        alone = grad(half, scale, has_aux=has_aux)(module, x, shift=1.0)
        assert jax.tree.structure(alone[0] if has_aux else alone) == jax.tree.structure(grads)


def test_several_modules_and_arrays_at_once(standard_promotion):
    def loss_fn(x, first, second):
        return jnp.sum(x * first.w * first.factor * second["w"] * len(second["name"]))

    first, second = OnlyArrays(jnp.full(3, 2.0)), {"w": jnp.full(3, 3.0), "name": "ab"}
    x = jnp.ones(3)
    value, grads = value_and_grad(loss_fn, NoOpLossScale(), (0, -1, 1))(x, first, second)
    assert value == 72
    np.testing.assert_array_equal(grads[0], 24 * jnp.ones(3))
    np.testing.assert_array_equal(grads[1]["w"], 8 * jnp.ones(3))
    assert (grads[1]["name"], grads[2].factor) == (None, None)
    np.testing.assert_array_equal(grads[2].w, 12 * jnp.ones(3))
    # What JAX differentiates by, it goes on to, and what it refuses in a tree of arrays, too.
    assert value_and_grad(lambda w: w**2, NoOpLossScale())(3.0)[1] == 6
    with pytest.raises(TypeError, match="int"):
        value_and_grad(lambda w: w["a"] ** 2.0, NoOpLossScale())({"a": jnp.int32(3)})
