"""In which dtype gradients of weights are made and summed, by devices and over micro-batches."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jmp_kit import NoOpLossScale, autocast, numerics, value_and_grad

KEYS = jax.random.split(jax.random.key(0), 3)
PARAMS = [jax.random.normal(key, (16, 16)) / 4 for key in KEYS[:2]]
X = jax.random.normal(KEYS[2], (64, 16))


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params[0]) @ params[1]) ** 2)


def step(params, x):
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    return loss, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def one_line(**options):
    return autocast(step, "mixed_bfloat16", **options)


def four_lines(**options):
    half = autocast(loss_fn, "mixed_bfloat16", **options)
    return value_and_grad(half, NoOpLossScale())


WAYS = {"one line": one_line, "four lines": four_lines}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@ways
@pytest.mark.parametrize(("reduce_dtype", "dtype"), [(None, "bfloat16"), ("float32", "float32")])
def test_a_gradient_is_made_in_the_dtype_that_it_is_summed_in(way, reduce_dtype, dtype):
    found = numerics.audit(way(reduce_dtype=reduce_dtype), PARAMS, X).products
    assert {p.lhs_dtype for p in found} == {p.rhs_dtype for p in found} == {"bfloat16"}
    weights = [p for p in found if p.backward and p.shape == (16, 16)]
    assert [p.out_dtype for p in weights] == 2 * [dtype]
    assert {p.out_dtype for p in found if p not in weights} == {"bfloat16"}


H200 = numerics.TARGETS["h200"]


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
@pytest.mark.parametrize("libraries", [False, True])
@ways
def test_h200s_sum_what_is_asked_for(way, libraries):
    found = topologies.get_topology_desc(
        "", "cuda", target_config=H200.description, topology="1x8x1"
    )
    mesh = Mesh(np.array(found.devices), ("data",))

    def sums(**options):
        def at(tree, *axes):
            sharding = NamedSharding(mesh, PartitionSpec(*axes))
            return jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
            )

        lowered = jax.jit(way(**options)).trace(at(PARAMS), at(X, "data")).lower()
        compiler = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": not libraries}
        text = lowered.compile(compiler_options=compiler).as_text()
        found = re.findall(r"= (.*?) all-reduce(?:-start)?\(", text)
        return {dtype for results in found for dtype in re.findall(r"(\w+)\[\d", results)}

    assert sums() == {"bf16"}
    assert sums(reduce_dtype="float32") == {"f32"}


def test_a_gradient_that_is_not_rounded_is_nearer_and_micro_batches_add_up():
    exact = jax.grad(loss_fn)(PARAMS, X)

    def grads_of(reduce_dtype, batches):
        def accumulated(params, xs):
            def add(total, x):
                return jax.tree.map(jnp.add, total, jax.grad(loss_fn)(params, x)), None

            zeros = jax.tree.map(jnp.zeros_like, params)
            total, _ = jax.lax.scan(add, zeros, xs)
            return jax.tree.map(lambda t: t / len(xs), total)

        half = autocast(accumulated, "mixed_bfloat16", reduce_dtype=reduce_dtype)
        return jax.jit(half)(PARAMS, X.reshape(batches, -1, 16))

    for batches in (1, 16):
        wide = grads_of("float32", batches)
        rounded = grads_of(None, batches)
        assert {g.dtype for g in wide} == {jnp.dtype("float32")}
        for g, h, e in zip(wide, rounded, exact, strict=True):
            np.testing.assert_allclose(g, e, atol=0.02 * float(jnp.abs(e).max()))
            assert jnp.linalg.norm(g - e) < 1.05 * jnp.linalg.norm(h - e)
            assert (g != g.astype(jnp.bfloat16).astype(jnp.float32)).any()


def test_what_goes_on_to_a_product_and_convolutions_stay_half():
    def muon(params, x):
        grads = jax.grad(loss_fn)(params, x)
        return [g @ g.T @ g for g in grads]

    found = numerics.audit(autocast(muon, "bfloat16", reduce_dtype="float32"), PARAMS, X)
    assert {p.out_dtype for p in found.products if p.backward} == {"bfloat16"}

    def convolved(w, x):
        return jnp.sum(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME") ** 2)

    w, x = jnp.ones((4, 2, 3, 3)), jnp.ones((1, 2, 8, 8))
    half = autocast(jax.grad(convolved), "mixed_bfloat16", reduce_dtype="float32")
    found = numerics.audit(half, w, x)
    assert {(p.lhs_dtype, p.out_dtype) for p in found.products} == {("bfloat16", "bfloat16")}


def test_an_optimizer_takes_float32(standard_promotion):
    optimizer = optax.adam(1e-2)

    def train(params, state, x):
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        updates, state = optimizer.update(grads, state)
        return loss, optax.apply_updates(params, updates), state

    half = jax.jit(autocast(train, "mixed_bfloat16", reduce_dtype="float32"))
    params, state, losses = PARAMS, optimizer.init(PARAMS), []
    for _ in range(10):
        loss, params, state = half(params, state, X)
        losses.append(float(loss))
    assert losses[-1] < losses[0]


def test_another_dtype_is_refused():
    for wrong in ("bfloat16", jnp.float16, "float64"):
        with pytest.raises(ValueError, match='reduce_dtype is .*write "float32"'):
            autocast(loss_fn, "mixed_bfloat16", reduce_dtype=wrong)
