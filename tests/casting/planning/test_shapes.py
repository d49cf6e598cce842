"""Passes that compute in several shapes, in one."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

import jmp_kit
from jmp_kit import autocast
from jmp_kit.casting.planning import _written
from jmp_kit.casting.planning._shapes import Shaped, in_one_shape
from jmp_kit.casting.rewriting._inline import inlined
from jmp_kit.programs._axes import ELEMENTWISE, RESHAPES
from jmp_kit.programs._jaxpr import is_var, shape_of
from tests.casting.rewritten import assert_devices_learn_the_same, gradient_error
from tests.casting.stream import step_of
from tests.casting.zoo import mean_square

GROUPS = 4
X = jax.random.normal(jax.random.key(0), (3, 5, 2, 8))
CHANNELS = jnp.arange(1.0, 9.0)


def group_norm(x, scale=CHANNELS):
    """As in books: of [n, h, w, groups, channels]."""
    y = x.reshape(*x.shape[:-1], GROUPS, -1)
    axes = 1, 2, 4
    mean = y.mean(axes, keepdims=True)
    y = (y - mean) * lax.rsqrt(jnp.mean((y - mean) ** 2, axes, keepdims=True) + 1e-6)
    return y.reshape(x.shape) * scale + scale


def transposed(x):
    return (
        jnp.sin(x.reshape(3, 5, 16)).reshape(x.shape).transpose(3, 0, 2, 1)
        + CHANNELS[:, None, None, None]
    )


def reduced(x):
    return jnp.cos(jnp.sin(x).reshape(15, 16)).reshape(3, 5, 2, 8).max((0, 3)) + 1


def summed_in_both(x):
    y = jnp.sin(x)
    z = y.reshape(3, 5, 2, 2, 4)
    return jnp.sum(z * z, (1, 2, 4)), jnp.sum(y * CHANNELS, (0, 1, 2)), (z + 1).reshape(-1)


def of_ones(x):
    y = jnp.sin(x[:, None]).reshape(3, 1, 5, 1, 16)
    z = jnp.cos(y.reshape(3, 5, 2, 8)[:, None, :, None].reshape(y.shape))
    return y + jnp.sum(y, (2, 4), keepdims=True) * z


def with_others_between(x):
    """What is neither computed value by value nor moved as a whole."""
    y = jnp.sin(x).reshape(3, 5, 4, 4)
    y = jnp.cumsum(y, 2) + y[:, ::-1]
    a, b = jnp.split(jnp.cos(y).reshape(3, 5, 2, 8) + CHANNELS, 2, -1)
    return jnp.tanh(jnp.concatenate([b, a], -1).reshape(3, -1)) + 1


def results_that_are_taken(x):
    y = jnp.sin(x)
    z = y.reshape(3, 5, 16)
    return y, z, z + 1, y + 1


COMPUTED = {
    f.__name__: f
    for f in (
        group_norm,
        transposed,
        reduced,
        summed_in_both,
        of_ones,
        with_others_between,
        results_that_are_taken,
    )
}
COMPUTED["gradient"] = jax.grad(lambda x: mean_square(jax.nn.silu(group_norm(x))))
COMPUTED["masked"] = lambda x: jnp.where((jnp.sin(x) > 0).reshape(-1, 16), x.reshape(-1, 16), 1.0)


def shaped(fun, *args):
    """A function's equations in one shape, and what these give; the equations, too."""
    closed = jax.make_jaxpr(fun)(*args)
    jaxpr = inlined(closed.jaxpr)
    found = in_one_shape(jaxpr.eqns)
    eqns = [*found.eqns, *found.after(jaxpr.outvars)]
    results = jaxpr_as_fun(ClosedJaxpr(jaxpr.replace(eqns=eqns), closed.consts))(*args)
    return found, eqns, results


@pytest.mark.parametrize("fun", COMPUTED.values(), ids=COMPUTED)
def test_the_same_is_computed_in_one_shape(fun):
    found, eqns, results = shaped(fun, X)
    assert found.names
    for a, b in zip(results, jax.tree.leaves(fun(X)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    if "others" not in fun.__name__:
        assert not reshapes_between(eqns)


def reshapes_between(eqns):
    """What is computed, split into other axes, and computed with."""
    maker = {v: e for e in eqns for v in e.outvars}
    taken = {a for e in eqns if e.primitive.name in ELEMENTWISE for a in e.invars if is_var(a)}
    reshapes = [e for e in eqns if e.primitive.name in RESHAPES and e.outvars[0] in taken]
    sizes = [
        [[n for n in shape_of(v) if n > 1] for v in (e.invars[0], *e.outvars)] for e in reshapes
    ]
    pairs = zip(reshapes, sizes, strict=True)
    return [e for e, (a, b) in pairs if a != b and e.invars[0] in maker]


def not_nested(x):
    y = jnp.sin(x.reshape(-1)[:180].reshape(4, 45))
    return jnp.cos(y.reshape(6, 30)) + jnp.ones((6, 30))


OTHERS = {
    "one shape": lambda x: jnp.sin(x) * CHANNELS,
    "what is read": lambda x: jnp.sin(x.reshape(3, -1)) + 1,
    "what is written": lambda x: jnp.sin(x).reshape(3, -1),
    "what is summed": lambda x: jnp.sum(jnp.sin(x).reshape(3, -1), 1),
    "axes of one": lambda x: jnp.cos(jnp.sin(x)[:, None]) + 1,
    "none": lambda x: jnp.cos(jnp.sin(x[:0]).reshape(0, 80)) + 1,
    "not nested": not_nested,
}


@pytest.mark.parametrize("fun", OTHERS.values(), ids=OTHERS)
def test_others_stay_as_they_are(fun):
    found, eqns, _ = shaped(fun, X)
    assert not found.names
    assert found.eqns == eqns


def test_of_any_number_they_stay_as_they_are():
    n = jax.export.symbolic_shape("n")
    x = jax.ShapeDtypeStruct((*n, 8), jnp.float32)
    jaxpr = jax.make_jaxpr(lambda x: jnp.sin(x).reshape(-1, 4, 2) + 1)(x).jaxpr
    assert not in_one_shape(jaxpr.eqns).names


def network(params, x):
    for name in ("first", "second"):
        layout = ("NHWC", "HWIO", "NHWC")
        y = jax.nn.silu(group_norm(x, params["scale"]))
        x = x + lax.conv_general_dilated(y, params[name], (1, 1), "SAME", dimension_numbers=layout)
    return mean_square(x)


def parameters(channels):
    filters = jax.random.normal(jax.random.key(1), (2, 3, 3, channels, channels)) / channels
    return {"first": filters[0], "second": filters[1], "scale": jnp.ones(channels)}


def test_gradients_are_as_good(monkeypatch):
    params, x = parameters(8), jax.random.normal(jax.random.key(2), (16, 16, 16, 8))
    found = gradient_error(network, params, x)
    monkeypatch.setattr(_written, "in_one_shape", lambda eqns: Shaped(eqns, {}))
    assert found <= 1.05 * gradient_error(network, params, x)


def test_devices_that_share_a_batch_learn_the_same():
    x = jax.random.normal(jax.random.key(2), (16, 8, 8, 8))
    assert_devices_learn_the_same(network, parameters(8), x)


H200 = jmp_kit.numerics.TARGETS["h200"]
ACTIVATION = 64**4  # values


def traffic_for_an_h200():
    """Of a step of the network, its activations of 64 images."""
    params = jax.eval_shape(lambda: parameters(64))
    x = jax.ShapeDtypeStruct((64, 64, 64, 64), jnp.float32)
    step = autocast(step_of(network), "mixed_bfloat16")
    return jmp_kit.numerics.traffic(step, params, x, target="h200")


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_nothing_is_computed_for_each_shape_for_an_h200(monkeypatch):
    found = traffic_for_an_h200()
    assert found.wide <= 0.1 * 4 * ACTIVATION
    monkeypatch.setattr(_written, "in_one_shape", lambda eqns: Shaped(eqns, {}))
    assert found.nbytes <= traffic_for_an_h200().nbytes - 2.5 * 4 * ACTIVATION
