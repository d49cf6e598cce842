"""Sums over the same values, shared."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import AxisType, PartitionSpec

import jmp_kit
from jmp_kit import autocast
from jmp_kit.casting.rewriting import _rewritten
from jmp_kit.casting.rewriting._sums import of_one, shared
from jmp_kit.programs._jaxpr import opened, size_of
from tests.casting.rewritten import assert_devices_learn_the_same, farthest
from tests.casting.stream import step_of
from tests.casting.zoo import mean_square

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


GROUPS = 4, 4, 2, 16, 32  # of the channels, where they are the second axis


def gradients_of_groups(x, y, scale, factor):
    """Those of a norm of groups of channels: what is summed up comes in one of two shapes."""
    deviations, image = y.reshape(GROUPS), (0, 2, 3)
    by_deviations = x * scale
    return (
        jnp.sum(x, image),
        jnp.sum(x * (deviations * factor).reshape(SHAPE), image),
        jnp.sum(-(by_deviations.reshape(GROUPS) * factor), (2, 3, 4)),
        jnp.sum(deviations * by_deviations.reshape(GROUPS), (2, 3, 4)),
    )


@pytest.mark.parametrize("is_written_out", [False, True])
def test_sums_over_groups_of_channels_share_those_over_each(is_written_out):
    def fun(x, y, scale, factor):
        if is_written_out:  # axis by axis, as `vmap` does
            scale = jnp.broadcast_to(jnp.broadcast_to(scale, (8, 16, 32))[None], SHAPE)
        return gradients_of_groups(x, y, scale, factor)

    args = drawn(0, SHAPE, SHAPE, (8, 1, 1), (4, 4, 1, 1, 1))
    large, found = rewritten(fun, *args)
    assert large == [(2, 3), (2, 3)]  # of x, and of x times the deviations
    for a, b in zip(found, fun(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


PRODUCTS = {
    "x": lambda x, y, b: x * b,
    "in groups": lambda x, y, b: (x.reshape(GROUPS) * b.reshape(4, 4, 2, 1, 1)).reshape(SHAPE),
    "x · y": lambda x, y, b: (x * b) * -y,
    "y · x in groups": lambda x, y, b: (y.reshape(GROUPS) * (x * b).reshape(GROUPS)).reshape(SHAPE),
    "x · x / b": lambda x, y, b: x * (x / b),
    "x⁸": lambda x, y, b: functools.reduce(lambda x, _: x * x, range(3), x * b),
    "x · b²": lambda x, y, b: (x * b) * jnp.sum(b * b, 0, keepdims=True),
    "y + x": lambda x, y, b: y + x * b,
}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(PRODUCTS)), st.sampled_from([*AXES, (2, 3), (0, 2, 3)])),
        min_size=1,
        max_size=4,
    )
)
def test_sums_of_any_products_are_what_they_were(wanted):
    def fun(x, y, b):
        return [jnp.sum(PRODUCTS[name](x, y, b), axes) for name, axes in wanted]

    args = [a / 4 for a in drawn(7, SHAPE, SHAPE, (4, 8, 1, 1))]
    _, found = rewritten(fun, *args)
    for a, b in zip(found, fun(*args), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4)


def test_a_value_that_is_scaled_over_and_over():
    """However often: a program may be a loop that was unrolled."""

    def fun(x):
        scaled = functools.reduce(lambda y, _: -y * 1.001, range(1000), x)
        return scaled.sum((0, 1, 2)), x.sum((0, 1, 2))

    [x] = drawn(0, SHAPE)
    large, found = rewritten(fun, x)
    assert large == [(0, 1, 2)]
    for a, b in zip(found, fun(x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4)


def test_a_sum_of_a_sum_is_one():
    def fun(x):
        return x.sum(0)[None].sum((2, 3)), x.sum((1, 2)), x.sum(0).sum(-1)[:, None]

    [x] = drawn(0, SHAPE)
    before, consts = opened(jax.make_jaxpr(fun)(x))
    jaxpr = of_one(before, lambda eqn: True)
    sums = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "reduce_sum"]
    assert [eqn.params["axes"] for eqn in sums] == [(0, 2, 3), (1, 2), (0, 3)]
    for a, b in zip(jaxpr_as_fun(ClosedJaxpr(jaxpr, consts))(x), fun(x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert str(of_one(before, lambda eqn: False)) == str(before)


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: jnp.sum(jax.lax.iota(jnp.float32, 64)) + x,
        lambda x: (x > 0).astype(jnp.int8).sum(0, dtype=jnp.int8).sum(0, dtype=jnp.int8),
        lambda x: jnp.sum(jnp.ones(SHAPE), 0) * jnp.sum(x[:0].sum((0, 1)), 0),
    ],
    ids=["of places", "of integers", "of nothing"],
)
def test_sums_of_other_things(fun):
    [x] = drawn(0, SHAPE)
    jaxpr, consts = opened(jax.make_jaxpr(fun)(x))
    jaxpr = shared(of_one(jaxpr, lambda eqn: True), lambda eqn: True)
    [found] = jaxpr_as_fun(ClosedJaxpr(jaxpr, consts))(x)
    assert found.dtype == fun(x).dtype
    np.testing.assert_allclose(found, fun(x), rtol=1e-5)


def test_a_sum_that_others_take_too_is_left_alone():
    def fun(x):
        total = x.sum(0)
        return total.sum(0), total, jnp.exp(x).sum(1).reshape(4, 512).sum(1)

    jaxpr, _ = opened(jax.make_jaxpr(fun)(*drawn(0, SHAPE)))
    jaxpr = of_one(jaxpr, lambda eqn: True)
    sums = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "reduce_sum"]
    assert [eqn.params["axes"] for eqn in sums] == [(0,), (0,), (1,), (1,)]


def test_sums_of_sums_and_factors_that_are_sums():
    def fun(x):
        total = jnp.sum(x, (0, 1, 2))
        return jnp.sum(x * total, (0, 1, 2)), jnp.sum(x, (0, 1)), total

    [x] = drawn(0, SHAPE)
    _, found = rewritten(fun, x)
    for a, b in zip(found, fun(x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4)


H200 = jmp_kit.numerics.TARGETS["h200"]


def network(params, x):
    """Norms of groups of channels, these first, as they are written for one image."""

    def normed(x, scale, bias):
        groups = x.reshape(8, -1, *x.shape[1:])
        mean, variance = groups.mean((1, 2, 3), keepdims=True), groups.var((1, 2, 3), keepdims=True)
        y = ((groups - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape)
        scale, bias = (jnp.broadcast_to(v[:, None, None], x.shape) for v in (scale, bias))
        return scale * y + bias

    def of_one(x):
        for w, scale, bias, shift in params:
            y = jax.nn.silu(normed(x, scale, bias))
            x = jax.lax.conv(y[None], w, (1, 1), "SAME")[0] + bias[:, None, None]
            x += (shift @ x.mean((1, 2)))[:, None, None]
        return x

    return mean_square(jax.vmap(of_one)(x))


def drawn_layers():
    rng = np.random.default_rng(3)
    sizes = (32, 32, 3, 3), (32,), (32,), (32, 32), (16, 32, 8, 8)
    *layer, x = [jnp.asarray(rng.normal(size=size) / 3, jnp.float32) for size in sizes]
    return [layer] * 2, x


def test_devices_that_share_a_batch_learn_the_same():
    assert_devices_learn_the_same(network, *drawn_layers())


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_devices_that_hold_parts_of_a_batch_learn_the_same(kind):
    params, x = drawn_layers()
    step = jax.jit(autocast(jax.grad(network), "mixed_bfloat16"))
    alone = step(params, x)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        found = step(
            jax.device_put(params, jax.NamedSharding(mesh, PartitionSpec())),
            jax.device_put(x, jax.NamedSharding(mesh, PartitionSpec("data"))),
        )
    assert farthest(found, alone) <= 0.01


@pytest.mark.usefixtures("as_on_gpus")
def test_what_is_summed_up_lies_on_devices_as_its_type_says():
    """Of words along which a batch is split, the sums for what all of them share."""

    def loss_fn(params, x):  # [batch, channel, word]
        shift, w = params
        h = jnp.einsum("bct,cd->bdt", x, w)
        h = (h - h.mean((0, 2), keepdims=True)) * jax.nn.sigmoid(h) + shift
        h = h - h.mean((1, 2), keepdims=True)
        h = h * jax.lax.rsqrt((h * h).mean((1, 2), keepdims=True) + 1e-5)
        return mean_square(jnp.sin(jnp.einsum("bdt,de->bte", h, w)))

    mesh = jax.make_mesh((8,), ("word",), axis_types=(AxisType.Explicit,))
    spec = PartitionSpec(None, None, "word")
    with jax.set_mesh(mesh):
        x, shift, w = (
            jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, held))
            for shape, held in (
                ((64, 32, 1024), spec),
                ((32, 1024), PartitionSpec()),
                ((32, 32), PartitionSpec()),
            )
        )
        half = autocast(jax.grad(loss_fn), "mixed_bfloat16")
        found, wanted = (jax.eval_shape(f, (shift, w), x) for f in (half, jax.grad(loss_fn)))
    assert found == wanted


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
@pytest.mark.parametrize("name", ["shared", "of_one"])
def test_norms_of_channels_that_come_first_are_read_less_on_an_h200(name, monkeypatch):
    def found():
        sizes = (64, 64, 3, 3), (64,), (64,), (64, 64), (128, 64, 64, 64)
        *layer, x = [jax.ShapeDtypeStruct(size, jnp.float32) for size in sizes]
        step = autocast(step_of(network), "mixed_bfloat16")
        return jmp_kit.numerics.traffic(step, [layer] * 3, x, target="h200")

    with_it = found()
    assert with_it.wide <= 0.1 * 4 * 128 * 64**3
    monkeypatch.setattr(_rewritten, name, lambda jaxpr, _: jaxpr)
    assert with_it.nbytes <= 0.95 * found().nbytes
