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
from jmp_kit.casting._autocast import plans_of

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
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_gradient_is_made_in_the_dtype_that_it_is_summed_in(way, dtype):
    found = numerics.audit(way(reduce_dtype=dtype), PARAMS, X).products
    by_default = numerics.audit(way(), PARAMS, X).products
    assert (found == by_default) == (dtype == "float32")
    assert {p.lhs_dtype for p in found} == {p.rhs_dtype for p in found} == {"bfloat16"}
    weights = [p for p in found if p.backward and p.shape == (16, 16)]
    assert [p.out_dtype for p in weights] == 2 * [dtype]
    assert {p.out_dtype for p in found if p not in weights} == {"bfloat16"}


@pytest.mark.filterwarnings("ignore:Gradients are computed in float16", "ignore:A product asks")
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_cotangents_of_half_programs_are_in_their_dtype(dtype, policy):
    """What a product gives is added to what none gives, and a weight's gradient is made of both."""

    def loss_fn(params, x):
        x = x @ params[0]
        return ((x @ params[1] + x) / 2).sum()

    params, x = [p.astype(dtype) for p in PARAMS], X.astype(dtype)
    found = autocast(jax.grad(loss_fn), policy)(params, x)
    for ours, full in zip(found, jax.grad(loss_fn)(params, x), strict=True):
        assert ours.dtype == dtype
        ours, full = (np.asarray(a, np.float32) for a in (ours, full))
        np.testing.assert_allclose(ours, full, atol=0.02 * np.abs(full).max())


@ways
def test_what_leads_to_a_looked_up_table_is_half(way, monkeypatch):
    """It is no gradient of a weight, though no product follows it."""

    def looked_up(params, words):
        return jnp.mean((jnp.sin(params["table"][words]) @ params["w"]) ** 2)

    monkeypatch.setitem(globals(), "loss_fn", looked_up)
    params = {"table": jnp.ones((32, 16)), "w": jnp.ones((16, 8))}
    found = numerics.audit(way(), params, jnp.arange(64) % 32).products
    assert {p.shape: p.out_dtype for p in found if p.backward} == {
        (64, 16): "bfloat16",
        (16, 8): "float32",
    }


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

    assert sums() == {"f32"}
    assert sums(reduce_dtype=jnp.bfloat16) == {"bf16"}


def added(total, grads, micro_batches):
    return jax.tree.map(jnp.add, total, grads)


def averaged(total, grads, micro_batches):
    return jax.tree.map(lambda t, g: t + g / micro_batches, total, grads)


def accumulated(add):
    """The sum of gradients over micro-batches, in a loop."""

    def gradients(params, xs):
        def micro_batch(total, x):
            return add(total, jax.grad(loss_fn)(params, x), len(xs)), None

        return jax.lax.scan(micro_batch, jax.tree.map(jnp.zeros_like, params), xs)[0]

    return gradients


@pytest.mark.parametrize("add", [added, averaged])
def test_micro_batches_add_up_without_a_rounding(add):
    xs = X.reshape(16, -1, 16)
    exact = accumulated(add)(PARAMS, xs)

    def error_of(**options):
        half = autocast(accumulated(add), "mixed_bfloat16", **options)
        found = numerics.audit(half, PARAMS, xs).products
        grads = jax.jit(half)(PARAMS, xs)
        dtypes = {p.out_dtype for p in found if p.backward and p.shape == (16, 16)}
        return [jnp.linalg.norm(g - e) for g, e in zip(grads, exact, strict=True)], dtypes

    (wide, dtypes), (rounded, halves) = error_of(), error_of(reduce_dtype="bfloat16")
    assert (dtypes, halves) == ({"float32"}, {"bfloat16"})
    assert all(w < 1.05 * r for w, r in zip(wide, rounded, strict=True))
    [plan] = plans_of(accumulated(add), "mixed_bfloat16", PARAMS, xs)
    assert set(summed_in(plan)) == {np.dtype(np.float32)}


def test_what_is_added_to_what_is_scattered_is_float32():
    """The gradient of a table that is looked up in and that multiplies, too."""

    def loss_fn(table, tokens):
        return jnp.mean((jnp.tanh(table[tokens]) @ table.T) ** 2)

    [plan] = plans_of(jax.grad(loss_fn), "mixed_bfloat16", PARAMS[0], jnp.arange(8))
    assert list(summed_in(plan)).count(np.dtype(np.float32)) == 1


def test_what_an_optimizer_takes_is_kept_in_half():
    """In a loop, too: a step that is trained in a scan adds no gradient to another."""

    def trained(params, xs):
        def one(state, x):
            params, moment = state
            grads = jax.grad(loss_fn)(params, x)
            moment = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g * g.mean(), moment, grads)
            return (jax.tree.map(lambda p, m: p - 0.1 * m, params, moment), moment), None

        return jax.lax.scan(one, (params, params), xs)[0]

    for fun, given in ((step, X), (trained, X.reshape(4, -1, 16))):
        [plan] = plans_of(fun, "mixed_bfloat16", PARAMS, given)
        assert set(summed_in(plan)) == {np.dtype(jnp.bfloat16)}


def summed_in(plan):
    """In what the sums of a plan are kept, however deep."""
    for planned in plan.steps:
        yield from getattr(planned, "summed", {}).values()
        for _, inner in getattr(planned, "bodies", ()):
            yield from summed_in(inner)


def test_an_optimizer_that_multiplies_gradients_takes_halves_of_whole_sums():
    def muon(params, x):
        grads = jax.grad(loss_fn)(params, x)
        return [g @ g.T @ g for g in grads]

    found = numerics.audit(autocast(muon, "bfloat16"), PARAMS, X).products
    weights = [p for p in found if p.backward and p.shape == (16, 16)]
    assert {p.out_dtype for p in weights} == {"float32"}
    assert {p.lhs_dtype for p in found} == {p.rhs_dtype for p in found} == {"bfloat16"}


def test_gradients_of_convolutions_stay_half():
    def convolved(w, x):
        return jnp.sum(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME") ** 2)

    w, x = jnp.ones((4, 2, 3, 3)), jnp.ones((1, 2, 8, 8))
    found = numerics.audit(autocast(jax.grad(convolved), "mixed_bfloat16"), w, x)
    assert {(p.lhs_dtype, p.out_dtype) for p in found.products} == {("bfloat16", "bfloat16")}


def test_derivatives_of_gradients_are_half():
    gradient = autocast(jax.grad(loss_fn), "mixed_bfloat16")

    def penalty(params, x):
        return sum(jnp.sum(g**2) for g in gradient(params, x))

    def along(params, x):
        return jax.jvp(lambda p: gradient(p, x), [params], [params])[1]

    for fun in (jax.grad(penalty), along):
        found = numerics.audit(fun, PARAMS, X).products
        assert {p.lhs_dtype for p in found} == {p.rhs_dtype for p in found} == {"bfloat16"}


def test_an_optimizer_takes_float32(standard_promotion):
    optimizer = optax.adam(1e-2)

    def train(params, state, x):
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        updates, state = optimizer.update(grads, state)
        return loss, optax.apply_updates(params, updates), state

    half = jax.jit(autocast(train, "mixed_bfloat16"))
    params, state, losses = PARAMS, optimizer.init(PARAMS), []
    for _ in range(10):
        loss, params, state = half(params, state, X)
        losses.append(float(loss))
    assert losses[-1] < losses[0]


def test_another_dtype_is_refused():
    for wrong in (jnp.float16, "float64"):
        with pytest.raises(ValueError, match="reduce_dtype is float.*write float32"):
            autocast(loss_fn, "mixed_bfloat16", reduce_dtype=wrong)
    autocast(loss_fn, "float32", reduce_dtype="bfloat16")  # a policy that changes nothing
