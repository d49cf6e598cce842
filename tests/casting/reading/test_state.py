"""What is updated is as near to float32 as with the products alone cast by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jmp_kit import autocast, numerics
from jmp_kit.programs import scan_counts
from tests.casting.products_alone import products_alone
from tests.casting.states import LOSSES, PROGRAMS, K, Q, V, normal, streaming_softmax
from tests.casting.test_by_hand import COMPILES_AS_TRACED
from tests.compiling import quick_or_slow

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),  # for optax's sake
    pytest.mark.filterwarnings("ignore:Gradients are computed in float16"),
]


# XLA's CPU compiler in JAX 0.10 leaves out roundings of the program by hand.
LIMIT = 1.2 if COMPILES_AS_TRACED else 1.5


def errors(fun, args, half, around=lambda f: f):
    """For each array of the results, how far autocast and products by hand are from float32."""
    kinds = [fun, products_alone(fun, half), autocast(fun, half, reduce_dtype=half)]
    # As one program, which compiles in less time than three.
    found = jax.jit(lambda *args: [jax.tree.leaves(around(f)(*args)) for f in kinds])(*args)
    for full, hand, ours in zip(*found, strict=True):
        assert full.dtype == hand.dtype == ours.dtype
        # The error of a scalar may be next to none by chance.
        if jnp.issubdtype(full.dtype, jnp.floating) and full.size > 4:
            norm = np.linalg.norm(full) + 1e-30
            yield [float(np.linalg.norm(x - full) / norm) for x in (ours, hand)]


def assert_as_near(found):
    found = list(found)
    assert found
    for ours, hand in found:
        assert ours <= LIMIT * (hand + 2e-6), (
            f"{ours:.2e} from float32, with products alone {hand:.2e}"
        )


# One or two of a kind show in `make test` what all show.
QUICK = {
    *("euler, while", "verlet, scan", "verlet, vmap", "störmer, unrolled", "sgd, scan"),
    *("adam, unrolled", "adam, steps per call", "muon, unrolled", "shampoo", "averaging"),
    *("adversarial, jit inside", "actor and critic", "linear attention, plain, chunks"),
    *("linear attention, gated, vmap", "linear attention, delta, scan"),
    *("neural ODE, scan", "neural ODE, linen", "fast weights, unrolled"),
    *("fast weights, of batches", "rows put back, scan"),
}


@pytest.mark.parametrize("name", quick_or_slow(PROGRAMS, QUICK))
def test_state_is_as_with_products_alone(name):
    assert_as_near(errors(*PROGRAMS[name], jnp.bfloat16))


@pytest.mark.parametrize("name", quick_or_slow(LOSSES, QUICK))
def test_gradients_through_state_are_as_with_products_alone(name):
    loss, args = LOSSES[name]
    assert_as_near(errors(loss, args, jnp.bfloat16, around=jax.grad))
    assert_as_near(errors(jax.grad(loss), args, jnp.bfloat16))


@pytest.mark.parametrize(
    "name", ["verlet, scan", "adam, steps per call", "adversarial", "linear attention, gated, scan"]
)
def test_in_float16_too(name):
    assert_as_near(errors(*PROGRAMS[name], jnp.float16))


@pytest.mark.parametrize(
    "name",
    [
        *("sgd, scan", "sgd, unrolled", "adam, scan", "adam, unrolled", "adam, steps per call"),
        *("muon, scan", "muon, unrolled", "shampoo", "accumulating", "averaging", "adversarial"),
    ],
)
def test_a_wrapped_step_gives_what_it_gives_with_products_alone(name):
    """Parameters, moments, statistics, averages and all."""
    step, args = PROGRAMS[name]
    half = jnp.bfloat16
    kinds = products_alone(step, half), autocast(step, half, reduce_dtype=half)
    found = [jax.jit(f)(*args) for f in kinds]
    for hand, ours in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(ours, hand, rtol=1e-5, atol=1e-5 * np.abs(hand).max())


@pytest.mark.parametrize(("half", "limit"), [("bfloat16", 1.2e-2), ("float16", 2.5e-3)])
@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint, jax.vmap])
def test_a_running_maximum(half, limit, around):
    """It is small, and state: as good as the products of its blocks."""

    def attended(q, k, v):
        return streaming_softmax(q @ jnp.eye(16), k, v) @ jnp.eye(16)

    args = (Q, K, V) if around is not jax.vmap else [jnp.stack([x, -x]) for x in (Q, K, V)]
    found = jax.jit(autocast(around(attended), f"mixed_{half}"))(*args)
    want = around(lambda q, k, v: jax.nn.softmax(q @ k.T) @ v)(*args)
    assert jnp.abs(found - want).max() <= limit * jnp.abs(want).max()


def carried(fun, *args):
    """The dtypes of what the loops of a function carry, under autocast."""
    jaxpr = jax.make_jaxpr(autocast(fun, "mixed_bfloat16"))(*args).jaxpr
    loops = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
    return [str(v.aval.dtype) for e in loops for v in e.outvars[: scan_counts(e)[1]]]


LAYERS = normal(4, 8, 8, scale=0.3)
TABLE = normal(12, 8)
IDS = jnp.arange(24).reshape(2, 12) % 12


def layer(x, w):
    return x + jnp.tanh(x @ w) @ w.T


def loss_of(x, w, body=layer, length=None):
    x, _ = lax.scan(lambda x, w: (body(x, w), None), x, w, length=length)
    return jnp.sum((x @ LAYERS[0]) ** 2)


@pytest.mark.parametrize(
    ("fun", "dtype"),
    [
        (lambda w: loss_of(TABLE[IDS], w), "bfloat16"),
        (lambda w: loss_of(TABLE[IDS] @ w[0], w), "bfloat16"),
        (
            lambda w: loss_of(jnp.tanh(TABLE @ w[0]) + TABLE[IDS], w, jax.checkpoint(layer)),
            "bfloat16",
        ),
        (lambda w: loss_of(TABLE[IDS], w, jax.jit(layer)), "bfloat16"),
        # What is no stack of layers, or may be none.
        (lambda w: loss_of(TABLE + w[0, 0], w), "float32"),
        (lambda w: loss_of(jnp.zeros((2, 8)), w), "float32"),
        (lambda w: loss_of(TABLE[IDS], jnp.tile(w, (65, 1, 1))), "float32"),
        (lambda w: loss_of(TABLE[IDS], w[:, 0], lambda x, v: x + (x @ v)[..., None]), "float32"),
        (lambda w: loss_of(TABLE[IDS], None, lambda x, _: layer(x, w[0]), 4), "float32"),
        # Made anew in every round.
        (lambda w: loss_of(TABLE, w, lambda x, w: jnp.tanh(x @ w)), "bfloat16"),
        # But for what is a result.
        (lambda w: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), TABLE, w)[0], "float32"),
    ],
)
def test_what_loops_carry(fun, dtype):
    assert carried(fun, LAYERS) == [dtype]


def test_what_is_small_keeps_its_dtype_in_a_carry_too():
    """A statistic of each row, made anew in every round."""

    def fun(w, x):
        def body(carry, _):
            h, size = carry
            h = jnp.tanh((h * size) @ w)
            return (h, jnp.exp(-jnp.mean(h**2, -1, keepdims=True))), None

        (h, _), _ = lax.scan(body, (x, jnp.ones((8, 1))), None, length=3)
        return jnp.sum((h @ w) ** 2)

    w = jnp.eye(16)
    assert carried(fun, w, jnp.ones((8, 16))) == ["bfloat16", "float32"]
    found = numerics.plan(fun, "mixed_bfloat16", w, jnp.ones((8, 16)))
    assert [v.why for v in found.values if v.shape == (8, 1)] == ["carried by a loop, small"]


def test_layers_are_half_in_a_backward_pass_too():
    step = jax.grad(lambda w: loss_of(TABLE[IDS] @ w[0], w))
    assert carried(step, LAYERS) == ["bfloat16", "bfloat16"]


def test_what_is_returned_is_not_rounded():
    """At its own size, by whatever way but a product."""

    def fun(w, x):
        h = jnp.tanh(x @ w)
        return h @ w, jnp.exp(2 * h), h[:2]

    _, *found = autocast(fun, "mixed_bfloat16")(LAYERS[0], TABLE)
    z = (TABLE.astype(jnp.bfloat16) @ LAYERS[0].astype(jnp.bfloat16)).astype(jnp.float32)
    np.testing.assert_allclose(found[0], jnp.exp(2 * jnp.tanh(z)), rtol=1e-6)
    np.testing.assert_allclose(found[1], jnp.tanh(z)[:2], rtol=1e-6)


def own_rule(step):
    ruled = jax.custom_vjp(step)
    ruled.defvjp(lambda *args: jax.vjp(step, *args), lambda pullback, ct: pullback(ct))
    return ruled


def own_tangent(step):
    ruled = jax.custom_jvp(step)
    ruled.defjvp(lambda primals, tangents: jax.jvp(step, primals, tangents))
    return ruled


@pytest.mark.parametrize("ruled", [own_rule, own_tangent])
def test_steps_with_derivatives_of_their_own(ruled):
    step = ruled(lambda y, w: y + 0.01 * jnp.tanh(y @ w))

    def loss(w, y):
        return jnp.mean(lax.fori_loop(0, 100, lambda _, y: step(y, w), y) ** 2)

    for half in (jnp.bfloat16, jnp.float16):
        [(ours, hand)] = errors(loss, (LAYERS[0], TABLE), half, around=jax.grad)
        assert ours <= LIMIT * hand


def test_across_devices():
    """Local steps, then their mean."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(jax.P(), jax.P("data")), out_specs=jax.P()
    )
    def trained(w, x):
        def body(w, x):
            grad = jax.grad(lambda w: jnp.mean((x @ w - 1) ** 2))(w)
            return w - 1e-4 * lax.pmean(grad, "data"), None

        return lax.scan(body, w, jnp.stack([x] * 8))[0]

    args = LAYERS[0], TABLE
    full, ours = (jax.jit(f)(*args) for f in (trained, autocast(trained, "mixed_bfloat16")))
    assert np.linalg.norm(ours - full) <= 0.02 * np.linalg.norm(full - args[0])


# Two values updated by each other, in random ways, in loops in loops: small steps, so that what a
# rounding would cost is a hundred times what products in half cost.
STACK = jax.random.normal(jax.random.key(0), (10, 4, 4)) / 4
STACK = STACK - jnp.swapaxes(STACK, 1, 2)  # rotations: nothing grows
WEIGHT = STACK[0]
START = jax.random.normal(jax.random.key(1), (2, 4, 4))
UPDATES = {
    "add": lambda x, y: x + 0.01 * jnp.tanh(y @ WEIGHT),
    "subtract": lambda x, y: x - 0.01 * (x @ WEIGHT),
    "decay": lambda x, y: 0.99 * x + 0.01 * (y @ WEIGHT),
    "gate": lambda x, y: x * (1 - 0.01 * jax.nn.sigmoid(y @ WEIGHT)),
    "divide": lambda x, y: x / (1 + 0.01 * jax.nn.sigmoid(y @ WEIGHT)),
    "largest": lambda x, y: jnp.maximum(x, 0.01 * y @ WEIGHT),
    "clip": lambda x, y: jnp.clip(x + 0.01 * (y @ WEIGHT), -2.0, 2.0),
    "choose": lambda x, y: jnp.where(jnp.tri(4) > 0, x, x + 0.01 * (x @ WEIGHT)),
    "row": lambda x, y: lax.dynamic_update_slice(x, x[:1] - 0.01 * (y[:1] @ WEIGHT), (0, 0)),
    "rows": lambda x, y: x.at[jnp.array([2, 0])].add(0.01 * (y @ WEIGHT)[:2]),
    "transpose": lambda x, y: (x.T + 0.01 * (y @ WEIGHT).T).T,
    "reshape": lambda x, y: (x.reshape(-1) + 0.01 * (y @ WEIGHT).reshape(-1)).reshape(4, 4),
    "pieces": lambda x, y: jnp.concatenate(
        [x[:2] + 0.01 * (y @ WEIGHT)[:2], x[2:] - 0.01 * (y @ WEIGHT)[2:]]
    ),
    "gradient": lambda x, y: x - 0.01 * jax.grad(lambda x: jnp.mean((x @ WEIGHT - y) ** 2))(x),
    "outer": lambda x, y: x + 0.01 * y[0][:, None] * jnp.tanh(x @ WEIGHT)[0],
}
AROUND = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda c: lax.scan(lambda c, _: (f(c), c[0][0]), c, None, length=10)[0],
    "over": lambda f: (
        lambda c: lax.scan(lambda c, w: (f((c[0] + 0.01 * (c[0] @ w), c[1])), None), c, STACK)[0]
    ),
    "while": lambda f: (
        lambda c: lax.while_loop(lambda c: c[0] < 10, lambda c: (c[0] + 1, f(c[1])), (0, c))[1]
    ),
    "branch": lambda f: lambda c: lax.cond(jnp.sum(c[0]) > -1e9, f, lambda c: c, c),
    "vmap": lambda f: (
        lambda c: tuple(x[1] for x in jax.vmap(lambda *c: f(c))(*(jnp.stack([x, x]) for x in c)))
    ),
}


UPDATE = st.tuples(st.sampled_from(list(UPDATES)), st.booleans())
PAIR = st.lists(UPDATE, min_size=1, max_size=3)
for _ in range(2):
    PAIR = st.lists(UPDATE | st.tuples(st.sampled_from(list(AROUND)), PAIR), min_size=1, max_size=3)


def run(program, pair):
    for name, what in program:
        if name in UPDATES:
            x, y = pair[::-1] if what else pair
            pair = (UPDATES[name](x, y), y)[:: -1 if what else 1]
        else:
            pair = AROUND[name](lambda c, what=what: run(what, c))(pair)
    return pair


@settings(max_examples=12, deadline=None, derandomize=True)
@given(program=PAIR)
def test_random_updates(program):
    assert_random_updates_are_kept(program)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(program=PAIR)
def test_more_random_updates(program):
    assert_random_updates_are_kept(program)


def assert_random_updates_are_kept(program):
    def fun(pair):
        return run([("scan", program)], pair)

    for ours, hand in errors(fun, (tuple(START),), jnp.bfloat16):
        # What is made anew in between is rounded, too: that is twice as much, not a hundred times.
        assert ours <= 2 * hand + 1e-5
