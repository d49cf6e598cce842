"""What autocast promises beyond numbers: dtypes in between, effects, arguments, errors."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import pallas

import jmp_kit
from jmp_kit import PRODUCTS, autocast, full_precision
from jmp_kit.programs._jaxpr import subjaxprs
from tests.casting.calls import calls_of_ours
from tests.casting.test_zoo import products_of
from tests.casting.zoo import SQUARE, ZOO, X, mean_square


@pytest.mark.parametrize(
    ("operation", "x", "want"),
    [
        (jax.nn.softmax, jnp.full((1, 70000), 300.0), 1 / 70000),
        (lambda h: jax.nn.logsumexp(h, axis=-1, keepdims=True), jnp.zeros((1, 70000)), 11.156),
        (lambda h: jnp.sum(h, -1, keepdims=True) / 70000, jnp.ones((1, 70000)), 1.0),
        (lambda h: h / jnp.linalg.norm(h, axis=-1, keepdims=True), jnp.full((1, 4), 300.0), 0.5),
        (
            lambda h: h * lax.rsqrt(jnp.var(h, -1, keepdims=True) + 1e-8),
            jnp.asarray([[300.0, -300.0, 300.0, -300.0]]),
            jnp.asarray([[1.0, -1.0, 1.0, -1.0]]),
        ),
        (
            lambda h: jax.nn.softmax(h + jnp.asarray([0.0, 0.0, -1e9, -1e9])),
            jnp.full((1, 4), 100.0),
            jnp.asarray([[0.5, 0.5, 0.0, 0.0]]),
        ),
        (lambda h: jnp.log(jnp.exp(h)), jnp.full((1, 4), 80.0), 80.0),
    ],
    ids=["softmax", "logsumexp", "sum", "norm", "variance", "mask", "exp"],
)
def test_float16_between_products_is_right_to_half_precision(operation, x, want):
    def fun(x):
        def times_one(h):
            return jnp.ones((1, 1)) @ h

        return times_one(operation(times_one(x)))

    got = autocast(fun, "mixed_float16")(x)
    np.testing.assert_allclose(got, jnp.broadcast_to(want, got.shape), rtol=2e-3, atol=1e-7)


def stored_dtypes(fun, *args):
    """The dtypes of the variables of each shape in the program that autocast makes."""
    found = {}
    for eqn in jax.make_jaxpr(autocast(fun, "mixed_bfloat16"))(*args).jaxpr.eqns:
        for var in eqn.outvars:
            found.setdefault(var.aval.shape, set()).add(var.aval.dtype.name)
    return found


def test_a_segment_is_stored_in_half_and_its_small_values_are_not():
    def fun(x):
        h = x @ SQUARE[0]
        scale = jnp.sum(h**2, axis=-1, keepdims=True)  # 1 of 16 numbers
        y = jnp.tanh(h / scale) @ SQUARE[1]
        return y * scale @ SQUARE[0]

    dtypes = stored_dtypes(fun, X)
    assert dtypes[X.shape] == {"bfloat16", "float32"}  # float32: the cast of x and of the result
    assert dtypes[(8, 1)] == {"float32"}


def test_what_depends_on_no_product_keeps_its_dtype():
    def fun(x):
        angles = jnp.sin(jnp.arange(4096.0))[:, None] * jnp.ones((1, 4))
        h = jnp.ones((4096, 8)) @ x[:, :4]
        return (h * angles) @ jnp.ones((4, 2))

    program = jax.make_jaxpr(autocast(fun, "mixed_bfloat16"))(X)
    sines = [v for e in program.jaxpr.eqns for v in e.outvars if e.primitive.name == "sin"]
    assert [v.aval.dtype for v in sines] == [jnp.float32]
    exact = jax.jit(fun)(X)
    np.testing.assert_allclose(jax.jit(autocast(fun, "mixed_bfloat16"))(X), exact, atol=0.1)


def test_a_running_sum_beside_a_recurrent_state_stays_float32():
    def fun(x):
        def step(carry, _):
            h, total = carry
            h = jnp.tanh(h @ SQUARE[0])
            return (h, total + h), None

        return lax.scan(step, (x @ SQUARE[1], jnp.zeros_like(x)), None, length=3)[0][1]

    program = jax.make_jaxpr(autocast(fun, "p=f32,c=bf16,o=f32"))(X)
    (scan,) = [e for e in program.jaxpr.eqns if e.primitive.name == "scan"]
    assert [v.aval.dtype.name for v in scan.outvars] == ["bfloat16", "float32"]


def test_the_epilogue_is_float32_to_the_bit():
    """The optimizer of a wrapped train step does what it did."""

    def step(w, x):
        grads = jax.grad(lambda w: mean_square(x @ w))(w)
        return w - 0.1 * grads, grads

    w, grads = autocast(step, "mixed_bfloat16")(SQUARE[0], X)
    np.testing.assert_array_equal(w, SQUARE[0] - 0.1 * grads)


def test_dtypes_that_leave():
    def fun(x):
        y = x @ SQUARE[0]
        return {
            "product": y,
            "half": x.astype(jnp.bfloat16),
            "integer": jnp.argmax(y),
            "number": 3,
            "none": None,
        }

    got = autocast(fun, "p=f32,c=bf16,o=f16")(X)
    assert got["product"].dtype == jnp.float16
    assert got["half"].dtype == jnp.bfloat16
    assert got["integer"].dtype == jnp.int32
    assert got["none"] is None
    assert got["number"] == 3
    assert autocast(fun, "p=f32,c=f32,o=f16")(X)["product"].dtype == jnp.float16


def test_float64_and_integers_are_not_touched():
    with jax.enable_x64(True):
        w = jnp.eye(3, dtype=jnp.float64)
        with pytest.warns(UserWarning, match="1 of 1 products are in float64.*arguments are: x"):
            assert products_of(autocast(lambda x: x @ x, jnp.bfloat16), w) == [{w.dtype}]
        with pytest.warns(UserWarning, match="float64"):
            assert autocast(lambda x: x @ x, jnp.bfloat16)(w).dtype == jnp.float64
    n = jnp.arange(9).reshape(3, 3)
    np.testing.assert_array_equal(autocast(lambda n: n @ n, jnp.float16)(n), n @ n)


def test_products_that_the_user_made_half_or_wide_are_half():
    """preferred_element_type=float32 of half operands makes both backward products float32."""

    def fun(x, w):
        half = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
        return mean_square(jnp.matmul(*half, preferred_element_type=jnp.float32))

    float32 = jnp.dtype(jnp.float32)
    assert sum(float32 in d for d in products_of(jax.grad(fun, (0, 1)), X, SQUARE[0])) == 3
    cast = products_of(jax.grad(autocast(fun, "mixed_bfloat16"), (0, 1)), X, SQUARE[0])
    assert cast == [{jnp.dtype(jnp.bfloat16)}] * 3


def test_random_bits_are_drawn_once_and_effects_keep_their_order():
    seen = []

    def fun(w, key):
        h = X @ w
        keep = jax.random.bernoulli(key, 0.5, h.shape)
        jax.debug.callback(lambda n: seen.append(int(n)), 1, ordered=True)
        h = jnp.where(keep, jnp.tanh(h), 0.0)
        jax.debug.callback(lambda n: seen.append(int(n)), 2, ordered=True)
        return mean_square(h @ w)

    half = autocast(fun, "mixed_bfloat16")
    draws = [
        str(jax.make_jaxpr(jax.grad(f))(SQUARE[0], jax.random.key(0))).count("random_bits")
        for f in (fun, half)
    ]
    assert draws[0] == draws[1] == 1
    jax.block_until_ready(jax.jit(jax.grad(half))(SQUARE[0], jax.random.key(0)))
    jax.effects_barrier()
    assert seen == [1, 2]


def test_a_callback_gets_what_it_was_traced_with():
    seen = []

    def fun(x):
        h = x @ SQUARE[0]
        jax.debug.callback(seen.append, h)
        return jnp.tanh(h) @ SQUARE[1] @ SQUARE[0]

    jax.block_until_ready(jax.jit(autocast(fun, "mixed_bfloat16"))(X))
    jax.effects_barrier()
    assert [x.dtype for x in seen] == [jnp.float32]


def test_collectives_are_not_repeated_in_the_backward_pass():
    """And a segment that holds one is recomputed all the same, but for it."""
    fun, w, x = ZOO["sharded"]
    programs = [
        str(jax.make_jaxpr(jax.grad(f))(w, x)) for f in (fun, autocast(fun, "mixed_bfloat16"))
    ]
    assert programs[0].count("psum_invariant[") == programs[1].count("psum_invariant[") > 0
    assert "remat" in programs[1]


def cube(x):
    """By a kernel, with a kernel for its derivative that takes what the first one gave."""

    def call(kernel, *args):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pallas.pallas_call(kernel, out_shape=shape, interpret=True)(*args)

    def forward_kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] ** 3

    def backward_kernel(x_ref, y_ref, d_ref, o_ref):
        o_ref[...] = 3 * y_ref[...] / x_ref[...] * d_ref[...]

    kernel = jax.custom_vjp(lambda x: call(forward_kernel, x))
    kernel.defvjp(
        lambda x: (y := call(forward_kernel, x), (x, y)),
        lambda kept, d: (call(backward_kernel, *kept, d),),
    )
    return kernel(x)


def factor(x):
    return jnp.linalg.cholesky(x @ x.T + 100 * jnp.eye(len(x))) @ x


@pytest.mark.parametrize(("operation", "name"), [(cube, "pallas_call"), (factor, "cholesky")])
def test_kernels_and_solvers_are_not_run_again_in_the_backward_pass(operation, name):
    def fun(w, x):
        return mean_square(operation(jax.nn.gelu(x @ w[0])) @ w[1])

    half = autocast(fun, "mixed_bfloat16")
    programs = [str(jax.make_jaxpr(jax.grad(f))(SQUARE, X)) for f in (fun, half)]
    counts = [len(re.findall(rf"= {name}\b", program)) for program in programs]
    assert counts[0] == counts[1] > 0
    assert "remat" in programs[1]


@pytest.mark.parametrize("taken", [jnp.bfloat16, jnp.float32])
def test_what_a_kernel_takes_in_half_is_kept_for_its_backward_pass(taken):
    """Not what they are parts of; and a float32 kernel takes what it was traced with."""
    half, full = (jax.ShapeDtypeStruct((8, 8), d) for d in (taken, jnp.float32))

    @jax.custom_vjp
    def kernel(x, y):
        return jax.ffi.ffi_call("forward", (half, full))(x, y)[0]

    def forward(x, y):
        out, statistics = jax.ffi.ffi_call("forward", (half, full))(x, y)
        return out, (x, y, out, statistics)

    kernel.defvjp(forward, lambda kept, d: jax.ffi.ffi_call("backward", (half, half))(*kept, d))

    @autocast("mixed_bfloat16")
    def fun(w, x):
        z = x @ w[0] + jnp.arange(16.0)
        parts = z[:, :8].astype(taken), z[:, 8:].astype(taken)
        return mean_square(kernel(*parts).astype(jnp.float32) @ w[1][:8])

    assert jax.eval_shape(fun, SQUARE, X).dtype == jnp.float32
    eqns = jax.make_jaxpr(jax.grad(fun))(SQUARE, X).jaxpr.eqns
    if taken == jnp.bfloat16:
        assert not any("policy" in e.params for e in eqns)
        [called] = [e for e in eqns if e.params.get("target_name") == "backward"]
        [first] = [e for e in eqns if e.params.get("target_name") == "forward"]
        assert called.invars[:2] == first.invars
    else:
        kernels = [e for e in every_equation(eqns) if e.primitive.name == "ffi_call"]
        assert {v.aval.dtype for e in kernels for v in e.invars} == {jnp.dtype("float32")}


@pytest.mark.parametrize("extremum", ["max", "min"])
def test_an_extremum_is_compared_with_values_computed_alike(extremum):
    """Its derivative asks which value it is: a kept one may differ from all computed again."""

    def fun(w, x):
        h = jax.nn.softmax(x @ w[0])
        return mean_square((h * getattr(jnp, extremum)(h, axis=-1, keepdims=True)) @ w[1])

    jaxpr = jax.make_jaxpr(jax.grad(autocast(fun, "mixed_bfloat16")))(SQUARE, X)
    [repeated] = [e.params["jaxpr"] for e in jaxpr.eqns if "policy" in e.params]
    names = [e.primitive.name for e in repeated.eqns]
    assert names.index(f"reduce_{extremum}") < names.index("eq")


def every_equation(eqns):
    for eqn in eqns:
        yield eqn
        for inner in subjaxprs(eqn):
            yield from every_equation(inner.eqns)


def test_a_segment_that_keeps_nothing_is_not_repeated():
    def fun(w, x):
        return mean_square((x - (x @ w[0]).T.reshape(8, 16)) @ w[1])

    assert "remat" not in str(jax.make_jaxpr(jax.grad(autocast(fun, "mixed_float16")))(SQUARE, X))


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
def test_a_function_with_a_rule_may_close_over_arrays(kind):
    if kind == "vjp":
        layer = jax.custom_vjp(lambda x: x @ SQUARE[0])
        layer.defvjp(lambda x: (x @ SQUARE[0], None), lambda _, d: (d @ SQUARE[0].T,))
    else:
        layer = jax.custom_jvp(lambda x: x @ SQUARE[0])
        layer.defjvp(lambda x, t: (x[0] @ SQUARE[0], t[0] @ SQUARE[0]))

    def fun(x):
        return mean_square(layer(jnp.tanh(layer(x))))

    gradient = jax.grad(autocast(fun, "mixed_float16", reduce_dtype="float16"))
    np.testing.assert_allclose(gradient(X), jax.grad(fun)(X), atol=1e-4)
    assert products_of(gradient, X) == [{jnp.dtype(jnp.float16)}] * 4


def test_parameters_of_calls_are_kept():
    """Names, shardings, donation, unrolling, checkpoint policies."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    saved = jax.checkpoint_policies.dots_saveable

    def layer(w, x):
        return jnp.tanh(x @ w)

    def fun(w, x):
        in_shardings = None, sharding
        x = jax.jit(layer, in_shardings=in_shardings, out_shardings=sharding, donate_argnums=1)(
            w, x
        )
        x = jax.jit(layer, keep_unused=True, inline=False)(w, x)
        x = jax.checkpoint(layer, policy=saved, prevent_cse=False)(w, x)
        x = lax.scan(lambda x, _: (layer(w, x), None), x, None, 4, reverse=True, unroll=2)[0]
        specs = jax.P(), jax.P("data")
        return jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=jax.P("data"))(w, x)

    names = (
        "name in_shardings out_shardings donated_invars keep_unused inline length reverse unroll"
    )
    names = {*names.split(), "policy", "prevent_cse", "mesh", "in_specs", "out_specs"}

    def calls(fun):
        found = []
        for eqn in jax.make_jaxpr(fun)(SQUARE[0], X).jaxpr.eqns:
            if eqn.primitive.name in ("jit", "pjit", "remat2", "checkpoint", "scan", "shard_map"):
                found.append({k: str(v) for k, v in eqn.params.items() if k in names})
        return found

    assert len(calls(fun)) == 5
    assert calls(autocast(fun, "mixed_bfloat16")) == calls(fun)


def test_full_precision_by_context_and_by_decorator():
    @full_precision
    def head(x, w):
        return x @ w

    def fun(w, x):
        h = jnp.tanh(x @ w)
        with full_precision():
            h = jax.jit(lambda h: jnp.tanh(h @ w))(h)
        return mean_square(head(h, w) @ w)

    products = products_of(autocast(fun, "mixed_bfloat16"), SQUARE[0], X)
    half, full = {jnp.dtype(jnp.bfloat16)}, {jnp.dtype(jnp.float32)}
    assert products == [half, full, full, half]
    backward = products_of(jax.grad(autocast(fun, "mixed_bfloat16")), SQUARE[0], X)
    assert backward.count(half) == 5  # the first layer has no gradient by x to find
    assert backward.count(full) == 6
    assert str(jax.make_jaxpr(fun)(SQUARE[0], X)) == str(
        jax.make_jaxpr(autocast(fun, "float32"))(SQUARE[0], X)
    )


def test_the_innermost_policy_wins():
    inner = {
        policy: autocast(lambda x, w: x @ w, policy)
        for policy in ("float32", "mixed_float16", "mixed_bfloat16")
    }

    def fun(w, x):
        for f in inner.values():
            x = f(jnp.tanh(x), w)
        return x @ w

    names = [next(iter(d)).name for d in products_of(autocast(fun, "mixed_bfloat16"), SQUARE[0], X)]
    assert names == ["float32", "float16", "bfloat16", "bfloat16"]


def test_products_may_be_taken_out():
    only = autocast(lambda w, x: x @ w, "mixed_bfloat16", products=PRODUCTS - {"dot_general"})
    assert products_of(only, SQUARE[0], X) == [{jnp.dtype(jnp.float32)}]


def test_products_may_be_added():
    """One that JAX exports, and one of the user's own."""
    own = jax.extend.core.Primitive("own")
    own.def_impl(lambda x: x)
    own.def_abstract_eval(lambda x: x)
    fun = autocast(lambda x: own.bind(jnp.sinh(x)), "half", products=PRODUCTS | {"own", "sinh"})
    calls = jax.make_jaxpr(fun)(X).jaxpr.eqns
    inner = [eqn for call in calls for p in call.params.values() for eqn in getattr(p, "eqns", [])]
    dtypes = {eqn.primitive.name: eqn.invars[0].aval.dtype for eqn in [*calls, *inner]}
    assert dtypes["own"] == dtypes["sinh"] == jnp.float16


def test_arguments_of_every_kind():
    closed_over = SQUARE[0]

    @autocast("mixed_bfloat16")
    def fun(x, activation, *, key, training, scale=1.0, name=None):
        assert isinstance(training, bool)
        assert name == "layer"
        noise = jax.random.normal(key, x.shape) if training else 0.0
        return activation(x @ closed_over) * scale + noise

    arguments = {"key": jax.random.key(1), "training": True, "name": "layer"}
    got = fun(X, jnp.tanh, **arguments)
    want = jnp.tanh(X @ SQUARE[0]) + jax.random.normal(arguments["key"], X.shape)
    np.testing.assert_allclose(got, want, atol=0.05)
    assert fun.__name__ == "fun"
    got = fun(np.asarray(X), jnp.tanh, **{**arguments, "training": False})
    np.testing.assert_allclose(got, jnp.tanh(X @ SQUARE[0]), atol=0.05)


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_a_function_may_close_over_a_key(make):
    key = make(0)

    def fun(x):
        return jnp.tanh(x @ SQUARE[0]) + jax.random.normal(key, x.shape)

    np.testing.assert_allclose(autocast(fun, "mixed_bfloat16")(X), fun(X), atol=0.05)


@pytest.mark.parametrize("shape", [(0, 16), (1, 16)])
def test_empty_batches_scalars_and_no_arguments(shape):
    half = autocast(lambda x: jnp.tanh(x @ SQUARE[0]) @ SQUARE[1], "mixed_float16")
    assert half(jnp.ones(shape)).shape == shape
    assert float(autocast(lambda: 2.0, "mixed_float16")()) == 2.0
    assert autocast(lambda tree: tree, "mixed_float16")({}) == {}
    assert float(autocast(lambda x: x * 3, "mixed_float16")(jnp.float32(2))) == 6.0


def test_policies_of_every_spelling():
    for policy in (
        "mixed_bfloat16",
        jnp.bfloat16,
        np.dtype(jnp.bfloat16),
        jmp_kit.Policy("f32", "bf16", "f32"),
    ):
        half = autocast(lambda w, x: x @ w, policy)
        assert products_of(half, SQUARE[0], X) == [{jnp.dtype(jnp.bfloat16)}]
        assert half(SQUARE[0], X).dtype == jnp.float32


def test_one_trace_for_one_signature():
    traces = []

    @jax.jit
    @autocast("mixed_bfloat16")
    def fun(x):
        traces.append(None)
        return x @ SQUARE[0]

    for scale in range(4):
        fun(scale * X)
    assert len(traces) == 1


def test_an_error_inside_has_its_own_traceback():
    def model(x):
        return x @ jnp.ones((3, 3))

    with pytest.raises(TypeError, match="dot_general requires contracting dimensions") as caught:
        autocast(model, "mixed_bfloat16")(X)
    assert any(entry.name == "model" for entry in caught.traceback)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (
            lambda: autocast(3, "mixed_bfloat16"),
            TypeError,
            "wraps a function, but got 3.*@autocast",
        ),
        (lambda: autocast(len, "mixed_bf16"), ValueError, "Unknown dtype 'mixed_bf16'"),
        (lambda: autocast(len, jnp.int8), ValueError, "Unknown dtype .*floating-point values only"),
        (lambda: autocast(len, "half", products=[3]), ValueError, "products holds 3.*PRODUCTS |"),
        (
            lambda: autocast(lambda x: jnp.tanh(x @ x.T), "half", products={"matmul"})(X),
            ValueError,
            "'matmul', which is no primitive.* It uses .*dot_general.*tanh",
        ),
        (
            lambda: autocast(lambda x: {"y": x, "name": object()}, "half")(X),
            TypeError,
            r"returns arrays, but \['name'\] of the function is <object object",
        ),
    ],
)
def test_bad_input_teaches(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_float16_on_a_device_that_has_none(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    half = autocast(lambda x: x @ x.T, "mixed_float16")
    with pytest.raises(ValueError, match='do not multiply in float16.*Write "mixed_bfloat16"'):
        half(X)
    assert products_of(autocast(lambda x: x @ x.T, "mixed_bfloat16"), X)


def test_tracing_takes_work_in_proportion():
    """Ten times the layers, ten times the calls of Python."""

    def calls(layers):
        def fun(weights, x):
            for w in weights:
                x = jnp.tanh(x @ w)
            return x

        return calls_of_ours(autocast(fun, "mixed_bfloat16"), [SQUARE[0]] * layers, X)

    twenty, two_hundred = calls(20), calls(200)
    assert 20 < twenty < two_hundred < 12 * twenty


@pytest.mark.parametrize("compiled", [lambda fun: fun, jax.jit])
def test_references_from_outside_are_state(compiled):
    """One is an argument, and one is closed over."""
    products = 20 * mean_square(X @ SQUARE[0])
    given, around = jax.new_ref(jnp.ones(4)), jax.new_ref(jnp.ones(4))

    def count(reference, x):
        for box in (reference, around):
            box[...] += 1e-3 * mean_square(x @ SQUARE[0])

    half = compiled(autocast(count, "mixed_bfloat16"))
    for _ in range(20):
        half(given, X)
    for box in (given, around):  # each update is less than the last digit of a bfloat16
        assert jnp.allclose(box[...], 1 + 1e-3 * products, atol=1e-2 * 1e-3 * products)


def test_equinox_s_train_step_in_one_line(standard_promotion):
    """Its model has functions for leaves, which come in and go out."""
    optimizer = optax.adam(1e-2)

    def step(model, state, x):
        loss, grads = eqx.filter_value_and_grad(lambda m: mean_square(jax.vmap(m)(x)))(model)
        updates, state = optimizer.update(grads, state, model)
        return eqx.apply_updates(model, updates), state, loss, "step"

    half = autocast(step, "mixed_bfloat16")
    model = eqx.nn.MLP(16, 16, 8, 2, key=jax.random.key(0))
    activation = model.activation
    state = optimizer.init(eqx.filter(model, eqx.is_array))
    losses = []
    for take in (half, eqx.filter_jit(half)):
        for _ in range(3):
            model, state, loss, name = take(model, state, X)
            losses.append(float(loss))
    assert name == "step"
    assert model.activation is activation
    assert losses == sorted(losses, reverse=True)
    assert model.layers[0].weight.dtype == jnp.float32
