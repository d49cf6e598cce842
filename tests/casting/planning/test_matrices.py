"""Rows of arrays of several axes, as those of matrices."""

import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive, primitives
from jax.sharding import NamedSharding, PartitionSpec

import jmp_kit
from jmp_kit import autocast
from jmp_kit.casting import plans_of
from jmp_kit.casting.planning import _written
from jmp_kit.casting.planning._matrices import of_matrices
from jmp_kit.casting.planning._plan import Part, Piece
from jmp_kit.programs._axes import ELEMENTWISE
from jmp_kit.programs._jaxpr import cut_out, is_along_rows, opened
from tests.casting.zoo import mean_square

H200 = jmp_kit.numerics.TARGETS["h200"]

SHAPES = [(4, 8, 2, 16), (4, 7, 3, 16), (4, 8, 16), (4, 7, 16)]


def norm(x, *_):
    mean = jnp.mean(x, -1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(jnp.mean(jnp.square(x - mean), -1, keepdims=True) + 1e-6)


def softmax(x, *_):
    return jax.nn.softmax(x)


def reshaped(x, *_):
    return norm(jnp.sin(x.reshape(-1, x.shape[-1])).reshape(x.shape)).reshape(-1)


def turned(x, *_):
    return norm(jnp.swapaxes(x, 1, x.ndim - 2)).swapaxes(0, 1)


def summed_over_images(x, *_):
    return jnp.sum(norm(x), 0)


def called(x, *_):
    return jax.nn.hard_swish(norm(x))


def called_with_axes(x, *_):
    return jax.jit(jnp.cumsum, inline=False, static_argnums=1)(norm(x), 0)


def called_with_several(x, *_):
    return jax.jit(jnp.add, inline=False)(norm(x), jnp.ones(x.shape[-1:]))


def as_matrices(fun, *xs, apart=True, moved=None):
    """What is made of a function's equations, and what that gives; None if nothing is."""
    jaxpr = opened(jax.make_jaxpr(fun)(*xs))[0]
    every = [e for e in jaxpr.eqns if e.primitive.name == "reduce_sum" and is_along_rows(e)]
    before = [e for e in jaxpr.eqns if e.primitive.name == moved]
    piece = Piece(jaxpr.eqns, jaxpr.outvars, jaxpr.invars[:1] if apart else [], moved=before)
    found = of_matrices(piece, {e.outvars[0] for e in every})
    if found is None:
        return None
    values = dict(zip(jaxpr.invars, map(jnp.asarray, xs), strict=True))
    for eqn in before:
        function, taken = cut_out(jaxpr, [eqn], eqn.outvars)
        values |= zip(eqn.outvars, function(*(values[v] for v in taken)), strict=True)
    named = {
        new: values[v].reshape(new.aval.shape) for v, new in found.names.items() if v in values
    }
    values |= named
    function, taken = cut_out(jaxpr, found.piece.eqns, found.piece.results)
    [x] = function(*(values[v] for v in taken))
    return x.reshape(jaxpr.outvars[0].aval.shape)


def given(shape, scale):
    random = np.random.default_rng(0)
    return [random.normal(size=s).astype(np.float32) for s in (shape, scale)]


def ones(shape, *kept):
    """The shape with 1 for all axes but these."""
    return tuple(n if i in kept else 1 for i, n in enumerate(shape))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fun", [norm, softmax, reshaped, called])
def test_rows_of_matrices_are_what_they_were(fun, shape):
    x, _ = given(shape, ())
    np.testing.assert_allclose(as_matrices(fun, x), fun(x), rtol=1e-5, atol=1e-5)


def scales(shape):
    last = len(shape) - 1
    yield from ([shape[last:], True], [ones(shape, last), True], [(), True])
    yield from ([ones(shape, *range(last)), True], [ones(shape), True])
    # XLA cuts a reshape in a kernel in powers of two.
    is_cut = all(n in (2, 4, 8, 16) for n in shape)
    yield from ([ones(shape, 0, last), is_cut], [ones(shape, 1, last), False])


@pytest.mark.parametrize(
    ("shape", "scale", "can_be"), [(s, *of) for s in SHAPES for of in scales(s)]
)
def test_what_rows_are_combined_with(shape, scale, can_be):
    def fun(x, scale):
        return norm(x) * (scale + 1)

    x, scale = given(shape, scale)
    found = as_matrices(fun, x, scale)
    assert (found is not None) == can_be
    if can_be:
        np.testing.assert_allclose(found, fun(x, scale), rtol=1e-5, atol=1e-5)


def test_what_has_the_sizes_of_other_axes_is_combined_with_those_it_has():
    """As many channels as words: a scale of each image could be one of each row."""

    def fun(x, scale):
        return norm(x) * lax.broadcast_in_dim(scale + 1, x.shape, (0, 2))

    x, scale = given((4, 16, 16), (4, 16))
    np.testing.assert_allclose(as_matrices(fun, x, scale), fun(x, scale), rtol=1e-5, atol=1e-5)


def test_what_is_padded_beforehand_is_joined():
    x, _ = given((4, 16, 32), ())
    padded = as_matrices(
        lambda x: norm(lax.pad(x, 0.0, [(0, 0, 0), (1, 1, 0), (0, 0, 0)])), x, moved="pad"
    )
    np.testing.assert_allclose(padded[:, 1:-1], norm(x), rtol=1e-5, atol=1e-5)


def looked_up(x, *_):
    return norm(jnp.take_along_axis(x, jnp.zeros((*x.shape[:-1], 1), int), 1))


def put_in(x, *_):
    return norm(lax.dynamic_update_slice(x, x[:2], (1,) * x.ndim))


def multiplied(x, *_):
    square = x[..., : x.shape[-2]]
    return norm(square @ square)


OTHERS = [called_with_axes, called_with_several, looked_up, put_in, multiplied]


@pytest.mark.parametrize("fun", [turned, summed_over_images, *OTHERS])
def test_axes_that_are_treated_differently_are_not_joined(fun):
    x, _ = given(SHAPES[0], ())
    assert as_matrices(fun, x) is None


def test_what_is_taken_for_elementwise_is_known_to_jax():
    known = {p.name for p in vars(primitives).values() if isinstance(p, Primitive)}
    since_0_12 = {"one_minus_square", "log2"}
    assert known | since_0_12 >= ELEMENTWISE


def test_rows_of_what_is_no_argument_or_of_one_axis_or_of_any_are_left():
    x, _ = given(SHAPES[0], ())
    assert as_matrices(norm, x, apart=False) is None
    assert as_matrices(norm, x[0, 0]) is None
    shape = jax.export.symbolic_shape("b, 8, 16")
    jaxpr, _ = opened(jax.make_jaxpr(norm)(jax.ShapeDtypeStruct(shape, jnp.float32)))
    sums = {e.outvars[0] for e in jaxpr.eqns if e.primitive.name == "reduce_sum"}
    assert of_matrices(Piece(jaxpr.eqns, jaxpr.outvars, jaxpr.invars), sums) is None


def loss_fn(weights, x):
    """Of norms, one with each image's own scale, one of which a part is taken."""
    y = norm(x @ weights["in"]) * (1 + x[:, :1, :1] @ weights["scale"])
    return mean_square(norm(y @ weights["out"])[:, 1:] @ weights["in"])


WEIGHTS = {
    name: jax.random.normal(jax.random.key(i), (32, 32)) / 6
    for i, name in enumerate(("in", "scale", "out"))
}
X = jax.random.normal(jax.random.key(9), (8, 16, 8, 32))


def joined(x):
    """Of each pass over rows, whether it is one over those of a matrix."""
    found = plans_of(jax.grad(loss_fn), "mixed_bfloat16", WEIGHTS, x)
    parts = (step for plan in found for step in plan.steps if isinstance(step, Part))
    return [piece.matrices is not None for part in parts for piece in part.segment]


def passes_over_rows(loss_fn, x, monkeypatch):
    """What each is as one over those of a matrix, or None."""
    found = []

    def spied(*args):
        found.append(of_matrices(*args))
        return found[-1]

    monkeypatch.setattr(_written, "of_matrices", spied)
    plans_of(jax.grad(loss_fn), "mixed_bfloat16", WEIGHTS, x)
    return found


@pytest.mark.parametrize("x", [X, X.reshape(-1, 32)], ids=["several axes", "two"])
@pytest.mark.parametrize(
    "cut", [lambda x: jnp.swapaxes(x, 0, -2), lambda x: x[..., 1:, :], lambda x: x[::-1]]
)
def test_rows_that_are_turned_or_cut_are_none_of_a_kernel_but_of_a_matrix(cut, x, monkeypatch):
    def loss_fn(weights, x):
        return mean_square(norm(cut(x @ weights["in"])) @ weights["out"])

    assert len(passes_over_rows(loss_fn, x, monkeypatch)) == (2 if x.ndim == 2 else 0)


def test_what_is_one_number_everywhere_is_made_where_rows_take_it(monkeypatch):
    """The ones and zeros of `clip`'s derivative: XLA needed minutes for a net of such functions."""

    def clipped(x):
        return x * jnp.clip(x + 3, 0, 6) / 6

    def loss_fn(weights, x):
        x = norm(clipped(norm(x @ weights["in"])) @ weights["scale"])
        return mean_square(clipped(x) @ weights["out"])

    found = passes_over_rows(loss_fn, X, monkeypatch)
    assert len(found) == 4
    assert None not in found


@pytest.mark.parametrize("size", [1, 4])
def test_a_sum_that_goes_into_more_than_its_rows_is_none_of_them(size, monkeypatch):
    """Statistics of groups of channels, say, which are summed up over an image before."""

    def loss_fn(weights, x):
        groups = (x @ jnp.ones((32, 64))).reshape(-1, size, size, 2, 32)
        totals = jnp.sum(jnp.sin(groups[:, 0, 0]), -1)
        return mean_square(jnp.sin(groups * totals[:, None, None, :, None]) @ weights["in"])

    found = passes_over_rows(loss_fn, jnp.zeros((2**14, size, size, 32)), monkeypatch)
    assert len(found) == (size == 1)


@pytest.mark.parametrize("device", ["this", "a GPU"])
@pytest.mark.parametrize(
    ("time", "count"), [(16, 3), (12, 1)]
)  # of two norms, forward and backward
def test_gradients_by_rows_of_matrices_are_what_they_were(
    time, count, device, request, monkeypatch
):
    if device == "a GPU":
        request.getfixturevalue("as_on_gpus")
    x = X[:, :time]
    assert joined(x).count(True) == count

    def gradients():
        return jax.jit(autocast(jax.grad(loss_fn), "mixed_bfloat16"))(WEIGHTS, x)

    found = gradients()
    monkeypatch.setattr(_written, "of_matrices", lambda *_: None)
    assert not any(joined(x))
    for name, wanted in gradients().items():
        np.testing.assert_allclose(found[name], wanted, rtol=1e-2, atol=1e-5)


def test_axes_that_devices_may_share_are_not_joined():
    """Two that both lie on devices cannot be one; nor may JAX say so, if XLA places arrays."""
    mesh = jax.make_mesh((4, 2), ("data", "time"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    placed = jax.device_put(X, NamedSharding(mesh, PartitionSpec("data", "time")))
    assert not any(joined(placed))
    compiled = (
        jax.jit(autocast(jax.grad(loss_fn), "mixed_bfloat16")).lower(WEIGHTS, placed).compile()
    )
    gathered = re.findall(r"\w+\[([\d,]+)\]\S* all-gather", compiled.as_text())
    assert max((np.prod(list(map(int, s.split(",")))) for s in gathered), default=0) < X.size / 8


def test_axes_of_what_each_device_has_are_joined():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    images = PartitionSpec("data")
    grads = jax.grad(loss_fn)

    def sums(weights, x):
        here = autocast(grads, "mixed_bfloat16")(
            jax.tree.map(lambda w: lax.pcast(w, "data", to="varying"), weights), x
        )
        return jax.lax.psum(here, "data")

    x = jnp.tile(X, (8, 1, 1, 1))
    per_device = jax.shard_map(
        sums, mesh=mesh, in_specs=(PartitionSpec(), images), out_specs=PartitionSpec()
    )
    text = str(jax.make_jaxpr(per_device)(WEIGHTS, x))
    assert "f32[1024,32]" in text
    found = jax.jit(per_device)(WEIGHTS, x)
    wanted = jax.jit(autocast(grads, "mixed_bfloat16"))(WEIGHTS, X)
    for name in wanted:
        np.testing.assert_allclose(found[name], 8 * wanted[name], rtol=2e-2, atol=1e-4)


@pytest.mark.filterwarnings("default")  # JAX cannot read from its cache what is for no device here
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_kernels_of_rows_are_cut_along_two_axes(monkeypatch):
    """Which has XLA compile such a kernel in a fraction of the time; no byte more is moved."""

    def loss_fn(weights, x):
        return mean_square(norm(x @ weights["in"]) @ weights["out"])

    def compiled():
        half = jax.jit(autocast(jax.grad(loss_fn), "mixed_bfloat16"))
        lowered = half.trace(*H200.placed((WEIGHTS, X))).lower()
        return lowered.compile(H200.compiler_options)

    def axes(program):
        tiles = re.findall(r'"output_tiles":\[\{"sizes":\[([^]]*)', program.as_text())
        return [len(sizes.split(",")) for sizes in tiles]

    there = compiled()
    monkeypatch.setattr(_written, "of_matrices", lambda *_: None)
    before = compiled()
    assert max(axes(there)) < max(axes(before)) == 4
    moved = jmp_kit.numerics.traffic
    assert moved(there).nbytes <= 1.01 * moved(before).nbytes
