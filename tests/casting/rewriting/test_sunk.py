"""What a later part takes, and can be computed there of less, is not stored."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_kit
from jmp_kit import autocast
from jmp_kit.casting import plans_of
from jmp_kit.programs._jaxpr import uses_of
from jmp_kit.programs._marks import is_backward, stack_of
from tests.casting.rewritten import gradient_error
from tests.casting.states import normals
from tests.casting.stream import norm, step_of
from tests.casting.zoo import mean_square

H200 = jmp_kit.numerics.TARGETS["h200"]

normal = normals(np.random.default_rng(0))
BATCH, TIME, WIDTH = 4, 32, 16
NAMES = ("queries", "keys", "values", "gate", "out")
PARAMS = {name: normal(WIDTH, WIDTH, scale=0.3) for name in NAMES}
PARAMS["decay"] = normal(WIDTH, 1, scale=0.3)
X = normal(BATCH, TIME, WIDTH)


def stored(loss_fn):
    """What the forward pass stores: the primitives that make it, and the shapes."""
    [plan] = plans_of(jax.value_and_grad(loss_fn), "mixed_bfloat16", PARAMS, X)
    every = (s for s in plan.every_stored() if not is_backward(stack_of(s.eqn, s.calls)))
    return [(s.eqn.primitive.name, s.var.aval.shape) for s in every]


def decaying(params, x):
    """A state space: what was long ago counts less, by how much each time says."""
    rates = jax.nn.softplus(x @ params["decay"])[..., 0]
    passed = jnp.cumsum(rates, -1)
    decays = jnp.exp(passed[:, None, :] - passed[:, :, None])
    decays = jnp.where(jnp.tril(jnp.ones(decays.shape[1:], bool)), decays, 0)
    scores = (x @ params["queries"]) @ (x @ params["keys"]).swapaxes(-1, -2)
    return mean_square((scores * decays) @ (x @ params["values"]) @ params["out"])


def gated_early(params, x):
    """The gate is open before there is what it lets through."""
    gate = jax.nn.silu(x @ params["gate"])
    y = jax.nn.gelu(x @ params["values"]) @ params["keys"]
    return mean_square(norm(gate * y) @ params["out"])


def gated_late(params, x):
    gate = x @ params["gate"]
    y = jax.nn.gelu(x @ params["values"]) @ params["keys"]
    return mean_square(norm(jax.nn.silu(gate) * y) @ params["out"])


def stages(params, x):
    """What four stages take that others have changed, and in the end all of it."""
    x = x @ params["queries"]
    y, branches = x, []
    for _ in range(4):
        branches.append(jnp.tanh(y @ params["keys"]) @ params["values"])
        y = x + branches[-1]
    return mean_square((x + sum(branches)) @ params["out"])


def fed(params, x):
    """What each of four stages multiplies anew."""
    x = jnp.tanh(x @ params["queries"])
    y = x
    for _ in range(4):
        y = jnp.tanh(y @ params["keys"] + x @ params["values"])
    return mean_square(y @ params["out"])


def test_what_is_spread_of_less_is_not_stored_for_others():
    """Of decays between all times, only what a product takes: scores times decays."""
    square = [name for name, shape in stored(decaying) if shape == (BATCH, TIME, TIME)]
    assert "mul" in square
    assert not {"exp", "select_n"} & {*square}


def test_a_gate_is_opened_where_it_is_taken():
    """What it is made of is there in any case, for the backward pass."""
    assert stored(gated_early) == stored(gated_late)


@pytest.mark.parametrize("loss_fn", [decaying, gated_early, stages])
def test_the_gradient_is_as_near_to_float32(loss_fn, monkeypatch):
    taken = {name: w for name, w in PARAMS.items() if jnp.any(jax.grad(loss_fn)(PARAMS, X)[name])}

    def error():
        return gradient_error(lambda params, x: loss_fn(PARAMS | params, x), taken, X)

    found = error()
    monkeypatch.setattr("jmp_kit.casting.rewriting._rewritten.sunk", lambda parts, *_: list(parts))
    assert found <= 1.25 * error()


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_an_h200_does_not_write_the_decays(monkeypatch):
    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    def moved():
        params = {name: shape(256, 256) for name in NAMES} | {"decay": shape(256, 1)}
        step = autocast(step_of(decaying), "mixed_bfloat16")
        return jmp_kit.numerics.traffic(step, params, shape(16, 1024, 256), target="h200").nbytes

    found = moved()
    monkeypatch.setattr("jmp_kit.casting.rewriting._rewritten.sunk", lambda parts, *_: list(parts))
    assert found <= 0.9 * moved()


def terms(loss_fn):
    """The stored sums of cotangents that are taken by another sum alone."""
    [plan] = plans_of(jax.value_and_grad(loss_fn), "mixed_bfloat16", PARAMS, X)
    uses = uses_of(plan.jaxpr)
    every = (s for s in plan.every_stored() if s.eqn.primitive.name == "add_any")
    names = ([use and use.primitive.name for use in uses[s.var]] for s in every)
    return sum(several == ["add_any"] for several in names)


def test_cotangents_of_stages_are_added_up_at_once(monkeypatch):
    """Each is stored for the product that takes it: partial sums would be stored as well."""
    assert terms(stages) == 0
    monkeypatch.setattr("jmp_kit.casting.rewriting._rewritten.sunk", lambda parts, *_: list(parts))
    assert terms(stages) > 0


def test_sums_that_products_add_stay_where_they_are(monkeypatch):
    """What a product gives and nobody else takes is added in its kernel, and never stored."""
    found = terms(fed)
    monkeypatch.setattr("jmp_kit.casting.rewriting._rewritten.sunk", lambda parts, *_: list(parts))
    assert found == terms(fed) > 0


def test_no_product_moves_with_what_sinks():
    """A backward pass between what is made and what takes it, as of a second network's step."""

    def step(w, x):
        x = x + x @ w["out"]
        grad = jax.grad(lambda w: mean_square(w * x))(w["keys"])
        return x + jnp.tanh((w["keys"] - grad) @ w["gate"]), grad

    x = X[0, :WIDTH]
    found, expected = autocast(step, "mixed_bfloat16")(PARAMS, x), step(PARAMS, x)
    for ours, full in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, full, atol=0.05 * np.abs(full).max())
