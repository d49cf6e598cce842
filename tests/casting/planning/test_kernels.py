"""What XLA is shown on a GPU computes what it stands for."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Var
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jmp_kit import autocast
from jmp_kit.casting.planning._kernels import (
    after,
    begun_late,
    flattened,
    given_first,
    own_zeros,
    row_sum,
    rows,
    scattered,
    staged_sum,
    sums,
    sums_of,
)
from jmp_kit.casting.reading._accumulated import begun
from jmp_kit.programs._jaxpr import constants_of, opened, subjaxprs, traced_back, uses_of


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_a_row_s_sum_is_its_sum(scale):
    x = scale * np.random.default_rng(0).normal(size=(5, 7, 300)).astype(np.float32)
    [found] = jax.jit(row_sum)(x)
    expected = x.sum(-1, dtype=np.float64)
    # Not more than what adding up loses.
    assert np.all(np.abs(found - expected) <= 300 * np.finfo(np.float32).eps * np.abs(x).max(-1))


@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan])
def test_a_row_s_sum_shows_what_is_not_finite(wrong):
    x = np.ones((2, 16), np.float32)
    x[0, 3] = wrong
    assert np.array_equal(np.isfinite(row_sum(x)[0]), [False, True])


def test_of_sums_along_rows_the_last_is_written_for_xla_to_see():
    """A kernel that it makes for one takes in the others."""

    def fun(x):
        first = jnp.sum(x, -1, keepdims=True)
        return (x - first) * jnp.sum(x * first, -1, keepdims=True)

    jaxpr = opened(jax.make_jaxpr(fun)(jnp.ones((4, 16))))[0]
    first, last = (e.outvars[0] for e in jaxpr.eqns if e.primitive.name == "reduce_sum")
    eqns = list(rows(jaxpr.eqns, {first, last}))
    assert [e.outvars[0] for e in eqns if e.primitive.name == "reduce_sum"] == [first]
    [shown] = [e for e in eqns if last in e.outvars]
    assert list(subjaxprs(shown))


@pytest.mark.parametrize(("axes", "axis"), [((1, 2), 1), ((1, 2, 4), 2), ((2,), 2), ((0, 2), 2)])
def test_a_sum_in_stages_is_the_sum(axes, axis):
    x = np.random.default_rng(0).integers(9, size=(3, 16, 16, 2, 5)).astype(np.float32)
    np.testing.assert_array_equal(staged_sum(x, axes=axes, axis=axis), x.sum(axes))


@pytest.mark.parametrize("axis", [None, 1])
@pytest.mark.parametrize("wrong", [1.0, np.inf, np.nan])
def test_two_sums_in_one_are_two_sums(axis, wrong):
    """What is not finite in one does not get into the other."""
    x, y = np.random.default_rng(0).integers(9, size=(2, 4, 16, 3)).astype(np.float32)
    x[1, 2, 0] = wrong
    found = sums_of(x, y, axes=(0, 1), axis=axis, shapes=[(3,), (3,)])
    np.testing.assert_array_equal(found[0], x.sum((0, 1)))
    np.testing.assert_array_equal(found[1], y.sum((0, 1)))


def test_two_sums_in_one_are_of_the_same_values_in_a_row():
    """Of channels, and of groups of channels, neither summed up."""
    x, y = np.random.default_rng(0).integers(9, size=(2, 4, 16, 6)).astype(np.float32)
    groups = y.reshape(4, 16, 2, 3)
    found = sums_of(x, groups, axes=(0, 1), axis=1, shapes=[(6,), (2, 3)])
    np.testing.assert_array_equal(found[0], x.sum((0, 1)))
    np.testing.assert_array_equal(found[1], groups.sum((0, 1)))


@pytest.mark.parametrize("wrong", [1.0, np.inf, np.nan])
def test_one_of_many_sums_is_one_of_a_pair(wrong):
    x = np.random.default_rng(0).integers(9, size=(4, 16, 3)).astype(np.float32)
    x[1, 2, 0] = wrong
    [found] = sums_of(x, axes=(0, 1), axis=None, shapes=[(3,)], is_one_of_many=True)
    np.testing.assert_array_equal(found, x.sum((0, 1)))


@pytest.mark.parametrize(("count", "pairs"), [(1, 0), (2, 1), (3, 2), (4, 2)])
def test_sums_are_all_of_pairs_or_there_is_one(count, pairs):
    def fun(x):
        return [jnp.sum(jnp.sin(n * x), (0, 1)) for n in range(count)]

    jaxpr = opened(jax.make_jaxpr(fun)(jnp.ones((4, 16, 3))))[0]
    made = sums(jaxpr.eqns, set(jaxpr.outvars))
    names = [e.primitive.name for eqn in made for s in subjaxprs(eqn) for e in s.eqns]
    assert names.count("complex") == pairs


def stages(*shape):
    """Whether a sum over images is taken in two."""
    image = jax.ShapeDtypeStruct(shape, jnp.float32)
    jaxpr = opened(jax.make_jaxpr(lambda x: jnp.sum(x, (1, 2)))(image))[0]
    return "optimization_barrier" in str([*sums(jaxpr.eqns, set(jaxpr.outvars))])


def test_what_is_counted_is_summed_up_beside_a_loss():
    """How many are right, or masked, say."""
    x, up, down = (jnp.ones(shape) / 8 for shape in ((512, 64), (64, 128), (128, 64)))

    def loss_fn(up, down):
        y = jax.nn.relu(x @ up) @ down + jnp.ones(64)
        return jnp.mean(y**2 + y), (y > 0).sum()

    step = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, count), _ = jax.jit(autocast(step, "mixed_bfloat16"))(up, down)
    assert float(loss) == pytest.approx(float(loss_fn(up, down)[0]), rel=0.01)
    assert count.dtype == jnp.int32
    assert count == 512 * 64


def test_few_sums_are_taken_in_two_stages():
    assert stages(8, 64, 64, 32)
    assert not stages(8, 16, 16, 32)
    assert not stages(8, 64, 64, 2048)
    assert not stages(8, 63, 65, 32)


@pytest.mark.parametrize("padding", ["VALID", "SAME"])
def test_the_gradient_of_a_maximum_over_windows(padding):
    def pooled(x):
        window, strides = (1, 3, 3, 1), (1, 2, 2, 1)
        return lax.reduce_window(x, -jnp.inf, lax.max, window, strides, padding)

    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype(np.float32))
    cotangent = jnp.arange(pooled(x).size, dtype=jnp.float32).reshape(pooled(x).shape)
    jaxpr, _ = opened(jax.make_jaxpr(lambda x, g: jax.vjp(pooled, x)[1](g))(x, cotangent))
    [eqn] = (e for e in jaxpr.eqns if e.primitive.name == "select_and_scatter_add")
    [found] = scattered(eqn, cotangent, x)
    np.testing.assert_array_equal(found, jax.vjp(pooled, x)[1](cotangent)[0])
    assert [e.primitive.name for e in own_zeros(eqn)] != ["select_and_scatter_add"]


@pytest.mark.parametrize(
    ("axes", "shape", "is_flat"),
    [
        ((0,), (4, 3, 2), True),
        ((0, 1), (5, 4, 3, 2), True),
        ((0,), (4, 3), False),
        ((0, 1), (4, 3, 2), False),
        ((1,), (4, 3, 2), False),
        ((0, 2), (5, 4, 3, 2), False),
    ],
)
def test_what_is_flat_in_between_is_as_it_was(axes, shape, is_flat):
    x = np.random.default_rng(0).integers(9, size=shape).astype(np.float32)
    jaxpr, _ = opened(jax.make_jaxpr(lambda x: jnp.sum(x, axes))(x))
    eqns = [e for eqn in jaxpr.eqns for e in flattened(eqn)]
    [found] = jax.core.eval_jaxpr(jaxpr.replace(eqns=eqns), [], x)
    np.testing.assert_array_equal(found, x.sum(axes))
    assert (len(eqns) > 1) == is_flat


@pytest.mark.parametrize(
    ("spec", "is_split"), [((), False), (("data",), False), ((None, "data"), True)]
)
@pytest.mark.usefixtures("as_on_gpus")
def test_axes_that_are_split_explicitly_are_not_joined(spec, is_split):
    """JAX does not say where what is in one axis in between would lie."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    x = np.random.default_rng(0).integers(9, size=(8, 16, 3)).astype(np.float32)
    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
        jaxpr, _ = opened(jax.make_jaxpr(lambda x: jnp.sum(x, 0))(placed))
        eqns = [e for eqn in jaxpr.eqns for e in flattened(eqn)]
        flat = jaxpr.replace(eqns=eqns)
        [found] = jax.jit(lambda x: jax.core.eval_jaxpr(flat, [], x))(placed)
    np.testing.assert_array_equal(found, x.sum(0))
    assert found.sharding.is_fully_replicated != is_split
    assert (len(eqns) == 1) == is_split


@pytest.mark.usefixtures("as_on_gpus")
@pytest.mark.parametrize("first", [1.0, np.nan, np.inf])
def test_what_is_scattered_into_comes_after_what_is_added(first):
    """And is what it was, whatever that is. If it is large, and made of numbers alone."""

    def lookups(places, updates):
        return jnp.zeros((2**16, 64)).at[places].add(updates)

    places, updates = jnp.arange(4), jnp.full((4, 64), first)
    jaxpr, _ = opened(jax.make_jaxpr(lookups)(places, updates))
    zeros = begun(jaxpr.eqns, constants_of(jaxpr.eqns), set(), uses_of(jaxpr))
    sources = [jaxpr.invars[1]]
    eqns = [e for eqn in jaxpr.eqns for e in begun_late(eqn, zeros, sources)]
    [found] = jax.jit(lambda *args: jax.core.eval_jaxpr(jaxpr.replace(eqns=eqns), [], *args))(
        places, updates
    )
    np.testing.assert_array_equal(found, lookups(places, updates))
    [scatter] = (e for e in eqns if e.primitive.name == "scatter-add")
    _, taken = traced_back([scatter.invars[0]], {v: e for e in eqns for v in e.outvars})
    assert jaxpr.invars[1] in taken
    nothing = [Var(sources[0].aval.update(shape=(4, 0)))]
    for args in ((set(), sources), (zeros, []), (zeros, nothing)):
        assert [e for eqn in jaxpr.eqns for e in begun_late(eqn, *args)] == jaxpr.eqns


@pytest.mark.parametrize("spec", [("data",), (None, "data"), (None, None, "data")])
def test_to_be_late_devices_tell_each_other_one_number(spec):
    """Of updates that they hold parts of, as a compiler decides."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    updates = jax.ShapeDtypeStruct((16, 32, 64), jnp.float32, sharding=sharding)
    zeros = lax.full((1000, 64), 0.0)
    program = jax.jit(lambda x: after(zeros, x)).lower(updates).compile()
    sizes = [
        math.prod(map(int, shape.split(",")))
        for shape in re.findall(r" = f32\[([\d,]+)\]\S* (?:all-|collective-)", program.as_text())
    ]
    assert sizes == [1]


def test_what_is_added_to_others_begins_with_these():
    """The gradient of a table that is multiplied with, too."""

    def gradient(places, updates, product):
        return jnp.zeros((16, 4)).at[places].add(updates) + product

    places, updates, product = jnp.arange(4), jnp.ones((4, 4)), jnp.ones((16, 4))
    jaxpr, _ = opened(jax.make_jaxpr(gradient)(places, updates, product))
    [eqn] = (e for e in jaxpr.eqns if e.primitive.name == "scatter-add")
    constant, uses = constants_of(jaxpr.eqns), uses_of(jaxpr)
    assert begun(jaxpr.eqns, constant, set(), uses) == set()
    assert begun(jaxpr.eqns, constant, {*eqn.outvars}, uses) == {eqn.invars[0]}  # of a cotangent


def test_a_sum_takes_first_what_it_is_given():
    """Of products, the one that XLA asks whether it adds the other to what it gives."""

    def cotangent(q, k, v):
        return (k + v) + q + 1.0

    jaxpr, _ = opened(jax.make_jaxpr(cotangent)(1.0, 2.0, 3.0))
    eqns = list(given_first(jaxpr.eqns))
    q, k, v = jaxpr.invars
    assert [e.invars[:2] for e in eqns[:2]] == [[k, v], [q, eqns[0].outvars[0]]]
    assert eqns[2:] == jaxpr.eqns[2:]
    assert jax.core.eval_jaxpr(jaxpr.replace(eqns=eqns), [], 1.0, 2.0, 3.0) == [7.0]
