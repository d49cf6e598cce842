"""Planted overflows and NaNs: the line, the operation and the iteration are named."""

import inspect

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import jmp_kit
from jmp_kit.numerics import locate_nonfinite

pytestmark = pytest.mark.usefixtures("standard_promotion")  # for Flax's sake

X = jnp.arange(1.0, 9.0).reshape(2, 4)
HALF = X.astype(jnp.float16)
PLANTED = {}


def planted(args, primitive, kind, **expected):
    """A function with one line that ends in `# bad`, and what is to be said of it."""

    def register(fun):
        PLANTED[fun.__name__] = fun, args, {"primitive": primitive, "kind": kind, **expected}
        return fun

    return register


def line_with(fun, comment):
    lines, first = inspect.getsourcelines(fun)
    [number] = [i for i, line in enumerate(lines, start=first) if line.rstrip().endswith(comment)]
    return f"test_locate.py:{number}"


@planted((X,), "div", "inf")
def division(x):
    y = x - 1
    y = x / y  # bad
    return jnp.sum(jnp.tanh(y) * y)


@planted((X,), "div", "nan")
def zero_by_zero(x):
    return jnp.sum((x - x) / (x - x))  # bad


@planted((X,), "log", "nan")
def logarithm_of_a_negative(x):
    return jnp.sum(jnp.log(x - 4.5) ** 2)  # bad


@planted((X,), "log", "inf")
def logarithm_of_zero(x):
    y = jnp.log(x - 1)  # bad
    return y.mean()


@planted((-X,), "log1p", "nan")
def logarithm_of_one_more(x):
    return jnp.log1p(2 * x).sum()  # bad


@planted((X,), "sqrt", "nan")
def root_of_a_negative(x):
    return jnp.sqrt(2 - x)  # bad


@planted((X,), "rsqrt", "inf")
def norm_without_epsilon(x):
    y = x - x.mean(0)
    y = y * 0
    return y * lax.rsqrt(jnp.mean(y**2, -1, keepdims=True))  # bad


@planted((X * 20,), "exp", "inf")
def softmax_by_hand(x):
    e = jnp.exp(x)  # bad
    return e / e.sum(-1, keepdims=True)


@planted((HALF * 100,), "mul", "inf", dtype="float16")
def square_in_half(x):
    y = x * x  # bad
    return jnp.tanh(y).sum() + y.sum()


@planted((HALF * 300, HALF.T * 300), "dot_general", "inf", dtype="float16")
def product_in_half(x, w):
    return jnp.sum((x @ w).astype(jnp.float32))  # bad


@planted((HALF * 3000,), "reduce", "inf", dtype="float16")
def sum_in_half(x):
    y = lax.reduce(x, jnp.float16(0), lax.add, (0, 1))  # bad
    return 2 * y


@planted((X * 1e5,), "convert_element_type", "inf", dtype="float16")
def cast_to_half(x):
    y = x.astype(jnp.float16)  # bad
    return y.astype(jnp.float32).sum()


@planted((HALF * 60000,), "argument", "inf")
def argument(x):
    return x.sum()


@planted((X,), "sub", "nan")
def row_of_a_mask(x):
    masked = jnp.where(x > 100, x, -jnp.inf)
    shifted = masked - masked.max(-1, keepdims=True)  # bad
    return jnp.exp(shifted).sum()


@planted((X,), "mul", "nan")
def zero_times_infinity(x):
    masked = jnp.where(x > 4, x, jnp.inf)
    return (0 * masked).sum()  # bad


@planted((X,), "div", "inf", iteration=(4,))
def inside_a_scan(x):
    def body(x, i):
        return x / (4 - i), None  # bad

    return lax.scan(body, x, jnp.arange(6.0))[0]


@planted((X,), "div", "inf", iteration=(1,))
def inside_a_reversed_scan_that_stacks(x):
    def body(total, i):
        y = x / (1 - i)  # bad
        return total + 1, y

    return lax.scan(body, 0, jnp.arange(6.0), reverse=True)[1][1:]


@planted((X,), "exp", "inf", iteration=(3,))
def inside_a_while(x):
    def body(state):
        i, x = state
        return i + 1, jnp.exp(x)  # bad

    return lax.while_loop(lambda state: state[0] < 4, body, (0, x[0, :1]))[1]


@planted((X,), "log", "nan", iteration=())
def inside_a_branch(x):
    def other(x):
        return jnp.log(-x)  # bad

    return lax.cond(x.sum() > 0, other, jnp.tanh, x).sum()


@planted((X,), "log", "inf", iteration=(1, 2))
def inside_two_loops(x):
    def outer(total, i):
        def inner(total, j):
            return total + jnp.log(jnp.abs(i - 1) + jnp.abs(j - 2)), None  # bad

        return lax.scan(inner, total, jnp.arange(4.0))[0], None

    return lax.scan(outer, x.sum(), jnp.arange(3.0))[0]


@planted((X,), "log", "nan")
def inside_jit(x):
    @jax.jit
    def inner(x):
        return jnp.log(x - 5)  # bad

    return inner(x).sum()


@planted((X,), "log", "nan")
def inside_a_checkpoint(x):
    @jax.checkpoint
    def inner(x):
        return jnp.log(x - 5)  # bad

    return inner(x).sum()


@planted((X,), "log", "nan")
def inside_a_custom_jvp(x):
    @jax.custom_jvp
    def inner(x):
        return jnp.log(x - 5)  # bad

    inner.defjvp(lambda primals, tangents: (inner(*primals), tangents[0]))
    return inner(x).sum()


@planted((X,), "log", "nan")
def inside_a_custom_vjp(x):
    @jax.custom_vjp
    def inner(x):
        return jnp.log(x - 5)  # bad

    inner.defvjp(lambda x: (inner(x), None), lambda _, g: (g,))
    return inner(x).sum()


@planted((X,), "dot_general", "inf", dtype="float16")
def under_autocast(x):
    @jmp_kit.autocast("mixed_float16")
    def loss_fn(x):
        y = 300 * x
        y = y @ y.T  # bad
        return jnp.sum(jnp.tanh(y)) + y.sum()

    return loss_fn(x)


@planted((X,), "div", "inf")
def backward_only_by_a_root(x):
    def loss_fn(x):
        positive = jnp.maximum(x - 1, 0)
        return jnp.sum(jnp.where(positive > 0, jnp.sqrt(positive), 0))  # bad

    return jax.grad(loss_fn)(x)


@planted((HALF,), "mul", "inf", backward=True, dtype="float16")
def backward_only_by_the_scale(x):
    def loss_fn(x):
        y = x * 16  # bad
        return 2.0**14 * jnp.sum(y.astype(jnp.float32))

    return jax.grad(loss_fn)(x)


@planted((X,), "exp", "inf")
def vmapped(x):
    def row(x):
        return jnp.exp(x * 30).sum()  # bad

    return jax.vmap(row)(x)


@planted((X,), "pow", "nan")
def power_of_a_negative(x):
    return (2.5 - x) ** jnp.float32(0.5)  # bad


@planted((X,), "cumprod", "inf")
def cumulative_product(x):
    return jnp.cumprod(x * 1e15)  # bad


@planted((X * 0,), "cholesky", "nan")
def cholesky_of_nothing(x):
    return lax.linalg.cholesky(x.T @ x - jnp.eye(4))  # bad


@planted((X,), "log", "inf")
def reference(x):
    kept = jax.new_ref(x)
    kept[...] = kept[...] - 1
    kept[...] = jnp.log(kept[...])  # bad
    return kept[...] * 2


@pytest.mark.parametrize("name", PLANTED)
def test_the_planted_line_is_named(name):
    fun, args, expected = PLANTED[name]
    found = locate_nonfinite(fun, *args)
    assert found is not None
    if found.primitive != "argument":
        assert found.source == line_with(fun, "# bad")
    assert {key: getattr(found, key) for key in expected} == expected
    text = str(found)
    assert found.source in text
    assert f"gives {found.kind}" in text
    if found.iteration:
        assert f"in iteration {', '.join(map(str, found.iteration))}" in text


@planted((jnp.array([1.0, 1e20, 1e38]),), "mul", "inf", iteration=(1,))
def vmapped_while(x):
    """Of three loops in one, the last ends at once and the second overflows first."""
    return jax.vmap(
        lambda x: lax.while_loop(
            lambda c: c < 3e37,
            lambda c: c * 1e10,  # bad
            x,
        )
    )(x)


def test_there_are_thirty():
    assert len(PLANTED) >= 30


def test_what_is_finite_has_no_cause():
    def masked(x):
        scores = jnp.where(x > 4, x, -jnp.inf)
        scores = scores.at[0, 0].set(0.0)
        return jax.nn.softmax(scores, axis=-1), jnp.log(0 * x).sum() < 0

    assert locate_nonfinite(masked, X) is None
    assert locate_nonfinite(lambda x: x.astype(jnp.int32), X) is None

    def never(x):
        return lax.scan(lambda count, row: (count, 2 * row), 0, x[:0])[1]

    assert locate_nonfinite(never, X) is None


def test_a_constant_is_blamed_if_nothing_else_is():
    found = locate_nonfinite(lambda x: jnp.where(x > 100, x, -jnp.inf).max(0), X)
    assert (found.dtype, found.kind) == ("float32", "inf")
    assert "float32[] from nan to nan, 1 not finite" in str(found)

    def both(x):
        return jnp.where(x > 4, x, -jnp.inf), jnp.log(x - 1)  # log

    assert locate_nonfinite(both, X).primitive == "log"


def test_rows_of_an_argument_are_blamed_alone():
    x = X.at[1, 1].set(jnp.nan)
    found = locate_nonfinite(
        lambda batch: lax.scan(lambda c, r: (c + 1, r.sum()), 0, batch["x"])[1], {"x": x}
    )
    assert (found.primitive, found.path, found.kind) == ("argument", "batch/x", "nan")
    assert "1 not finite" in str(found)


def test_paths_of_linen_and_nnx():
    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(4, name="body", dtype=jnp.float16)(x)
            return nn.Dense(4, name="head", dtype=jnp.float16)(100 * x)

    params = jax.tree.map(lambda p: 0 * p + 10, Network().init(jax.random.key(0), X))
    found = locate_nonfinite(Network().apply, params, X)
    assert (found.primitive, found.path, found.dtype) == ("dot_general", "Network/head", "float16")
    assert "use bfloat16" in found.suggestion
    assert "rule for its path" in str(found)

    class Model(nnx.Module):
        def __init__(self):
            self.head = nnx.Linear(4, 4, dtype=jnp.float16, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.head(50000 * x / 8)

    graphdef, state = nnx.split(Model())
    state = jax.tree.map(lambda p: 0 * p + 10, state)
    found = locate_nonfinite(lambda state, x: nnx.merge(graphdef, state)(x), state, X)
    assert found.primitive == "dot_general"
    assert "head/kernel" in found.path


def test_a_train_step_that_overflowed():
    """The whole step, optimizer and all, with flags and structures of other kinds."""

    @jmp_kit.autocast("mixed_float16")
    def loss_fn(params, x, flag):
        assert flag == "train"
        return jnp.sum((x @ params["w"]) ** 2)

    def step(params, x, flag):
        scale = jmp_kit.StaticLossScale(2.0**24)
        return jmp_kit.value_and_grad(loss_fn, scale)(params, x, flag)

    found = locate_nonfinite(jax.jit(step, static_argnums=2), {"w": jnp.ones((4, 2))}, X, "train")
    assert (found.dtype, found.backward) == ("float16", True)
    assert "With a loss scale, a lower one may do" in found.suggestion


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("division", "1 of 8 denominators are 0"),
        ("logarithm_of_zero", "smallest argument is 0"),
        ("root_of_a_negative", "add an epsilon inside"),
        ("softmax_by_hand", "subtract the maximum first"),
        ("row_of_a_mask", "a whole row of a mask"),
        ("square_in_half", "float16 ends at 6.55e+04, and the largest operand is 800"),
        ("cumulative_product", "float32 ends at 3.4e+38"),
    ],
)
def test_a_suggestion_is_made_where_one_is_clear(name, words):
    fun, args, _ = PLANTED[name]
    assert words in locate_nonfinite(fun, *args).suggestion


def too_large_in_half(params, x):
    h = jnp.exp(x @ params["a"])  # too large forward
    return jnp.sum((h @ params["b"]) ** 2)  # too large backward


def one_line(params, x):
    return jax.value_and_grad(lambda params: 2.0**15 * too_large_in_half(params, x))(params)


in_half = jmp_kit.autocast(too_large_in_half, "mixed_float16")


@pytest.mark.filterwarnings("ignore:Gradients are computed in float16")
@pytest.mark.parametrize(
    ("fun", "size", "comment"),
    [
        (in_half, 3.0, "forward"),
        (jmp_kit.autocast(one_line, "mixed_float16"), 3.0, "forward"),
        (jmp_kit.value_and_grad(in_half, jmp_kit.StaticLossScale(2.0**15)), 0.9, "backward"),
        (jax.grad(lambda *args: 2.0**15 * in_half(*args)), 0.9, "backward"),
    ],
    ids=["loss", "one line", "loss scale", "jax.grad"],
)
def test_of_a_cast_that_autocast_adds_it_is_where_its_operand_is_made(fun, size, comment):
    params = {"a": jnp.ones((4, 4)), "b": jnp.ones((4, 4))}
    found = locate_nonfinite(fun, params, jnp.full((2, 4), size))
    assert (found.primitive, found.dtype) == ("convert_element_type", "float16")
    assert found.source == line_with(too_large_in_half, f"# too large {comment}")


def test_of_a_parameter_that_is_cast_the_path_is_named():
    params = {"a": jnp.full((4, 4), 1e5), "b": jnp.ones((4, 4))}
    assert locate_nonfinite(in_half, params, jnp.zeros((2, 4))).path == "params/a"


@pytest.mark.parametrize(
    "jit", [jax.jit, eqx.filter_jit, nnx.jit, lambda f: eqx.filter_jit(lambda *args: f(*args))]
)
def test_a_function_that_a_library_jits_has_its_own_lines(jit):
    """Inside another, and of the second of two that take a jitted function of JAX."""

    def norm(x):
        return jnp.sum(jnp.where(x > 2, x, jnp.log(x - 1)) @ x.T)  # a line of its own

    jitted = jit(norm)

    def loss_fn(x):
        x = jnp.where(x > 0, x, 1)
        return jitted(x) + 1

    expected = line_with(norm, "# a line of its own")
    for fun in (loss_fn, jit(loss_fn), jit(jmp_kit.autocast(loss_fn, "mixed_float16"))):
        assert locate_nonfinite(fun, X).source == expected
        assert {p.source for p in jmp_kit.numerics.audit(fun, X).products} == {expected}


def test_what_devices_share_is_one_operation():
    """With the line where it begins, and no advice that is meant for one operation."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))

    def logarithm(x):  # begins
        return lax.psum(jnp.log(x), "data")

    mapped = jax.shard_map(
        logarithm, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec()
    )
    found = locate_nonfinite(mapped, X - 1)
    assert (found.primitive, found.source) == ("shard_map", line_with(logarithm, "# begins"))
    assert "looked at as one operation" in found.suggestion


def test_of_what_the_host_computes_nothing_is_advised():
    def on_host(x):
        return jax.pure_callback(lambda x: np.asarray(x) / 0, x, x)

    with np.errstate(divide="ignore"):
        assert locate_nonfinite(on_host, X).suggestion == ""


def test_under_jit_it_is_refused():
    with pytest.raises(ValueError, match="cannot do so while a program is traced"):
        jax.jit(lambda x: locate_nonfinite(jnp.log, x))(X)


def test_complex_numbers_have_ranges_too():
    found = locate_nonfinite(lambda x: 1 / (x * 1j), X - 1)
    assert found.primitive == "div"
    assert found.inputs[-1].dtype == "complex64"
