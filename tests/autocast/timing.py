"""Prints, as JSON, how long autocast takes to trace and to run a model, relative to it by hand.

A process of its own, for a test under coverage would measure coverage. Best of several, by
processor time.
"""

import gc
import json
import sys
import time

import jax
import jax.numpy as jnp

from jmp_kit import autocast
from tests.autocast.by_hand import MODELS


def main(name):
    model = MODELS[name]
    example = model.draw(0)
    losses = {"hand": model.loss(jnp.bfloat16), "ours": autocast(model.loss(), jnp.bfloat16)}
    steps = {k: jax.jit(jax.value_and_grad(f)) for k, f in losses.items()}
    programs = {k: step.lower(*example).compile() for k, step in steps.items()}
    actions = {
        "trace": lambda k: jax.make_jaxpr(jax.value_and_grad(lambda *a: losses[k](*a)))(*example),
        "step": lambda k: jax.block_until_ready(programs[k](*example)),
    }
    seconds = {(what, k): [] for what in actions for k in losses}
    gc.disable()
    for _ in range(12):
        for what, k in seconds:
            start = time.process_time()
            actions[what](k)
            seconds[what, k].append(time.process_time() - start)
    print(
        json.dumps(
            {what: min(seconds[what, "ours"]) / min(seconds[what, "hand"]) for what in actions}
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
