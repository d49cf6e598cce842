"""A train step that is wrapped whole computes again what a wrapped loss would."""

import functools
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jmp_kit import autocast, full_precision
from tests.casting.calls import calls_of_ours
from tests.casting.stream import (
    WEIGHTS,
    X,
    block,
    loss_through,
    loss_through_scan,
    norm,
    printed,
    step_of,
)
from tests.casting.test_by_hand import COMPILES_AS_TRACED
from tests.casting.test_zoo import distance
from tests.casting.zoo import SQUARE, mean_square
from tests.compiling import quick_or_slow

# What is compared is rounding: no gradient is small.
pytestmark = pytest.mark.filterwarnings("ignore:Gradients are computed in float16")

LOSSES = {
    "as it is": loss_through(block),
    "behind a jit": jax.jit(loss_through(block)),
    "of jitted blocks": loss_through(jax.jit(block)),
    "of jits in jits": jax.jit(loss_through(jax.jit(lambda x, *w: jax.jit(block)(x, *w)))),
    "scanned": loss_through_scan(block),
    "scanned, of jits": jax.jit(loss_through_scan(jax.jit(block))),
}
STREAM = LOSSES["as it is"]


def bytes_of(compiled):
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.skipif(not COMPILES_AS_TRACED, reason="this XLA merges what is made again")
@pytest.mark.parametrize("name", quick_or_slow(LOSSES, ("as it is", "scanned")))
def test_it_needs_the_memory_of_a_wrapped_loss(name):
    def compiled(step):
        weights = [jnp.tile(w, (8, 8)) / 8 for w in WEIGHTS]
        return jax.jit(step).lower(weights, jnp.ones((4096, 128))).compile()

    whole, kept = (
        bytes_of(compiled(autocast(step_of(LOSSES[name]), "mixed_bfloat16", recompute=recompute)))
        for recompute in ("most", False)
    )
    loss_alone = bytes_of(compiled(step_of(autocast(LOSSES[name], "mixed_bfloat16"))))
    assert whole <= 1.1 * loss_alone
    assert whole <= 0.5 * kept


@pytest.mark.parametrize("name", quick_or_slow(LOSSES, ("as it is", "scanned, of jits")))
def test_the_numbers_are_those_of_a_wrapped_loss(name):
    whole = jax.jit(autocast(step_of(LOSSES[name]), "mixed_float16"))(WEIGHTS, X)
    loss_alone = jax.jit(step_of(autocast(STREAM, "mixed_float16")))(WEIGHTS, X)
    change = functools.partial(jax.tree.map, jnp.subtract)
    full = jax.jit(step_of(STREAM))(WEIGHTS, X)[0]
    errors = [distance(change(w, WEIGHTS), change(full, WEIGHTS)) for w, _ in (whole, loss_alone)]
    assert errors[0] <= 1.2 * errors[1]


@pytest.mark.slow
def test_every_process_gives_xla_the_same_program():
    """Many hosts run one, and XLA finds it in its cache again."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.casting.stream"]
    environment = os.environ | {"JAX_NUMPY_DTYPE_PROMOTION": "strict"}
    root = pathlib.Path(__file__).parents[3]
    programs = [
        subprocess.run(
            command, cwd=root, env=environment, check=True, capture_output=True, text=True
        ).stdout
        for _ in range(3)
    ]
    assert "bf16" in programs[0]
    assert len({*programs, printed() + "\n"}) == 1


def scanned(body):
    """A loss of layers that are scanned, `body(x, w)` each, on `SQUARE`."""
    return lambda w, x: mean_square(lax.scan(body, x, jnp.stack(w))[0])


def layer(x, w):
    return x + jnp.sin(jnp.tanh(norm(x) @ w))


def masked(x, w):
    scores = jnp.where(jnp.tri(8) > 0, (x @ w) @ (x @ w).T / 4, -1e9)
    return x + jax.nn.softmax(scores) @ x, None


def with_a_result(w, x):
    x, found = lax.scan(lambda x, w: (layer(x, w), jnp.tanh(x @ w)), x, jnp.stack(w))
    return mean_square(x) + mean_square(found @ w[0])


def with_a_constant(w, x):
    gate = jnp.tanh(x @ w[0])
    return scanned(lambda x, w: (layer(x, w) * jnp.tanh(gate @ w), None))(w, x)


def with_a_key(w, x):
    def body(carry, w):
        x, key = carry
        key, drawn = jax.random.split(key)
        kept = jax.random.bernoulli(drawn, 0.8, x.shape)
        return (jnp.where(kept, layer(x, w), 0.0), key), None

    return mean_square(lax.scan(body, (x, jax.random.key(5)), jnp.stack(w))[0][0] @ w[0])


def one_after_another(w, x):
    x, _ = lax.scan(lambda x, w: (layer(x, w), None), x, jnp.stack(w))
    x, _ = lax.scan(lambda x, w: (layer(x, w), None), jnp.tanh(x), jnp.stack(w), reverse=True)
    return mean_square(x @ w[0])


SCANNED = {
    "backwards": lambda w, x: mean_square(
        lax.scan(lambda x, w: (layer(x, w), None), x, jnp.stack(w), reverse=True)[0]
    ),
    "masked": scanned(masked),
    "rematerialised": scanned(jax.checkpoint(lambda x, w: (layer(x, w), None))),
    "in a scan": scanned(
        lambda x, w: lax.scan(lambda x, _: (layer(x, w), None), x, None, length=2)
    ),
    "with a result": with_a_result,
    "with a constant": with_a_constant,
    "with a key": with_a_key,
    "one after another": one_after_another,
    "mapped": lambda w, x: mean_square(lax.map(lambda w: layer(layer(x, w), w) @ w, jnp.stack(w))),
    "counted": lambda w, x: mean_square(
        lax.fori_loop(0, 2, lambda i, x: layer(x, jnp.stack(w)[i]), x)
    ),
    "of no round": lambda w, x: mean_square(
        lax.scan(lambda x, _: (layer(x, w[0]), None), x, None, length=0)[0] @ w[0]
    ),
}


@pytest.mark.parametrize("name", quick_or_slow(SCANNED, ("backwards", "masked", "with a key")))
def test_scans_give_the_numbers_of_a_wrapped_loss(name):
    change = functools.partial(jax.tree.map, jnp.subtract)
    full, *halves = (
        change(jax.jit(step)(SQUARE, X)[0], SQUARE)
        for step in (
            step_of(SCANNED[name]),
            autocast(step_of(SCANNED[name]), "mixed_float16"),
            step_of(autocast(SCANNED[name], "mixed_float16")),
        )
    )
    errors = [distance(half, full) for half in halves]
    assert errors[0] <= 1.5 * errors[1] + 1e-4


def test_sums_of_narrow_rows_are_not_rounded():
    """A softmax over few experts: were its sums, its rows would be wrong together."""

    def loss(w, x):
        q = x @ w[0]
        return mean_square(jax.nn.softmax(q @ q.T / 4) @ x)

    full, whole, loss_alone = (
        jax.jit(step)(SQUARE, X)
        for step in (
            jax.grad(loss),
            autocast(jax.grad(loss), "mixed_float16"),
            jax.grad(autocast(loss, "mixed_float16")),
        )
    )
    assert distance(whole, full) <= 1.2 * distance(loss_alone, full)


def operations(step, name):
    program = str(jax.make_jaxpr(step)(SQUARE, X))
    return len(re.findall(rf"= {name}\b", program))


KEPT = {
    "sort": lambda h: jnp.sort(h) * h,
    "cumsum": lambda h: jnp.cumsum(h, -1) * h,
    "random_bits": lambda h: h * jax.random.uniform(jax.random.key(0), h.shape),
    "scan": lambda h: lax.fori_loop(0, 3, lambda i, h: jnp.sin(h), h),
    "cholesky": lambda h: jnp.linalg.cholesky(h.T @ h + jnp.eye(16))[:8] * h,
    "dot_general": lambda h: jax.checkpoint(lambda h: h @ SQUARE[1])(jnp.sin(h)),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_takes_long_is_not_repeated(name):
    def loss(w, x):
        return mean_square(jnp.tanh(KEPT[name](jnp.tanh(x @ w[0]))) @ w[1])

    step = step_of(loss)
    assert operations(autocast(step, "mixed_bfloat16"), name) == operations(step, name) > 0
    assert operations(autocast(step, "mixed_bfloat16"), "tanh") > operations(step, "tanh")


def test_a_product_in_full_precision_is_not_repeated():
    def loss(w, x):
        h = x @ w[0]
        with full_precision():
            h = jnp.tanh(h) @ w[1]
        # What is last is there at the peak of memory, and may be kept.
        return mean_square(jnp.tanh(jnp.tanh(jnp.sin(h) @ w[1]) @ w[1]) @ w[1])

    step = step_of(loss)
    repeated = autocast(step, "mixed_bfloat16")
    assert operations(repeated, "dot_general") == operations(step, "dot_general")
    assert operations(repeated, "sin") > operations(step, "sin")


def test_what_others_take_too_is_stored_and_not_repeated():
    def loss(w, x):
        h = jnp.exp(x @ w[0])  # read by a later segment
        return mean_square((h + jnp.tanh(h @ w[1])) @ w[1])

    step = step_of(loss)
    repeated = autocast(step, "mixed_bfloat16")
    assert operations(repeated, "exp") == operations(step, "exp") == 1
    assert operations(repeated, "tanh") > operations(step, "tanh") == 1


def test_a_step_inside_a_jit_a_result_of_the_forward_pass_and_a_barrier_of_the_user():
    def loss(w, x):
        h = lax.optimization_barrier(jnp.tanh(x @ w[0]))
        z = h @ w[1]
        return mean_square(jnp.exp(jnp.sin(z)) @ w[1]), (z, jnp.sin(z))

    def step(w, x):
        (value, aux), grads = jax.value_and_grad(loss, has_aux=True)(w, x)
        return jax.tree.map(lambda w, g: w - g, w, grads), value, aux

    want = step(SQUARE, X)
    got = autocast(jax.jit(step), "mixed_float16")(SQUARE, X)
    assert [x.dtype for x in jax.tree.leaves(got)] == [x.dtype for x in jax.tree.leaves(want)]
    assert distance(got, want) < 0.01


def loss_with_sines(n):
    """With so many operations between two products."""

    def loss(w, x):
        h = x @ w[0]
        for _ in range(n):
            h = jnp.sin(h)
        return mean_square(h @ w[1])

    return loss


def test_a_long_segment():
    """Of more operations than Python's calls may be deep."""
    n = sys.getrecursionlimit() + 100
    # The last is kept, for it is there at the peak of memory in any case.
    assert operations(autocast(step_of(loss_with_sines(n)), "mixed_bfloat16"), "sin") >= 2 * n - 1


def test_planning_takes_as_many_calls_as_there_are_operations():
    def calls(n):
        half = autocast(step_of(loss_with_sines(n)), "mixed_bfloat16")
        return calls_of_ours(half, SQUARE, X)

    assert calls(400) <= 4.4 * calls(100)


def test_what_a_product_and_its_own_segment_take_is_stored_and_not_repeated():
    """A shortcut beside a norm: both get what is rounded, forward and backward."""

    def loss(w, x):
        h = jnp.concatenate([x @ w[0], jnp.tanh(x @ w[1])], 0)
        return mean_square(norm(h) @ w[1] + h @ w[0])

    step = step_of(loss)
    repeated = autocast(step, "mixed_bfloat16")
    assert operations(repeated, "concatenate") == operations(step, "concatenate") == 1


def test_a_gradient_through_a_step_of_a_rematerialised_layer():
    """Of what `jax.checkpoint` holds, a derivative alone takes what a product gives."""
    layer = jax.checkpoint(lambda w, x: jnp.sin(jnp.tanh(x @ w)))

    def loss_fn(w, x):
        return mean_square(layer(w, x))

    def after_a_step(w, x):
        return loss_fn(w - jax.grad(loss_fn)(w, x), x)

    w, x = (jax.random.normal(jax.random.key(i), (32, 32)) / 8 for i in range(2))
    found = autocast(jax.grad(after_a_step), "mixed_bfloat16")(w, x)
    assert distance(found, jax.grad(after_a_step)(w, x)) <= 0.02


def test_what_was_looked_up_is_not_looked_up_again():
    """To read it costs more than to keep what it is joined in, for a product."""
    places = jnp.arange(len(X)) % 4

    def loss(w, x):
        h = jnp.tanh(x @ w[0])
        joined = jnp.concatenate([h, w[1][places], w[1][places + 1]], -1)
        h = jnp.tanh(joined @ jnp.tile(w[1], (3, 1)))
        return mean_square(jnp.tanh(jnp.tanh(h @ w[1]) @ w[1]) @ w[1])

    step = step_of(loss)
    assert operations(autocast(step, "mixed_bfloat16"), "concatenate") == 1


@pytest.mark.parametrize("recompute", [True, False, "most"])
def test_a_gradient_that_nobody_takes(recompute):
    loss_fn = loss_through(block)

    def value(*args):
        return jax.value_and_grad(loss_fn)(*args)[0]

    found = autocast(value, "mixed_bfloat16", recompute=recompute)(WEIGHTS, X)
    assert float(found) == pytest.approx(float(loss_fn(WEIGHTS, X)), rel=0.02)
