"""The example reproduces the facts of the field on a real run, and its numbers are counts."""

import matplotlib.image
import ml_dtypes
import numpy as np
import pytest

from examples import underflow

pytestmark = pytest.mark.usefixtures("standard_promotion")  # for optax.adamw


@pytest.mark.slow
def test_what_is_lost_grows_as_training_goes_on_and_a_scale_saves_it(tmp_path, capsys):
    found = []
    look_on = underflow.look_on
    underflow.look_on = lambda *args: found.append(look_on(*args)) or found[0]
    try:
        underflow.main(["--steps", "150", "--every", "49", "--out", str(tmp_path)])
    finally:
        underflow.look_on = look_on
    first, *_, last = found[0].looks
    assert 0 < first.flushed < last.flushed < last.below
    assert all(look.flushed_scaled < 0.001 for look in found[0].looks)
    assert last.lost["bfloat16"] > last.lost["float16"] > first.lost["float16"] > 0.05
    assert last.lost["bfloat16"] > 0.5
    output = capsys.readouterr().out
    for words in ("flushes", "lost in", "2^", "underflow.png"):
        assert words in output
    picture = matplotlib.image.imread(tmp_path / "underflow.png")
    assert picture.shape[0] > 400
    assert picture.std() > 0.05


def test_lost_updates_are_those_that_numpy_loses():
    random = np.random.default_rng(0)
    weights = random.normal(size=1000).astype(np.float32)
    updates = (random.normal(size=1000) * 2.0 ** random.integers(-20, 0, 1000)).astype(np.float32)
    updates[:100] = 0
    for dtype in (np.float16, ml_dtypes.bfloat16):
        half = weights.astype(dtype)
        same = (half.astype(np.float32) + updates).astype(dtype) == half
        expected = (same & (updates != 0)).sum() / 900
        share = underflow.lost_updates({"w": weights}, {"w": updates}, dtype)
        assert float(share) == pytest.approx(expected, abs=1e-6)
