"""Products in float8: how near they are, where they are, and what is not finite in them."""

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import pallas

import jmp_kit
from benchmarks.training import plain_state, plain_step
from benchmarks.zoo import WIDE
from jmp_kit import NoOpLossScale, autocast, numerics, value_and_grad
from tests.casting.test_zoo import distance

FLOAT8 = {"": "float8"}  # whatever the size
KEYS = jax.random.split(jax.random.key(0), 8)


def normal(key, *shape, scale=1.0):
    return scale * jax.random.normal(KEYS[key], shape)


X = normal(0, 64, 32)
PARAMS = {"up": normal(1, 32, 128, scale=0.2), "down": normal(2, 128, 32, scale=0.1)}


def loss_fn(params, x):
    return jnp.mean((x + jax.nn.gelu(x @ params["up"]) @ params["down"]) ** 2)


def in_float8(fun, rules=FLOAT8, **options):
    return autocast(fun, "mixed_bfloat16", rules=rules, **options)


def one_line(fun, **options):
    return in_float8(jax.value_and_grad(fun), **options)


def four_lines(fun, **options):
    return value_and_grad(in_float8(fun, **options), NoOpLossScale())


def plain(fun, **options):
    return jax.value_and_grad(in_float8(fun, **options))


WAYS = {"one line": one_line, "four lines": four_lines, "jax.grad": plain}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def squared_gradient(fun):
    """The function that penalises the gradient of a function."""
    return lambda *args: sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(fun)(*args)))


def operands_of(fun, *args):
    """Of the products, the dtypes of the operands; each pair once."""
    return {(p.lhs_dtype, p.rhs_dtype) for p in numerics.audit(fun, *args).products}


EIGHT, HALF = 2 * ("float8_e4m3fn",), 2 * ("bfloat16",)


def gradients(fun, full, params):
    """Of products in float8 alone; and those of the function in full precision."""
    assert operands_of(fun, params, X) == {EIGHT}
    loss, grads = jax.jit(fun)(params, X)
    wanted_loss, wanted = jax.value_and_grad(full)(params, X)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, wanted_loss, rtol=0.01)
    return grads, wanted


@ways
@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint])
def test_every_product_takes_float8_and_the_gradient_is_near(way, around):
    grads, wanted = gradients(way(around(loss_fn)), loss_fn, PARAMS)
    assert distance(grads, wanted) < 0.085
    assert jax.tree.map(lambda g: g.dtype, grads) == jax.tree.map(lambda p: p.dtype, PARAMS)


@pytest.mark.parametrize(("outlier", "limit"), [(1, 0.06), (100, 0.09), (1e4, 0.09)])
def test_an_outlier_among_the_channels_costs_the_others_little(outlier, limit):
    x = X.at[:, 3].mul(outlier)
    params = PARAMS | {"up": PARAMS["up"].at[3].divide(outlier)}
    wanted = jax.grad(loss_fn)(params, x)
    _, grads = four_lines(loss_fn)(params, x)
    for name in params:
        assert distance(grads[name], wanted[name]) < limit


def test_the_cotangents_of_small_rows_are_near():
    """Tokens whose loss weighs little: with one scale for all they would be flushed to zero."""
    weights = jnp.where(jnp.arange(64) % 2 == 0, 1.0, 1e-4)[:, None]

    def weighted(x, params):
        return jnp.sum(weights * (x + jax.nn.gelu(x @ params["up"]) @ params["down"]) ** 2)

    wanted = jax.grad(weighted)(X, PARAMS)
    got = in_float8(jax.grad(weighted))(X, PARAMS)
    assert distance(got[1::2], wanted[1::2]) < 0.085


@ways
@pytest.mark.parametrize("size", [0.0, 1e-40, 1e-30, 1e30])
def test_zeros_subnormals_and_large_values_are_finite(way, size):
    def loss(params, x):
        return jnp.sum(jnp.tanh(x @ params["up"]) @ params["down"])

    params = PARAMS | {"up": PARAMS["up"].at[:, :4].set(size)}
    value, grads = way(loss)(params, X.at[:3].set(0.0))
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


@ways
@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_so(way, wrong):
    value, grads = way(loss_fn)(PARAMS, X.at[5, 7].set(wrong))
    assert not np.isfinite(value)
    assert not jmp_kit.all_finite(grads)


def test_a_step_with_an_infinity_is_skipped(standard_promotion):
    optimizer = jmp_kit.mixed_precision(optax.adam(1e-2), jmp_kit.DynamicLossScale(2.0**15))
    state = optimizer.init(PARAMS)

    @jax.jit
    def step(state, x):
        scale = jmp_kit.loss_scale_of(state)
        _, grads = value_and_grad(in_float8(loss_fn), scale)(PARAMS, x)
        return optimizer.update(grads, state, PARAMS)

    for x, finite in ((X, True), (X.at[0, 0].set(jnp.inf), False), (X, True)):
        updates, state = step(state, x)
        assert bool(jmp_kit.metrics(state)["finite"]) == finite
        assert any(jnp.any(u != 0) for u in jax.tree.leaves(updates)) == finite


@pytest.mark.parametrize("power", [1, 7, 15])
def test_a_loss_scale_changes_no_bit(power):
    plain, scaled = (
        jax.jit(value_and_grad(in_float8(loss_fn), jmp_kit.StaticLossScale(scale)))(PARAMS, X)
        for scale in (1.0, 2.0**power)
    )
    jax.tree.map(np.testing.assert_array_equal, scaled, plain)


def test_products_with_batches_and_several_contracted_axes():
    w, x = normal(3, 4, 8, 16, 24), normal(4, 5, 4, 8, 16)
    functions = {
        "several": (lambda w, x: jnp.einsum("bhid,hidk->bk", x, w), w, x),
        "batched": (lambda w, x: jnp.einsum("bhid,hidk->bhik", x, w), w, x),
        "transposed": (lambda w, x: jnp.einsum("bhid,hidk->hkb", x, w), w, x),
        "vector": (lambda w, x: jnp.einsum("bhid,hid->b", x, w), w[..., 0], x),
        "same": (lambda w, x: jnp.einsum("bhid,bhjd->bhij", x, x) * w[0, 0, 0, 0], w, x),
    }
    for name, (fun, *args) in functions.items():

        def loss(w, x, fun=fun):
            y = fun(w, x)
            return jnp.sum(y * jnp.cos(jnp.arange(y.size, dtype=jnp.float32).reshape(y.shape)))

        found, wanted = (jax.jit(f)(*args) for f in (in_float8(fun), fun))
        np.testing.assert_array_less(distance(found, wanted), 0.05, err_msg=name)
        wanted = jax.jit(jax.grad(loss, (0, 1)))(*args)
        for way in (in_float8(jax.grad(loss, (0, 1))), jax.grad(in_float8(loss), (0, 1))):
            assert operands_of(way, *args) == {EIGHT}
            assert distance(jax.jit(way)(*args), wanted) < 0.085, name


def layers(params, x):
    def layer(x, p):
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"], None

    return jnp.mean(lax.scan(layer, x, params)[0] ** 2)


STACKED = {name: jnp.stack([w, -w, 0.5 * w]) for name, w in PARAMS.items()}


def kernel_of_half(x):
    def copy(given, result):
        result[...] = given[...]

    shape = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
    call = pallas.pallas_call(copy, out_shape=shape, interpret=True)
    return call(x.astype(jnp.bfloat16)).astype(jnp.float32)


copied = jax.custom_vjp(kernel_of_half)
copied.defvjp(lambda x: (kernel_of_half(x), None), lambda _, g: (kernel_of_half(g),))


@ways
def test_what_a_kernel_takes_is_scaled_where_it_is_made(way):
    """In one product, of matrices, and with one rounding."""

    def loss(params, x):
        heads = copied(jnp.einsum("btd,dhk->bthk", x, params["up"].reshape(32, 8, 16)))
        out = jnp.einsum("bthk,hkd->btd", heads, params["down"].reshape(8, 16, 32))
        return jnp.mean((x + out) ** 2)

    args = PARAMS, X.reshape(16, 4, 32)
    got = jax.jit(way(loss))(*args)
    assert distance(got, jax.value_and_grad(loss)(*args)) < 0.085
    assert operands_of(way(loss), *args) == {EIGHT, HALF}  # the kernels'
    # What goes into the kernel, and its cotangent.
    traced = str(jax.make_jaxpr(way(loss))(*args))
    assert len(set(re.findall(r"(\w+):f32\[64,128\] = dot_general", traced))) >= 2


@ways
def test_in_scans_and_under_vmap(way):
    fun = way(layers)
    assert operands_of(fun, STACKED, X) == {EIGHT}
    found, wanted = (jax.jit(f)(STACKED, X) for f in (fun, jax.value_and_grad(layers)))
    assert distance(found, wanted) < 0.085
    many = jnp.stack([X, 2 * X])
    found, wanted = (
        jax.jit(jax.vmap(f, (None, 0)))(PARAMS, many)
        for f in (way(loss_fn), jax.value_and_grad(loss_fn))
    )
    assert distance(found, wanted) < 0.085


def test_what_the_function_closes_over_has_a_gradient():
    def closing(autocasted):
        def loss(params, x):
            return autocasted(lambda x: loss_fn(params, x))(x)

        return loss

    wanted = jax.grad(loss_fn)(PARAMS, X)
    assert distance(jax.jit(jax.grad(closing(in_float8)))(PARAMS, X), wanted) < 0.085


def test_the_second_derivative_is_there():
    found, wanted = (
        jax.jit(jax.grad(squared_gradient(fun)))(PARAMS, X) for fun in (in_float8(loss_fn), loss_fn)
    )
    assert distance(found, wanted) < 0.15


def test_a_product_that_contracts_nothing_goes_to_a_kernel():
    fun = in_float8(lambda a, b: kernel_of_half(jnp.einsum("i,j->ij", a, b)))
    np.testing.assert_allclose(fun(jnp.ones(3), jnp.ones(4)), jnp.ones((3, 4)))


def test_no_way_computes_the_forward_pass_twice():
    compiled = [jax.jit(way(loss_fn)).lower(PARAMS, X).compile() for way in WAYS.values()]
    operations = [c.cost_analysis()["flops"] for c in compiled]
    np.testing.assert_allclose(operations, operations[0], rtol=0.01)
    kept = [c.memory_analysis().temp_size_in_bytes for c in compiled]
    assert max(kept) <= 1.01 * min(kept)


@ways
def test_the_value_beside_a_gradient_has_a_derivative(way):
    grads = jax.grad(lambda params: way(loss_fn)(params, X)[0])(PARAMS)
    assert distance(grads, jax.grad(loss_fn)(PARAMS, X)) < 0.085


@pytest.mark.parametrize("recompute", [False, True, "most", 0.0])
def test_whatever_is_computed_again(recompute):
    fun = one_line(loss_fn, recompute=recompute)
    assert operands_of(fun, PARAMS, X) == {EIGHT}
    assert distance(fun(PARAMS, X), jax.value_and_grad(loss_fn)(PARAMS, X)) < 0.085


LARGE = jax.ShapeDtypeStruct((8192, 4096), jnp.float32)
WEIGHTS = {
    "attention": {"kernel": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)},
    "small": {"kernel": jax.ShapeDtypeStruct((4096, 64), jnp.float32)},
}


def two_sizes(params, x):
    with jax.named_scope("attention"):
        x = jnp.tanh(x @ params["attention"]["kernel"])
    with jax.named_scope("small"):
        return jnp.mean((x @ params["small"]["kernel"]) ** 2)


def formats(rules=None, policy="mixed_float8"):
    fun = value_and_grad(autocast(two_sizes, policy, rules=rules), NoOpLossScale())
    found = numerics.audit(fun, WEIGHTS, LARGE).products
    return {(p.path, p.lhs_dtype, p.rhs_dtype) for p in found}


def test_the_size_decides_and_a_rule_before_it():
    both = [("attention", *EIGHT), ("small", *HALF)]
    assert formats() == set(both)
    assert formats({"small": "float8"}) == {("attention", *EIGHT), ("small", *EIGHT)}
    assert formats({"attention": "bfloat16"}) == {("attention", *HALF), ("small", *HALF)}
    assert formats({"attention": "float32"}) == {
        ("attention", "float32", "float32"),
        ("small", *HALF),
    }
    assert formats({"kernel": "float8"}, "mixed_bfloat16") == {
        ("attention", *EIGHT),
        ("small", *EIGHT),
    }
    assert formats(policy="mixed_bfloat16") == {("attention", *HALF), ("small", *HALF)}


def test_the_plan_says_where_and_why_not():
    found = numerics.plan(two_sizes, "mixed_float8", WEIGHTS, LARGE)
    products = [p for part in found.parts for p in part.products]
    assert products == ["dot_general float8_e4m3fn", "dot_general bfloat16: N is 64"]
    found = numerics.plan(
        two_sizes, "mixed_float8", WEIGHTS, LARGE, rules={"attention": "bfloat16"}
    )
    products = [p for part in found.parts for p in part.products]
    assert products == ["dot_general bfloat16: a rule says so", "dot_general bfloat16: N is 64"]
    found = numerics.plan(two_sizes, "mixed_bfloat16", WEIGHTS, LARGE)
    assert {p for part in found.parts for p in part.products} == {"dot_general bfloat16"}


def test_an_operand_is_off_by_what_the_page_says():
    found = in_float8(lambda x: x @ jnp.eye(512))(jax.random.normal(KEYS[5], (256, 512)))
    exact = jax.random.normal(KEYS[5], (256, 512))
    assert distance(found, exact) == pytest.approx(0.026, abs=0.002)


def test_what_is_left_as_it_is_written():
    x, w = LARGE, WEIGHTS["attention"]["kernel"]
    products = {
        "half_precision": (jmp_kit.half_precision(lambda x, w: x @ w), HALF),
        "written": (lambda x, w: x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), HALF),
        "full_precision": (jmp_kit.full_precision(lambda x, w: x @ w), 2 * ("float32",)),
        "plain": (lambda x, w: x @ w, EIGHT),
    }
    for name, (product, expected) in products.items():

        def loss(x, w, product=product):
            return jnp.sum(product(x, w).astype(jnp.float32))

        half = autocast(loss, "mixed_float8")
        gradient = value_and_grad(half, NoOpLossScale(), argnums=(0, 1))
        assert operands_of(gradient, x, w) == {expected}, name


@pytest.mark.parametrize("shapes", [((0, 4), (4, 3)), ((3, 0), (0, 3)), ((4,), (4,))])
def test_empty_operands_and_vectors(shapes, standard_promotion):
    x, w = map(jnp.ones, shapes)
    value, slope = value_and_grad(in_float8(lambda x, w: jnp.sum(x @ w)), NoOpLossScale())(x, w)
    assert (float(value), slope.shape) == (pytest.approx(float(jnp.sum(x @ w))), x.shape)
    whole = in_float8(lambda x, w: jnp.sum(x @ w).astype(jnp.float32))
    assert whole(jnp.ones((2, 4), jnp.int8), jnp.ones((4, 3))) == pytest.approx(24)


def test_other_reasons():
    def reason_of(fun, *args):
        [product] = numerics.plan(fun, "mixed_float8", *args).parts[0].products
        return product.partition(": ")[2]

    images, kernel = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 64, 9, 9), (64, 64, 3, 3)))
    convolved = functools.partial(lax.conv_general_dilated, window_strides=(1, 1), padding="SAME")
    assert "conv_general_dilated is not" in reason_of(convolved, images, kernel)
    square = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    assert reason_of(jnp.matmul, square, square) == "1.1e+09 multiplications"
    odd = jax.ShapeDtypeStruct((2049, 1024), jnp.float32)
    assert reason_of(jnp.matmul, odd, square) == "M is 2049"

    def known_later(x, w):
        return jnp.sum(autocast(jnp.matmul, "mixed_float8")(x, w))

    symbolic = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 1024"), jnp.float32)
    exported = jax.export.export(jax.jit(known_later))(symbolic, square)
    made = exported.call(jnp.ones((2, 1024)), jnp.ones((1024, 1024)))
    assert made == pytest.approx(2 * 1024**2)
    forced = jax.jit(lambda x, w: jnp.sum(in_float8(jnp.matmul)(x, w)))
    exported = jax.export.export(forced)(symbolic, square)
    made = exported.call(jnp.ones((2, 1024)), jnp.ones((1024, 1024)))
    assert made == pytest.approx(2 * 1024**2)


def test_policies_of_float8():
    policy = jmp_kit.get_policy("mixed_float8")
    assert str(policy) == "p=f32,c=f8,o=f32"
    assert jmp_kit.get_policy(str(policy)) == policy
    assert str(jmp_kit.get_policy("c=float8")) == "p=f32,c=f8,o=bf16"
    assert policy.cast_to_compute(jnp.ones(2)).dtype == jnp.bfloat16
    assert policy.compute_dtype == jnp.float8_e4m3fn
    for wrong in ("float8", "p=f8", "o=f8,c=f8"):
        with pytest.raises(ValueError, match="only products compute in float8.*mixed_float8"):
            jmp_kit.get_policy(wrong)
    for written in ("float8", "f8", jnp.float8_e4m3fn, "mixed_float8", policy):
        assert formats(policy=written) == formats()
    with pytest.raises(ValueError, match="e5m2"):
        autocast(loss_fn, jnp.float8_e5m2)


def test_small_products_of_a_float8_policy_are_as_in_bfloat16():
    args = PARAMS, X
    half, eight = (
        jax.jit(jax.value_and_grad(autocast(loss_fn, f"mixed_{name}"))).lower(*args).as_text()
        for name in ("bfloat16", "float8")
    )
    assert half == eight


@functools.cache
def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def test_on_several_devices():
    spec = jax.sharding.PartitionSpec
    split = jax.device_put(X, jax.NamedSharding(mesh(), spec("data")))
    fun = jax.jit(one_line(loss_fn))
    wanted = one_line(loss_fn)(PARAMS, X)
    got = fun(PARAMS, split)
    # A bfloat16 cotangent of other sums may be another, and so may be its float8.
    assert distance(got, wanted) < 0.01
    # Of the scales by which weights' gradients are made, a maximum over tokens on all devices.
    found = numerics.audit(fun.lower(PARAMS, split).compile()).transfers
    reduced = [t for t in found if t.kind == "all-reduce"]
    assert max(t.nbytes for t in reduced) <= 4 * 32 * 128
    mapped = jax.shard_map(
        lambda p, x: jax.lax.pmean(loss_fn(p, x), "data"),
        mesh=mesh(),
        in_specs=(spec(), spec("data")),
        out_specs=spec(),
    )
    wanted = jax.value_and_grad(loss_fn)(PARAMS, X)
    assert distance(jax.jit(four_lines(mapped))(PARAMS, split), wanted) < 0.085
    inside = jax.shard_map(
        lambda p, x: four_lines(lambda p, x: jax.lax.pmean(loss_fn(p, x), "data"))(p, x),
        mesh=mesh(),
        in_specs=(spec(), spec("data")),
        out_specs=spec(),
    )
    assert distance(jax.jit(inside)(PARAMS, split), wanted) < 0.085


H200 = numerics.TARGETS["h200"]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
@pytest.mark.parametrize("libraries", [False, True])
def test_an_h200_multiplies_float8_and_a_layer_needs_less_memory(libraries, standard_promotion):
    """GPT's layer of 2,048 channels: three of them against one."""

    def step(layers, policy):
        model = WIDE["gpt 1.3B, 4 layers"].at(layers=layers)
        train = plain_step(model.task.loss(), model.task.optimizer)
        args = jax.eval_shape(plain_state(model.task)), *model.batch
        jitted = jax.jit(autocast(train, policy), donate_argnums=0)
        options = {**H200.compiler_options, "xla_gpu_enable_triton_gemm": not libraries}
        return jitted.lower(*H200.placed(args)).compile(compiler_options=options)

    def layer(policy):
        """Bytes moved and kept by a layer."""
        costs = [
            (numerics.traffic(c).nbytes, c.memory_analysis().temp_size_in_bytes)
            for c in (step(1, policy), step(3, policy))
        ]
        return np.subtract(*reversed(costs)) / 2

    products = numerics.audit(step(1, "mixed_float8")).products
    multiplied = [p for p in products if not p.primitive.startswith("attention")]
    assert {(p.lhs_dtype, p.rhs_dtype) for p in multiplied} == {EIGHT}
    assert len(multiplied) == 15
    moved, kept = layer("mixed_float8") / layer("mixed_bfloat16")
    assert moved < (1.18 if libraries else 1.1)
    assert kept < 0.9


def test_a_rule_that_can_be_called_only_while_it_is_differentiated():
    @jax.custom_vjp
    def scaled(x):
        return 2 * x

    scaled.defvjp(lambda x: (2 * x.value, None), lambda _, g: (2 * g,), symbolic_zeros=True)

    def loss(params, x):
        return loss_fn(params, scaled(x))

    for take in (lambda f: f, squared_gradient):
        wanted, got = (jax.grad(take(f))(PARAMS, X) for f in (loss, in_float8(loss)))
        assert distance(got, wanted) < 0.15
