import collections
import gc
import itertools
import os

from tests.compiling import CACHE, QUICK

# Before JAX starts.
flags = (os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8", QUICK)
os.environ["XLA_FLAGS"] = " ".join(flags)
# For the processes that tests start, too.
for name, value in CACHE.items():
    os.environ.setdefault(name, value)

import jax
import pytest

# Dtypes are never promoted behind our back.
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def standard_promotion():
    """For what itself promotes: optax's Adam family takes a float to an integer power, and
    `optax.apply_updates` adds a float32 update to a half-precision parameter."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def as_on_gpus(monkeypatch):
    """What is written otherwise for a GPU, on this machine."""

    def for_cuda(*args, default, **others):
        return others.get("cuda", default)(*args)

    monkeypatch.setattr(jax.lax, "platform_dependent", for_cuda)


@pytest.fixture(autouse=True)
def _examples_promote(request):
    """Doctests are what a user writes, under JAX's own default."""
    if isinstance(request.node, pytest.DoctestItem):
        request.getfixturevalue("standard_promotion")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Tests marked `gpu` run where there is one, and say so where there is none.

    `make test` takes the first and the last case of each test, but for slow ones.
    """
    cases = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
            item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))
        elif not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for item in itertools.chain.from_iterable(of_one[1:-1] for of_one in cases.values()):
        item.add_marker(pytest.mark.further)


def pytest_collection_finish():
    """What is there before the tests stays; the collector of garbage need not look at it again."""
    gc.collect()
    gc.freeze()
