"""What of a segment is worth what: sums, statistics, what is woven."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp_kit.casting.reading._worth import looked_up, reduced, spread, woven
from jmp_kit.programs import PRODUCTS, Flow, is_var
from tests.casting.recomputing.test_again import after


def made_by(found, jaxpr):
    """The primitives that make these variables."""
    return [eqn.primitive.name for eqn in jaxpr.eqns for v in eqn.outvars if v in found]


def test_a_logarithm_of_a_sum_is_a_statistic():
    jaxpr = jax.make_jaxpr(lambda x: x.max(-1) + jnp.log(jnp.exp(x).sum(-1)))(
        jnp.ones((4, 8))
    ).jaxpr
    assert made_by(reduced(jaxpr.eqns, is_var), jaxpr) == ["reduce_max", "reduce_sum", "log", "add"]


def test_a_sum_of_a_few_values_that_is_added_to_another_is_none():
    jaxpr = jax.make_jaxpr(lambda x, y: x + y.sum(1))(jnp.ones((4, 8)), jnp.ones((4, 2, 8))).jaxpr
    assert made_by(reduced(jaxpr.eqns, is_var), jaxpr) == ["reduce_sum"]


def test_a_barrier_holds_back_each_value_for_itself():
    def function(x, y):
        x, y = lax.optimization_barrier((jnp.sin(x), jnp.cos(y)))
        return x, y[:, None] * jnp.ones((4, 8))

    jaxpr = jax.make_jaxpr(function)(jnp.ones(4), jnp.ones(4)).jaxpr
    found = made_by(spread(jaxpr, Flow(PRODUCTS)), jaxpr)
    assert "cos" in found
    assert "sin" not in found


@pytest.mark.parametrize(("length", "is_woven"), [(4, False), (64, True)])
def test_what_an_associative_scan_cuts_and_joins_is_woven(length, is_woven):
    def function(x):
        return lax.associative_scan(after, (jnp.cos(x), jnp.sin(x)))

    jaxpr = jax.make_jaxpr(function)(jnp.ones(length)).jaxpr
    found = woven(jaxpr.eqns)
    assert bool(found) == is_woven
    assert found.isdisjoint([*jaxpr.invars, *jaxpr.outvars])
    assert not {"sin", "cos"} & {*made_by(found, jaxpr)}


def test_halves_that_are_turned_and_joined_are_not_woven():
    def rotated(x):
        for angle in range(2):
            a, b = jnp.split(x * jnp.sin(x), 2)
            x = jnp.concatenate([a * jnp.cos(angle) - b, b * jnp.sin(angle) + a])
        return x

    assert not woven(jax.make_jaxpr(rotated)(jnp.ones(8)).jaxpr.eqns)


@pytest.mark.parametrize(("rows", "is_more"), [(4, False), (16, True), ("n", False)])
def test_more_is_looked_up_than_a_table_holds(rows, is_more):
    """Through other shapes; of as many rows as one likes, nobody knows."""

    def function(x, places):
        return jnp.sin(x).reshape(8, 2, 4)[places]

    [count] = jax.export.symbolic_shape(str(rows))
    places = jax.ShapeDtypeStruct((count,), jnp.int32)
    jaxpr = jax.make_jaxpr(function)(jnp.ones((8, 8)), places).jaxpr
    assert made_by(looked_up(jaxpr.eqns), jaxpr) == ["sin", "reshape"] * is_more
