"""Recurrences whose products are outside: gates of all times at once, and a scan that uses them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import jmp_kit
from jmp_kit import autocast
from jmp_kit.casting import plans_of
from jmp_kit.casting.planning._plan import Form, Part
from jmp_kit.programs import every_equation, scan_counts
from tests.casting.planning.test_passes import is_shape
from tests.casting.reading.test_state import assert_as_near, errors
from tests.casting.states import normal
from tests.casting.stream import step_of
from tests.casting.zoo import mean_square

BATCH, TIME, WIDTH = 4, 32, 16
WEIGHTS = {"in": normal(WIDTH, 3 * WIDTH, scale=0.3), "out": normal(WIDTH, WIDTH, scale=0.3)}
X = normal(BATCH, TIME, WIDTH)
H200 = jmp_kit.numerics.TARGETS["h200"]


def unit(c, gates):
    """One step of a simple recurrent unit, its state in float32."""
    f, r = map(jax.nn.sigmoid, gates[1:])
    c = f.astype(jnp.float32) * c + ((1 - f) * gates[0]).astype(jnp.float32)
    return c, r * jnp.tanh(c).astype(r.dtype)


def recurrent(weights, x):
    """The state at the end, and what follows from all of them."""
    gates = jnp.split((x @ weights["in"]).swapaxes(0, 1), 3, -1)
    last, hidden = lax.scan(unit, jnp.zeros(gates[0].shape[1:]), gates)
    return last, hidden.swapaxes(0, 1) @ weights["out"]


def loss_fn(weights, x):
    return mean_square(recurrent(weights, x)[1])


WAYS = {
    "of the function": lambda f, half: jax.grad(autocast(f, half)),
    "around the gradient": lambda f, half: autocast(jax.grad(f), half),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_scan_reads_and_stacks_halves_and_carries_float32(way):
    closed = jax.make_jaxpr(WAYS[way](loss_fn, "mixed_bfloat16"))(WEIGHTS, X)
    scans = [e for e, _ in every_equation(closed.jaxpr) if e.primitive.name == "scan"]
    assert len(scans) >= 2
    for eqn in scans:
        n_consts, n_carry = scan_counts(eqn)
        carried = eqn.invars[n_consts : n_consts + n_carry]
        assert {v.aval.dtype for v in carried} == {jnp.dtype("float32")}
        for several in (eqn.invars[n_consts + n_carry :], eqn.outvars[n_carry:]):
            dtypes = [v.aval.dtype for v in several]
            assert dtypes.count(jnp.bfloat16) >= 1
            assert dtypes.count(jnp.float32) <= 1  # the states of the forward pass


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.filterwarnings("ignore:Gradients are computed in float16")
@pytest.mark.usefixtures("standard_promotion")
def test_it_is_as_near_to_float32_as_with_products_alone(half):
    half = jnp.dtype(half)
    assert_as_near(errors(recurrent, (WEIGHTS, X), half))
    assert_as_near(errors(jax.grad(loss_fn), (WEIGHTS, X), half))
    assert_as_near(errors(loss_fn, (WEIGHTS, X), half, around=jax.grad))


def by_hand(weights, x):
    return loss_fn(*jax.tree.map(lambda x: x.astype(jnp.bfloat16), (weights, x)))


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_an_h200_moves_no_more_bytes_of_it_than_by_hand():
    weights = {"in": (1024, 3072), "out": (1024, 1024)}
    args = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        (weights, (64, 128, 1024)),
        is_leaf=is_shape,
    )
    steps = autocast(step_of(loss_fn), "mixed_bfloat16"), step_of(by_hand)
    ours, hand = (jmp_kit.numerics.traffic(step, *args, target="h200").nbytes for step in steps)
    assert ours <= hand


def test_a_scan_that_depends_on_no_product_splits_no_segment():
    """How much what came earlier counts, say, between a product and a norm."""

    def loss_fn(weights, x, scans):
        x = jnp.exp(x @ weights["in"][:, :WIDTH])
        start, powers = jnp.ones(()), jnp.arange(WIDTH, dtype=jnp.float32)
        if scans:
            _, powers = lax.scan(lambda c, _: (0.9 * c, c), start, None, length=WIDTH)
        x = x * powers
        return mean_square(x / x.sum(-1, keepdims=True) @ weights["out"])

    def stored(scans):
        fun = jax.grad(lambda *args: loss_fn(*args, scans))
        [plan] = plans_of(fun, "mixed_bfloat16", WEIGHTS, X)
        parts = [step for step in plan.steps if isinstance(step, Part)]
        return [s.form for part in parts for s in part.stored.values()]

    assert stored(scans=True) == stored(scans=False)
    assert Form.CAST in stored(scans=True)


def test_a_scan_of_what_has_an_effect_stays_where_it_is():
    """What it takes could not go first without it, and effects keep their order."""
    said = []

    def say(word):
        said.append(int(word))
        return np.float32(word)

    def fun(x, w):
        y = x @ w
        for word in (1, 2):
            start = io_callback(say, jax.ShapeDtypeStruct((), "float32"), word, ordered=True)
        _, powers = lax.scan(lambda c, _: (0.5 * c, c), start, None, length=WIDTH)
        return y * powers

    out = jax.block_until_ready(autocast(fun, "mixed_bfloat16")(X, WEIGHTS["out"]))
    assert said == [1, 2]
    np.testing.assert_allclose(out, fun(X, WEIGHTS["out"]), rtol=0.1, atol=0.1)
