"""Train, be killed, train on: run by `test_checkpoint.py` in a process of its own.

    python -m tests.killed FOLDER KILLS SEED

Trains once without being disturbed. Then starts the same training over and over, kills it with
SIGKILL at a random moment, and lets the last one finish. Prints what came of it as JSON.
"""

import functools
import hashlib
import json
import operator
import os
import pathlib
import random
import signal
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from sklearn.datasets import load_digits

import jmp_kit
from jmp_kit import checkpoint

STEPS, EVERY = 120, 2


def train(directory: pathlib.Path) -> None:
    """With all that has state: remainders, random rounding, loss scale, accumulation, EMA."""
    digits = load_digits()
    images, labels = jnp.asarray(digits.data / 16, jnp.float32), jnp.asarray(digits.target)
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "hidden": (jax.random.normal(keys[0], (64, 32)) / 8).astype(jnp.bfloat16),
        "out": (jax.random.normal(keys[1], (32, 10)) / 6).astype(jnp.bfloat16),
    }
    inner = optax.MultiSteps(optax.adamw(optax.cosine_decay_schedule(1e-2, STEPS)), 2)
    optimizer = jmp_kit.mixed_precision(
        inner,
        jmp_kit.DynamicLossScale(2.0**15, period=5),
        master="remainder",
        moment_dtype="bfloat16",
        seed=1,
    )
    ema = optax.ema(0.99)

    @jmp_kit.autocast("mixed_float16")
    def loss_fn(params, images, labels):
        logits = jax.nn.relu(images @ params["hidden"]) @ params["out"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @jax.jit
    def train_step(state):
        params, opt_state = state["params"], state["opt_state"]
        key, batch_key = jax.random.split(state["key"])
        rows = jax.random.randint(batch_key, (64,), 0, len(images))
        scale = jmp_kit.loss_scale_of(opt_state)
        _, grads = jmp_kit.value_and_grad(loss_fn, scale)(params, images[rows], labels[rows])
        # Every seventh step overflows.
        spoil = jnp.where(state["step"] % 7 == 3, jnp.inf, 1.0)
        grads = jax.tree.map(lambda g: g * spoil, grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        _, average = ema.update(jmp_kit.master_params(opt_state, params), state["ema"])
        return {
            "params": params,
            "opt_state": opt_state,
            "ema": average,
            "key": key,
            "step": state["step"] + 1,
        }

    opt_state = optimizer.init(params)
    state = {
        "params": params,
        "opt_state": opt_state,
        "ema": ema.init(jmp_kit.master_params(opt_state, params)),
        "key": keys[2],
        "step": jnp.asarray(0),
    }
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(directory / "checkpoints", options=options) as manager:
        if manager.latest_step() is not None:
            state = checkpoint.restore(directory / "checkpoints", like=state)
        for step in range(int(state["step"]), STEPS):
            state = train_step(state)
            if step % EVERY == 0:
                manager.save(step + 1, args=ocp.args.StandardSave(state))
    digest = hashlib.sha256()
    state["key"] = jax.random.key_data(state["key"])
    for leaf in jax.tree.leaves(state):
        digest.update(np.asarray(leaf).tobytes())
    text = f"{digest.hexdigest()} {int(state['opt_state'].skipped)}"
    (directory / "end").write_text(text)


def start(directory: pathlib.Path) -> int:
    """The process id of a training process."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            # Only now does JAX start threads, so the fork copied none.
            train(directory)
            code = 0
        finally:
            os._exit(code)
    return pid


def wait(directory: pathlib.Path, until: Callable[[list[str]], bool]) -> None:
    """Until the names in a folder are such, or for a minute."""
    patience = time.monotonic() + 60
    while not until(os.listdir(directory)) and time.monotonic() < patience:
        time.sleep(0.001)


def wait_for_a_change(directory: pathlib.Path) -> None:
    """A save is three: it begins, it is there, and the oldest goes."""
    wait(directory, functools.partial(operator.ne, os.listdir(directory)))


def has_unfinished(names: list[str]) -> bool:
    """Whether a save has begun and is not there yet."""
    return any("tmp" in name for name in names)


def main(folder: str, kills: str, seed: str) -> None:
    """Train undisturbed, then with kills, and compare the ends."""
    root = pathlib.Path(folder)
    moments = random.Random(int(seed))
    # Compiled once, for all of the starts.
    jax.config.update("jax_compilation_cache_dir", str(root / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    whole, disturbed = root / "whole", root / "disturbed"
    for directory in (whole, disturbed):
        (directory / "checkpoints").mkdir(parents=True)
    assert os.waitpid(start(whole), 0)[1] == 0

    killed, during_save, steps = 0, 0, []
    for _ in range(int(kills)):
        pid = start(disturbed)
        checkpoints = disturbed / "checkpoints"
        # Some while it starts and restores, most while it trains and saves: as many changes of its
        # folder later as chance says, so that a slow machine gets as far as a fast one. Half of
        # these as soon as a save has begun, or chance alone would say whether any is cut short.
        if (moment := moments.random()) < 0.3:
            time.sleep(moments.uniform(0, 1))
        else:
            for _ in range(moments.randint(1, 12)):
                wait_for_a_change(checkpoints)
            if moment < 0.65:
                time.sleep(moments.uniform(0, 0.01))
            else:
                wait(checkpoints, has_unfinished)
        os.kill(pid, signal.SIGKILL)
        killed += os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        names = os.listdir(checkpoints)
        during_save += has_unfinished(names)
        steps.append(max((int(name) for name in names if name.isdigit()), default=0))
    assert os.waitpid(start(disturbed), 0)[1] == 0
    ends = [(directory / "end").read_text() for directory in (whole, disturbed)]
    print(json.dumps({"killed": killed, "during_save": during_save, "steps": steps, "ends": ends}))


if __name__ == "__main__":
    main(*sys.argv[1:])
