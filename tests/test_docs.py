"""What the documentation shows runs, and nothing public is without it."""

import inspect
import json
import pathlib
import re
import runpy

import PIL.Image
import pytest

import jmp_kit
from benchmarks.zoo import ZOO

ROOT = pathlib.Path(jmp_kit.__file__).parent.parent
README = (ROOT / "README.md").read_text()

CONSTANTS = {"LossScale", "PRODUCTS"}
MODULES = {"checkpoint", "linen", "nnx", "numerics", "rounding"}

PUBLIC = [
    name
    for name in jmp_kit.__all__
    if name[0] != "_" and name not in MODULES and name not in CONSTANTS
]


def test_the_public_names_are_those_of_the_contract():
    assert set(jmp_kit.__all__) > MODULES
    assert set(PUBLIC) | CONSTANTS == {
        *("half_dtype", "all_finite", "select_tree"),
        *("split_float32", "join_float32", "stochastic_round"),
        *("Policy", "get_policy", "cast_to_half", "cast_to_full"),
        *("LossScale", "NoOpLossScale", "StaticLossScale", "DynamicLossScale"),
        *("value_and_grad", "grad", "gather_params", "state_shardings"),
        *("autocast", "full_precision", "half_precision", "PRODUCTS"),
        *("mixed_precision", "MixedPrecisionState"),
        *("loss_scale_of", "master_params", "convert_precision", "metrics", "raise_if_diverged"),
    }


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_example_that_runs(name):
    # That it runs is seen by --doctest-modules, which pyproject.toml switches on.
    doc = inspect.getdoc(getattr(jmp_kit, name))
    assert ">>> " in doc
    assert f"jmp_kit.{name}" in doc or name == "MixedPrecisionState"


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_the_readme_runs(block, standard_promotion):
    exec(block, {})


def test_the_readme_is_short_and_has_the_two_commands():
    assert len(README.splitlines()) <= 200
    assert "make demo" in README
    assert "make test" in README


def test_the_picture_is_of_the_present_plan(tmp_path):
    block = runpy.run_path(str(ROOT / "docs" / "block.py"))
    lines = block["lines"]()
    products = [box for line in lines for box in line if box.colour == block["PRODUCT"]]
    assert len(products) == 10
    assert all(box.stored.startswith("bfloat16[") for box in products)
    assert [box.name for box in max(lines, key=len)] == ["query", "key", "value"]
    block["draw"](lines, tmp_path / "block.svg")
    for picture in (tmp_path / "block.svg", ROOT / "docs" / "block.svg"):
        text = picture.read_text()
        drawn = re.findall(r">([^<>]+)</text>", text)
        for line in lines:
            assert f"{line[0].stored}<" in text
            for box in line:
                drawn.remove(box.name)


def test_the_picture_of_programs_is_of_the_last_results(tmp_path):
    programs = runpy.run_path(str(ROOT / "docs" / "programs.py"))
    found = programs["ratios"](programs["last_results"]())
    assert set(found) == set(ZOO)
    assert all(len(ways) == 2 for model in found.values() for ways in model.values())
    programs["draw"](found, tmp_path / "programs.png")
    for picture in (tmp_path / "programs.png", ROOT / "docs" / "programs.png"):
        assert json.loads(PIL.Image.open(picture).text["Description"]) == found


def test_what_is_said_of_scale_is_what_a_mesh_does(standard_promotion):
    text = runpy.run_path(str(ROOT / "docs" / "scale.py"))["document"]()
    assert (ROOT / "docs" / "scale.md").read_text() == text
    rows = re.findall(r"^\| ([^|]*) \| \d \+ \d \+ \d \| (.*) \|$", text, re.MULTILINE)
    assert len(rows) == 6
    for name, cells in rows:
        for formula, measured in (cell.split(", ") for cell in cells.split(" | ")):
            assert formula == measured, name
