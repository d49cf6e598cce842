"""Products of halves in float32, gradients of weights, run on CPUs, in whatever axes they lie."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jmp_kit
from jmp_kit import autocast
from jmp_kit.casting.evaluating import _wide
from jmp_kit.programs import every_equation
from tests.casting.planning.test_passes import compiled, layer_norm
from tests.casting.test_zoo import distance
from tests.casting.zoo import mean_square
from tests.compiling import OPTIMISED

H200 = jmp_kit.numerics.TARGETS["h200"]

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


# Of weights and activations, and over how many axes the gradient's product sums up.
SUMMED = {
    "dhk,btd->bthk": ((32, 4, 16), (2, 8, 32), 1),
    "hkd,bthk->btd": ((4, 16, 32), (2, 8, 4, 16), 1),
    "gdk,btgd->btgk": ((2, 32, 16), (3, 8, 2, 32), 1),
    "dk,tdb->tbk": ((32, 16), (8, 32, 3), 2),
}


@pytest.mark.parametrize("is_scanned", [True, False])
@pytest.mark.parametrize("formula", SUMMED)
@pytest.mark.usefixtures("as_on_gpus")
def test_axes_to_sum_up_over_are_one_where_they_are_neighbours(formula, is_scanned):
    *shapes, count = SUMMED[formula]
    w, x = (normal(i, *shape) for i, shape in enumerate(shapes))

    def gradient(x):
        return jax.grad(lambda w: mean_square(1 + jnp.tanh(jnp.einsum(formula, w, x))))(w)

    step, x = (lambda xs: lax.map(gradient, xs), x[None]) if is_scanned else (gradient, x)
    jaxpr = jax.make_jaxpr(autocast(step, "mixed_bfloat16"))(x).jaxpr
    products = [e for e, _ in every_equation(jaxpr) if e.primitive.name == "dot_general"]
    wide = [e for e in products if e.outvars[0].aval.dtype == jnp.float32]
    assert all(v.aval.dtype == jnp.bfloat16 for e in wide for v in e.invars)
    assert {len(e.params["dimension_numbers"][0][0]) for e in wide} == {count}


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_an_odd_number_of_words_is_not_moved_for_an_h200(monkeypatch):
    """XLA moves axes to sum up over, unless they are one."""

    def loss_fn(params, x):
        x = jnp.tanh(layer_norm(x @ params["in"]) @ params["out"])
        return mean_square(x @ params["out"])

    def moved():
        return compiled(loss_fn, {"in": (256, 256), "out": (256, 256)}, (32, 63, 256)).nbytes

    found = moved()
    monkeypatch.setattr(_wide, "_is_over_neighbours", lambda _: False)
    assert found <= 0.98 * moved()


ENSEMBLES = {
    "weights": (0, None),
    "batches": (None, 0),
    "of both": (0, 0),
    "of ensembles": ((0, None), (0, None)),
    "of ensembles, each its batch": ((0, None), (None, 0)),
}


@pytest.mark.parametrize("name", ENSEMBLES)
def test_a_step_that_is_mapped_over_some_of_what_it_takes(name):
    """Weights that share a batch, say: of the products' operands, one is of each and one of all."""
    axes = ENSEMBLES[name] if isinstance(ENSEMBLES[name][0], tuple) else (ENSEMBLES[name],)
    w, x = normal(0, 64, 64), normal(1, 32, 64)
    step = jax.grad(lambda w, x: mean_square(jnp.tanh(x @ w) @ w))
    half = autocast(step, "mixed_bfloat16")
    for of_w, of_x in axes:
        half, step = (jax.vmap(f, (of_w, of_x)) for f in (half, step))
        w, x = (jnp.stack([v, 2 * v, -v]) if i == 0 else v for v, i in ((w, of_w), (x, of_x)))
    for found in (half(w, x), jax.jit(half)(w, x)):
        assert distance(found, step(w, x)) < 0.02


def test_no_weights_are_spread_over_batches_on_gpus():
    half = autocast(jax.grad(lambda w, x: mean_square(x @ w)), "mixed_bfloat16")
    mapped = jax.jit(jax.vmap(half, (0, None)))
    lowered = mapped.trace(jnp.ones((3, 64, 64)), jnp.ones((32, 64)))
    on_cpus, on_gpus = (lowered.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "cuda"))
    spread = "(tensor<32x64xbf16>) -> tensor<3x32x64xbf16>"
    assert spread in on_cpus
    assert spread not in on_gpus
