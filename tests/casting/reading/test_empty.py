"""Rows that are zero, for nothing was put there: who holds a place of the experts, and what for."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_kit.casting.reading._places import Places
from jmp_kit.casting.rewriting._inline import inlined

WORDS, EXPERTS, ROOM, WIDTH = 16, 2, 12, 3

W, SCALES = (
    jnp.asarray(np.random.default_rng(n).normal(size=(EXPERTS, n, WIDTH)), jnp.float32)
    for n in (WIDTH, ROOM)
)


def as_they_are(y):
    return y


def looked_up(y, slots):
    return y.at[slots].get(mode="fill", fill_value=0)


def sent(network=as_they_are, *, own=as_they_are, find=looked_up, best=1):
    """What experts make of the words that they have room for, first come, first served."""

    def send(words, scores):
        chosen = lax.top_k(scores, best)[1]
        one = jax.nn.one_hot(chosen.reshape(-1), EXPERTS, dtype=jnp.int32)
        rank = (jnp.cumsum(one, 0) * one).sum(-1).reshape(chosen.shape) - 1
        slots = jnp.where(rank < ROOM, chosen * ROOM + rank, EXPERTS * ROOM)
        owners = jnp.broadcast_to(jnp.arange(WORDS)[:, None], chosen.shape)
        held = jnp.zeros(EXPERTS * ROOM, int).at[slots].set(owners, mode="drop")
        y = network(words[own(held.reshape(EXPERTS, ROOM))])
        return find(y.reshape(EXPERTS * ROOM, -1), slots)

    return send


def both(y):
    return jax.nn.silu(y @ W) * (y @ W + 1)


def turned(y):
    return jnp.einsum("ehw,etw->ewt", W, jnp.moveaxis(y, 1, 0).swapaxes(0, 1)).swapaxes(1, 2)


def of_all(y, slots):
    return looked_up(y - y.mean(0), slots)


KNOWN = {
    "as they are": (sent(), 1),
    "two each": (sent(best=2), 2),
    "a network": (sent(lambda y: jnp.tanh(y @ W) @ W), 1),
    "a gate": (sent(both, best=2), 2),
    "rectified": (sent(lambda y: jnp.maximum(y @ W, 0) @ W), 1),
    "with a bias": (sent(lambda y: -(y @ W + jnp.ones(WIDTH)) / 3), 1),
    "normed": (sent(lambda y: y / jnp.sqrt((y * y).sum(-1, keepdims=True) + 1)), 1),
    "scaled": (sent(lambda y: y * SCALES), 1),
    "turned": (sent(turned), 1),
    "flat": (sent(lambda y: (y.reshape(-1, WIDTH) @ W[0]).reshape(y.shape)), 1),
    "one number of each": (sent(lambda y: y.sum(-1)), 1),
    "a choice": (sent(lambda y: jnp.where(y > 0, y, 2 * y)), 1),
}

UNKNOWN = {
    "without their mean": sent(lambda y: y - y.mean(1, keepdims=True)),
    "without the mean of all": sent(find=of_all),
    "added up": sent(lambda y: jnp.cumsum(y, 1)),
    "the wrong way round": sent(lambda y: y[:, ::-1]),
    "experts the wrong way round": sent(lambda y: y[::-1]),
    "experts and rows changed": sent(lambda y: y.swapaxes(0, 1).reshape(y.shape)),
    "held the wrong way round": sent(own=lambda held: held[:, ::-1]),
    "looked up next to it": sent(find=lambda y, slots: looked_up(y, slots + 1)),
    "looked up at the end, too": sent(find=lambda y, slots: y.at[slots].get(mode="clip")),
    "others looked up, too": sent(find=lambda y, slots: looked_up(y, slots) + y[:1]),
    "mixed": sent(lambda y: jnp.einsum("etw,ts->esw", y, jnp.ones((ROOM, ROOM)))),
}

ARGS = jnp.ones((WORDS, WIDTH)), jnp.ones((WORDS, EXPERTS))


def most(send):
    """How many cotangents go to one word at most."""

    def loss_fn(words, scores):
        return jnp.sum(jnp.sin(send(jnp.tanh(words), scores)))

    jaxpr = inlined(jax.make_jaxpr(jax.grad(loss_fn))(*ARGS).jaxpr)
    scatters = [e for e in jaxpr.eqns if e.primitive.name == "scatter-add"]
    [eqn] = [e for e in scatters if e.outvars[0].aval.shape == (WORDS, WIDTH)]
    return Places(jaxpr, {}).most_at_one(eqn)


@pytest.mark.parametrize(("send", "count"), KNOWN.values(), ids=KNOWN)
def test_places_that_nobody_holds_count_nothing(send, count):
    assert most(send) == count


@pytest.mark.parametrize("send", UNKNOWN.values(), ids=UNKNOWN)
def test_places_that_are_not_known_to_be_empty(send):
    assert most(send) == math.inf


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("send", "count"), KNOWN.values(), ids=KNOWN)
def test_their_cotangents_are_zero(send, count, seed):
    """Counted: of each place, whether its cotangent is any but zero."""
    scores = jax.random.normal(jax.random.key(seed), (WORDS, EXPERTS))
    scores = scores.at[:, 0].add(1)  # so that the first has no room for all, and the second has
    words = jax.random.normal(jax.random.key(seed + 1), (WORDS, WIDTH))
    closed = jax.make_jaxpr(jax.grad(lambda *args: jnp.sum(jnp.sin(send(*args)))))(words, scores)
    jaxpr, found = inlined(closed.jaxpr), []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scatter-add" and eqn.outvars[0].aval.shape == words.shape:
            found = eqn.invars[1:]
    values = jax.core.eval_jaxpr(jaxpr.replace(outvars=found), closed.consts, words, scores)
    places, cotangents = (np.asarray(v).reshape(EXPERTS * ROOM, -1) for v in values)
    counts = np.bincount(places[np.any(cotangents != 0, 1), 0], minlength=WORDS)
    assert 0 < counts.max() <= count
