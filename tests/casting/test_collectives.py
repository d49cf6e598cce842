"""What devices exchange between products: as traced, and the products around it in half."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmp_kit
from jmp_kit.numerics import audit
from tests.compiling import POLICIES, quick_or_slow

WIDTH = 16


def mapped(fun, in_specs, out_specs):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    return jax.shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


def weights(*shape):
    keys = jax.random.split(jax.random.key(0), 2)
    return [jax.random.normal(key, shape) / np.sqrt(shape[-1]) for key in keys]


def psum(params, x):
    """Tensor parallelism: the first product splits columns, the second sums rows."""
    return lax.psum(jax.nn.gelu(x @ params[0]) @ params[1].T, "x")


def reduce_scatter(params, x):
    h = lax.all_gather(x, "x", axis=0, tiled=True)
    h = jax.nn.gelu(h @ params[0]) @ params[1].T
    return lax.psum_scatter(h, "x", scatter_dimension=0, tiled=True)


def all_gather(params, x):
    """Fully sharded, written by hand: rows of weights are gathered before their product."""
    for part in params:
        x = jnp.tanh(x @ lax.all_gather(part, "x", axis=0, tiled=True))
    return x


def all_to_all(params, x):
    """Experts: rows go to the device of their expert and back."""
    h = lax.all_to_all(jnp.tanh(x @ params[0][0]), "x", 0, 0, tiled=True)
    h = jax.nn.relu(h @ params[1][0])
    return lax.all_to_all(h, "x", 0, 0, tiled=True) + x


def pipeline(params, x):
    """Eight stages: each step computes one and hands what it has on to the next device."""

    def step(h, _):
        h = jnp.tanh(h @ params[0][0]) + h
        return lax.ppermute(h, "x", [(i, (i + 1) % 8) for i in range(8)]), None

    return lax.scan(step, x, length=8)[0] @ params[1][0]


def streaming_mean(params, x):
    """Statistics over all devices, between two products."""
    h = x @ params[0][0]
    mean = lax.pmean(h.mean(0), "x")
    spread = lax.pmean(((h - mean) ** 2).mean(0), "x")
    top = lax.pmax(lax.stop_gradient(jnp.abs(h).max()), "x")
    return ((h - mean) * lax.rsqrt(spread + 1e-5) / top) @ params[1][0]


ROWS, COLUMNS, COPY = P("x"), P(None, "x"), P()
SHAPES = {ROWS: (8 * WIDTH, WIDTH), COLUMNS: (WIDTH, 8 * WIDTH)}
STACKED = (8, WIDTH, WIDTH)
CASES = {
    # how parameters, the input and the result are split
    psum: (COLUMNS, COPY, COPY),
    reduce_scatter: (COLUMNS, ROWS, ROWS),
    all_gather: (ROWS, ROWS, ROWS),
    all_to_all: (ROWS, ROWS, ROWS),
    pipeline: (ROWS, ROWS, ROWS),
    streaming_mean: (ROWS, ROWS, ROWS),
}
PRODUCTS = dict.fromkeys(CASES, 2) | {pipeline: 9}


@pytest.mark.parametrize("recompute", quick_or_slow([True, False], [True]))
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fun", CASES, ids=lambda fun: fun.__name__)
def test_products_around_collectives_are_half(fun, policy, recompute):
    split, rows, out = CASES[fun]
    shape = (WIDTH, WIDTH) if fun is all_gather else SHAPES.get(split)
    shape = STACKED if fun in (all_to_all, pipeline, streaming_mean) else shape
    params, x = weights(*shape), jax.random.normal(jax.random.key(1), (64, WIDTH))
    full = mapped(fun, ([split, split], rows), out)
    half = jmp_kit.autocast(full, policy, recompute=recompute)
    inside = mapped(jmp_kit.autocast(fun, policy, recompute=recompute), ([split, split], rows), out)

    def loss(run, params, x):
        return jnp.mean(jnp.sin(run(params, x)))

    def step_of(run):
        return jax.jit(jax.value_and_grad(functools.partial(loss, run), (0, 1)))

    expected, wanted = step_of(full)(params, x)
    for run in (half, inside):
        step = step_of(run)
        found, got = step(params, x)
        np.testing.assert_allclose(found, expected, atol=0.01)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            assert np.linalg.norm(a - b) < 0.06 * np.linalg.norm(b)
        products = audit(step, params, x).products
        assert all(product.is_half for product in products)
        forward = sum(product.times for product in products if not product.backward)
        assert forward == PRODUCTS[fun]


def test_sums_over_devices_stay_float32():
    split, rows, out = CASES[streaming_mean]
    params, x = weights(*STACKED), jnp.ones((64, WIDTH))
    run = jmp_kit.autocast(mapped(streaming_mean, ([split, split], rows), out), "mixed_bfloat16")
    found = audit(run, params, x, level="lowered").transfers
    assert {(transfer.kind, transfer.dtype) for transfer in found} == {("all-reduce", "float32")}


def test_a_mapped_step_without_jit():
    """Nothing is computed while it is planned: labels that are counted are not."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))
    labels = jnp.arange(8) % 4

    def loss_fn(w, x):
        return -jax.nn.log_softmax(x @ w)[jnp.arange(8), labels].mean()

    half = jmp_kit.autocast(jax.grad(loss_fn), "mixed_bfloat16")
    step = jax.shard_map(half, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    w, x = weights(4, 16)[0].T, jnp.ones((8, 16))
    np.testing.assert_allclose(step(w, x), jax.grad(loss_fn)(w, x), atol=5e-3)


def test_donation_survives():
    split, rows, out = CASES[psum]
    params, x = weights(*SHAPES[split]), jnp.ones((64, WIDTH))
    run = jmp_kit.autocast(mapped(psum, ([split, split], rows), out), "mixed_bfloat16")
    step = jax.jit(lambda x, params: run(params, x), donate_argnums=0)
    text = step.lower(x, params).as_text()
    assert "tf.aliasing_output = 0" in text or "jax.buffer_donor = true" in text
