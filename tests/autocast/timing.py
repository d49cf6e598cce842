"""Times a model of `by_hand`, by hand and with autocast, in a process of its own.

    python -m tests.autocast.timing transformer          step and retrace: JSON, ours / by hand
    python -m tests.autocast.timing transformer ours     seconds of the first trace in a process

A process of its own, for a test under coverage would measure coverage. By processor time.
"""

import gc
import json
import sys
import time

import jax
import jax.numpy as jnp

from jmp_kit import autocast
from tests.autocast.by_hand import MODELS


def losses_of(model):
    return {"hand": model.loss(jnp.bfloat16), "ours": autocast(model.loss(), jnp.bfloat16)}


def first_trace(model, kind):
    """What a user waits for: later traces find parts of the model by hand in JAX's caches."""
    loss, example = losses_of(model)[kind], model.draw(0)
    start = time.process_time()
    jax.make_jaxpr(jax.value_and_grad(loss))(*example)
    return time.process_time() - start


def ratios(model):
    """Best of several, side by side."""
    losses, example = losses_of(model), model.draw(0)
    steps = {k: jax.jit(jax.value_and_grad(f)) for k, f in losses.items()}
    programs = {k: step.lower(*example).compile() for k, step in steps.items()}
    actions = {
        "retrace": lambda k: jax.make_jaxpr(jax.value_and_grad(lambda *a: losses[k](*a)))(*example),
        "step": lambda k: jax.block_until_ready(programs[k](*example)),
    }
    seconds = {(what, k): [] for what in actions for k in losses}
    gc.disable()
    for _ in range(12):
        for what, k in seconds:
            start = time.process_time()
            actions[what](k)
            seconds[what, k].append(time.process_time() - start)
    best = {case: min(found) for case, found in seconds.items()}
    return {what: best[what, "ours"] / best[what, "hand"] for what in actions}


if __name__ == "__main__":
    name, *kinds = sys.argv[1:]
    print(json.dumps(first_trace(MODELS[name], *kinds) if kinds else ratios(MODELS[name])))
