"""The house: who may import whom, and what an import of the package loads."""

import ast
import pathlib
import subprocess
import sys

import pytest

import jmp_kit

PACKAGE = pathlib.Path(jmp_kit.__file__).parent
ROOT = PACKAGE.parent

FLOORS = {
    "_version": 0,
    "_dtypes": 0,
    "_flax": 0,
    "_tree": 0,
    "_alike": 0,
    "_warn": 0,
    "rounding": 1,
    "_policy": 1,
    "_loss_scale": 2,
    "_gather": 3,
    "_grad": 3,
    "programs": 2,
    "casting": 3,
    "optim": 4,
    "checkpoint": 5,
    "linen": 5,
    "nnx": 5,
    "numerics": 5,
    "cli": 6,
    "__init__": 7,
}
# What autocast is made of. A function is traced and read; it is told what to compute again; it is
# rewritten, planned and evaluated.
CASTING_FLOORS = {
    "_regions": 0,
    "_models": 0,
    "_misused": 0,
    "_warned": 0,
    "reading": 0,
    "recomputing": 1,
    "rewriting": 2,
    "planning": 3,
    "evaluating": 4,
    "_casting": 5,
    "_autocast": 6,
    "__init__": 7,
}

FILES = sorted(PACKAGE.rglob("*.py"))
CASTING = PACKAGE / "casting"
FILES_OF_CASTING = sorted(CASTING.rglob("*.py"))


def room_of(path: pathlib.Path, house: pathlib.Path = PACKAGE) -> str:
    """The file, or the folder, directly under the package, or under this folder of it."""
    return path.relative_to(house).parts[0].removesuffix(".py")


def imported_rooms(path: pathlib.Path, house: str = "jmp_kit") -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            modules = [node.module]
            if node.module == house:
                modules = [f"{house}.{alias.name}" for alias in node.names]
        inside = [m.removeprefix(f"{house}.") for m in modules if m.startswith(f"{house}.")]
        rooms |= {m.split(".")[0] for m in inside}
    return rooms


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_imports_only_from_lower_floors(path):
    room = room_of(path)
    for other in imported_rooms(path) - {room}:
        assert FLOORS[other] < FLOORS[room], f"{room} imports {other}, from its floor or above"


@pytest.mark.parametrize("path", FILES_OF_CASTING, ids=lambda p: str(p.relative_to(CASTING)))
def test_a_function_goes_through_autocast_in_one_direction(path):
    room = room_of(path, CASTING)
    for other in imported_rooms(path, "jmp_kit.casting") - {room}:
        below, above = CASTING_FLOORS[other], CASTING_FLOORS[room]
        assert below < above, f"{room} imports {other}, from its floor or above"


def test_the_floor_check_sees_the_imports_there_are():
    assert imported_rooms(PACKAGE / "_grad.py") == {"_loss_scale", "_tree"}
    assert imported_rooms(PACKAGE / "optim" / "_inspect.py") == {"_loss_scale", "optim"}
    site = imported_rooms(CASTING / "evaluating" / "_site.py", "jmp_kit.casting")
    assert site == {"_regions", "planning", "reading"}


@pytest.mark.parametrize("folder", ["jmp_kit", "examples", "benchmarks", "tests"])
def test_nothing_uses_private_jax(folder):
    private = "jax." + "_src"
    for path in (ROOT / folder).rglob("*.py"):
        assert private not in path.read_text(), path


def test_importing_loads_no_framework():
    loaded = "import sys, jmp_kit; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    result = subprocess.run(
        [sys.executable, "-c", loaded], capture_output=True, text=True, check=True
    )
    modules = set(result.stdout.split())
    assert {"jmp_kit", "jax", "optax"} <= modules
    assert not modules & {"flax", "orbax", "matplotlib", "haiku", "equinox", "torch", "jmp"}


def test_flax_is_loaded_on_first_use():
    code = (
        "import sys, jmp_kit\n"
        "print('flax' in sys.modules, set(dir(jmp_kit)) == set(jmp_kit.__all__))\n"
        "print(jmp_kit.linen.apply_policy, jmp_kit.nnx.apply_policy, jmp_kit.checkpoint.restore)\n"
        "from jmp_kit import *\n"
        "print(linen is jmp_kit.linen, 'flax' in sys.modules)\n"
    )
    run = [sys.executable, "-c", code]
    told = subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()
    assert (told[0], told[-1]) == ("False True", "True True")


def test_help_lists_what_there_is(monkeypatch):
    linen = jmp_kit.linen
    monkeypatch.delattr(jmp_kit, "linen")
    assert jmp_kit.linen is linen
    assert dir(jmp_kit) == sorted(jmp_kit.__all__)
    assert all(f"`{name}`" in jmp_kit.__doc__ for name in jmp_kit.__all__ if name[0] != "_")
    with pytest.raises(AttributeError, match="module 'jmp_kit' has no attribute 'autocasts'"):
        _ = jmp_kit.autocasts


def test_importing_starts_no_backend():
    # Or `jax.distributed.initialize()` could not be called after it.
    code = (
        "import jax, jmp_kit\n"
        "jax.config.update('jax_platforms', 'nonsense')\n"
        "try: jax.devices()\n"
        "except RuntimeError: print('not started')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "not started", result.stderr


def test_it_works_where_flax_is_not_loaded():
    """And learns of it when it is."""
    code = (
        "import sys, jax, jax.numpy as jnp, optax, jmp_kit\n"
        "optimizer = jmp_kit.mixed_precision(optax.sgd(0.1), jmp_kit.DynamicLossScale())\n"
        "half = jmp_kit.autocast(lambda w: jnp.sum(w @ w), 'mixed_bfloat16')\n"
        "print(half(jnp.ones((2, 2))), 'flax' in sys.modules)\n"
        "import flax.serialization\n"
        "state = jmp_kit.mixed_precision(optax.sgd(0.1)).init(jnp.ones(2))\n"
        "flax.serialization.to_bytes(state)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.split() == ["8.0", "False"], result.stderr
    assert result.returncode == 0, result.stderr


def test_what_is_said_to_flax_is_said_to_nobody_where_it_is_not_loaded(monkeypatch):
    monkeypatch.delitem(sys.modules, "flax.serialization", raising=False)
    monkeypatch.delitem(sys.modules, "flax.nnx", raising=False)
    jmp_kit.DynamicLossScale()
    assert jmp_kit.autocast(lambda x: x, "mixed_bfloat16")(3.0) == 3.0
