"""With float32 in place of halves: all is rewritten, nothing is rounded, and any error shows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_kit
from benchmarks.gradients import drawn, near, runnable
from benchmarks.zoo import ZOO as MODELS
from jmp_kit.casting._casting import Casting
from jmp_kit.casting.planning import _alone, _kernels, _segment
from jmp_kit.casting.rewriting import _scans
from jmp_kit.programs._jaxpr import equations_of
from tests.casting.planning.test_biases import along, along_forward
from tests.casting.test_random_steps import WEIGHTS, X
from tests.casting.test_random_updates import OTHERS, WAYS, step_of
from tests.casting.zoo import PLAIN, ZOO
from tests.compiling import quick_or_slow

pytestmark = pytest.mark.usefixtures("standard_promotion")  # for Flax's sake

half = functools.partial(jmp_kit.autocast, policy="mixed_bfloat16")


@pytest.fixture(autouse=True)
def nothing_is_rounded(monkeypatch):
    def copies(pairs, jaxpr):  # a cast to the same dtype would be no equation
        for v, other in pairs.items():
            yield from equations_of(jnp.copy, [v], [other], jaxpr.eqns[-1].source_info)

    monkeypatch.setattr(Casting, "halves", [np.dtype(np.float32)])
    monkeypatch.setattr(_scans, "_casts", copies)


@pytest.fixture
def as_large_on_gpus(as_on_gpus, monkeypatch):
    """What is only worth it for much, done for little."""
    for module, name in ((_segment, "_LEAST"), (_alone, "_LEAST"), (_kernels, "_LARGE")):
        monkeypatch.setattr(module, name, 1)
    monkeypatch.setattr(_kernels, "_MANY", 8)


def error(found, wanted):
    """The largest of an array, relative to its length; some gradients are zero but for rounding."""
    norm, least = np.linalg.norm, 1e-3 * optax.tree.norm(wanted)
    pairs = zip(*map(jax.tree.leaves, (found, wanted)), strict=True)
    return max(float(norm(a - b) / (norm(b) + least)) for a, b in pairs)


def four_lines(fun, **options):
    return jmp_kit.grad(half(fun, **options), jmp_kit.NoOpLossScale())


def one_line(fun, **options):
    return half(jax.grad(fun), **options)


def by_jax(fun, **options):
    return jax.grad(half(fun, **options))


# A while loop has no derivative in reverse.
ONCE = [name for name in ZOO if name != "looping"]


@pytest.mark.parametrize("way", [one_line, four_lines, by_jax])
@pytest.mark.parametrize("name", quick_or_slow(ONCE, ("mlp", "scanned")))
def test_gradients(name, way):
    fun, params, x = ZOO[name]
    wanted = jax.jit(jax.grad(fun))(params, x)
    for recompute in (True, False, "most"):
        found = jax.jit(way(fun, recompute=recompute))(params, x)
        assert error(found, wanted) < 1e-3


@pytest.mark.usefixtures("as_large_on_gpus")
@pytest.mark.parametrize("name", quick_or_slow(ONCE, ("mlp", "scanned")))
def test_gradients_of_what_is_large(name):
    fun, params, x = ZOO[name]
    found, wanted = (jax.jit(f)(params, x) for f in (one_line(fun), jax.grad(fun)))
    assert error(found, wanted) < 1e-3


@pytest.mark.usefixtures("as_on_gpus")
@pytest.mark.parametrize("way", [one_line, four_lines, by_jax])
def test_two_softmaxes_in_a_row_whose_rows_fit_into_registers(way):
    def loss_fn(w, x):
        return jnp.mean(jnp.sin(jax.nn.log_softmax(9 * jax.nn.softmax(x @ w)) @ w) ** 2)

    w, x = (jax.random.normal(jax.random.key(i), (n, 8)) for i, n in enumerate((8, 2**14)))
    found, wanted = (jax.jit(f)(w, x) for f in (way(loss_fn), jax.grad(loss_fn)))
    assert error(found, wanted) < 1e-3


# JAX itself has no second derivative of a ragged product.
TWICE = [name for name in PLAIN if name != "experts"]


@pytest.mark.parametrize("second", [along, along_forward])
@pytest.mark.parametrize("name", quick_or_slow(TWICE, ("mlp",)))
def test_second_derivatives(name, second):
    fun, params, x = PLAIN[name]
    found, wanted = (
        jax.jit(lambda p, f=f: second(lambda p: f(p, x), p))(params) for f in (half(fun), fun)
    )
    assert error(found, wanted) < 1e-3


def loss_at(name):
    """A loss of parameters alone, and these: of a model of the zoo, at a random point."""
    model = runnable(name)
    params, rest = model.task.variables
    batch = drawn(model.batch, jax.random.key(1))
    loss_fn = model.task.loss()
    return lambda params: loss_fn(params, rest, *batch)[0], near(params, jax.random.key(0))


@pytest.mark.usefixtures("as_on_gpus")
@pytest.mark.parametrize("name", quick_or_slow(MODELS, ("gpt", "graph")))
def test_gradients_of_models(name):
    loss_fn, params = loss_at(name)
    with jax.default_matmul_precision("highest"):
        found, wanted = (jax.jit(f)(params) for f in (one_line(loss_fn), jax.grad(loss_fn)))
    assert error(found, wanted) < 1e-3


@pytest.mark.parametrize("second", [along, along_forward])
@pytest.mark.parametrize("name", quick_or_slow(("gpt", "mixer", "mamba"), ("gpt",)))
def test_second_derivatives_of_models(name, second):
    """Of layers with biases."""
    loss_fn, params = loss_at(name)
    found, wanted = (jax.jit(lambda p, f=f: second(f, p))(params) for f in (half(loss_fn), loss_fn))
    assert error(found, wanted) < 1e-3


@pytest.mark.parametrize("machine", ["here", "as_on_gpus", "as_large_on_gpus"])
@pytest.mark.parametrize("way", quick_or_slow(WAYS, WAYS[:1]), ids=lambda way: way.__name__)
def test_steps_of_random_networks(way, machine, request):
    """Of two networks, and of several gradients."""
    if machine != "here":
        request.getfixturevalue(machine)
    for seed in range(2):
        step = step_of(way, seed)

        def changes(step, *args):
            return jax.tree.map(jnp.subtract, step(*args), args[:2])

        with jax.default_matmul_precision("highest"):
            ways = (jax.jit(functools.partial(changes, f)) for f in (half(step), step))
            found, wanted = (way(WEIGHTS, OTHERS, X) for way in ways)
        assert error(found, wanted) < 1e-3
