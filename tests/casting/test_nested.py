"""Programs inside programs: each is looked at once, however deep it lies."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

from jmp_kit import autocast
from jmp_kit.programs import Flow, opened
from jmp_kit.programs._flow import PRODUCTS
from tests.casting.calls import calls_of_ours


def scanned(fun):
    return lambda x: jax.lax.scan(lambda carry, _: (fun(carry), None), x, None, 3)[0]


def swapped(fun):
    """In a scan whose carries change places: three rounds until nothing new is known."""

    def step(carry, _):
        return (carry[1], fun(carry[0])), None

    return lambda x: jax.lax.scan(step, (x, x), None, 3)[0][0]


def looped(fun):
    return lambda x: jax.lax.fori_loop(0, 3, lambda _, carry: fun(carry), x)


def chosen(fun):
    return lambda x: jax.lax.cond(x[0, 0] > 0, fun, jnp.cos, x)


def with_rule(fun):
    ruled = jax.custom_jvp(lambda x: fun(x))
    ruled.defjvp(lambda primals, tangents: jax.jvp(fun, primals, tangents))
    return ruled


WRAPPERS = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan of a checkpoint": lambda fun: scanned(jax.checkpoint(fun)),
    "scan, swapped": swapped,
    "loop": looped,
    "cond": chosen,
    "derivative of its own": with_rule,
}


def nested(wrapper, depth):
    def loss(x):
        def fun(y):
            return jnp.tanh(y @ jnp.eye(8))

        for _ in range(depth):
            fun = wrapper(lambda y, fun=fun: jnp.sin(fun(y)) + y)
        return (fun(x) ** 2).sum()

    return loss


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("differentiate", [jax.grad, lambda loss: loss])
def test_a_level_more_does_not_multiply_the_work_of_tracing(name, differentiate):
    if name == "loop" and differentiate is jax.grad:
        differentiate = jax.jacfwd

    def calls(depth):
        half = autocast(differentiate(nested(WRAPPERS[name], depth)), "mixed_bfloat16")
        return calls_of_ours(half, jnp.ones((4, 8)))

    two, three, four = map(calls, (2, 3, 4))
    assert two < three < four
    # In proportion to the levels, or to their square: not twice as much for each.
    assert four - three < 1.5 * (three - two)


def test_what_was_found_in_a_program_goes_with_it():
    flow = Flow(PRODUCTS)
    jaxpr, _ = opened(jax.make_jaxpr(lambda x: x @ x)(jnp.eye(2)))
    found = flow.depending(jaxpr, [False])
    assert found == set(jaxpr.outvars)
    assert flow.depending(jaxpr, (False,)) is found
    assert flow.depending(jaxpr, [True]) == {*jaxpr.invars, *jaxpr.outvars}
    assert Flow(frozenset()).depending(jaxpr, [False]) == set()

    gone = weakref.ref(jaxpr)
    del jaxpr
    jax.clear_caches()
    gc.collect()
    assert gone() is None
