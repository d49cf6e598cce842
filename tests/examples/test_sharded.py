"""The same run on many devices and in many processes, killed and gone on, to the same bits."""

import functools
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import jmp_kit.checkpoint
from examples import sharded
from tests.compiling import QUICK

pytestmark = pytest.mark.usefixtures("standard_promotion")  # for optax.adamw

ROOT = pathlib.Path(sharded.__file__).parents[1]
STEPS, OVERFLOWS = 40, (3, 25)  # the scale halves, grows after twenty steps, and halves


def command(*arguments):
    fixed = f"--layout fully_sharded --devices 4 --steps {STEPS} --json --overflow"
    given = *fixed.split(), *map(str, (*OVERFLOWS, *arguments))
    return [sys.executable, "-W", "ignore", str(ROOT / "examples" / "sharded.py"), *given]


def start(*arguments):
    # Each with its own devices, and not the eight of the tests.
    environment = {**os.environ, "XLA_FLAGS": QUICK}
    return subprocess.Popen(
        command(*arguments),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process, timeout=240):
    output, error = process.communicate(timeout=timeout)
    assert process.returncode == 0, error[-3000:]
    lines = [line for line in output.splitlines() if line.startswith("{")]
    return json.loads(lines[-1])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Two processes, and the folder of what they saved."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return finished(start("--processes", 2, "--checkpoint-dir", folder)), folder / "fully_sharded"


@functools.cache
def in_one_process(layout):
    with jax.numpy_dtype_promotion("standard"):
        return sharded.train(layout, STEPS, overflows=OVERFLOWS)


@pytest.mark.slow
def test_every_layout_walks_alike():
    data, split, tensor = map(in_one_process, sharded.LAYOUTS)
    for run in (split, tensor):
        assert (run.loss_scale, run.skipped) == (data.loss_scale, data.skipped) == (2.0**11, 2)
        np.testing.assert_allclose(run.losses, data.losses, rtol=0.01)
    assert tuple(np.flatnonzero(~np.isfinite(data.losses)) + 1) == OVERFLOWS
    assert data.losses[-1] < 0.6 * data.losses[0]
    # An eighth of the matrices; and tensor parallelism in groups of four, embeddings whole.
    assert split.device_mib < 0.2 * data.device_mib
    assert tensor.device_mib < 0.4 * data.device_mib


@pytest.mark.slow
def test_processes_walk_as_one(undisturbed):
    """Two here; four, which go on where two were killed, below."""
    one, (two, _) = in_one_process("fully_sharded"), undisturbed
    # Between processes sums have one order, within one process another.
    np.testing.assert_allclose(two["losses"], one.losses, rtol=0.01)
    assert (two["processes"], two["devices"]) == (2, 4)
    assert (two["loss_scale"], two["skipped"]) == (one.loss_scale, one.skipped)


@pytest.mark.slow
def test_what_two_processes_saved_one_restores(undisturbed):
    _, folder = undisturbed
    saved = jmp_kit.checkpoint.read(folder)
    run = sharded.train("fully_sharded", STEPS, checkpoint_dir=folder)
    assert run.losses == []  # it was there already
    assert (run.loss_scale, run.skipped) == (2.0**11, 2)
    # To other devices, and back, bit for bit.
    mesh = sharded.make_mesh("data")
    rows = jax.sharding.NamedSharding(mesh, sharded.P("data"))

    def like(x):
        splits = x.ndim > 1 and x.shape[0] % 8 == 0
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows) if splits else x

    restored = jmp_kit.checkpoint.restore(folder, jax.tree.map(like, saved))
    split = [x for x in jax.tree.leaves(restored) if getattr(x, "sharding", None) == rows]
    assert len(split) > 20
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(saved), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.slow
def test_a_killed_process_ends_the_others_and_four_go_on_to_the_same_bits(undisturbed, tmp_path):
    """From step 20 or 30 on, and an overflow may be among them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    shared = "--processes", 2, "--checkpoint-dir", tmp_path, "--coordinator", coordinator
    first, second = (start(*shared, "--process", i) for i in range(2))
    folder = tmp_path / "fully_sharded"
    patience = time.monotonic() + 200
    while not (folder / "20").exists() and time.monotonic() < patience:
        assert first.poll() is None, first.communicate()[1][-3000:]
        time.sleep(0.01)
    second.send_signal(signal.SIGKILL)
    second.communicate()
    _, error = first.communicate(timeout=200)  # it notices by itself, and would wait for good
    assert first.returncode != 0, error[-3000:]
    four = finished(start("--processes", 4, "--checkpoint-dir", tmp_path))
    two, whole = undisturbed
    assert (four["processes"], four["devices"]) == (4, 4)
    assert (four["loss_scale"], four["skipped"]) == (two["loss_scale"], two["skipped"])
    assert STEPS - 30 <= len(four["losses"]) <= STEPS - 20
    assert four["losses"] == two["losses"][-len(four["losses"]) :]
    states = [jax.tree.leaves(jmp_kit.checkpoint.read(f, STEPS)) for f in (folder, whole)]
    for a, b in zip(*states, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.slow
def test_the_launcher_ends_when_one_fails(capfd):
    assert sharded.launch(2, ["--policy", "bfloat17"]) == 1
    assert capfd.readouterr().err.count("Unknown dtype 'bfloat17'") == 2


def children_of(pid):
    return pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/task").exists(), reason="asks Linux for children")
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP])
def test_a_launcher_that_is_ended_leaves_nobody_behind(ending):
    launcher, patience = start("--processes", 2), time.monotonic() + 100
    while len(started := children_of(launcher.pid)) < 2 and time.monotonic() < patience:
        time.sleep(0.05)
    assert len(started) == 2
    launcher.send_signal(ending)
    launcher.communicate(timeout=100)
    assert launcher.returncode == 128 + ending
    assert not [pid for pid in started if pathlib.Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--devices", "8", "--processes", "3"], "8 devices cannot be shared by 3 processes"),
        (["--devices", "7"], "7 devices cannot share a batch of 16 rows"),
        (["--layout", "pipeline"], "invalid choice: 'pipeline'"),
        (["--policy", "bfloat17"], "Unknown dtype"),
    ],
)
def test_bad_arguments_teach(arguments, words, capsys):
    with pytest.raises(SystemExit):
        sharded.main(arguments)
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_in_a_line():
    line = sharded.told(in_one_process("fully_sharded"))
    for words in ("fully_sharded", "8 devices, 1 process:", "scale 2048, skipped 2", "ms a step"):
        assert words in line
