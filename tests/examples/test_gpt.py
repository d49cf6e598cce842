"""The GPT: it learns under every policy, stops and goes on, and prints what it promises."""

import dataclasses

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest
from flax import nnx

import jmp_kit
from examples import gpt
from tests.casting.test_zoo import products_of

pytestmark = pytest.mark.usefixtures("standard_promotion")  # for optax.adamw

SMALL = dataclasses.replace(
    gpt.SIZES["small"],
    layers=1,
    heads=2,
    width=32,
    time=32,
    batch=4,
    steps=6,
    warmup=2,
    evaluate=4,
    dropout=0.1,
)


@pytest.fixture(autouse=True)
def little_text(monkeypatch):
    """Enough to learn from, and the validation text short."""
    monkeypatch.setattr(gpt, "bits_per_byte", lambda *a: BITS_PER_BYTE(*a, count=2))


BITS_PER_BYTE = gpt.bits_per_byte


@pytest.mark.slow
def test_it_learns_the_same_under_every_policy():
    config = dataclasses.replace(SMALL, steps=100, evaluate=50, width=64, dropout=0.0, period=30)
    runs = {policy: gpt.train(config, policy, sample=1) for policy in gpt.POLICIES}
    full = runs["float32"].curve[-1]
    assert full < 4.5  # of 8 at first
    for policy, run in runs.items():
        assert abs(run.curve[-1] - full) < 0.03, policy
    assert runs["mixed_float16"].skipped  # The scale grew until it overflowed.


@pytest.mark.parametrize("policy", gpt.POLICIES)
def test_every_product_computes_in_the_policy_s_dtype(policy):
    policy = jmp_kit.get_policy(policy)
    graphdef, state = nnx.split(gpt.make_model(SMALL, policy, 0))
    text = np.zeros((2, SMALL.time + 1), np.uint8)
    found = products_of(lambda s: nnx.grad(gpt.loss_fn)(nnx.merge(graphdef, s), text), state)
    assert len(found) == 3 * 7  # qkv, two of attention, out, up, down, head
    assert all(dtypes == {policy.compute_dtype} for dtypes in found)


class StoppedError(Exception):
    """What stops a run in the middle."""


@pytest.mark.slow
def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path):
    """Parameters are donated to the next step while the last ones are still being saved."""

    def stop(step, *_):
        if step == 5:
            raise StoppedError

    def run(directory, on_step=lambda *progress: None):
        return gpt.train(
            SMALL, "mixed_float16", 1, on_step, checkpoint_dir=directory, checkpoint_every=1
        )

    whole = run(None)
    with pytest.raises(StoppedError):
        run(tmp_path, stop)
    seen = []
    resumed = run(tmp_path, lambda step, *_: seen.append(step))
    assert seen == [5, 6]
    assert (resumed.curve, resumed.written) == (whole.curve, whole.written)


@pytest.mark.slow
def test_a_run_goes_on_at_another_precision(tmp_path):
    first = gpt.train(SMALL, "float32", checkpoint_dir=tmp_path, checkpoint_every=6)
    half = gpt.train(SMALL, "p=bf16,c=bf16,o=f32", checkpoint_dir=tmp_path)
    assert half.curve == first.curve
    assert np.isnan(half.bytes_per_second)  # No step was left to train.
    assert half.skipped == 0


def test_the_large_size_has_124_million_parameters():
    model = nnx.eval_shape(lambda: gpt.GPT(gpt.SIZES["124m"], nnx.Rngs(0)))
    count = sum(p.size for p in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert round(count / 1e6) == 124


def test_an_untrained_model_knows_nothing_of_the_eight_bits_of_a_byte():
    _, validation = gpt.load_text()
    model = gpt.make_model(SMALL, jmp_kit.get_policy("mixed_bfloat16"), 0)
    assert 8 < gpt.bits_per_byte(model, validation, SMALL) < 9


@pytest.mark.parametrize("prompt", [b"", b"def ", bytes(range(100))])
def test_it_writes_after_any_prompt(prompt):
    model = gpt.make_model(SMALL, jmp_kit.get_policy("mixed_float16"), 0)
    # So surely that there is no chance in it: the byte after b is b + 1.
    model.blocks = nnx.List([])
    model.embed.embedding[...] = 10 * jnp.eye(256, 32)
    model.position[...] *= 0
    model.head.kernel[...] = jnp.roll(10 * jnp.eye(32, 256), 1, axis=1)
    written = gpt.write(model, prompt + b"\x01", jax.random.key(0), 10, SMALL.time, 0.1)
    assert written == bytes(range(2, 12))
    assert len(gpt.write(model, prompt, jax.random.key(0), 0, SMALL.time, 0.1)) == 0


def test_what_it_writes_does_no_harm_to_a_terminal():
    assert gpt.printable(b"a\x1b[2Jb\tc\n\xff\xc3\xa9") == "a\ufffd[2Jb\tc\n\ufffdé"


@pytest.mark.slow
def test_the_command_prints_a_row_per_policy_and_saves_a_figure(tmp_path, capsys):
    arguments = ["--policy", "mixed_float16", "float32", "--prompt", "import"]
    arguments += ["--layers=1", "--width=32", "--time=16", "--steps=3", "--out", str(tmp_path)]
    gpt.main(arguments)
    output = capsys.readouterr().out
    for words in ("3/3", "loss", "kB/s", "scale 2^16", "skips 0", "bits per", "import"):
        assert words in output
    rows = [line.split()[0] for line in output.splitlines() if " 2^" in line and "kB" not in line]
    assert rows == ["mixed_float16", "float32"]
    picture = matplotlib.image.imread(tmp_path / "gpt.png")
    assert picture.shape[0] > 500
    assert picture.std() > 0.05


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "c=f17"], "Unknown dtype 'f17'"),
        (["--steps", "0"], "steps is 0, but has to be at least 1"),
        (["--width", "100", "--heads", "3"], "width is 100, which 3 heads cannot share"),
        (["--learning-rate", "nan"], "learning_rate is nan"),
        (["--heat", "0"], "--heat is 0.0, but has to be positive"),
        (["--sample", "-1"], "'-1' is no positive number"),
    ],
)
def test_a_wrong_command_line_is_explained(arguments, words, capsys):
    with pytest.raises(SystemExit):
        gpt.parse(arguments)
    assert words in capsys.readouterr().err
