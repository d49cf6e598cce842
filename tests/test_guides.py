"""The guides in `docs/coming_from`: every diff runs, before and after, to the same losses."""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = {page.stem: page for page in (ROOT / "docs" / "coming_from").glob("*.md")}
# Lightning's trainer takes a device and a data module: its page has a table and a program.
GUIDES = [PAGES[name] for name in sorted(PAGES.keys() - {"index", "lightning"})]
DIFFS = {
    f"{guide.stem}-{i}": diff
    for guide in GUIDES
    for i, diff in enumerate(re.findall(r"```diff\n(.*?)```", guide.read_text(), re.DOTALL))
}


QUICK = "jmp-0"
SLOW, TORCH = [pytest.mark.slow], [pytest.mark.torch]


def program(diff, sign):
    return "\n".join(line[1:] for line in diff.splitlines() if line[:1] in (" ", sign))


def losses_of(program):
    """In a process of its own: Keras has global settings, and PyTorch threads."""
    code = f"{program}\nimport json\nprint(json.dumps(losses))"
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return np.array(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "name",
    # Each trains twice in a process of its own; one of them shows that the way there works.
    [pytest.param(n, marks=SLOW + TORCH if "torch" in n else SLOW) for n in DIFFS if n != QUICK]
    + [QUICK],
)
def test_a_guide_s_program_runs_before_and_after_to_the_same_losses(name):
    before, after = program(DIFFS[name], "-"), program(DIFFS[name], "+")
    assert "jmp_kit" in after
    assert "jmp_kit" not in before
    new = losses_of(after)
    if name.startswith("pytorch_amp") and not importlib.util.find_spec("torch"):
        pytest.skip(reason="PyTorch is not installed: CI has it on Python 3.11")
    old = losses_of(before)
    assert len(new) == len(old)
    close = 1e-5 if "full_precision" in after else 0.02
    np.testing.assert_allclose(new, old, rtol=close, atol=close * abs(old).max())
    if "losses.append" in after:
        assert new[-1] < 0.7 * new[0]


def test_there_is_a_guide_for_each_and_one_page_leads_to_all():
    index = PAGES["index"].read_text()
    assert len(GUIDES) == 7
    assert {name.rpartition("-")[0] for name in DIFFS} == {guide.stem for guide in GUIDES}
    for name in PAGES.keys() - {"index"}:
        assert f"({name}.md)" in index
