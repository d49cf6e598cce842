"""Gradients that a scan would add up round by round: the same, in one product behind it."""

import functools

import flax.linen as nn
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

import jmp_kit
from jmp_kit import autocast
from jmp_kit.programs import every_equation
from jmp_kit.programs._jaxpr import scan_counts
from tests.casting.recomputing.test_stacked import terms_alone
from tests.casting.rewritten import farthest
from tests.casting.stream import step_of
from tests.casting.test_by_hand import COMPILES_AS_TRACED

KEYS = jax.random.split(jax.random.key(0), 4)
WIDTH, BATCH, ROUNDS = 32, 4, 6
X = jax.random.normal(KEYS[0], (BATCH, ROUNDS, WIDTH))
WEIGHTS = [jax.random.normal(key, (WIDTH, WIDTH)) / 6 for key in KEYS[1:]]


def summed_up(fun, *args):
    """The shapes of what scans carry from round to round."""
    eqns = every_equation(jax.make_jaxpr(fun)(*args).jaxpr)
    scans = [e for e, _ in eqns if e.primitive.name == "scan"]
    return [v.aval.shape for e in scans for v in e.outvars[: scan_counts(e)[1]]]


@pytest.fixture(autouse=True)
def no_sums_are_stacked(monkeypatch):
    """They are rounded once more, which `test_stacked` measures."""
    monkeypatch.setattr("jmp_kit.casting.rewriting._scans.halves_of", terms_alone)


def in_half(gradient):
    return autocast(gradient, "mixed_bfloat16")


@pytest.fixture
def in_rounds(monkeypatch):
    """The gradient in half, added up round by round."""

    def added_up(gradient, *args):
        with monkeypatch.context() as context:
            context.setattr("jmp_kit.casting.rewriting._rewritten.hoisted", lambda jaxpr, *_: jaxpr)
            return in_half(gradient)(*args)

    return added_up


def assert_same(found, wanted):
    """Of the same halves: sums in another order."""
    assert farthest(found, wanted) <= 2e-3


def assert_as_near(gradient, args, in_rounds):
    """To float32. What is stacked for a product may be computed with, or made again."""
    full, found = (jax.jit(f)(*args) for f in (gradient, in_half(gradient)))
    added_up = in_rounds(gradient, *args)
    for a, b, c in zip(*map(jax.tree.leaves, (full, found, added_up)), strict=True):
        assert np.linalg.norm(b - a) <= 1.25 * np.linalg.norm(c - a)


def recurrent(cell, **options):
    model = nn.RNN(cell(WIDTH), **options)
    params = model.init(KEYS[0], X)
    return params, jax.grad(lambda params, x: jnp.mean(model.apply(params, x) ** 2))


CELLS = {
    "GRU": functools.partial(recurrent, nn.GRUCell),
    "LSTM": functools.partial(recurrent, nn.OptimizedLSTMCell),  # of joined weights
    "reversed": functools.partial(recurrent, nn.SimpleCell, reverse=True),
    "unrolled": functools.partial(recurrent, nn.SimpleCell, unroll=3),
}


@pytest.mark.parametrize("name", CELLS)
def test_gradients_of_recurrent_networks_are_those_that_are_added_up(name, in_rounds):
    params, gradient = CELLS[name]()
    assert_same(in_half(gradient)(params, X), in_rounds(gradient, params, X))
    assert (WIDTH, WIDTH) in summed_up(gradient, params, X)
    assert (WIDTH, WIDTH) not in summed_up(in_half(gradient), params, X)


def through(body, *carry):
    """The gradient of a loss of rounds, `body(weights, h, x)` each."""

    def loss_fn(weights, x):
        h, ys = lax.scan(lambda h, x: body(weights, h, x), jnp.ones((BATCH, WIDTH)), x)
        return jnp.mean(h**2) + jnp.mean(ys**2)

    return jax.grad(loss_fn)


def heads(h):
    return h.reshape(BATCH, 2, WIDTH // 2)


def of_heads(weights, h, x):
    """A product with a batch dimension that is no batch."""
    w = weights[0].reshape(2, WIDTH // 2, WIDTH)
    h = jnp.tanh(jnp.einsum("bhi,hio->bho", heads(h + x), w).sum(1))
    return h, h


def twice(weights, h, x):
    """One weight in two products of a round."""
    h = jnp.tanh(jnp.tanh(h @ weights[0] + x) @ weights[0] + x @ weights[1])
    return h, h @ weights[2]


def squared(weights, h, x):
    """A gradient of which no product alone is a term."""
    h = jnp.tanh(h @ (weights[0] ** 2) + x)
    return h, h


def nested(weights, h, x):
    h, _ = lax.scan(lambda h, _: (jnp.tanh(h @ weights[0] + x), None), h, None, length=2)
    return h, h


def alone(weights, h, x):
    """Rounds of which nothing but gradients of weights are products."""
    return h, x @ weights[0]


@pytest.mark.parametrize("body", [of_heads, twice, squared, nested, alone, jax.checkpoint(twice)])
def test_gradients_of_other_rounds_are_as_near_as_those_that_are_added_up(body, in_rounds):
    assert_as_near(through(body), (WEIGHTS, jnp.swapaxes(X, 0, 1)), in_rounds)


@pytest.mark.parametrize("rounds", [0, 1])
def test_few_rounds(rounds, in_rounds):
    assert_as_near(through(twice), (WEIGHTS, jnp.swapaxes(X, 0, 1)[:rounds]), in_rounds)


def test_gradients_of_large_micro_batches_are_added_up():
    """To stack their cotangents would cost more than the sum."""

    def loss_fn(weights, batches):
        def body(total, x):
            return total + jnp.mean(jnp.tanh(x @ weights[0]) ** 2), None

        return lax.scan(body, 0.0, batches)[0]

    args = WEIGHTS, jnp.ones((4, 4096, WIDTH))
    assert (WIDTH, WIDTH) in summed_up(in_half(jax.grad(loss_fn)), *args)


@pytest.mark.parametrize("name", ["GRU", "LSTM"])
def test_no_digit_is_lost(name):
    """A sum of all rounds is float32, as it was when each was added."""
    params, gradient = CELLS[name]()
    found = in_half(gradient)
    eqns = every_equation(jax.make_jaxpr(found)(params, X).jaxpr)
    products = [e for e, _ in eqns if e.primitive.name == "dot_general"]
    of_rounds = [e for e in products if len(e.params["dimension_numbers"][0][0]) == 2]
    assert of_rounds
    assert all(e.outvars[0].aval.dtype == jnp.float32 for e in of_rounds)
    wanted = jax.tree.leaves(gradient(params, X))

    def error(gradient):
        found = jax.tree.leaves(gradient(params, X))
        squares = [jnp.sum((a - b) ** 2) for a, b in zip(found, wanted, strict=True)]
        return float(sum(squares) / sum(jnp.sum(b**2) for b in wanted)) ** 0.5

    limit = 1.02 if COMPILES_AS_TRACED else 1.1
    assert error(found) <= limit * error(autocast(gradient, "mixed_bfloat16", recompute=False))


def test_batches_of_any_size():
    """Of which nobody knows whether they are larger than a sum."""
    params, gradient = CELLS["GRU"]()
    [batch] = jax.export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((batch, *X.shape[1:]), jnp.float32)
    params = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), params)
    exported = jax.export.export(jax.jit(in_half(gradient)))(params, x)
    assert exported.out_avals[0].dtype == jnp.float32


def test_devices_that_share_a_batch_learn_the_same():
    params, gradient = CELLS["GRU"]()
    x = jnp.concatenate([X, -X])
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    step = jax.jit(in_half(gradient))
    for a, b in zip(
        *(jax.tree.leaves(step(params, x)) for x in (jax.device_put(x, rows), x)), strict=True
    ):
        assert jnp.linalg.norm(a - b) <= 0.01 * jnp.linalg.norm(b)


H200 = jmp_kit.numerics.TARGETS["h200"]


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_a_recurrent_network_moves_half_the_bytes_on_an_h200(monkeypatch):
    model = nn.RNN(nn.GRUCell(1024))
    x = jax.ShapeDtypeStruct((64, 32, 1024), jnp.float32)
    params = jax.eval_shape(model.init, KEYS[0], x)
    step = step_of(lambda params, x: jnp.mean(model.apply(params, x) ** 2))

    def moved():
        function = autocast(step, "mixed_bfloat16")
        return jmp_kit.numerics.traffic(function, params, x, target="h200").nbytes

    found = moved()
    monkeypatch.setattr("jmp_kit.casting.rewriting._rewritten.hoisted", lambda jaxpr, *_: jaxpr)
    assert found <= 0.6 * moved()
