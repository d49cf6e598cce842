"""Exponents and underflow, counted independently by NumPy, whose casts are exact."""

import math

import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jmp_kit
from jmp_kit import DynamicLossScale
from jmp_kit.numerics import exponent_histogram, recommend_loss_scale, underflow

NARROW = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    **{
        name: getattr(ml_dtypes, name)
        for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e4m3fnuz")
    },
    "float8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
}


def exponents(x):
    """By frexp in float64, which takes all of them for normal."""
    return np.frexp(np.abs(x.astype(np.float64)))[1] - 1


def random_values(dtype, count=4000):
    """Every exponent, random digits, signs and zeros, from random bits."""
    whole = np.dtype(f"uint{8 * np.dtype(dtype).itemsize}")
    bits = np.random.default_rng(0).integers(0, np.iinfo(whole).max, count, whole, endpoint=True)
    bits[:50] &= whole.type(7)  # subnormals and zeros
    return bits.view(dtype)


def finite(x):
    with np.errstate(invalid="ignore"):
        return x[np.isfinite(x.astype(np.float64))]


@pytest.mark.parametrize("dtype", [np.float32, *NARROW.values()])
def test_a_histogram_counts_every_value_once(dtype):
    values = random_values(dtype)
    found = jax.jit(exponent_histogram)(values)
    known = finite(values)
    zeros = known == 0
    assert int(found.zeros) == zeros.sum()
    assert int(found.nonfinite) == len(values) - len(known)
    expected = np.bincount(exponents(known[~zeros]) + 149, minlength=277)
    np.testing.assert_array_equal(found.counts, expected)
    assert found.nonzero == expected.sum()


READINGS = {"histogram": exponent_histogram, "underflow": lambda x: underflow(x, "float16")}


@pytest.mark.parametrize("reading", READINGS.values(), ids=READINGS)
def test_an_array_of_another_shape_costs_one_compilation(reading):
    reading(jnp.ones(4))
    x, compiled = jax.device_put(np.ones((4, 5), np.float32)), []

    def listen(event, *_, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        reading(x)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(compiled) == 1


def test_a_histogram_of_float64():
    with jax.enable_x64(True):
        found = exponent_histogram(np.array([0.0, 1.0, 1e-300, 1e300, 5e-324, np.inf]))
    assert (found[0], found[-149], found[127]) == (1, 2, 1)
    assert (int(found.zeros), int(found.nonfinite)) == (1, 1)


def test_histograms_add_up_and_tell_shares():
    a, b = (exponent_histogram(jnp.array(x)) for x in ([1.0, 0.0], [2.0**-30, 2.0**-24]))
    both = a + b
    assert (both[0], both[-30], both[-24], int(both.zeros)) == (1, 1, 1, 1)
    assert both.share_below(-24) == pytest.approx(1 / 3)
    assert both.share_below(-200) == 0
    assert both.share_below(200) == 1
    assert exponent_histogram(jnp.zeros(3)).share_below(0) == 0


def test_only_floating_arrays_count():
    tree = {"w": jnp.ones((2, 3)), "n": 3, "i": jnp.arange(3), "none": None, "x": 0.5, "s": "a"}
    found = exponent_histogram(tree)
    assert {k for k, v in found.items() if v is not None} == {"w", "x"}
    assert found["w"][0] == 6
    assert exponent_histogram(jnp.zeros((0, 3))).nonzero == 0
    assert underflow({"i": jnp.arange(3), "e": jnp.zeros((0,))}, jnp.float16) == 0


def flushed_share(x, dtype, scale):
    """By a cast of NumPy's."""
    with np.errstate(all="ignore"):
        cast = (x * x.dtype.type(scale)).astype(dtype)
    return ((cast == 0) & (x != 0)).sum() / max((x != 0).sum(), 1)


def around(dtype):
    """The boundaries of what a cast flushes, one float32 to each side, and ties."""
    info = ml_dtypes.finfo(dtype)
    smallest = np.float32(info.smallest_subnormal)
    edges = np.float32([smallest, smallest / 2, smallest / 4, smallest * 0.75, smallest * 1.5])
    sides = [edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(1))]
    values = np.concatenate(sides)
    return np.concatenate([values, -values, np.zeros(3, np.float32)])


@pytest.mark.parametrize("dtype", NARROW.values(), ids=NARROW)
@pytest.mark.parametrize("scale", [1.0, 2.0**10, 2.0**16])
def test_underflow_is_what_a_cast_flushes(dtype, scale):
    random = np.random.default_rng(0)
    spread = np.float32(2.0) ** random.integers(-149, 10, 5000) * random.normal(size=5000)
    for values in (around(dtype), spread.astype(np.float32), finite(random_values(np.float32))):
        found = underflow({"a": values[:7], "b": values[7:]}, dtype, scale)
        assert float(found) == pytest.approx(flushed_share(values, dtype, scale), abs=1e-6)
    by_loss_scale = underflow(values, dtype, jmp_kit.StaticLossScale(scale))
    assert float(by_loss_scale) == float(found)


@hypothesis.given(
    hypothesis.extra.numpy.arrays(
        np.float32, st.integers(1, 20), elements=st.floats(width=32, allow_nan=False)
    ),
    st.sampled_from(list(NARROW.values())),
    st.floats(1.0, 2.0**20, width=32),
)
@hypothesis.settings(max_examples=150, deadline=None)
def test_underflow_of_any_values_by_any_scale(values, dtype, scale):
    padded = np.zeros(20, np.float32)
    padded[: len(values)] = values
    found = float(_underflow[dtype](padded, scale))
    hypothesis.assume(np.isfinite(values).all())
    # A subnormal product is rounded where it ends, and then once more.
    hypothesis.assume(not 0 < np.abs(values * np.float64(scale)).min() < 2.0**-126)
    assert found == pytest.approx(flushed_share(padded, dtype, scale), abs=1e-6)


_underflow = {
    dtype: jax.jit(lambda x, s, dtype=dtype: underflow(x, dtype, s)) for dtype in NARROW.values()
}


def test_underflow_of_other_inputs():
    half = random_values(np.float16)
    known = finite(half).astype(np.float32)
    share = flushed_share(known, ml_dtypes.float8_e5m2, 1.0)
    assert float(underflow(half, ml_dtypes.float8_e5m2)) == pytest.approx(share, rel=0.1)
    with jax.enable_x64(True):
        assert float(underflow(np.array([1e-300, 1.0]), jnp.float16)) == 0.5


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("center", [-30, -10, 0, 8])
def test_the_recommended_scale_loses_hardly_anything_and_overflows_nothing(dtype, center):
    random = np.random.default_rng(1)
    grads = (random.normal(size=10000) * 2.0 ** (center + random.normal(size=10000))).astype("f4")
    scale = recommend_loss_scale({"g": grads}, dtype)
    assert math.log2(scale).is_integer()
    with np.errstate(over="ignore"):
        cast = (grads * np.float32(scale)).astype(dtype)
    assert np.isfinite(cast.astype(np.float32)).all()
    assert float(underflow(grads, dtype, scale)) < 1e-3


def test_the_recommended_scale_of_the_edges():
    assert recommend_loss_scale({"z": jnp.zeros(3), "n": None}, jnp.float16) == 1.0
    largest = jnp.float32(65504)
    for x in (largest, largest / 3, jnp.float32(1e-30), jnp.float32(1e-40)):
        scale = recommend_loss_scale(x, jnp.float16)
        DynamicLossScale(scale)  # takes it
        assert np.isfinite(np.float16(np.float64(x) * scale))
        assert float(underflow(x, jnp.float16, scale)) == 0
    # Wider than float16: nothing may overflow, and what is lost is the least.
    wide = np.float32(2.0) ** np.arange(-40, 10)
    assert recommend_loss_scale(wide, jnp.float16) == 2.0**6


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: underflow(jnp.ones(2), jnp.int8), "dtype is int8, which has no exponents"),
        (lambda: recommend_loss_scale(jnp.array([1.0, jnp.inf, jnp.nan]), "float16"), "2 values"),
        (
            lambda: recommend_loss_scale(jnp.array([1e6, 1.0]), "float16"),
            r"largest value is 1e\+06, more than float16 .* StaticLossScale\(2.0\*\*-4\)",
        ),
        (lambda: recommend_loss_scale(65600.0, "float16"), "more than float16 ends at"),
        (lambda: recommend_loss_scale(np.float64(1e-300), "float16"), "is 1e-300, zero in float16"),
    ],
)
def test_bad_input_teaches(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_float64_of_numpy_has_all_its_digits():
    """With JAX's 64 bits off, which they are by default."""
    x = np.array([1e-300, 1e300, 1.0, 0.0, np.nan, 2.0**-1074])
    found = exponent_histogram({"x": x, "y": 1e-300})
    assert (int(found["x"].zeros), int(found["x"].nonfinite), found["x"].nonzero) == (1, 1, 4)
    assert (found["x"][-149], found["x"][0], found["x"][127]) == (2, 1, 1)
    assert int(found["y"].zeros) == 0
    assert float(underflow(x[:3], ml_dtypes.bfloat16)) == pytest.approx(1 / 3)
    assert jax.jit(lambda: exponent_histogram(x).counts)().sum() == 4


def test_exponents_that_no_value_has():
    histogram = exponent_histogram(jnp.array([2.0**127, 2.0**-149, 1.0]))
    assert [histogram[e] for e in (-400, -177, -150, -149, 0, 127, 128)] == [0, 0, 0, 1, 1, 1, 0]
    with pytest.raises(TypeError, match="not iterable"):
        list(histogram)
