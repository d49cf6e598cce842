"""One function is one program: compiled once, and the same on all processes that share devices."""

import functools
import os
import subprocess
import sys

import jax
import pytest

from benchmarks.zoo import ZOO
from jmp_kit import autocast
from tests.compiling import quick_or_slow

pytestmark = pytest.mark.usefixtures("standard_promotion")


def ways(loss):
    half = functools.partial(autocast, policy="mixed_bfloat16")
    return half(jax.grad(loss, has_aux=True)), jax.grad(half(loss), has_aux=True)


def traced_anew(function, *args):
    """The program for GPUs, of a trace that remembers no other."""
    jax.clear_caches()
    return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("name", quick_or_slow(ZOO, {"gpt"}))
def test_every_trace_gives_the_same_program(name):
    model = ZOO[name].at(True, batch=64)
    args = *jax.eval_shape(lambda: model.task.variables), *model.batch
    for way in ways(model.task.loss()):
        # A set of variables comes in the order of their addresses: in the same one by chance.
        assert len({traced_anew(way, *args) for _ in range(3)}) == 1


STEP = """
from benchmarks.zoo import ZOO
from tests.casting.test_same_program import ways
import jax

model = ZOO["gpt plain"].at(True, batch=64)
args = *jax.eval_shape(lambda: model.task.variables), *model.batch
for way in ways(model.task.loss()):
    jax.jit(way).lower(*args).compile()
"""


@pytest.mark.slow
def test_another_process_finds_what_was_compiled(tmp_path):
    found = []
    for seed in "12":  # of the order of what Python hashes
        cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "PYTHONHASHSEED": seed}
        cache |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        subprocess.run([sys.executable, "-c", STEP], check=True, env={**os.environ, **cache})
        found.append({path.name for path in tmp_path.glob("*-cache")})
    assert found[0] == found[1]
    assert len([name for name in found[0] if "loss" in name]) == 2
