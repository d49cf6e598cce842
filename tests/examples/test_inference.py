"""Serving in half: half the memory of the weights, and the same answers."""

import jax
import numpy as np
import pytest

from examples import digits, inference

pytestmark = pytest.mark.usefixtures("standard_promotion")  # for optax.adamw


def test_weights_take_half_and_say_the_same(capsys):
    inference.main(["--steps", "100"])
    output = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in output.splitlines() if line.count("%") == 3}
    assert list(rows) == ["float32", "bfloat16", "float16"]
    weights = [float(row[1]) for row in rows.values()]
    np.testing.assert_allclose(weights[1:], weights[0] / 2, rtol=1e-3)
    for _, _, _, accuracy, same, error in rows.values():
        assert float(accuracy.rstrip("%")) > 94
        assert float(same.rstrip("%")) > 99
        assert float(error.rstrip("%")) < 2


@pytest.mark.parametrize("dtype", inference.DTYPES)
def test_a_program_takes_weights_of_half_the_bytes(dtype):
    (images, _), _ = digits.load_data(0)
    params = digits.Network().init(jax.random.key(0), images[:1])["params"]

    def argument_bytes(dtype):
        weights, predict = inference.cast_once(params, dtype)
        program = predict.lower(weights, images[:4]).compile()
        return program.memory_analysis().argument_size_in_bytes - images[:4].nbytes

    assert argument_bytes(dtype) == pytest.approx(argument_bytes("float32") / 2, rel=1e-2)


def test_a_wrong_command_line_is_explained(capsys):
    with pytest.raises(SystemExit):
        inference.main(["--dtype", "float8"])
    assert "invalid choice: 'float8'" in capsys.readouterr().err
