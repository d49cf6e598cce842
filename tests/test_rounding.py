"""Rounding against NumPy's own."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jmp_kit._rounding import round_to

HALVES = [np.float16, ml_dtypes.bfloat16]


@pytest.mark.parametrize("dtype", HALVES)
def test_every_representable_number_and_its_midpoints(dtype):
    bits = np.arange(2**16, dtype=np.uint16)
    numbers = np.sort(bits.view(dtype).astype(np.float32))
    numbers = numbers[np.isfinite(numbers)]
    middles = (numbers[1:] / 2 + numbers[:-1] / 2).astype(np.float32)
    nudged = np.concatenate([np.nextafter(middles, np.float32(s)) for s in (-np.inf, np.inf)])
    _check(np.concatenate([numbers, middles, nudged]), dtype)


@pytest.mark.parametrize("dtype", HALVES)
def test_random_bit_patterns(dtype):
    bits = np.random.default_rng(0).integers(0, 2**32, 2_000_000, dtype=np.uint32)
    _check(bits.view(np.float32), dtype)


def _check(x, dtype):
    with np.errstate(all="ignore"):
        # XLA's CPU backend flushes float32's own subnormals, which no 16-bit parameter needs.
        x = x[(np.abs(x) >= np.finfo(np.float32).tiny) | (x == 0) | np.isnan(x)]
        want = x.astype(dtype).astype(np.float32)
    got = np.asarray(jax.jit(round_to, static_argnums=1)(x, jnp.dtype(dtype)))
    same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
    assert same.all(), (x[~same][:5], got[~same][:5], want[~same][:5])


def test_a_format_as_wide_changes_nothing():
    x = jnp.asarray([0.1, -1e-30])
    assert round_to(x, jnp.dtype(jnp.float32)) is x
