"""What the doctor measures, and what it concludes."""

import json
import re

import jax
import pytest

from jmp_kit.numerics import _doctor, doctor
from jmp_kit.numerics._doctor import Rate, recommend


def rates(highest, full, bf16, f16, f8=0.01):
    numbers = zip(_doctor._DTYPES, (highest, full, bf16, f16, f8), strict=True)
    return [Rate(dtype, dtype.partition(",")[0], tflops) for dtype, tflops in numbers]


def test_it_measures_every_dtype(monkeypatch):
    monkeypatch.setattr(_doctor, "_LARGEST", 512)
    told = []
    found = doctor(seconds=0.01, on_progress=told.append)
    assert found.backend == "cpu"
    assert found.devices == (jax.devices()[0].device_kind,) * 8
    assert [rate.dtype for rate in found.rates] == list(_doctor._DTYPES)
    assert all(0 < rate.tflops < 100 for rate in found.rates)
    assert [rate.is_native for rate in found.rates[:2]] == [True, True]
    assert found.rates[3].computed_in in ("float32", "float16")
    assert told[-1] == ""
    assert any("in bfloat16" in text for text in told)
    text = str(found)
    for words in ("8 × ", f"{found.size} × {found.size}", "float16", found.policy, "- "):
        assert words in text
    assert json.loads(json.dumps(found.to_dict()))["rates"][0]["is_native"] is True


@pytest.mark.parametrize(
    ("numbers", "policy", "reason"),
    [
        ((50, 50, 60.1, 60), "mixed_bfloat16", "1.2 times as fast as float32, and has its range"),
        ((50, 350, 700, 720), "mixed_bfloat16", r"shortened here \(TF32\): 7.0 times"),
        ((50, 350, 700, 700, 1300), "mixed_bfloat16", "float8 multiplies 1.9 times as fast as b"),
        ((8, 8, 4, 60), "mixed_float16", "float16 multiplies 7.5 times .* needs a loss scale"),
        ((8, 8, 16, 60), "mixed_float16", "bfloat16 2.0 times"),
        ((0.06, 0.06, 0.04, 0.05), "float32", "bfloat16 0.67 and float16 0.83 times"),
    ],
)
def test_the_policy_follows_from_the_rates(numbers, policy, reason):
    found, reasons = recommend(rates(*numbers))
    assert found == policy
    assert re.search(reason, " ".join(reasons))
    assert ("TF32" in reasons[0]) == (numbers[1] > 1.2 * numbers[0])


def test_no_time_is_no_measurement():
    with pytest.raises(ValueError, match="seconds is 0, but measuring takes some"):
        doctor(seconds=0)
