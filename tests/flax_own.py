"""A plugin for pytest that puts every layer of Flax under a float32 policy, for Flax's own tests.

    git clone --depth 1 --branch v0.12.8 https://github.com/google/flax && cd flax
    PYTHONPATH=… pytest -p tests.flax_own -p no:cacheprovider -W ignore tests/nnx/nn tests/linen/…

of the version that is installed, with this repository's root for the path. With 0.12.8 1,351 of
1,391 pass: `tests/nnx/nn` and, of linen, activation, attention, combinators, linear, recurrent and
`linen_test`. The other 40 are told in OTHERS.
"""

import functools
import inspect

import pytest
from flax import linen, nnx

import jmp_kit

_HALF = "it asks for float16 or bfloat16 parameters or results, and the policy gives float32"
_DECODE = "its cache is float16, and what the layers within give under the policy is float32"
_GENERAL = [*range(6, 12), *range(18, 24)]
_ATTENTION = [n for first in (24, 72) for n in range(first, first + 22) if n % 4 < 2]

# What cannot pass, and why.
OTHERS = {
    "test_autoregressive_decode_with_x64": "its parameters are float64, and the policy's float32",
    "TestLora::test_dtype": _HALF,
    "::TestLSTMCell::test_lstm_with_different_dtypes": _HALF,
    "test_rnn_with_different_dtypes": _HALF,
    **{f"TestLinearGeneral::test_basic{n}": _HALF for n in _GENERAL},
    **{f"test_nnx_attention_equivalence{n}": _DECODE for n in _ATTENTION},
}


def pytest_configure() -> None:
    """Before tests are imported."""
    for name, kind in list(vars(linen).items()):
        if inspect.isclass(kind) and issubclass(kind, linen.Module) and kind is not linen.Module:
            setattr(linen, name, jmp_kit.linen.apply_policy(kind, "float32"))
    for kind in {id(value): value for value in vars(nnx).values()}.values():
        if inspect.isclass(kind) and issubclass(kind, nnx.Module) and "__init__" in vars(kind):
            kind.__init__ = _followed(kind)


def _followed(kind):
    """A constructor, and a policy for what it made."""
    construct = kind.__init__

    @functools.wraps(construct)
    def constructed(self, *args, **kwargs):
        construct(self, *args, **kwargs)
        if type(self) is kind:
            jmp_kit.nnx.apply_policy(self, "float32")

    return constructed


def pytest_collection_modifyitems(items) -> None:
    """Leave out what cannot pass."""
    for item in items:
        for name, why in OTHERS.items():
            if item.nodeid.endswith(name):
                item.add_marker(pytest.mark.skip(reason=why))
