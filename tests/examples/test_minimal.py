"""The same small task in every framework: short, in float16, and as good as it should be."""

import pathlib
import re
import runpy

import jax
import pytest

import jmp_kit

EXAMPLES = sorted(pathlib.Path(__file__).parents[2].glob("examples/minimal_*.py"))

pytestmark = pytest.mark.usefixtures("standard_promotion")  # for optax.adam


def test_every_framework_has_one():
    names = {path.stem.removeprefix("minimal_") for path in EXAMPLES}
    assert names == {"jax", "linen", "nnx", "equinox", "haiku"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example(path, capsys):
    assert len(path.read_text().splitlines()) <= 45
    found = runpy.run_path(str(path))
    output = capsys.readouterr().out
    assert float(re.search(r"accuracy ([\d.]+)%", output)[1]) > 98
    assert "'skipped': 0" in output
    # What the module trained with, once more: all of its products are half.
    states = ("model", "params", "rest", "state", "optimizer", "opt_state", "x", "y", "key")
    step, names = found["train_step"], re.search(r"def train_step\((.*)\)", path.read_text())[1]
    arguments = names.split(", ")
    assert set(arguments) <= set(states)
    audited = jmp_kit.numerics.audit(step, *(found[name] for name in arguments))
    assert len(audited.products) == 5
    assert {p.lhs_dtype for p in audited.products} == {"float16"}
    assert jax.tree.leaves(found["loss"])
