"""Rounding against NumPy's own, and every float32 there is."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from jmp_kit.rounding import join_float32, round_to, split_float32, stochastic_round
from tests.compiling import OPTIMISED

HALVES = [np.float16, ml_dtypes.bfloat16]
halves = pytest.mark.parametrize("dtype", HALVES, ids=lambda d: np.dtype(d).name)


@halves
def test_every_representable_number_and_its_midpoints(dtype):
    _check(_numbers_midpoints_and_neighbours(dtype), dtype)


@halves
def test_random_bit_patterns(dtype):
    bits = np.random.default_rng(0).integers(0, 2**32, 2_000_000, dtype=np.uint32)
    _check(bits.view(np.float32), dtype)


def _numbers_midpoints_and_neighbours(dtype):
    with np.errstate(invalid="ignore"):  # NaN
        numbers = np.arange(2**16, dtype=np.uint16).view(dtype).astype(np.float32)
        numbers = np.sort(numbers[np.isfinite(numbers)])
    middles = (numbers[1:] / 2 + numbers[:-1] / 2).astype(np.float32)
    nudged = [np.nextafter(middles, np.float32(s)) for s in (-np.inf, np.inf)]
    x = np.concatenate([numbers, middles, *nudged])
    # XLA's CPU backend flushes float32's own subnormals, which no 16-bit parameter needs.
    return x[(np.abs(x) >= np.finfo(np.float32).tiny) | (x == 0)]


def _check(x, dtype):
    with np.errstate(all="ignore"):
        x = x[(np.abs(x) >= np.finfo(np.float32).tiny) | (x == 0) | np.isnan(x)]
        want = x.astype(dtype).astype(np.float32)
    got = np.asarray(jax.jit(round_to, static_argnums=1)(x, jnp.dtype(dtype)))
    same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
    assert same.all(), (x[~same][:5], got[~same][:5], want[~same][:5])


def test_a_format_as_wide_changes_nothing():
    x = jnp.asarray([0.1, -1e-30])
    assert round_to(x, jnp.dtype(jnp.float32)) is x


@pytest.mark.slow
def test_split_and_join_are_exact_for_every_float32():
    """All 2^32 bit patterns: equal after a round trip, NaN still NaN in both forms."""
    block = 2**24

    @functools.partial(jax.jit, compiler_options=OPTIMISED)
    def wrong(start):
        bits = start + lax.iota(jnp.uint32, block)
        x = lax.bitcast_convert_type(bits, jnp.float32)
        high, low = split_float32(x)
        joined = lax.bitcast_convert_type(join_float32(high, low), jnp.uint32)
        upper = lax.bitcast_convert_type(high, jnp.uint16)
        nan = (bits & jnp.uint32(0x7FFFFFFF)) > jnp.uint32(0x7F800000)
        still_nan = (upper & jnp.uint16(0x7FFF)) > jnp.uint16(0x7F80)
        still_nan &= (joined & jnp.uint32(0x7FFFFFFF)) > jnp.uint32(0x7F800000)
        same_sign = (upper >> 15).astype(jnp.uint32) == bits >> 31
        # Nearest: the other neighbour is no closer, for the distance is at most half a step.
        nearest = jnp.abs(low.astype(jnp.int32)) <= 2**15
        right = jnp.where(nan, still_nan & same_sign, (joined == bits) & nearest)
        return jnp.sum(~right, dtype=jnp.int32), jnp.sum(nan, dtype=jnp.int32)

    counts = [wrong(jnp.uint32(i * block)) for i in range(2**32 // block)]
    assert sum(int(nans) for _, nans in counts) == 2 * (2**23 - 1)
    assert sum(int(mistakes) for mistakes, _ in counts) == 0


def test_the_high_part_is_the_nearest_bfloat16_and_ties_go_away_from_zero():
    x = _numbers_midpoints_and_neighbours(ml_dtypes.bfloat16)
    high, low = map(np.asarray, split_float32(x))
    with np.errstate(over="ignore"):
        cast = x.astype(ml_dtypes.bfloat16)
    tie = low == -(2**15)
    assert (high[~tie] == cast[~tie]).all()
    assert 30_000 < tie.sum() < 2**16
    assert (np.abs(high[tie].astype(np.float32)) > np.abs(x[tie])).all()


def test_split_under_vmap_and_of_a_scalar():
    x = jnp.linspace(-3, 3, 12).reshape(3, 4)
    one, many = split_float32(x), jax.vmap(split_float32)(x)
    assert all((a == b).all() for a, b in zip(one, many, strict=True))
    high, low = split_float32(jnp.float32(0.1))
    assert high.shape == low.shape == ()
    assert join_float32(high, low) == jnp.float32(0.1)


# float32 values with one to all of the bits that rounding drops, in every kind of place.
UNEVEN = [1 + 2.0**-12, -(1 + 3 * 2.0**-13), 3.14159, -1e-3, 1.7e-5, 3e-6, -4.1e-8, 60001.5, 1e-30]
DRAWS = 10_000_000


@pytest.mark.parametrize("dtype", [pytest.param(jnp.bfloat16, marks=pytest.mark.slow), jnp.float16])
def test_stochastic_rounding_is_unbiased(dtype):
    """The mean of 10^7 draws lies within 5 of its standard errors, for each of nine values."""
    values = jnp.asarray(UNEVEN, jnp.float32)
    below, above = _neighbours(np.asarray(values), dtype)

    @functools.partial(jax.jit, compiler_options=OPTIMISED)
    def ups(key):
        """How many draws of a thousandth went up, per value."""
        x = jnp.broadcast_to(values, (DRAWS // 1000, len(UNEVEN)))
        rounded = stochastic_round(key, x, dtype).astype(jnp.float32)
        return jnp.sum(rounded == jnp.asarray(above), axis=0, dtype=jnp.int32), jnp.all(
            (rounded == jnp.asarray(below)) | (rounded == jnp.asarray(above))
        )

    counts, inside = zip(*(ups(jax.random.key(i)) for i in range(1000)), strict=True)
    assert all(inside)
    got = np.sum([np.asarray(c, np.int64) for c in counts], axis=0) / DRAWS
    x = np.asarray(values, np.float64)
    want = (x - below) / (np.float64(above) - below)
    error = np.sqrt(want * (1 - want) / DRAWS)
    np.testing.assert_array_less(np.abs(got - want), 5 * error + 1 / DRAWS)


def _neighbours(x, dtype):
    """The values of `dtype` below and above each x, in float32."""
    with np.errstate(over="ignore"):
        rounded = x.astype(dtype)
        down = np.nextafter(rounded, np.asarray(-np.inf, dtype), dtype=dtype)
        up = np.nextafter(rounded, np.asarray(np.inf, dtype), dtype=dtype)
    below = np.where(rounded.astype(np.float32) > x, down, rounded).astype(np.float32)
    above = np.where(rounded.astype(np.float32) < x, up, rounded).astype(np.float32)
    return below, above


@halves
def test_stochastic_rounding_is_exact_on_what_is_representable(dtype):
    numbers = np.arange(2**16, dtype=np.uint16).view(dtype)
    with np.errstate(invalid="ignore"):  # comparing NaN
        numbers = numbers[(np.abs(numbers) >= np.finfo(np.float32).tiny) | (numbers == 0)]
    for seed in range(20):
        got = np.asarray(stochastic_round(jax.random.key(seed), numbers.astype(np.float32), dtype))
        assert got.tobytes() == numbers.tobytes()


@halves
def test_stochastic_rounding_never_passes_a_neighbour(dtype):
    x = _numbers_midpoints_and_neighbours(dtype)
    x = x[np.abs(x) <= float(ml_dtypes.finfo(dtype).max)]
    below, above = _neighbours(x, dtype)
    seen = np.zeros((2, len(x)), bool)
    for seed in range(20):
        rounded = np.asarray(stochastic_round(jax.random.key(seed), x, dtype), np.float32)
        assert ((rounded == below) | (rounded == above)).all()
        seen |= rounded == np.stack([below, above])
    # A midpoint misses one of its sides twenty times in a row once in half a million.
    assert seen[:, below != above].mean() > 0.6


@halves
def test_stochastic_rounding_keeps_infinities_and_nan(dtype):
    x = jnp.asarray([jnp.inf, -jnp.inf, jnp.nan, 3e38, -3e38, 0.0, -0.0])
    for seed in range(20):
        got = np.asarray(stochastic_round(jax.random.key(seed), x, dtype), np.float32)
        assert (got[0], got[1], np.isnan(got[2])) == (np.inf, -np.inf, True)
        big = np.inf if dtype == np.float16 else 3e38
        np.testing.assert_allclose(got[3:5], [big, -big], rtol=2**-7)
        assert (np.signbit(got[5:]) == [False, True]).all()


def test_a_nan_of_any_payload_stays_one():
    nans = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)
    assert np.isnan(np.asarray(stochastic_round(jax.random.key(0), nans), np.float32)).all()


def test_the_same_key_rounds_the_same_way_compiled_or_not():
    x = jax.random.normal(jax.random.key(1), (1000,))
    plain = stochastic_round(jax.random.key(2), x)
    compiled = jax.jit(functools.partial(stochastic_round, dtype=jnp.bfloat16))
    assert (compiled(jax.random.key(2), x) == plain).all()
    assert (compiled(jax.random.key(3), x) != plain).any()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: split_float32(jnp.ones(2, jnp.float16)),
            TypeError,
            r"float32 .* got float16\[2\]",
        ),
        (lambda: split_float32(1.0), TypeError, "but got 1.0. Convert it first"),
        (lambda: join_float32(jnp.float16(1), jnp.int16(0)), TypeError, "bfloat16 .* float16"),
        (lambda: join_float32(jnp.bfloat16(1), jnp.int32(0)), TypeError, "int16 .* int32"),
        (lambda: stochastic_round(jax.random.key(0), jnp.bfloat16(1)), TypeError, "got bfloat16"),
        (
            lambda: stochastic_round(jax.random.key(0), jnp.float32(1), jnp.float32),
            ValueError,
            "dtype is float32: write jnp.bfloat16 or jnp.float16",
        ),
    ],
)
def test_bad_input_teaches(call, error, words):
    with pytest.raises(error, match=words):
        call()
