"""The demo: it prints what it promises, and half precision reaches what float32 does."""

import importlib.util
import pathlib
import statistics

import jax
import matplotlib.image
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("standard_promotion")  # for optax.adamw


@pytest.fixture(scope="module")
def digits():
    spec = importlib.util.spec_from_file_location("digits", ROOT / "examples" / "digits.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_demo_prints_a_row_per_policy_and_saves_a_figure(digits, tmp_path, capsys):
    digits.main(["--steps", "12", "--seed", "3", "--out", str(tmp_path / "new")])
    output = capsys.readouterr().out
    for words in ("accuracy", "final", "skipped", "scale", "median", "memory", "12/12", "MiB"):
        assert words in output
    rows = [line.split() for line in output.splitlines() if "%" in line and "MiB" in line]
    assert [row[0] for row in rows] == list(digits.POLICIES)
    picture = matplotlib.image.imread(tmp_path / "new" / "digits.png")
    assert picture.shape[0] > 500
    assert picture.std() > 0.05


def test_one_policy_of_one_s_own(digits, tmp_path, capsys):
    digits.main(["--policy", "p=bf16,c=bf16", "--steps", "2", "--out", str(tmp_path)])
    assert "p=bf16,c=bf16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "c=f17"], "Unknown dtype 'f17'"),
        (["--steps", "0"], "'0' is no positive number"),
        (["--master", "kaan"], "master is 'kaan', which is no way to keep precision"),
    ],
)
def test_a_wrong_command_line_is_explained(digits, arguments, words, capsys):
    with pytest.raises(SystemExit):
        digits.parse(arguments)
    assert words in capsys.readouterr().err


class StoppedError(Exception):
    """What stops a run in the middle."""


def stop_after(count):
    losses = []

    def on_step(loss):
        losses.append(loss)
        if len(losses) == count:
            raise StoppedError

    return on_step


@pytest.mark.slow
def test_a_stopped_run_goes_on_by_itself_to_the_same_bits(digits, tmp_path):
    def run(directory, on_step=lambda loss: None):
        return digits.train(
            "p=bf16,c=f16,o=f32",
            30,
            0,
            on_step,
            master="stochastic",
            checkpoint_dir=directory,
            checkpoint_every=7,
        )

    whole = run(None)
    with pytest.raises(StoppedError):
        run(tmp_path / "run", stop_after(12))
    seen = []
    resumed = run(tmp_path / "run", seen.append)
    assert resumed.losses == whole.losses == seen
    assert resumed.loss_scales == whole.loss_scales
    assert resumed.skipped == whole.skipped
    for a, b in zip(jax.tree.leaves(resumed.state), jax.tree.leaves(whole.state), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.slow
def test_the_command_line_resumes_at_another_master(digits, tmp_path, capsys):
    arguments = ["--policy", "p=bf16,c=bf16,o=f32", "--steps", "9", "--checkpoint-every", "9"]
    arguments += ["--out", str(tmp_path), "--checkpoint-dir", str(tmp_path / "checkpoints")]
    digits.main([*arguments, "--master", "float32"])
    first = capsys.readouterr().out
    digits.main([*arguments, "--master", "remainder"])
    second = capsys.readouterr().out
    assert "unknown" in second  # No step was trained, so none was timed.
    accuracy = [next(w for w in text.split() if "%" in w and "." in w) for text in (first, second)]
    assert accuracy[0] == accuracy[1]


@pytest.mark.slow
def test_half_precision_is_as_accurate_as_float32(digits):
    """Within 1 percentage point of float32's test accuracy, on every one of three seeds."""
    runs = {
        policy: [digits.train(policy, steps=200, seed=seed) for seed in range(3)]
        for policy in digits.POLICIES
    }
    full = runs["float32"]
    assert statistics.fmean(run.accuracy for run in full) > 0.97
    for policy in digits.POLICIES[1:]:
        for half, float32 in zip(runs[policy], full, strict=True):
            assert abs(half.accuracy - float32.accuracy) <= 0.01, policy
    # The scale grew until it overflowed, and the run went on.
    for run in runs["mixed_float16"]:
        assert run.skipped
        assert max(run.loss_scales) > run.loss_scales[0]


def test_of_runs_that_agree_each_is_seen(digits, tmp_path, monkeypatch):
    def run(policy, scale, skipped):
        return digits.Run(policy, [1.0] * 9, [scale] * 9, skipped, scale, 0.9, 0.1, None, None)

    monkeypatch.setattr(digits.plt, "close", lambda _: None)
    runs = [run("a", 1.0, []), run("b", 1.0, []), run("c", 2.0**16, [3, 4])]
    digits.plot(runs, tmp_path / "digits.png")
    figure = digits.plt.gcf()
    losses, scales = figure.axes
    widths = [line.get_linewidth() for line in losses.lines]
    assert widths == sorted(widths, reverse=True)
    assert len(set(widths)) == 3
    assert [text.get_text() for text in scales.get_legend().get_texts()] == ["c, skipped steps: 2"]
    for axes in figure.axes:
        label = axes.yaxis.label.get_window_extent()
        assert label.height < axes.get_window_extent().height
    monkeypatch.undo()
    digits.plt.close(figure)
