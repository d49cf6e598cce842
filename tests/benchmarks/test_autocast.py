"""The benchmark runs, and reads compiled programs rightly."""

import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks import autocast
from benchmarks.compiled import product_dtypes

pytestmark = pytest.mark.usefixtures("standard_promotion")


def test_it_runs_tiny(tmp_path, capsys):
    autocast.main(["--tiny", "--steps", "1", "--out", str(tmp_path / "results" / "cpu.json")])
    results = json.loads((tmp_path / "results" / "cpu.json").read_text())
    assert results["versions"]["jax"] == jax.__version__
    contenders = ["float32", "by hand", "autocast", "autocast, kept", "whole step"]
    assert [row["contender"] for row in results["rows"]] == contenders * 2
    by_contender = {row["contender"]: row for row in results["rows"] if row["task"] == "gpt"}
    for row in by_contender.values():
        assert abs(row["losses"][0] - by_contender["float32"]["losses"][0]) < 0.01
        assert len(row["losses"]) == 3
        assert row["products"]
        assert row["step_ms"] > 0
    printed = capsys.readouterr().out
    assert "whole step" in printed


CUBLAS = """
  %p = bf16[8,4]{1,0} parameter(0)
  %w = f32[4,4]{1,0} parameter(1)
  %gemm = (bf16[8,4]{1,0}, s8[1024]{0}) custom-call(%p, %p), custom_call_target="__cublas$gemm"
  ROOT dot.1 = f32[8,4]{1,0} dot(w, w), lhs_contracting_dims={1}
  %top = (f32[4]{0}, s32[4]{0}) custom-call(%w), custom_call_target="TopK"
  %conv = (bf16[8]{0}, u8[0]{0}) custom-call(%p, %w), custom_call_target="__cudnn$convForward"
"""


def test_products_in_a_compiled_text():
    assert product_dtypes(CUBLAS) == {"bf16": 2, "f32": 1}
    x = jnp.ones((8, 8))
    program = jax.jit(lambda x: jnp.tanh(x @ x) @ x).lower(x).compile()
    assert product_dtypes(program.as_text()) == {"f32": 2}
