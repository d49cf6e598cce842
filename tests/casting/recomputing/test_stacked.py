"""What scans stack for their backward pass: sums of halves in place of what they are sums of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_kit import autocast
from jmp_kit.casting import plans_of
from jmp_kit.casting.planning._plan import Call
from jmp_kit.casting.recomputing._stacked import halves_of
from jmp_kit.programs import every_equation, scan_counts
from tests.casting.rewritten import gradient_error
from tests.casting.states import normals
from tests.casting.zoo import mean_square

normal = normals(np.random.default_rng(0))
BATCH, TIME, WIDTH = 4, 8, 16
X = normal(TIME, BATCH, WIDTH)
PARAMS = {
    "in": normal(WIDTH, 4 * WIDTH, scale=0.3),
    "again": normal(WIDTH, 4 * WIDTH, scale=0.3),
    "bias": normal(4 * WIDTH, scale=0.3),
}


def long_memory(params, state, x):
    """An LSTM: gates of sums, joined."""
    c, h = state
    gates = x @ params["in"] + h @ params["again"] + params["bias"]
    i, f, g, o = jnp.split(gates, 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return c, jax.nn.sigmoid(o) * jnp.tanh(c)


def reset(params, state, x):
    """A GRU: of two gates sums, and one whose terms are needed by themselves."""
    c, h = state
    from_x = jnp.split(x @ params["in"] + params["bias"], 4, -1)
    from_h = jnp.split(h @ params["again"], 4, -1)
    r, z = (jax.nn.sigmoid(a + b) for a, b in zip(from_x[:2], from_h[:2], strict=True))
    n = jnp.tanh(from_x[2] + r * from_h[2])
    return c, (1 - z) * n + z * h


def loss_of(cell):
    def loss_fn(params, x):
        start = jnp.zeros((2, *x.shape[1:]))
        (_, h), _ = lax.scan(lambda s, x: (cell(params, s, x), None), tuple(start), x)
        return mean_square(h)

    return loss_fn


def stacked(fun, *args):
    """What the scan of the forward pass stacks: dtypes, and sizes in states."""
    eqns = [e for e, _ in every_equation(jax.make_jaxpr(fun)(*args).jaxpr)]
    scan = next(e for e in eqns if e.primitive.name == "scan")
    ys = [v.aval for v in scan.outvars[scan_counts(scan)[1] :]]
    return sorted((y.dtype.name, y.size // (TIME * BATCH * WIDTH)) for y in ys)


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.filterwarnings("ignore:Gradients are computed in float16")
def test_gates_are_stacked_and_not_what_they_are_sums_of(half):
    """And the states before: that which products take in half, the other whole."""
    found = stacked(autocast(jax.grad(loss_of(long_memory)), half), PARAMS, X)
    assert found == [(half, 1), (half, 4), ("float32", 1)]


def test_of_terms_that_are_needed_by_themselves_each_is_stacked():
    """Of two gates the sums, and both terms of the third."""
    found = stacked(autocast(jax.grad(loss_of(reset)), "mixed_bfloat16"), PARAMS, X)
    assert found == [("bfloat16", 1)] * 4 + [("float32", 1)]


def terms_alone(*args):
    """What products give, and none of its sums."""
    return halves_of(*args)[0], set()


@pytest.mark.parametrize("cell", [long_memory, reset])
def test_the_gradient_is_as_near_to_float32(cell, monkeypatch):
    found = gradient_error(loss_of(cell), PARAMS, X)
    monkeypatch.setattr("jmp_kit.casting.rewriting._scans.halves_of", terms_alone)
    assert found <= 1.25 * gradient_error(loss_of(cell), PARAMS, X)


def test_no_state_is_rounded():
    """The forward pass goes on with the sums as they are."""
    start = (jnp.zeros(X.shape[1:]), jnp.zeros(X.shape[1:]))

    def last(params):
        return lax.scan(lambda s, x: (long_memory(params, s, x), None), start, X)[0]

    def with_gradient(params):
        def loss_fn(params):
            state = last(params)
            return mean_square(state[1]), state

        return jax.value_and_grad(loss_fn, has_aux=True)(params)

    alone = autocast(last, "mixed_bfloat16")(PARAMS)
    (_, both), _ = autocast(with_gradient, "mixed_bfloat16")(PARAMS)
    assert all(map(jnp.array_equal, alone, both))


def test_a_product_is_stacked_rather_than_a_sum_of_it_alone():
    """That would take as much, and be rounded once more."""

    def cell(params, state, x):
        c, h = state
        return c, jnp.tanh(jnp.tanh(h @ params["again"][:, :WIDTH] + x) @ params["in"][:, :WIDTH])

    [plan] = plans_of(jax.grad(loss_of(cell)), "mixed_bfloat16", PARAMS, X)
    [forward, _] = [step for step in plan.steps if isinstance(step, Call)]
    [(body, _)] = forward.bodies
    assert "convert_element_type" not in {e.primitive.name for e in body.jaxpr.eqns}
