"""One run on one device and on several: the same losses, skips and scales; bytes on the wire."""

import collections
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_kit
from tests.compiling import quick_or_slow

pytestmark = pytest.mark.usefixtures("standard_promotion")  # for optax.adamw

WIDTH, ROWS, STEPS = 16, 32, 50
SPOILED = (7, 23)  # steps at which one row, and so one device, overflows


def mesh_of(n, axis_type=AxisType.Auto):
    return jax.make_mesh((n,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:n])


def start(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    weights = [jax.random.normal(key, (WIDTH, WIDTH)) / math.sqrt(WIDTH) for key in keys]
    layers = {f"layer{i}": {"w": w, "b": jnp.zeros(WIDTH)} for i, w in enumerate(weights)}
    return jax.tree.map(lambda x: x.astype(dtype), layers)


def network(params, x):
    *hidden, last = params.values()
    for layer in hidden:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ last["w"] + last["b"]


def batch(step):
    random = np.random.default_rng(step)
    x = random.normal(size=(ROWS, WIDTH)).astype(np.float32)
    y = np.roll(x, 1, axis=1)
    if step in SPOILED:
        y[3] = np.inf
    return x, y


def specs_of(params, split):
    """Matrices split along their rows, the rest on every device."""
    return jax.tree.map(lambda p: P("data") if split and p.ndim > 1 else P(), params)


def optimizer_of(axis_name=None, **kwargs):
    loss_scale = jmp_kit.DynamicLossScale(2.0**10, period=10)
    return jmp_kit.mixed_precision(optax.adamw(1e-2), loss_scale, axis_name=axis_name, **kwargs)


def jitted_step(mesh, specs, optimizer, policy):
    """The partitioner's."""

    @jmp_kit.autocast(policy)
    def loss_fn(params, x, y):
        return jnp.mean((network(params, x) - y) ** 2)

    def step(params, opt_state, x, y):
        scale = jmp_kit.loss_scale_of(opt_state)
        loss, grads = jmp_kit.value_and_grad(loss_fn, scale)(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def mapped_step(mesh, specs, optimizer, policy, state_specs, reduce_dtype=jnp.float32):
    """By hand, gathered in half."""
    policy = jmp_kit.get_policy(policy)

    @jmp_kit.autocast(policy)
    def loss_fn(params, x, y):
        whole = jmp_kit.gather_params(
            params, specs, "data", policy.compute_dtype, reduce_dtype=reduce_dtype
        )
        whole = jax.tree.map(lambda x: x.astype(jnp.float32), whole)
        return lax.pmean(jnp.mean((network(whole, x) - y) ** 2), "data")

    def step(params, opt_state, x, y):
        scale = jmp_kit.loss_scale_of(opt_state)
        loss, grads = jmp_kit.value_and_grad(loss_fn, scale)(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    rows = P("data")
    return jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(specs, state_specs, rows, rows),
            out_specs=(specs, state_specs, P()),
        ),
        donate_argnums=(0, 1),
    )


def made(n, kind, policy="mixed_float16", axis_type=AxisType.Auto, **kwargs):
    """A step on n devices, its parameters and state, and the sharding of a batch."""
    mesh = mesh_of(n, axis_type)
    params = start()
    specs = specs_of(params, split=kind != "copied")
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    params = jax.device_put(params, shardings)
    optimizer = optimizer_of("data" if kind == "mapped" else None)
    opt_state = jax.jit(optimizer.init)(params)
    if kind == "mapped":
        found = jmp_kit.state_shardings(opt_state, params)
        state_specs = jax.tree.map(lambda sharding: sharding.spec, found)
        step = mapped_step(mesh, specs, optimizer, policy, state_specs, **kwargs)
    else:
        step = jitted_step(mesh, specs, optimizer, policy)
    return step, params, opt_state, NamedSharding(mesh, P("data"))


def placed(tree):
    return [(x.sharding.device_set, x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree)]


@functools.cache
def walk(n, kind, axis_type=AxisType.Auto, steps=STEPS):
    step, params, opt_state, rows = made(n, kind, axis_type=axis_type)
    places, seen = placed((params, opt_state)), []
    for i in range(steps):
        x, y = jax.device_put(batch(i), rows)
        params, opt_state, loss = step(params, opt_state, x, y)
        told = jmp_kit.metrics(opt_state)
        seen.append((float(loss), told["loss_scale"], told["skipped"]))
    # Where shardings are types, JAX gives what was put at P() back at P(None), another signature.
    assert step._cache_size() == (1 if axis_type == AxisType.Auto else 2)
    assert placed((params, opt_state)) == places
    return np.array(seen), jax.tree.map(np.asarray, params)


@pytest.mark.parametrize("kind", ["copied", "split", "mapped"])
@pytest.mark.parametrize("n", quick_or_slow([2, 4, 8], [8]))
def test_many_devices_walk_as_one(n, kind):
    (one, params), (many, found) = walk(1, "copied"), walk(n, kind)
    np.testing.assert_array_equal(many[:, 1:], one[:, 1:])  # scales and skips
    good = np.isfinite(one[:, 0])
    assert list(np.flatnonzero(~good)) == list(SPOILED)
    np.testing.assert_array_equal(np.isfinite(many[:, 0]), good)
    np.testing.assert_allclose(many[good, 0], one[good, 0], rtol=3e-3)
    assert one[-1, 2] == len(SPOILED)
    assert one[-1, 0] < 0.5 * one[0, 0]
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(a, b, atol=0.02)


@pytest.mark.parametrize("kind", ["copied", "split", "mapped"])
def test_meshes_whose_shardings_are_types(kind):
    (one, _), (many, _) = walk(1, "copied"), walk(8, kind, AxisType.Explicit, SPOILED[0] + 2)
    np.testing.assert_allclose(many, one[: len(many)], rtol=3e-3)
    assert many[-1, 2] == 1


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "master", quick_or_slow(["float32", "remainder", "kahan", "stochastic"], ["remainder"])
)
def test_a_state_lies_beside_its_parameters(axis_type, master):
    mesh = mesh_of(8, axis_type)
    params = start(jnp.bfloat16)
    shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), specs_of(params, split=True))
    params = jax.device_put(params, shardings)
    inner = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), 2)
    optimizer = jmp_kit.mixed_precision(inner, jmp_kit.DynamicLossScale(), master=master)
    abstract = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=p.sharding), params
    )
    with jax.set_mesh(mesh):
        expected = jmp_kit.state_shardings(jax.eval_shape(optimizer.init, abstract), abstract)
        made = {
            "eagerly": optimizer.init(params),
            "under jit": jax.jit(optimizer.init)(params),
            "as told": jax.jit(optimizer.init, out_shardings=expected)(params),
        }
        for state in made.values():
            for leaf, sharding in zip(
                jax.tree.leaves(state), jax.tree.leaves(expected), strict=True
            ):
                assert leaf.sharding.shard_shape(leaf.shape) == sharding.shard_shape(leaf.shape)
        step = jax.jit(optimizer.update)
        state = made["under jit"]
        _, after = step(jax.tree.map(lambda p: p.astype(jnp.float32), params), state, params)
    assert placed(after) == placed(state)


@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
def test_the_wire_carries_half(reduce_dtype):
    def bytes_of(policy, reduce_dtype):
        step, params, opt_state, rows = made(8, "mapped", policy, reduce_dtype=reduce_dtype)
        lowered = step.lower(params, opt_state, *jax.device_put(batch(0), rows))
        found = collections.Counter()
        for transfer in jmp_kit.numerics.audit(lowered).transfers:
            found[transfer.kind, transfer.dtype] += transfer.nbytes
        return found

    matrices, rest = 3 * WIDTH * WIDTH, 4 * 3 * WIDTH + 4  # biases and the loss in float32
    exact = {("all-reduce", "float32"): rest, ("all-reduce", "int32"): 4}  # the finite check
    assert bytes_of("float32", jnp.float32) == exact | {
        ("all-gather", "float32"): 4 * matrices,
        ("reduce-scatter", "float32"): 4 * matrices,
    }
    half = bytes_of("mixed_bfloat16", reduce_dtype)
    if reduce_dtype == "bfloat16":  # of biases too
        exact = {("all-reduce", "bfloat16"): (rest - 4) // 2, ("all-reduce", "float32"): 4}
        exact["all-reduce", "int32"] = 4
    assert half == exact | {
        ("all-gather", "bfloat16"): 2 * matrices,
        ("reduce-scatter", reduce_dtype): jnp.dtype(reduce_dtype).itemsize * matrices,
    }


@pytest.mark.parametrize(("reduce_dtype", "finite"), [(jnp.float16, False), (jnp.float32, True)])
def test_a_half_sum_that_overflows_is_a_skipped_step(reduce_dtype, finite):
    """Each device's gradient is finite in float16, and their sum is not."""
    mesh, specs = mesh_of(8), {"w": P("data")}
    params = jax.device_put({"w": jnp.ones((8, 8))}, {"w": NamedSharding(mesh, P("data"))})
    optimizer = optimizer_of("data")
    opt_state = optimizer.init(params)
    state_specs = jax.tree.map(lambda s: s.spec, jmp_kit.state_shardings(opt_state, params))

    def step(params, opt_state, x):
        def loss_fn(params):
            whole = jmp_kit.gather_params(
                params, specs, "data", jnp.float16, reduce_dtype=reduce_dtype
            )
            return lax.psum(jnp.sum(x @ whole["w"].astype(jnp.float32)), "data")

        scale = jmp_kit.StaticLossScale(2.0**10)
        _, grads = jmp_kit.value_and_grad(loss_fn, scale)(params)
        return optimizer.update(grads, opt_state, params)

    in_specs, out_specs = (specs, state_specs, P("data")), (specs, state_specs)
    mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=out_specs))
    updates, opt_state = mapped(params, opt_state, 16 * jnp.ones((8, 8)))
    assert bool(opt_state.finite) == finite
    assert float(opt_state.loss_scale.loss_scale) == (2.0**10 if finite else 2.0**9)
    assert bool((updates["w"] == 0).all()) != finite


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_the_finite_check_adds_one_collective_of_scalars(axis_type):
    mesh = mesh_of(8, axis_type)
    specs = specs_of(start(), split=True)
    params = jax.device_put(start(), jax.tree.map(lambda s: NamedSharding(mesh, s), specs))

    def transfers_of(optimizer):
        def update(grads, opt_state, params):
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        with jax.set_mesh(mesh):
            args = params, jax.jit(optimizer.init)(params), params
            compiled = jax.jit(update).lower(*args).compile()
        return jmp_kit.numerics.audit(compiled).transfers

    assert transfers_of(optax.adamw(1e-2)) == ()
    found = transfers_of(optimizer_of())
    # XLA does them at once: a byte for each array, or fewer.
    assert {transfer.kind for transfer in found} == {"all-reduce"}
    assert sum(transfer.nbytes for transfer in found) <= len(jax.tree.leaves(params)) + 1


def test_several_axes_and_a_dimension_that_stays_split():
    mesh = jax.make_mesh((2, 2, 2), ("replica", "data", "model"), axis_types=(AxisType.Auto,) * 3)
    specs = {"w": P(("replica", "data"), "model"), "v": P("data"), "b": P("model"), "n": P()}
    shapes = {"w": (8, 6), "v": (4, 8), "b": (6,), "n": ()}
    random = np.random.default_rng(0)
    params = {k: jnp.asarray(random.integers(-4, 5, s), jnp.float32) for k, s in shapes.items()}
    x = jnp.asarray(random.integers(-4, 5, (8, 4)), jnp.float32)

    def loss_fn(params, x):
        y = x @ params["v"] @ params["w"] * params["n"] + params["b"]
        return jnp.mean(y)

    def mapped(params, x):
        def loss(params, x):
            whole = jmp_kit.gather_params(params, specs, ("replica", "data"), "bfloat16")
            whole = jax.tree.map(lambda x: x.astype(jnp.float32), whole)
            assert whole["w"].shape == (8, 3)  # along "model" it is as it was
            return lax.pmean(loss_fn(whole, x), ("replica", "data", "model"))

        return jax.value_and_grad(loss)(params, x)

    batch_spec = P(("replica", "data"))
    step = jax.jit(
        jax.shard_map(mapped, mesh=mesh, in_specs=(specs, batch_spec), out_specs=(P(), specs))
    )
    (loss, grads), (expected, wanted) = step(params, x), jax.value_and_grad(loss_fn)(params, x)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, wanted[name], rtol=1e-2, err_msg=name)
        assert grad.dtype == jnp.float32


def test_gathering_is_linear_and_can_be_differentiated_forward():
    mesh, spec = mesh_of(8), P("data")

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(spec, spec), out_specs=P("data"))
    def tangent(w, v):
        gather = lambda w: jmp_kit.gather_params(w, spec, "data") ** 2  # noqa: E731
        return jax.jvp(gather, (w,), (v,))[1].astype(jnp.float32).sum(keepdims=True)

    w = jnp.arange(16.0).reshape(8, 2)
    assert (tangent(w, jnp.ones((8, 2))) == 2 * w.sum()).all()


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_of_each_example(check_vma, dtype):
    """Of parameters split and copied, as `vmap(grad)` gives them, summed over the devices."""
    mesh, specs = mesh_of(8), {"w": P("data"), "b": P()}

    def loss_fn(params, x, gather=lambda params: params):
        whole = jax.tree.map(lambda w: w.astype(jnp.float32), gather(params))
        return jnp.sum((x @ whole["w"] + whole["b"]) ** 2)

    gather = lambda params: jmp_kit.gather_params(params, specs, "data")  # noqa: E731
    grads_of = jax.vmap(jax.grad(functools.partial(loss_fn, gather=gather)), (None, 0))
    random = np.random.default_rng(0)
    params = {"w": jnp.asarray(random.integers(-3, 4, (8, 4)), dtype), "b": jnp.ones(4, dtype)}
    x = jnp.asarray(random.integers(-3, 4, (3, 8)), jnp.float32)
    found = jax.shard_map(
        grads_of,
        mesh=mesh,
        in_specs=(specs, P()),
        out_specs={"w": P(None, "data"), "b": P()},
        check_vma=check_vma,
    )(params, x)
    wanted = jax.vmap(jax.grad(loss_fn), (None, 0))(params, x)
    for name, grad in found.items():  # each device has the same examples
        assert grad.dtype == dtype
        np.testing.assert_allclose(np.float32(grad), 8 * np.float32(wanted[name]), rtol=0.01)


@pytest.mark.parametrize("axes", ["data", ("model", "data")])
@pytest.mark.parametrize("order", [("model", "data"), ("data", "model")])
def test_a_dimension_that_is_split_twice(order, axes):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    w, spec, rest = jnp.arange(16.0 * 8).reshape(16, 8), P(order), P("model")
    if axes != "data":
        rest = P()

    def whole():
        return jax.shard_map(
            lambda w: jmp_kit.gather_params(w, spec, axes, "float32"),
            mesh=mesh,
            in_specs=spec,
            out_specs=rest,
            check_vma=False,
        )(w)

    if (order, axes) == (("data", "model"), "data"):
        with pytest.raises(ValueError, match=r"in another order.*PartitionSpec\(\('model', 'data'"):
            whole()
    else:
        np.testing.assert_array_equal(whole(), w)


def test_an_axis_that_is_the_partitioner_s_may_split_what_is_gathered():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    w = jnp.arange(16.0 * 8).reshape(16, 8)
    split = jax.device_put(w, NamedSharding(mesh, P(("data", "model"))))
    gather = jax.shard_map(
        lambda w: jmp_kit.gather_params(w, P(("data", "model")), "data", "float32"),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P(),
        axis_names={"data"},
        check_vma=False,
    )
    np.testing.assert_array_equal(jax.jit(gather)(split), w)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: jmp_kit.gather_params(p, P(), "data", "int8"), "Unknown dtype 'int8'"),
        (lambda p: jmp_kit.gather_params(p, P(), "data", reduce_dtype="f12"), "dtype 'f12'"),
        (
            lambda p: jmp_kit.gather_params(p, P(None, None, "data"), "data"),
            r"has 3 dimensions, but the parameter is float32\[8, 2\]: give the PartitionSpecs",
        ),
    ],
)
def test_bad_input_teaches(call, words):
    with pytest.raises(ValueError, match=words):
        call(jnp.ones((8, 2)))


def test_a_state_without_shardings_and_what_is_no_parameter():
    opt_state = optimizer_of().init({"w": jnp.ones(3)})
    numbers = jax.tree.map(np.asarray, {"w": jnp.ones(3)})
    found = jmp_kit.state_shardings(opt_state, numbers)
    assert jax.tree.leaves(found) == []
    tree = {"count": 3, "name": None, "w": jnp.ones(2)}
    assert jmp_kit.gather_params(tree, P(), ())["count"] == 3
