"""Ragged products in float8, of experts: how near they are, and what is beyond their groups."""

import collections
import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_kit
from jmp_kit import NoOpLossScale, autocast, numerics, value_and_grad
from jmp_kit.programs import every_equation
from tests.casting.rewriting.test_float8 import (
    EIGHT,
    H200,
    HALF,
    gradients,
    in_float8,
    normal,
    one_line,
    operands_of,
    ways,
)
from tests.casting.test_zoo import distance

ROWS = 54  # in the groups; the others are beyond
SIZES = jnp.array([10, 0, 30, 14], jnp.int32)
X = normal(0, 64, 32)
PARAMS = {"up": normal(1, 4, 32, 128, scale=0.2), "down": normal(2, 4, 128, 32, scale=0.1)}


def loss_fn(params, x, sizes=SIZES):
    hidden = jax.nn.gelu(lax.ragged_dot(x, params["up"], sizes))
    return jnp.mean((x + lax.ragged_dot(hidden, params["down"], sizes))[:ROWS] ** 2)


def products(x, w, dy, sizes=SIZES):
    """A ragged product and both of its gradients."""
    y, pulled_back = jax.vjp(lambda x, w: lax.ragged_dot(x, w, sizes), x, w)
    return y, *pulled_back(dy)


GIVEN = X, PARAMS["up"], normal(3, 64, 128)


@ways
@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint])
def test_every_product_takes_float8_and_the_gradient_is_near(way, around):
    grads, wanted = gradients(way(around(loss_fn)), loss_fn, PARAMS)
    for name in PARAMS:
        assert distance(grads[name], wanted[name]) < 0.085
        assert not np.any(grads[name][1])  # no row is in this group
    by_x = in_float8(jax.grad(loss_fn, 1))(PARAMS, X)
    assert distance(by_x, jax.grad(loss_fn, 1)(PARAMS, X)) < 0.085


def roundings(fun, *args):
    """The shapes of what is rounded to float8, and how often."""
    return collections.Counter(
        eqn.outvars[0].aval.shape
        for eqn, _ in every_equation(jax.make_jaxpr(fun)(*args).jaxpr)
        if eqn.params.get("new_dtype") == jnp.float8_e4m3fn
    )


def test_weights_and_activations_are_rounded_once():
    """Only a cotangent that two products take is rounded twice: by rows, and by groups."""
    assert roundings(one_line(loss_fn, recompute=False), PARAMS, X) == {
        (4, 32, 128): 1,
        (4, 128, 32): 1,
        (64, 128): 2,  # the hidden values, and their cotangent by groups
        (64, 32): 3,  # the tokens, and the cotangent of the result
    }


@pytest.mark.parametrize("outlier", [100, 1e4])
def test_an_outlier_among_the_channels_costs_the_others_little(outlier):
    x = X.at[:, 3].mul(outlier)
    params = PARAMS | {"up": PARAMS["up"].at[:, 3].divide(outlier)}
    wanted = jax.grad(loss_fn)(params, x)
    grads = in_float8(jax.grad(loss_fn))(params, x)
    for name in params:
        assert distance(grads[name], wanted[name]) < 0.09


def test_a_group_and_a_row_that_weigh_little_keep_their_digits():
    """With one scale for all they would be flushed to zero."""
    small = jnp.full(64, 1e-8).at[10:40].set(1.0).at[5].set(1e-4)[:, None]
    for x, dy in ((X * small, GIVEN[2]), (X, GIVEN[2] * small), (X * small, GIVEN[2] * small)):
        args = x, GIVEN[1] * jnp.array([1e-9, 1.0, 1.0, 1e9])[:, None, None], dy
        got, wanted = in_float8(products)(*args), products(*args)
        for rows in (slice(5), slice(5, 6), slice(6, 10), slice(10, 40), slice(40, ROWS)):
            for a, b in zip(got[:2], wanted[:2], strict=True):
                assert distance(a[rows], b[rows]) < 0.06
        for group in (0, 2, 3):
            assert distance(got[2][group], wanted[2][group]) < 0.06


@pytest.mark.parametrize("filling", [0.0, 1e30, np.inf, np.nan])
def test_rows_beyond_the_groups_change_nothing(filling):
    x, w, dy = GIVEN
    beyond = jnp.arange(64)[:, None] >= ROWS
    filled = jnp.where(beyond, filling, x), w, jnp.where(beyond, filling, dy)
    got = in_float8(products)(*filled)
    jax.tree.map(np.testing.assert_array_equal, got, in_float8(products)(*GIVEN))
    for one, plain in zip(got, products(*filled), strict=True):
        assert distance(one, plain) < 0.06
        assert np.isfinite(one).all()
    assert not np.any(got[0][ROWS:])
    assert not np.any(got[1][ROWS:])


@ways
@pytest.mark.parametrize("sizes", [(0, 0, 0, 0), (64, 0, 0, 0), (0, 0, 0, 64), (16, 16, 16, 16)])
def test_groups_without_rows_and_rows_of_zeros(way, sizes):
    sizes = jnp.array(sizes, jnp.int32)
    x = X.at[:20].set(0.0)
    value, grads = way(functools.partial(loss_fn, sizes=sizes))(PARAMS, x)
    wanted = jax.grad(loss_fn)(PARAMS, x, sizes)
    assert np.isfinite(value)
    assert jmp_kit.all_finite(grads)
    for name in PARAMS:
        error = np.linalg.norm(grads[name] - wanted[name])
        assert error <= 0.085 * np.linalg.norm(wanted[name])


@ways
@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("where", ["row", "weight"])
def test_what_is_not_finite_stays_so(way, wrong, where):
    x, params = X, PARAMS
    if where == "row":
        x = X.at[5, 7].set(wrong)
    else:
        params = PARAMS | {"down": PARAMS["down"].at[2, 7, 3].set(wrong)}
    value, grads = way(loss_fn)(params, x)
    assert not np.isfinite(value)
    assert not jmp_kit.all_finite(grads)


def test_an_infinite_cotangent_is_in_its_gradients():
    x, w, dy = GIVEN
    _, by_x, by_w = in_float8(products)(x, w, dy.at[20, 3].set(jnp.inf))
    assert not jnp.isfinite(by_x[20]).all()
    assert not jnp.isfinite(by_w[2]).all()


@pytest.mark.parametrize("power", [1, 7, 15])
def test_a_loss_scale_changes_no_bit(power):
    plain, scaled = (
        jax.jit(value_and_grad(in_float8(loss_fn), jmp_kit.StaticLossScale(scale)))(PARAMS, X)
        for scale in (1.0, 2.0**power)
    )
    jax.tree.map(np.testing.assert_array_equal, scaled, plain)


def layers(params, x):
    def layer(x, p):
        hidden = jax.nn.gelu(lax.ragged_dot(x, p["up"], SIZES))
        return x + lax.ragged_dot(hidden, p["down"], SIZES), None

    return jnp.mean(lax.scan(layer, x, params)[0][:ROWS] ** 2)


@ways
def test_in_scans(way):
    stacked = {name: jnp.stack([w, -w, 0.5 * w]) for name, w in PARAMS.items()}
    fun = way(layers)
    assert operands_of(fun, stacked, X) == {EIGHT}
    assert distance(fun(stacked, X), jax.value_and_grad(layers)(stacked, X)) < 0.085


@ways
def test_under_vmap(way):
    """Of all operands: JAX has no vmap of a ragged product over some of them."""
    many = jax.tree.map(lambda w: jnp.stack([w, -w]), PARAMS), jnp.stack([X, 2 * X])
    several = jnp.stack([SIZES, SIZES[::-1]])
    wanted = [
        jax.value_and_grad(loss_fn)(*jax.tree.map(lambda a, i=i: a[i], many), several[i])
        for i in (0, 1)
    ]
    wanted = jax.tree.map(lambda *xs: jnp.stack(xs), *wanted)
    got = jax.vmap(lambda p, x, s: way(functools.partial(loss_fn, sizes=s))(p, x))(*many, several)
    assert distance(got, wanted) < 0.085


def test_experts_that_a_router_chooses():
    """Of a mixture: sizes that depend on a product."""

    def loss(params, router, x):
        gate = jax.nn.softmax(jmp_kit.full_precision(jnp.matmul)(x, router))
        chosen = jnp.argmax(gate, axis=-1)
        order = jnp.argsort(chosen)
        y = lax.ragged_dot(x[order], params["up"], jnp.bincount(chosen, length=4))
        return jnp.mean((y[jnp.argsort(order)] * jnp.max(gate, axis=-1, keepdims=True)) ** 2)

    args = PARAMS, normal(4, 32, 4), X
    wanted = jax.grad(loss, (0, 1))(*args)
    for way in (in_float8(jax.grad(loss, (0, 1))), jax.grad(in_float8(loss), (0, 1))):
        assert operands_of(way, *args) == {EIGHT, 2 * ("float32",)}
        for got, exact in zip(way(*args), wanted, strict=True):
            assert distance(got, exact) < 0.085


def test_several_axes():
    """Two of rows, of which the second is in groups, and two that are contracted."""
    numbers = lax.RaggedDotDimensionNumbers((((3, 1), (2, 0)), ((), ())), (2,), (3,))
    x, w = normal(4, 3, 4, 64, 16), normal(5, 4, 24, 16, 4)
    weights = normal(6, 3, 64, 24)

    def multiplied(x, w):
        return lax.ragged_dot_general(x, w, SIZES, numbers)

    def loss(x, w):
        return jnp.sum(jnp.tanh(multiplied(x, w)) * weights)

    args = x, 0.1 * w
    assert multiplied(*args).shape == weights.shape
    assert distance(in_float8(multiplied)(*args), multiplied(*args)) < 0.05
    wanted = jax.grad(loss, (0, 1))(*args)
    for way in (in_float8(jax.grad(loss, (0, 1))), jax.grad(in_float8(loss), (0, 1))):
        assert operands_of(way, *args) == {EIGHT}
        for got, exact in zip(way(*args), wanted, strict=True):
            assert distance(got, exact) < 0.085


def test_rows_summed_in_groups_fold_the_copy_that_is_there():
    """Alone, after a product that takes the first, and after one that takes the second."""
    numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    x, _, dy = GIVEN
    square = normal(4, 4, 32, 32), normal(5, 4, 128, 128)

    def summed(x, dy, first, second):
        given = [
            jnp.sum(lax.ragged_dot(a, w, SIZES))
            for a, w, is_before in ((x, square[0], first), (dy, square[1], second))
            if is_before
        ]
        return lax.ragged_dot_general(x, dy, SIZES, numbers), given

    for first in (False, True):
        for second in (False, True):
            fun = functools.partial(summed, first=first, second=second)
            got, wanted = in_float8(fun)(x, dy)[0], fun(x, dy)[0]
            for group in (0, 2, 3):
                assert distance(got[group], wanted[group]) < 0.05
            assert not np.any(got[1])
            taken = 2 + 2 * first + 2 * second - (first or second)
            assert roundings(in_float8(fun), x, dy).total() == taken


def shaped(*shapes):
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def why(fun, *args, **options):
    [product] = numerics.plan(fun, "mixed_float8", *args, **options).parts[0].products
    return product.removeprefix("ragged_dot_general ")


def test_the_size_decides_and_a_rule_before_it():
    def by_sizes(x, w, groups):
        return lax.ragged_dot(x, w, jnp.full(groups, 16, jnp.int32))

    for groups, shapes, reason in (
        (8, ((16384, 2048), (8, 2048, 4096)), "float8_e4m3fn"),
        (8, ((16384, 2048), (8, 2048, 64)), "bfloat16: N is 64"),
        (8, ((16384, 512), (8, 512, 4096)), "bfloat16: K is 512"),
        (32, ((16384, 2048), (32, 2048, 4096)), "bfloat16: a group has 512 rows"),
        (2, ((4104, 4096), (2, 4096, 8192)), "bfloat16: M is 4104"),
        (2, ((4096, 1024), (2, 1024, 1024)), "bfloat16: 4.3e+09 multiplications"),
    ):
        fun = functools.partial(by_sizes, groups=groups)
        assert why(fun, *shaped(*shapes)) == reason
        assert why(fun, *shaped(*shapes), rules={"": "float8"}) == "float8_e4m3fn"
        assert why(fun, *shaped(*shapes), rules={"": "bfloat16"}) in (
            "bfloat16: a rule says so",
            "bfloat16",
        )
    gradient = value_and_grad(
        autocast(lambda x, w: jnp.sum(by_sizes(x, w, 8) ** 2), "mixed_float8"),
        NoOpLossScale(),
        argnums=(0, 1),
    )
    assert operands_of(gradient, *shaped((16384, 2048), (8, 2048, 4096))) == {EIGHT}
    assert operands_of(gradient, *shaped((16384, 2048), (8, 2048, 1008))) == {HALF}
    assert operands_of(gradient, *shaped((8176, 2048), (8, 2048, 4096))) == {HALF}


def test_what_stays_half_says_why():
    numbers = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), (0,), ())
    x, w = normal(4, 8, 5, 16), normal(5, 8, 16, 4)
    sizes = jnp.array([3, 5], jnp.int32)

    def along_a_batch(x, w):
        return lax.ragged_dot_general(x, w, sizes, numbers)

    forced = {"rules": {"": "float8"}}
    assert why(along_a_batch, x, w, **forced) == "bfloat16: it is ragged and has batch axes"
    assert operands_of(in_float8(along_a_batch), x, w) == {HALF}
    assert distance(in_float8(along_a_batch)(x, w), along_a_batch(x, w)) < 0.01
    several = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((), ())), (1,), (0,))
    x, w, sizes_of_each = normal(4, 3, 8, 16), normal(5, 2, 16, 4), jnp.array([[3, 5]] * 3)

    def of_each(x, w):
        return lax.ragged_dot_general(x, w, sizes_of_each, several)

    assert why(of_each, x, w, **forced) == "bfloat16: its groups differ along an axis"
    found = numerics.float8_errors(of_each, x, w).rows
    assert [(row.error == row.bfloat16_error, row.flushed) for row in found] == [(True, 0.0)]


def test_dimensions_that_are_known_later():
    symbolic = jax.ShapeDtypeStruct(jax.export.symbolic_shape("b, 32"), jnp.float32)
    forced = jax.jit(in_float8(lambda x: lax.ragged_dot(x, PARAMS["up"], SIZES)))
    made = jax.export.export(forced)(symbolic).call(X)
    np.testing.assert_allclose(made, forced(X), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32"])
def test_sizes_of_other_integers(dtype):
    x, w, sizes = normal(4, 200, 32), PARAMS["up"], np.array([100, 0, 60, 12])

    def fun(x, w):
        return lax.ragged_dot(x, w, jnp.asarray(sizes, dtype))

    assert distance(in_float8(fun)(x, w), fun(x, w)) < 0.05


def test_the_error_of_each_product():
    found = numerics.float8_errors(jax.grad(loss_fn, (0, 1)), PARAMS, X)
    assert len(found.rows) == 6
    assert all(0.02 < row.error < 0.06 for row in found.rows)
    assert all(row.bfloat16_error < 0.005 for row in found.rows)
    assert all(row.flushed < 0.02 for row in found.rows if not row.backward)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
@pytest.mark.parametrize("libraries", [False, True])
def test_an_h200_multiplies_float8_and_moves_fewer_bytes(libraries, standard_promotion):
    def loss(params, x, sizes):
        hidden = jax.nn.gelu(lax.ragged_dot(jnp.tanh(x @ params["in"]), params["up"], sizes))
        return jnp.mean((x + lax.ragged_dot(hidden, params["down"], sizes)) ** 2)

    x, first, up, down = shaped((16384, 2048), (2048, 2048), (8, 2048, 8192), (8, 8192, 2048))
    args = {"in": first, "up": up, "down": down}, x, jax.ShapeDtypeStruct((8,), jnp.int32)
    options = {**H200.compiler_options, "xla_gpu_enable_triton_gemm": not libraries}

    def compiled(policy):
        step = jax.jit(autocast(jax.value_and_grad(loss), policy))
        return step.lower(*H200.placed(args)).compile(compiler_options=options)

    half, eight = map(compiled, ("mixed_bfloat16", "mixed_float8"))
    found = numerics.audit(eight).products
    assert {(p.lhs_dtype, p.rhs_dtype) for p in found} == {EIGHT}
    assert len(found) == 8  # XLA writes ragged products out as products of all groups
    moved = [numerics.traffic(program).nbytes for program in (eight, half)]
    kept = [program.memory_analysis().temp_size_in_bytes for program in (eight, half)]
    assert moved[0] < 0.75 * moved[1]
    assert kept[0] < 0.8 * kept[1]
