"""Sums over the same values, shared."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jmp_kit.casting._sums import shared
from jmp_kit.programs._jaxpr import opened, size_of

SHAPE = 4, 8, 16, 32
AXES = [(0,), (0, 1), (1, 2), (0, 1, 2), (0, 1, 2, 3)]


def rewritten(fun, *args):
    """The program with shared sums, its sums of what is large, and what it computes."""
    jaxpr, consts = opened(jax.make_jaxpr(fun)(*args))
    jaxpr = shared(jaxpr, lambda eqn: True)
    large = [
        tuple(eqn.params["axes"])
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "reduce_sum" and size_of(eqn.invars[0]) == np.prod(SHAPE)
    ]
    return large, jaxpr_as_fun(ClosedJaxpr(jaxpr, consts))(*args)


def drawn(seed, *shapes):
    generator = np.random.default_rng(seed)
    arrays = [generator.normal(size=shape) + 3.0 for shape in shapes]
    return [jnp.asarray(a, jnp.float32) for a in arrays]


def group_norm_sums(x, scale, other):
    return (
        jnp.sum(x, (0, 1, 2)),
        jnp.sum(-(x * scale), (1, 2)),
        jnp.sum(other * x, (1, 2)),
    )


def test_the_gradients_of_a_norm_read_what_they_share_once():
    args = drawn(0, SHAPE, (4, 1, 1, 32), SHAPE)
    large, found = rewritten(group_norm_sums, *args)
    assert sorted(large) == [(1, 2), (1, 2)]  # of x, and of x times the other
    for a, b in zip(found, group_norm_sums(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def modulated_sums(x, other):
    """The gradients of a bias, and of what scales each image's channels."""
    return jnp.sum(x, (0, 1, 2)), jnp.sum(x * other, (1, 2))


def test_what_is_summed_up_over_more_axes_is_summed_up_over_the_same_first():
    args = drawn(0, SHAPE, SHAPE)
    large, found = rewritten(modulated_sums, *args)
    assert large == [(1, 2), (1, 2)]
    for a, b in zip(found, modulated_sums(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    unrelated = rewritten(lambda x, y: (jnp.sum(x, (0, 1, 2)), jnp.sum(y, (1, 2))), *args)
    assert unrelated[0] == [(0, 1, 2), (1, 2)]


@st.composite
def factors(draw):
    """What a value is multiplied by, how, and whether it is written out in full."""
    kept = draw(st.sets(st.integers(0, 3)))
    shape = tuple(n if i in kept else 1 for i, n in enumerate(SHAPE))
    return draw(st.sampled_from(["mul", "rmul", "div", "neg"])), shape, draw(st.booleans())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(AXES), st.lists(factors(), max_size=3)), max_size=4))
def test_any_sums_are_what_they_were(wanted):
    def fun(x):
        results = []
        for i, (axes, several) in enumerate(wanted):
            y = x
            for j, (name, shape, is_written_out) in enumerate(several):
                [b] = drawn(10 * i + j, shape)
                b = jnp.broadcast_to(b, SHAPE) if is_written_out else b
                y = {"mul": y * b, "rmul": b * y, "div": y / b, "neg": -y}[name]
            results.append(jnp.sum(y, axes))
        return results

    [x] = drawn(99, SHAPE)
    large, found = rewritten(fun, x)
    assert len(large) <= len(wanted)
    for a, b in zip(found, fun(x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4)


@pytest.mark.parametrize("axes", [(3,), (0, 1, 2)])
def test_what_nothing_shares_is_left_alone(axes):
    def fun(x, scale):
        return jnp.sum(x * scale, axes)

    jaxpr, _ = opened(jax.make_jaxpr(fun)(*drawn(0, SHAPE, (1, 1, 1, 32))))
    assert str(shared(jaxpr, lambda eqn: True)) == str(jaxpr)


def test_a_forward_pass_is_left_alone():
    jaxpr, _ = opened(jax.make_jaxpr(group_norm_sums)(*drawn(0, SHAPE, (4, 1, 1, 32), SHAPE)))
    assert str(shared(jaxpr, lambda eqn: False)) == str(jaxpr)


def test_sums_of_sums_and_factors_that_are_sums():
    def fun(x):
        total = jnp.sum(x, (0, 1, 2))
        return jnp.sum(x * total, (0, 1, 2)), jnp.sum(x, (0, 1)), total

    [x] = drawn(0, SHAPE)
    _, found = rewritten(fun, x)
    for a, b in zip(found, fun(x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4)
