"""The site: its programs run and print what it says, and every public name is on it."""

import contextlib
import inspect
import io
import pathlib
import re
import runpy
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

import jmp_kit

ROOT = pathlib.Path(jmp_kit.__file__).parents[1]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^( *)```(python|text)\b[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
PAGES = {
    str(page.relative_to(DOCS)): page
    for page in sorted(DOCS.rglob("*.md"))
    if "```python" in page.read_text()
}
SLOW = {"getting_started.md", "numerics.md", "recipes/objectives.md", "recipes/state.md"}
# Tables differ in small ways where an older JAX traces a program.
AS_PRINTED = jax.__version_info__ >= (0, 12)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in PAGES]
)
def test_a_page_s_programs_run_and_print_what_it_says(name, standard_promotion):
    """One after the other, as a reader does. Text that follows a program is what it prints."""
    text, namespace, printed, end = PAGES[name].read_text(), {}, None, 0
    for block in FENCE.finditer(text):
        code = textwrap.dedent(block[3])
        if block[2] == "python":
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(code, "train.py", "exec"), namespace)
            printed, end = output.getvalue(), block.end()
        elif printed is not None and not text[end : block.start()].strip():
            if AS_PRINTED:
                assert code == re.sub(r" +$", "", printed, flags=re.MULTILINE)
            printed = None


def public():
    """What users can call, by the names that they write."""
    modules = ("linen", "nnx", "numerics", "checkpoint", "rounding")
    for name in set(jmp_kit.__all__) - {*modules, "__version__"}:
        yield f"jmp_kit.{name}"
    for module in (getattr(jmp_kit, name) for name in modules):
        for name in getattr(module, "__all__", None) or vars(module):
            value = getattr(module, name)
            home = inspect.getmodule(value)
            is_own = home is module or "numerics" in module.__name__
            if name[0] != "_" and is_own and not inspect.ismodule(value):
                yield f"{module.__name__}.{name}"


def test_every_public_name_is_on_a_page_of_the_reference():
    reference = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    shown = set(re.findall(r"^::: (\S+)$", reference, re.MULTILINE))
    also = {f"jmp_kit.rounding.{n}" for n in ("split_float32", "join_float32", "stochastic_round")}
    assert set(public()) - also == shown


def test_the_readme_leads_to_pages_and_files_that_there_are():
    readme = (ROOT / "README.md").read_text()
    pages = re.findall(r"https://jmp-kit\.readthedocs\.io/en/latest/([^)#\s]*)", readme)
    assert len(set(pages)) > 10
    for page in pages:
        name = page.strip("/") or "index"
        assert (DOCS / f"{name}.md").exists() or (DOCS / name / "index.md").exists(), page
    files = re.findall(r"jmp-kit/jmp-kit/(?:blob/)?main/([^)\s]*)", readme)
    for page in DOCS.rglob("*.md"):
        files += re.findall(r"jmp-kit/jmp-kit/(?:blob|tree)/main/([^)\s]*)", page.read_text())
    assert all((ROOT / file).exists() for file in files)
    assert not re.search(r"\]\((?!https://|#)", readme)  # which PyPI could not follow


@pytest.mark.slow
def test_the_site_builds_and_asks_no_other_server(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        text = page.read_text()
        tags = re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", text)
        abroad = [tag for tag in tags if re.search(r"(?:src|href)=\"?(?:https?:)?//", tag)]
        assert all('rel="canonical"' in tag for tag in abroad), page
        # For these the theme's script would ask GitHub and a CDN.
        assert 'data-md-component="source"' not in text
        assert 'class="mermaid"' not in text
    for sheet in tmp_path.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import )[\"']?(?:https?:)?//", sheet.read_text())


@pytest.mark.slow
def test_errors_of_float8_are_those_of_the_page():
    page = runpy.run_path(str(DOCS / "float8.py"))
    for name, case in page["CASES"].items():
        [told] = re.findall(rf"^\| {re.escape(name)} \| (.*?) \|$", page["PAGE"].read_text(), re.M)
        found = page["errors"](case).values()
        np.testing.assert_allclose([*map(float, told.split(" | "))], [*found], rtol=0.15)
        assert max(found) < 0.085
