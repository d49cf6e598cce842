"""What is cut from what is computed, cut before, for a kernel of rows to read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_kit
from jmp_kit.casting.planning import _written
from jmp_kit.casting.planning._cut import cut_first
from jmp_kit.casting.reading._parts import living
from jmp_kit.casting.rewriting._inline import inlined
from jmp_kit.programs._axes import ELEMENTWISE
from jmp_kit.programs._jaxpr import shape_of
from tests.casting.planning.test_passes import compiled, layer_norm
from tests.casting.zoo import mean_square

H200 = jmp_kit.numerics.TARGETS["h200"]

X, BIAS, SCALE = (
    np.random.default_rng(i).normal(size=shape).astype(np.float32)
    for i, shape in enumerate([(4, 6, 8), (8,), (4, 1, 1)])
)


def halves(x, bias, scale):
    gate, value = jnp.split(jax.nn.gelu(scale * x + bias), 2, -1)
    return gate * value


def one_half(x, bias, scale):
    return jnp.split(jax.nn.gelu(scale * x + bias), 2, -1)[1]


def of_one_value(x, bias, scale):
    return jnp.where(x > 0, jnp.exp(scale) * 2, x)[:, :1]


def rows(x, bias, scale):
    y = x * scale + bias
    return jnp.sin(y)[1:3, 2:, :3] + y[:2, :4, 5:]


def whole(x, bias, scale):
    y = jnp.tanh(x)
    return y[:, :3] + y[:, 3:] + jnp.sum(y)


CUTS = [one_half, of_one_value, rows]


def equations(fun):
    jaxpr = inlined(jax.make_jaxpr(fun)(X, BIAS, SCALE).jaxpr)
    [eqns] = living([list(cut_first(jaxpr.eqns, jaxpr.outvars, lambda _: True))], jaxpr.outvars)
    return jaxpr.replace(eqns=eqns)


@pytest.mark.parametrize("fun", [*CUTS, halves, whole])
def test_a_part_is_what_it_was(fun):
    [found] = jax.core.eval_jaxpr(equations(fun), [], X, BIAS, SCALE)
    np.testing.assert_allclose(found, fun(X, BIAS, SCALE), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("fun", CUTS)
def test_of_no_more_is_anything_computed(fun):
    eqns = [e for e in equations(fun).eqns if e.primitive.name in ELEMENTWISE]
    assert X.shape not in [shape_of(e.outvars[0]) for e in eqns]


def joined(x, *_):
    return jnp.sin(jnp.concatenate([x[:1], x[1:]]) * 2)[:2]


LEFT = [
    halves,
    joined,
    lambda x, *_: jnp.sin(x)[::2],
    lambda x, *_: x[:2],
    lambda x, *_: x.sum(0)[:2],
]


@pytest.mark.parametrize("fun", LEFT)
def test_what_is_all_taken_or_cut_over_and_over_or_not_computed_is_left(fun):
    jaxpr = inlined(jax.make_jaxpr(fun)(X, BIAS, SCALE).jaxpr)
    assert list(cut_first(jaxpr.eqns, jaxpr.outvars, lambda _: True)) == jaxpr.eqns


def test_what_is_small_is_left():
    jaxpr = inlined(jax.make_jaxpr(one_half)(X, BIAS, SCALE).jaxpr)
    assert list(cut_first(jaxpr.eqns, jaxpr.outvars, lambda _: False)) == jaxpr.eqns


def test_as_many_functions_as_there_are():
    """Of each other: there is no limit to how deep."""

    def fun(x, *_):
        for _ in range(2000):
            x = jnp.sin(x)
        return x[:1]

    assert shape_of(equations(fun).eqns[-1].outvars[0]) == (1, 6, 8)


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_what_a_gate_lets_through_is_not_written_in_float32_for_an_h200(monkeypatch):
    """A norm takes half of what is computed."""

    def loss_fn(params, x):
        gate, value = jnp.split(jax.nn.gelu(x @ params["in"]), 2, -1)
        value = jnp.einsum("btd,st->bsd", layer_norm(value), params["time"])
        return mean_square((gate * value) @ params["out"])

    def moved():
        params = {"in": (256, 1024), "time": (128, 128), "out": (512, 256)}
        return compiled(loss_fn, params, (64, 128, 256))

    found = moved()
    monkeypatch.setattr(_written, "cut_first", lambda eqns, *_: eqns)
    before = moved()
    assert found.wide <= before.wide - 4 * 64 * 128 * 512
    assert found.nbytes <= 0.95 * before.nbytes
