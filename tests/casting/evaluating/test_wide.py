"""Products of halves in float32, gradients of weights, run on CPUs, in whatever axes they lie."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jmp_kit
from jmp_kit import autocast
from tests.casting.test_zoo import distance
from tests.casting.zoo import mean_square
from tests.compiling import OPTIMISED

BATCHES = 4, 32, 64


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape) / 8


def in_rounds(w, x):
    return mean_square(lax.fori_loop(0, 3, lambda _, x: x + jnp.tanh(x @ w), x))


def scanned(w, x):
    return mean_square(lax.scan(lambda x, _: (x + jnp.tanh(x @ w), None), x, length=3)[0])


def mapped(w, x):
    return mean_square(lax.map(lambda x: jnp.tanh(x @ w), x[:, None]))


def scanned_in_scans(w, x):
    return lax.scan(lambda x, _: (scanned(w, x) * x, None), x, length=2)[0].sum()


def rematerialised(w, x):
    return jax.checkpoint(scanned)(w, x)


LOOPS = [in_rounds, scanned, mapped, scanned_in_scans, rematerialised]

# Of weights and activations; each failed.
EINSUMS = {
    "dhk,td->thk": ((32, 4, 16), (64, 32)),
    "hdk,td->htk": ((4, 32, 16), (64, 32)),
    "dbga,beg->bade": ((16, 3, 16, 3), (3, 4, 16)),
    "ecfg,bf->egcb": ((16, 16, 2, 4), (16, 2)),
}


def assert_same(loss_fn, w, x, **options):
    step = jax.value_and_grad(loss_fn)
    ways = autocast(step, "mixed_bfloat16", **options), step
    found, wanted = (jax.jit(way).lower(w, x).compile(OPTIMISED)(w, x)[1] for way in ways)
    assert distance(found, wanted) <= 0.02


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("loss_fn", LOOPS, ids=lambda loss_fn: loss_fn.__name__)
def test_gradients_of_loops(loss_fn, recompute):
    assert_same(loss_fn, normal(0, 64, 64), normal(1, *BATCHES), recompute=recompute)


@pytest.mark.parametrize("formula", EINSUMS)
def test_gradients_by_weights_of_several_axes(formula):
    w, x = (normal(i, *shape) for i, shape in enumerate(EINSUMS[formula]))
    assert_same(lambda w, x: mean_square(1 + jnp.tanh(jnp.einsum(formula, w, x))), w, x)


def test_each_row_of_a_batch_alone():
    """What runs in place of such a product can be mapped, too."""
    loss_fn = lambda w, x: mean_square(1 + jnp.einsum("dhk,td->thk", w, x))  # noqa: E731
    w, x = normal(0, 32, 4, 16), normal(1, 3, 64, 32)
    step = jmp_kit.value_and_grad(autocast(loss_fn, "mixed_bfloat16"), jmp_kit.NoOpLossScale())
    found = jax.jit(jax.vmap(lambda x: step(w, x)[1])).lower(x).compile(OPTIMISED)(x)
    wanted = jax.vmap(lambda x: jax.grad(loss_fn)(w, x))(x)
    assert distance(found, wanted) <= 0.02


def attended(w, x):
    return mean_square(1 + jnp.tanh(jnp.einsum("dhk,td->thk", w, x)))


def attended_in_scan(w, xs):
    return lax.scan(lambda total, x: (total + attended(w, x), None), 0.0, xs)[0]


def args_of(loss_fn):
    return normal(0, 32, 4, 16), normal(1, *[2] * (loss_fn is attended_in_scan), 64, 32)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("loss_fn", [attended, attended_in_scan])
def test_weights_of_several_axes_on_a_mesh(loss_fn, kind):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
    w, x = args_of(loss_fn)
    with jax.set_mesh(mesh):
        placed = (
            jax.device_put(w, NamedSharding(mesh, PartitionSpec(None, None, "model"))),
            jax.device_put(x, NamedSharding(mesh, PartitionSpec(*[None] * (x.ndim - 2), "data"))),
        )
        assert_same(loss_fn, *placed)


@pytest.mark.parametrize("loss_fn", [attended, attended_in_scan])
def test_weights_of_several_axes_on_every_device(loss_fn):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    assert_same(loss_fn, *jax.device_put(args_of(loss_fn), NamedSharding(mesh, PartitionSpec())))


# Batch axes that are not first, of weights or of activations.
BATCHED = {
    "nio,tin->nto": ((2, 4, 32), (32, 4, 2)),
    "nio,tni->nto": ((2, 4, 32), (32, 2, 4)),
    "onmj,tmnj->otnm": ((32, 2, 2, 4), (32, 2, 2, 4)),
}


def batched(formula, is_scanned):
    def loss_fn(w, x):
        return mean_square(1 + jnp.tanh(jnp.einsum(formula, w, x)))

    def scanned(w, x):
        return lax.scan(lambda total, x: (total + loss_fn(w, x), None), 0.0, x)[0]

    w, x = (normal(i, *shape) for i, shape in enumerate(BATCHED[formula]))
    return (scanned, w, jnp.stack([x, x])) if is_scanned else (loss_fn, w, x)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("is_scanned", [True, False])
@pytest.mark.parametrize("formula", BATCHED)
def test_batch_axes_need_not_be_first(formula, is_scanned, recompute):
    assert_same(*batched(formula, is_scanned), recompute=recompute)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("is_scanned", [True, False])
@pytest.mark.parametrize("formula", BATCHED)
def test_batch_axes_need_not_be_first_on_a_mesh(formula, is_scanned, kind):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
    loss_fn, *args = batched(formula, is_scanned)
    with jax.set_mesh(mesh):
        assert_same(loss_fn, *jax.device_put(args, NamedSharding(mesh, PartitionSpec())))
