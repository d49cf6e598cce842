"""What `watch` costs the digits step, in a process of its own.

    python -m tests.numerics.watching

Prints the processor time of a hundred steps with `watch(every=100)`, one of which collects, by that
of a hundred without: the least of several each, in turns.
"""

import gc
import json
import time

import jax
import optax

import jmp_kit
from examples import digits
from jmp_kit import numerics

STEPS, TURNS = 100, 3


def main():
    policy = jmp_kit.get_policy("mixed_float16")
    data, _ = digits.load_data(0)
    batches = list(digits.batches(data, STEPS, 0))
    params = digits.Network().init(jax.random.key(0), data[0][:1])["params"]
    inners = {
        "plain": optax.adamw(1e-3),
        "watched": optax.chain(numerics.watch(every=STEPS), optax.adamw(1e-3)),
    }
    programs, states, seconds = {}, {}, {name: [] for name in inners}
    for name, inner in inners.items():
        optimizer = jmp_kit.mixed_precision(inner, jmp_kit.DynamicLossScale())
        states[name] = params, optimizer.init(params)
        step = digits.make_train_step(policy, optimizer)
        programs[name] = step.lower(*states[name], batches[0]).compile()
    gc.disable()
    for turn in range(TURNS + 1):
        for name in inners if turn % 2 else reversed(inners):
            start = time.process_time()
            for batch in batches:
                *states[name], _ = jax.block_until_ready(programs[name](*states[name], batch))
            seconds[name].append(time.process_time() - start)
    best = {name: min(found[1:]) for name, found in seconds.items()}
    collected = numerics.total_histogram(numerics.watched(states["watched"][1]))
    elements = sum(x.size for x in jax.tree.leaves(params)) * (TURNS + 1)
    everything = float(collected.counts.sum() + collected.zeros + collected.nonfinite)
    ratio = best["watched"] / best["plain"]
    print(json.dumps({"ratio": ratio, "collected": everything / elements, "seconds": seconds}))


if __name__ == "__main__":
    main()
