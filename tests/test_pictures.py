"""The documentation's pictures show what the library does now, and can be read."""

import json
import pathlib
import runpy

import jax.numpy as jnp
import PIL.Image
import pytest

import jmp_kit
from jmp_kit import numerics

ROOT = pathlib.Path(jmp_kit.__file__).parent.parent
DOCS = ROOT / "docs"
PICTURES = sorted(path for path in DOCS.rglob("*.png"))


def told(path):
    """The numbers that a picture was drawn from."""
    return json.loads(PIL.Image.open(path).text["Description"])


def script(name):
    return runpy.run_path(str(DOCS / f"{name}.py"))


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_a_picture_is_small_and_wide_enough(path):
    assert path.stat().st_size < 150_000
    image = PIL.Image.open(path)
    assert image.width >= 700
    # It brings its own ground, so that dark lettering is readable on a dark page.
    assert image.convert("RGBA").getpixel((0, 0)) == (255, 255, 255, 255)


def test_the_step_is_the_one_that_is_planned(tmp_path, standard_promotion):
    step = script("step")
    found = step["values"]()
    by_kind = {
        kind: [value for value in found if value.kind == step[kind]]
        for kind in ("STATE", "KEPT", "PASSING", "WEIGHT")
    }
    assert [value.dtype for value in by_kind["STATE"]] == ["float32"] * 6
    halves = [value for value in found if value.kind != step["STATE"]]
    assert {value.dtype for value in halves} == {"bfloat16"}
    plan = numerics.plan(step["train_step"], step["POLICY"], *step["arguments"]())
    # The plan counts statistics of rows, too.
    assert sum(v.nbytes for v in by_kind["KEPT"]) == pytest.approx(plan.kept, rel=0.01)
    assert sum(len(part.products) for part in plan.parts) == 8  # 3 forward, 2 + 2 + 1 backward
    assert len(halves) == 8 + len(plan.values)
    assert {v.name.partition(":")[0] for v in by_kind["WEIGHT"]} == {"up", "down", "head"}
    step["draw"](found, tmp_path / "step.png")
    for picture in (tmp_path / "step.png", DOCS / "step.png"):
        assert told(picture) == json.loads(json.dumps(found))


def test_what_recompute_keeps_is_what_the_benchmarks_found(tmp_path):
    recompute, programs = script("recompute"), script("programs")
    found = json.loads((DOCS / "recompute.json").read_text())
    nothing, default, most = found["rows"]
    assert [row["recompute"] for row in found["rows"]] == list(recompute["LEVELS"])
    [row] = [
        row
        for row in programs["last_results"]()
        if (row["group"], row["model"]) == (programs["KERNELS"], recompute["MODEL"])
        and row["contender"] == "jmp_kit, bfloat16, one line"
    ]
    assert default["bytes_moved"] == row["bytes_moved"]
    assert default["temporary_bytes"] / 2**20 == pytest.approx(row["temporary_mib"])
    assert nothing["temporary_bytes"] > default["temporary_bytes"] > most["temporary_bytes"]
    recompute["draw"](found, tmp_path / "recompute.png")
    for picture in (tmp_path / "recompute.png", DOCS / "recompute.png"):
        assert told(picture) == found["rows"]


def test_the_audit_is_of_the_block_with_a_head_in_float32(tmp_path):
    audit = script("audit")
    found = audit["audited"]()
    assert {product.path for product in found.products if not product.is_half} == {"head"}
    audit["draw"](found, tmp_path / "audit.png")
    assert told(tmp_path / "audit.png") == told(DOCS / "audit.png")


@pytest.mark.slow
def test_recompute_is_measured(standard_promotion):
    nothing, default, most = script("recompute")["measured"](tiny=True)["rows"]
    assert nothing["temporary_bytes"] > default["temporary_bytes"] >= most["temporary_bytes"]
    assert nothing["bytes_moved"] > default["bytes_moved"]


def test_the_life_of_a_loss_scale_is_that_of_the_library(tmp_path):
    picture = script("loss_scale")
    found = told(DOCS / "loss_scale.png")
    loss_scale, scales = picture["start"](), []
    for finite in found["finite"]:
        loss_scale = loss_scale.adjust(jnp.asarray(finite))
        scales.append(float(loss_scale.loss_scale))
    assert scales == found["loss_scale"]
    assert len(scales) == picture["STEPS"]
    assert 10 < found["finite"].count(False) < 20
    picture["draw"](found, tmp_path / "loss_scale.png")
    assert told(tmp_path / "loss_scale.png") == found


@pytest.mark.slow
def test_the_life_of_a_loss_scale_is_a_run_s(standard_promotion):
    # Rounding differs from one machine to another, the first overflows do not.
    drawn = told(DOCS / "loss_scale.png")
    found = script("loss_scale")["run"](steps=5)
    assert found == {name: values[:5] for name, values in drawn.items()}
