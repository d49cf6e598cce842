"""A user's file as the type checkers see it: what is right passes, and what is wrong does not."""

import re
import subprocess
import sys

import pytest

from tests.compiling import quick_or_slow

# What is wrong in it says so.
FILE = """
from typing import assert_type

import jax
import jax.numpy as jnp
import optax

import jmp_kit
import jmp_kit.numerics


def loss_fn(params: dict[str, jax.Array], x: jax.Array, *, power: int = 2) -> jax.Array:
    return jnp.mean((x @ params["w"]) ** power)


@jmp_kit.autocast("mixed_bfloat16", rules={"w": "float32"})
def decorated(w: jax.Array, x: jax.Array) -> tuple[jax.Array, str]:
    return jnp.sum(x @ w), "aux"


@jmp_kit.full_precision
def region(x: jax.Array) -> jax.Array:
    with jmp_kit.full_precision():
        return x


params, x = {"w": jnp.ones((2, 2))}, jnp.ones((1, 2))
half = jmp_kit.autocast(loss_fn, "mixed_bfloat16", recompute="most")
assert_type(half(params, x, power=3), jax.Array)
half(params)  # wrong
half(params, x, power="3")  # wrong
jmp_kit.autocast(loss_fn)  # wrong
jmp_kit.autocast(loss_fn, jnp.bfloat16, recompute="least")  # wrong

assert_type(decorated(x, x), tuple[jax.Array, str])
decorated(x)  # wrong
assert_type(region(x), jax.Array)
region()  # wrong
assert_type(jmp_kit.half_precision(region)(x), jax.Array)
jmp_kit.half_precision(region)(x, x)  # wrong

scale = jmp_kit.DynamicLossScale()
value, grads = jmp_kit.value_and_grad(half, scale)(params, x)
assert_type(value, jax.Array)
jmp_kit.value_and_grad(half, scale)(params)  # wrong
jmp_kit.value_and_grad(half)(params, x)  # wrong
(value, aux), grads = jmp_kit.value_and_grad(decorated, scale, has_aux=True)(x, x)
assert_type(aux, str)
grads, aux = jmp_kit.grad(decorated, scale, has_aux=True)(x, x)
assert_type(aux, str)
jmp_kit.grad(loss_fn, scale)(params, power=2)  # wrong

optimizer = jmp_kit.mixed_precision(optax.adamw(1e-3), scale, master="remainder")
jmp_kit.mixed_precision(optax.adamw(1e-3), scale, master="float23")  # wrong
jmp_kit.numerics.audit(half, params, x, level="compiled")
jmp_kit.numerics.audit(half, params, x, level="optimised")  # wrong
jmp_kit.nnx.apply_policy
jmp_kit.nix  # wrong
"""


CHECKERS = {
    "mypy": ["--ignore-missing-imports", "--cache-dir", "CACHE"],
    "pyright": ["--pythonpath", sys.executable],
}


@pytest.mark.parametrize("name", quick_or_slow(CHECKERS, {"pyright"}))
def test_a_file_of_a_user(name, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(FILE)
    (tmp_path / "pyrightconfig.json").write_text('{"reportUnusedExpression": false}')
    options = [option.replace("CACHE", str(tmp_path)) for option in CHECKERS[name]]
    run = [sys.executable, "-m", name, *options, str(path)]
    told = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path).stdout
    found = {int(line) for line in re.findall(r"train\.py:(\d+):.*?\berror\b", told)}
    lines = FILE.splitlines()
    wrong = {i for i, line in enumerate(lines, start=1) if line.endswith("# wrong")}
    assert found == wrong, told
