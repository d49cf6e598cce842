"""What is published: its version is told once, and it can be installed and tested."""

import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib

import pytest
import yaml

import jmp_kit

ROOT = pathlib.Path(jmp_kit.__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Of the folders, any file is; tests and documentation read these by name.
FILES = (
    "CHANGELOG.md",
    "CITATION.cff",
    "LICENSE",
    "Makefile",
    "README.md",
    "conftest.py",
    "pyproject.toml",
)
FOLDERS = ("benchmarks", "docs", "examples", "jmp_kit", "tests")


def test_the_version_is_one():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == jmp_kit.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text()
    releases = re.findall(r"^## \[(.*?)\]", changelog, re.MULTILINE)
    assert releases[:2] == ["Unreleased", jmp_kit.__version__]
    assert all(f"\n[{release}]: https://" in changelog for release in releases)


def test_what_is_to_be_installed_can_be():
    """Commands in messages and docstrings have quotes, for shells, and extras that there are."""
    sources = [
        p for name in ("jmp_kit", "benchmarks", "tests") for p in (ROOT / name).rglob("*.py")
    ]
    texts = {path: path.read_text().replace("\\", "") for path in sources if path.name != __file__}
    commands = [
        (path, *found)
        for path, text in texts.items()
        for found in re.findall(r'pip install ("?)(jmp-kit|\.)\[([\w,]+)\]("?)', text)
    ]
    assert len(commands) >= 5
    for path, before, _, extras, after in commands:
        assert before == after == '"', f"{path}: a shell takes [{extras}] for a pattern"
        assert set(extras.split(",")) <= EXTRAS.keys(), path


def test_extras_name_extras_that_there_are():
    for packages in EXTRAS.values():
        for package in packages:
            if found := re.fullmatch(r"jmp-kit\[(.*)\]", package):
                assert set(found[1].split(",")) <= EXTRAS.keys()


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda p: p.name)
def test_what_github_reads_is_yaml(path):
    found = yaml.safe_load(path.read_text())
    # YAML takes the key `on` for True.
    assert found.keys() & {True, "blank_issues_enabled", "body"}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The names of its files."""
    pytest.importorskip("hatchling", reason="hatchling, which builds the sdist, is no dependency")
    source = tmp_path_factory.mktemp("sdist") / "source"
    ignored = shutil.ignore_patterns(".git", ".venv*", ".*_cache", ".cache", "__pycache__", "out")
    shutil.copytree(ROOT, source, ignore=ignored)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", source.parent]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    [archive] = source.parent.glob("*.tar.gz")
    assert archive.name == f"jmp_kit-{jmp_kit.__version__}.tar.gz"
    with tarfile.open(archive) as files:
        return {name.partition("/")[2] for name in files.getnames()}


def test_the_sdist_holds_what_its_tests_need(sdist):
    assert set(FILES) <= sdist
    for folder in FOLDERS:
        files = (p for p in (ROOT / folder).rglob("*") if p.is_file())
        names = {str(p.relative_to(ROOT)) for p in files if "__pycache__" not in p.parts}
        assert names
        assert names <= sdist


def test_the_sdist_holds_nothing_else(sdist):
    known = {*FOLDERS, *FILES, "PKG-INFO"}
    known |= {".ci", ".github", ".gitignore", ".python-version", ".readthedocs.yaml", "mkdocs.yml"}
    known |= {"CONTRIBUTING.md", "SECURITY.md"}
    assert {name.partition("/")[0] for name in sdist} <= known
