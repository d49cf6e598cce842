"""Where the values of each array lie, against NumPy's own casts."""

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jmp_kit
from jmp_kit import numerics


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("loss_scale", [1.0, 1024.0])
def test_what_a_cast_loses(dtype, loss_scale):
    random = np.random.default_rng(0)
    x = (random.normal(size=4000) * 2.0 ** random.integers(-40, 40, 4000)).astype(np.float32)
    x[:100], x[100], x[101] = 0, np.inf, np.nan
    tree = {"a": {"b": x}, "count": 3, "mask": np.ones(3, bool), "half": jnp.ones(2, jnp.bfloat16)}
    found = numerics.ranges(tree, dtype, loss_scale)
    first, second = found.rows
    assert (first.path, second.path) == ("a/b", "half")
    with np.errstate(all="ignore"):
        cast = (x * loss_scale).astype(dtype).astype(np.float32)
    finite, nonzero = np.isfinite(x), x != 0
    assert first.underflow == pytest.approx((cast[nonzero] == 0).mean(), abs=1e-6)
    assert first.overflow == pytest.approx((~np.isfinite(cast[finite])).mean(), abs=1e-6)
    known = np.abs(x[finite & nonzero])
    assert first.lowest == np.floor(np.log2(known.min()))
    assert first.highest == np.floor(np.log2(known.max()))
    assert (first.size, first.zeros, first.nonfinite) == (4000, 100, 2)
    assert (second.dtype, second.lowest, second.highest) == ("bfloat16", 0, 0)
    text = str(found)
    assert text.startswith(f"cast to {np.dtype(dtype)}")
    assert ("after scaling by 1024" in text) == (loss_scale == 1024)
    assert "2 not finite" in text
    assert json.loads(json.dumps(found.to_dict()))["rows"][0]["zeros"] == 100


@pytest.mark.parametrize("scale", [jnp.float32(8), jmp_kit.StaticLossScale(8.0), 8])
def test_a_loss_scale_is_a_number_too(scale):
    found = numerics.ranges({"w": jnp.ones(2)}, loss_scale=scale)
    assert found == numerics.ranges({"w": jnp.ones(2)}, loss_scale=8.0)
    assert json.loads(json.dumps(found.to_dict()))["loss_scale"] == 8


def test_of_what_is_not_finite_alone_there_is_no_range():
    text = str(numerics.ranges({"w": jnp.full(2, jnp.nan)}))
    assert "  2 not finite  " in text


def test_nothing_and_only_zeros():
    assert numerics.ranges({}).rows == ()
    assert str(numerics.ranges({})).startswith("cast to float16:\nvalues")
    zeros, scalar, empty = numerics.ranges([jnp.zeros(3), 0.5, jnp.zeros((0, 2))]).rows
    assert (zeros.lowest, zeros.underflow, zeros.overflow) == (None, 0, 0)
    assert (scalar.lowest, scalar.size) == (-1, 1)
    assert (empty.size, empty.lowest) == (0, None)


@pytest.mark.parametrize("dtype", ["int8", "bfloat17"])
def test_a_dtype_without_exponents(dtype):
    with pytest.raises(ValueError, match=f"The dtype is {dtype}, which has no exponents"):
        numerics.ranges({"w": jnp.ones(2)}, dtype)
