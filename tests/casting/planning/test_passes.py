"""Segments in passes: what they compute, and what XLA makes of them for a GPU."""

import functools
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend.core import Literal

import jmp_kit
from jmp_kit import autocast
from jmp_kit.casting import plans_of
from jmp_kit.casting.planning import _kernels, _passes
from jmp_kit.casting.planning._plan import Barrier, Form, Part
from jmp_kit.programs import every_equation
from jmp_kit.programs._jaxpr import constants_of, is_along_rows, opened
from jmp_kit.programs._marks import is_backward, stack_of
from tests.casting.recomputing.test_again import after
from tests.casting.stream import step_of
from tests.casting.zoo import mean_square

WIDTH = 256
WEIGHTS = [*[jnp.eye(WIDTH)] * 3, jnp.ones((96, WIDTH))]
X = jnp.ones((64, 128, 96))


def layer_norm(x):
    mean = jnp.mean(x, -1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) - mean**2 + 1e-6)


def in_groups(x):
    y = x.reshape(*x.shape[:-1], 8, -1)
    axes = (*range(1, x.ndim - 1), x.ndim)
    mean = jnp.mean(y, axes, keepdims=True)
    y = (y - mean) * jax.lax.rsqrt(jnp.mean(y**2, axes, keepdims=True) - mean**2 + 1e-6)
    return y.reshape(x.shape)


def group_norm(x):
    return jax.nn.silu(in_groups(x))


def through(norm):
    def loss_fn(weights, x):
        x = x @ weights[-1]
        for w in weights[:-1]:
            x = x + jax.nn.gelu(norm(x) @ w)
        return mean_square(norm(x) @ weights[0])

    return step_of(loss_fn)


NORMS = {"layer norm": layer_norm, "softmax": jax.nn.softmax, "group norm": group_norm}


@pytest.mark.parametrize("device", ["this", "a GPU"])
@pytest.mark.parametrize("name", NORMS)
def test_passes_compute_what_a_segment_computes(name, device, request):
    if device == "a GPU":
        request.getfixturevalue("as_on_gpus")
    step = through(NORMS[name])
    weights = [jnp.asarray(np.random.default_rng(i).normal(size=(32, 32)) / 6) for i in range(4)]
    x = jnp.asarray(np.random.default_rng(9).normal(size=(16, 64, 32)))
    weights, x = jax.tree.map(lambda a: a.astype(jnp.float32), (weights, x))
    full, passes, kept = (
        jax.tree.leaves(jax.jit(fun)(weights, x))
        for fun in (
            step,
            autocast(step, "mixed_bfloat16"),
            autocast(step, "mixed_bfloat16", recompute=False),
        )
    )

    def error(found):
        change = [np.asarray(a) - np.asarray(w) for a, w in zip(found[:-1], weights, strict=True)]
        wanted = [np.asarray(a) - np.asarray(w) for a, w in zip(full[:-1], weights, strict=True)]
        norm = np.linalg.norm(np.ravel(wanted))
        return np.linalg.norm(np.ravel(change) - np.ravel(wanted)) / norm

    assert error(passes) <= 1.1 * error(kept) + 1e-6


H200 = jmp_kit.numerics.TARGETS["h200"]


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
@pytest.mark.parametrize("name", NORMS)
def test_kernels_write_fewer_float32_activations(name):
    def wide(recompute):
        step = autocast(through(NORMS[name]), "mixed_bfloat16", recompute=recompute)
        found = jmp_kit.numerics.traffic(step, WEIGHTS, X, target="h200")
        return sum(k.wide for k in found.kernels)

    assert wide(recompute=True) <= 0.85 * wide(recompute=False)


def compiled(loss_fn, *shapes, options=None):
    """What the kernels of a train step move on an H200."""
    params, x = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), shapes, is_leaf=is_shape
    )
    step = autocast(step_of(loss_fn), "mixed_bfloat16")
    return jmp_kit.numerics.traffic(step, params, x, target="h200", compiler_options=options)


def is_shape(x):
    return isinstance(x, tuple) and all(isinstance(n, int) for n in x)


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
@pytest.mark.parametrize("function", [jax.nn.gelu, jnp.tanh, jax.nn.silu])
def test_a_bias_is_summed_up_on_an_h200_where_its_cotangent_is_made(function):
    """However dear that is to compute, and though a product takes the function's value, too."""

    def loss_fn(params, x):
        h = x @ params["in"]
        return mean_square(function(h + params["bias"] if "bias" in params else h) @ params["out"])

    weights = {"in": (256, 3072), "out": (3072, 256)}
    with_bias, without = (
        compiled(loss_fn, params, (16384, 256)).nbytes
        for params in ({**weights, "bias": (3072,)}, weights)
    )
    assert with_bias - without <= 0.1 * 2 * 16384 * 3072


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_a_norm_of_windows_moves_less_on_an_h200_than_a_kernel_of_rows_would(monkeypatch):
    """As Swin's: images that are shifted, in windows. XLA would try thousands of tilings."""

    def windows(x):
        b, h, w, c = x.shape
        x = jnp.roll(x, (-4, -4), (1, 2)).reshape(b, h // 8, 8, w // 8, 8, c)
        return x.swapaxes(2, 3).reshape(b, h * w // 64, 64, c)

    def loss_fn(params, x):
        y = x @ params["in"]
        return mean_square(windows(layer_norm(y) * params["scale"]) @ params["out"])

    shapes = {"in": (256, 256), "scale": (256,), "out": (256, 256)}, (16, 64, 64, 256)
    found = compiled(loss_fn, *shapes).nbytes
    monkeypatch.setattr(_passes, "_CUTS", set())
    assert found <= compiled(loss_fn, *shapes).nbytes - 2 * 16 * 64 * 64 * 256


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_a_norm_of_a_sum_is_not_written_in_float32_for_an_h200():
    """What is added to each image, as the time of a diffusion, is added in two passes."""

    def loss_fn(params, x):
        shift = params["shift"] @ params["in"]
        return mean_square(in_groups(x @ params["in"] + shift[:, None]) @ params["out"])

    params = {"in": (128, 256), "out": (256, 256), "shift": (16, 128)}
    kernels = compiled(loss_fn, params, (16, 4096, 128)).kernels
    wide = sum(k.wide for k in kernels if "dot" not in k.name)  # of products, parts of sums
    assert wide <= 0.1 * 4 * 16 * 4096 * 256


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_a_cap_behind_a_mask_costs_an_h200_one_read_of_the_scores():
    """Masks are made again in registers, and no row is gone over twice."""
    mask = np.tri(1024, dtype=bool)

    def attention(function):
        def loss_fn(params, x):
            q, k, v = jnp.split(x @ params["in"], 3, -1)
            scores = jnp.where(mask, function(q @ k.swapaxes(1, 2)), -1e30)
            return mean_square(jax.nn.softmax(scores) @ v @ params["out"])

        params = {"in": (128, 384), "out": (128, 128)}
        return compiled(loss_fn, params, (64, 1024, 128)).nbytes

    more = attention(lambda x: 50 * jnp.tanh(x / 50)) - attention(lambda x: x)
    assert more <= 1.2 * 2 * 64 * 1024 * 1024


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_a_cap_over_long_rows_is_not_written_in_float32_for_an_h200():
    """Capped logits, that a cross entropy sums up twice."""

    def loss_fn(params, x):
        logits = 30 * jnp.tanh(x @ params["out"] / 30)
        labels = jnp.arange(len(x)) % logits.shape[-1]
        return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, logits.shape[-1])).mean()

    assert compiled(loss_fn, {"out": (256, 32768)}, (4096, 256)).wide <= 0.1 * 4 * 4096 * 32768


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_a_sum_of_what_was_looked_up_is_one_kernel_for_an_h200():
    """Two experts' results, weighted, are added to a residual stream."""
    width, rows = 256, 16384
    places = jnp.arange(2 * rows).reshape(rows, 2) % rows

    def loss_fn(params, x):
        x = x @ params["in"]
        found = (x @ params["in"])[places]
        x = x + (found * jax.nn.softmax(x @ params["router"])[..., None]).sum(1)
        return mean_square((x + jnp.tanh(layer_norm(x) @ params["in"])) @ params["in"])

    params = {"in": (width, width), "router": (width, 2)}
    kernels = compiled(loss_fn, params, (rows, width)).kernels
    written = sum(k.written for k in kernels if not k.backward and "dot" not in k.name)
    assert written <= 6.5 * 2 * rows * width  # two more if what was looked up is written


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_what_a_library_s_product_pads_is_not_copied_for_an_h200():
    """Logits of a vocabulary that is no multiple of 8, and scores between as many places."""

    def loss_fn(params, x):
        q = x @ params["in"]
        x = x + jax.nn.softmax(q @ q.swapaxes(1, 2) / 16) @ x
        logits = x @ params["out"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    labels = jnp.arange(32 * 252).reshape(32, 252) % 30522
    params = {"in": (256, 256), "out": (256, 30522)}
    shapes = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in params.items()}
    x = jax.ShapeDtypeStruct((32, 252, 256), jnp.float32)
    step, options = (
        autocast(step_of(loss_fn), "mixed_bfloat16"),
        {"xla_gpu_enable_triton_gemm": False},
    )
    found = jmp_kit.numerics.traffic(step, shapes, x, target="h200", compiler_options=options)
    assert any(k.dtype == "bfloat16" and "pad" in k.name for k in found.kernels)
    assert not [k for k in found.kernels if "slice" in k.name and k.written > 2 * 32 * 252 * 252]


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
@pytest.mark.parametrize("batch", [(32,), (4, 8)])
@pytest.mark.parametrize("first", [lambda x: x, layer_norm])
def test_positions_are_added_to_a_batch_as_it_lies_in_memory(first, batch):
    """XLA would have the batch last, for their gradient is a sum over it, and turn everything."""

    def loss_fn(params, x):
        x = first(x @ params["in"] + params["positions"].reshape(512, 256))
        x = layer_norm(x + jnp.tanh(x @ params["in"]) @ params["out"])
        return mean_square(x @ params["out"])

    def moved(*positions):
        params = {"in": (256, 256), "out": (256, 256), "positions": positions}
        return compiled(loss_fn, params, (*batch, 512, 256)).nbytes

    assert moved(512, 256) <= 1.02 * moved(512 * 256)


def looked_up(params, tokens):
    x = params["table"][tokens]
    for w in params["layers"]:
        x = x + jnp.tanh(x @ w) @ w.T
    return mean_square(x @ params["out"])


def with_a_table(*tokens):
    shape, layer = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((256, 1024), jnp.float32)
    table, out = shape((16384, 256), jnp.float32), shape((256, 16384), jnp.float32)
    return {"table": table, "layers": [layer] * 4, "out": out}, shape(tokens, jnp.int32)


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_a_table_s_gradient_takes_no_memory_before_it_is_made(monkeypatch):
    """XLA writes the zeros that it begins with where the backward pass begins."""

    def memory():
        step = jax.jit(autocast(step_of(looked_up), "mixed_bfloat16"), donate_argnums=0)
        program = step.lower(*H200.placed(with_a_table(8, 1024))).compile(H200.compiler_options)
        return program.memory_analysis().temp_size_in_bytes

    late = memory()
    monkeypatch.setattr(_kernels, "begun_late", lambda eqn, *_: [eqn])
    assert late <= memory() - 4 * 16384 * 256


@pytest.mark.usefixtures("as_on_gpus")
def test_a_large_table_s_gradient_waits_for_a_few_words():
    step = autocast(step_of(looked_up), "mixed_bfloat16")
    jaxpr, _ = opened(jax.make_jaxpr(step)(*with_a_table(1, 8)))
    [eqn] = (e for e in jaxpr.eqns if e.primitive.name == "scatter-add")
    assert eqn.invars[0] not in constants_of(jaxpr.eqns)


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_libraries_add_the_cotangents_of_three_products(monkeypatch):
    """Without a kernel that adds to what they give."""

    def loss_fn(params, x):
        x = layer_norm(x @ params["in"])
        q, k, v = (jnp.tanh(x @ params[name]) for name in "qkv")
        return mean_square(layer_norm(q * k * v) @ params["in"])

    def moved():
        params = dict.fromkeys(("in", *"qkv"), (512, 512))
        options = {"xla_gpu_enable_triton_gemm": False}
        return compiled(loss_fn, params, (16, 1024, 512), options=options).nbytes

    found = moved()
    monkeypatch.setattr(_kernels, "given_first", lambda eqns: eqns)
    assert found <= moved() - 2 * 2 * 16 * 1024 * 512


def test_what_is_written_for_gpus_is_exported_for_them():
    """With everything that `_kernels` writes otherwise there, and what hides operands from XLA."""

    def loss_fn(params, images):
        x = jax.lax.reduce_window(images, -jnp.inf, jax.lax.max, (1, 3, 1), (1, 2, 1), "SAME")
        words = params["table"][(9 * jnp.abs(images[:, ::2, 0])).astype(jnp.int32)]
        x = layer_norm((x + words) @ params["in"] + params["positions"])
        x = x + jax.nn.softmax(x @ params["in"]) @ params["out"] * params["scale"]
        return mean_square(group_norm(x @ params["out"]))

    def step(params, images):
        grads = jax.grad(loss_fn)(params, images)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    weight = jnp.eye(64)
    params = {"in": weight, "out": weight, "positions": jnp.ones((32, 64)), "scale": jnp.ones(64)}
    params["table"] = jnp.ones((2**16, 64))
    images = jax.random.normal(jax.random.key(0), (16, 64, 64))
    half = jax.jit(autocast(step, "mixed_bfloat16"))
    exported = jax.export.export(half, platforms=["cpu", "cuda"])(params, images)
    found, there = exported.call(params, images), half(params, images)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), found, there)


def pieces(norm, *shapes):
    """The passes of a train step, of the backward pass."""

    def loss_fn(params, x):
        return mean_square(norm(x @ params["in"], *params["norm"]) @ params["out"])

    width = shapes[-1][-1]
    shape = jax.ShapeDtypeStruct
    weight, vector = shape((width, width), jnp.float32), shape((width,), jnp.float32)
    params = {"in": weight, "out": weight, "norm": [vector, vector]}
    found = plans_of(jax.grad(loss_fn), "mixed_bfloat16", params, shape(shapes[0], jnp.float32))
    parts = (step for plan in found for step in plan.steps if isinstance(step, Part))
    return [piece for part in parts for piece in part.segment]


def test_sums_over_the_same_values_are_one_pass():
    """The gradients of a norm's scale and bias."""
    found = pieces(lambda x, scale, bias: layer_norm(x) * scale + bias, (64, 128, 64))
    vectors = [[v for v in piece.results if v.aval.shape == (64,)] for piece in found]
    assert max(map(len, vectors)) == 2


@pytest.mark.parametrize("cap", [None, 50.0])
@pytest.mark.parametrize(("time", "lies"), [(128, False), (126, True)])
def test_rows_that_a_library_pads_are_read_where_they_lie(time, lies, cap):
    """Of a whole row, a barrier costs nothing. Without one, XLA writes what is dear twice."""

    def loss_fn(params, x):
        q = x @ params[0]
        scores = q @ q.swapaxes(1, 2)
        scores = cap * jnp.tanh(scores / cap) if cap else scores
        return mean_square(jax.nn.softmax(scores) @ (x + params[1]) @ params[0])

    args = (jnp.eye(64), jnp.ones(64)), jnp.ones((8, time, 64))
    [plan] = plans_of(jax.grad(loss_fn), "mixed_bfloat16", *args)
    parts = [step for step in plan.steps if isinstance(step, Part)]
    found = [piece for part in parts for piece in part.segment if piece.apart]
    rows = [p for p in found if any(v.aval.shape == (8, time, time) for v in p.results)]
    assert rows
    assert rows[0].where_it_lies == (lies and not cap)  # the forward pass's
    assert all(piece.where_it_lies for piece in found if piece not in rows)


SLOW = {
    "a Fourier transform": ("fft", lambda x: x + jnp.fft.fft(x).real),
    "a running sum": ("cumsum", lambda x: x + jnp.cumsum(x, 1)),
    "a sort": ("sort", lambda x: x + jnp.sort(x, 1)),
}


@pytest.mark.parametrize("name", SLOW)
def test_what_is_slow_is_computed_once(name):
    """Though passes before and after a norm, forward and backward, are made of it."""
    primitive, function = SLOW[name]

    def loss_fn(params, x):
        x = layer_norm(function(x @ params[0])) @ params[1]
        return mean_square(layer_norm(function(x)) @ params[0])

    def count(fun):
        jaxpr = jax.make_jaxpr(fun)([jnp.eye(64)] * 2, jnp.ones((8, 128, 64))).jaxpr
        return sum(eqn.primitive.name == primitive for eqn, _ in every_equation(jaxpr))

    step = jax.grad(loss_fn)
    assert 0 < count(autocast(step, "mixed_bfloat16")) <= count(step)


def chosen_from(activation):
    """What passes choose from that read what lies there, by numbers of their own."""

    def loss_fn(params, x):
        for w, b in params:
            x = activation(layer_norm(x @ w) * b + b)
        return mean_square(x @ params[0][0])

    params = [(jnp.eye(64), jnp.ones(64))] * 3
    step = autocast(jax.grad(loss_fn), "mixed_bfloat16")
    traced = jax.make_jaxpr(step)(params, jnp.ones((256, 64)))
    barriers = (e for e, _ in every_equation(traced.jaxpr) if "barrier" in e.primitive.name)
    atoms = (a for e in barriers for a in e.invars if isinstance(a, Literal))
    return [float(a.val) for a in atoms if a.aval.dtype == jnp.float32]


def test_no_two_passes_share_what_is_dear():
    """XLA would take what both read for the same, and compute with it once."""
    numbers = chosen_from(jax.nn.silu)
    assert len(numbers) == len(set(numbers)) > 2
    assert set(chosen_from(lambda x: x)) == {0.0}


def test_what_is_dear_and_summed_up_is_a_pass_of_its_own():
    """XLA sums up where it is made, if no other result shares what is dear with it."""

    def loss_fn(params, x):
        return mean_square(jax.nn.gelu(x @ params[0] + params[1]) @ params[2])

    params = jnp.eye(64), jnp.ones(64), jnp.eye(64)
    [plan] = plans_of(jax.grad(loss_fn), "mixed_bfloat16", params, jnp.ones((256, 64)))
    parts = [step for step in plan.steps if isinstance(step, Part)]
    late = [s.var for part in parts for s in part.stored.values() if s.form is Form.FUSED]
    made = [piece.results for part in parts for piece in part.segment]
    assert late
    assert all([v] in made for v in late)


def test_the_scales_of_a_cotangent_s_rows_are_found_where_it_is_made():
    """Though the other operand's scale is a factor: its own pass would read all of it again."""

    def loss_fn(params, x):
        return mean_square(jax.nn.gelu(x @ params[0] + params[1]) @ params[2])

    args = (jnp.eye(256), jnp.ones(256), jnp.eye(256)), jnp.ones((512, 256))
    plans = plans_of(jax.grad(loss_fn), "mixed_bfloat16", *args, rules={"": "float8"})
    steps = [step for plan in plans for step in plan.steps if isinstance(step, Part)]
    made = [(piece.eqns[-1], piece.apart) for step in steps for piece in step.segment]
    scales = [(e, apart) for e, apart in made if e.primitive.name == "reduce_max"]
    rows = [apart for e, apart in scales if is_backward(stack_of(e)) and is_along_rows(e)]
    assert rows == [[]]


@pytest.mark.usefixtures("as_on_gpus")
def test_no_sign_is_within_a_sum_along_rows():
    """XLA takes it out, and makes two kernels of what else is one."""
    found = pieces(lambda x, *_: layer_norm(x), (64, 128, 64))
    maker = {v: e.primitive.name for piece in found for e in piece.eqns for v in e.outvars}
    sums = [e for piece in found for e in piece.eqns if e.primitive.name == "reduce_sum"]
    summed = [v for e in sums for v in e.invars if v.aval.shape == (64, 128, 64)]
    assert len(summed) > 4
    assert "neg" not in map(maker.get, summed)


def stored(fun, *args):
    """The shapes of what is rounded on its way into memory."""
    found = plans_of(fun, "mixed_bfloat16", *args)
    return [s.var.aval.shape for plan in found for s in plan.every_stored() if s.form]


def test_what_is_added_to_a_product_is_added_in_half():
    """A residual stream, and the cotangent of what two products take: as products give them."""

    def loss_fn(weights, x):
        x = x @ weights[0]
        for _ in range(2):
            y = layer_norm(x)
            x = x + jnp.tanh(y @ weights[1]) * (y @ weights[2]) @ weights[3]
        return mean_square(layer_norm(x) @ weights[0])

    weights, x = [jnp.eye(64)] * 4, jnp.ones((256, 64))
    [plan] = plans_of(jax.grad(loss_fn), "mixed_bfloat16", weights, x)
    sums = [s.eqn.primitive.name for s in plan.every_stored() if s.form is Form.ADDED]
    assert sums == ["add", "add_any", "add_any"]
    traced = str(jax.make_jaxpr(autocast(jax.grad(loss_fn), "mixed_bfloat16"))(weights, x))
    assert len(set(re.findall(r"(\w+):bf16\[256,64\] = add", traced))) == 3


def test_a_chain_of_convolutions_adds_cotangents_in_half():
    """Though what is computed again waits for them: it waits for the sum."""

    def convolved(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )

    def loss_fn(params, x):
        x = x @ params["in"]
        for w in params["kernels"]:
            x = x + jnp.tanh(convolved(x, w))
        return mean_square(x)

    params = {"in": jnp.eye(32), "kernels": [jnp.ones((3, 32, 32))] * 3}
    [plan] = plans_of(jax.grad(loss_fn), "mixed_bfloat16", params, jnp.ones((16, 64, 32)))
    sums = [s.form for s in plan.every_stored() if s.eqn.primitive.name == "add_any"]
    # Up to JAX 0.10, the derivative of tanh is such a sum, too, which only products take.
    assert [form for form in sums if form is not Form.CAST] == [Form.ADDED, Form.ADDED]


def convolved(x, w):
    return jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def before_norms(params, x):
    """A residual stream that ends in a norm, of which two convolutions are the next layer."""
    x = convolved(x, params["in"])
    x = x + convolved(group_norm(x), params["up"])
    y = group_norm(x)
    return mean_square(convolved(y, params["out"]) + convolved(y, params["skip"]))


def test_a_stream_that_only_a_norm_takes_is_stored_once():
    """And not both of what it is the sum of, which each pass of the norm would read."""
    names = ("in", "up", "out", "skip")
    params = {name: jnp.ones((1, 1, 64, 64)) for name in names}
    x = jnp.ones((8, 32, 32, 64))
    [plan] = plans_of(jax.value_and_grad(before_norms), "mixed_bfloat16", params, x)
    added = [s.eqn for s in plan.every_stored() if s.form is Form.ADDED]
    [stream] = [e for e in added if e.primitive.name == "add"]
    kept = {a for step in plan.steps if isinstance(step, Barrier) for a in step.eqn.invars}
    assert stream.outvars[0] in kept
    assert len(kept.intersection(stream.invars)) == 1  # the stream before it, for its own norm


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_a_stream_that_only_a_norm_takes_costs_an_h200_no_kernel(monkeypatch):
    """The convolution before it adds it, and each pass reads one value for two."""
    weights = dict.fromkeys(("in", "up", "out", "skip"), (1, 1, 256, 256))
    image = 2 * 64 * 32 * 32 * 256
    found = compiled(before_norms, weights, (64, 32, 32, 256)).nbytes
    monkeypatch.setattr("jmp_kit.casting.planning._planner.streams", lambda *_: set())
    monkeypatch.setattr("jmp_kit.casting.recomputing._taken.streams", lambda *_: set())
    assert found <= compiled(before_norms, weights, (64, 32, 32, 256)).nbytes - 3 * image


def gated(params, x):
    up, gate = jnp.split(x @ params["in"] + params["bias"], 2, -1)
    return mean_square(jnp.tanh(up) * jax.nn.sigmoid(gate) @ params["out"])


def test_cotangents_of_a_gate_share_nothing_dear():
    """XLA would write it for both, in float32. It takes two barriers of the same for one."""
    params = {"in": jnp.ones((64, 256)), "bias": jnp.ones(256), "out": jnp.ones((128, 64))}
    args = params, jnp.ones((1024, 64))
    [plan] = plans_of(jax.value_and_grad(gated), "mixed_bfloat16", *args)
    segments = [step.segment for step in plan.steps if isinstance(step, Part)]
    [(join, halves)] = [
        (piece, segment)
        for segment in segments
        for piece in segment
        if piece.eqns[-1].primitive.name == "concatenate"
    ]
    joined = [p for p in halves if p.results[0] in join.eqns[-1].invars]
    assert [bool(p.apart) for p in (*joined, join)] == [True, True, False]
    step = autocast(jax.value_and_grad(gated), "mixed_bfloat16")
    eqns = every_equation(jax.make_jaxpr(step)(*args).jaxpr)
    barriers = [e.invars for e, _ in eqns if e.primitive.name == "optimization_barrier"]
    held = [tuple(map(id, invars)) for invars in barriers if not isinstance(invars[0], Literal)]
    assert len(held) == len(set(held)) >= 3


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_cotangents_of_a_gate_are_one_kernel_for_an_h200(monkeypatch):
    shapes = {"in": (256, 512), "bias": (512,), "out": (256, 256)}
    found = compiled(gated, shapes, (65536, 256)).nbytes
    monkeypatch.setattr("jmp_kit.casting.planning._segment.Segment._joined", lambda *_: set())
    assert found <= compiled(gated, shapes, (65536, 256)).nbytes - 2 * 2 * 65536 * 256


def test_halves_of_what_is_dear_are_made_in_one_pass():
    """Each is used once, as in an associative scan: nothing is shared."""

    def loss_fn(params, x):
        dear = jnp.exp(x @ params["in"])
        even, odd = dear[:, ::2] * params["scale"], jnp.sin(x @ params["in"])[:, 1::2]
        both = jnp.concatenate([even + dear[:, ::2], odd + dear[:, 1::2]], 1)
        return mean_square(both @ params["out"])

    params = {"in": jnp.eye(128), "scale": jnp.ones(128), "out": jnp.eye(128)}
    args = params, jnp.ones((64, 32, 128))
    [plan] = plans_of(jax.value_and_grad(loss_fn), "mixed_bfloat16", *args)
    forward = next(step for step in plan.steps if isinstance(step, Part) and step.segment)
    assert not any(piece.apart for piece in forward.segment)


def test_a_sum_of_one_value_is_no_sum_of_several():
    """The two sides of a leaky rectifier, which no pass need store before a norm's."""

    def layer(params, x):
        return jax.nn.leaky_relu(in_groups(x @ params["in"]) * params["scale"])

    def loss_fn(params, x):
        logits = layer(params, layer(params, x)) @ params["out"]
        return jnp.mean(jax.nn.logsumexp(logits, -1))

    params = {"in": jnp.eye(64), "scale": jnp.ones(64), "out": jnp.ones((64, 4096))}
    args = params, jnp.ones((8, 256, 64))
    [plan] = plans_of(jax.value_and_grad(loss_fn), "mixed_bfloat16", *args)
    others = [s for s in plan.every_stored() if s.form not in (None, Form.CAST)]
    assert not others


def test_what_is_summed_up_along_rows_and_columns_is_stored():
    """Cotangents of scores that are sums of two vectors, behind a softmax."""

    def loss_fn(params, x):
        x = x @ params["in"]
        scores = jax.nn.leaky_relu((x @ params["left"]) + (x @ params["right"]).swapaxes(1, 2))
        return mean_square(jax.nn.softmax(scores) @ x @ params["in"])

    params = {"in": jnp.eye(64), "left": jnp.ones((64, 1)), "right": jnp.ones((64, 1))}
    [plan] = plans_of(jax.value_and_grad(loss_fn), "mixed_bfloat16", params, jnp.ones((4, 256, 64)))
    others = [s for s in plan.every_stored() if s.form not in (None, Form.CAST)]
    sums = [s.var.aval.shape for s in others if s.eqn.primitive.name == "add_any"]
    assert sums == [(4, 256, 256)]


def shifted(params, x):
    """Each position mixed with the one before it, three times, as queries, keys and values are."""
    x = layer_norm(x @ params["in"])
    before = jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1]
    mixed = [m * x + (1 - m) * before for m in params["mix"]]
    return mean_square(sum(jnp.tanh(y @ params["in"]) for y in mixed) @ params["in"])


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_a_sum_of_shifted_cotangents_is_stored_in_half_for_an_h200(monkeypatch):
    """What three products give is read once, and not by both passes of a norm."""
    shapes = {"in": (512, 512), "mix": (3, 512)}, (8, 4096, 512)
    found = compiled(shifted, *shapes).nbytes
    monkeypatch.setattr("jmp_kit.casting.reading._joined._SCALES", set())
    assert found <= compiled(shifted, *shapes).nbytes - 1.5 * 2 * 8 * 4096 * 512


def test_what_is_small_only_beside_what_is_gathered_of_it_is_stored_in_half():
    """Nodes of a graph, beside two values of each of many edges."""
    edges = jnp.arange(64 * 16)

    def loss_fn(params, x):
        x = jnp.tanh(x @ params["in"])
        pairs = jnp.concatenate([x[edges % 64], x[edges // 16]], -1)
        return mean_square(pairs @ params["edges"]) + mean_square(jnp.sin(x) @ params["in"])

    params = {"in": jnp.eye(64), "edges": jnp.ones((128, 64))}
    assert (64, 64) in stored(loss_fn, params, jnp.ones((64, 64)))


def test_what_several_passes_take_is_stored_once():
    """A sum of cotangents behind a mask, that a shortcut and a norm take."""

    def loss_fn(w, x):
        h = jax.nn.relu(layer_norm(x @ w[0]) + layer_norm(x @ w[1]))
        return mean_square(jax.nn.relu(h @ w[2]) @ w[3] + h @ w[4])

    weights, x = [jnp.eye(64)] * 5, jnp.ones((256, 64))
    [plan] = plans_of(jax.grad(loss_fn), "mixed_bfloat16", weights, x)
    others = [s for s in plan.every_stored() if s.form not in (None, Form.CAST)]
    assert "select_n" in [s.eqn.primitive.name for s in others]


def test_what_a_norm_before_another_gives_back_is_stored_in_half():
    """Behind every block of a stream but the last: both of its passes take it."""

    def loss_fn(weights, x):
        x = x @ weights[0]
        for w in weights:
            x = layer_norm(x + jax.nn.silu(layer_norm(x) @ w) @ w)
        return mean_square(x @ weights[0])

    def apart(blocks):
        args = [jnp.eye(64)] * blocks, jnp.ones((256, 64))
        [plan] = plans_of(jax.grad(loss_fn), "mixed_bfloat16", *args)
        every = [s for s in plan.every_stored() if s.eqn.primitive.name == "add_any"]
        return sum(s.form is Form.APART for s in every)

    assert apart(3) - apart(2) == 2


def test_a_cotangent_that_was_summed_up_is_stored_in_half_for_a_norm():
    """That of a norm of which a layer makes several functions, and another takes it as it is."""

    def loss_fn(w, x):
        y = layer_norm(x @ w[0])
        waves = jnp.sin(y[..., None] * jnp.arange(1.0, 9.0)).reshape(len(y), -1)
        return mean_square(waves @ jnp.ones((512, 64)) + jax.nn.silu(y) @ w[1])

    args = [jnp.eye(64)] * 2, jnp.ones((256, 64))
    [plan] = plans_of(jax.grad(loss_fn), "mixed_bfloat16", *args)
    sums = {e.outvars[0] for e in plan.jaxpr.eqns if e.primitive.name == "reduce_sum"}
    found = [s for s in plan.every_stored() if not sums.isdisjoint(s.eqn.invars)]
    assert [(s.var.aval.shape, s.form) for s in found] == [((256, 64), Form.APART)]


def test_what_joins_projections_is_not_stored_apart():
    """The cotangent of a projection that was split: no part is padded before all are there."""

    def loss_fn(w, x):
        h = x @ w[0]
        q, k, v = h[:, :64], h[:, 64:128], h[:, 128:]
        return mean_square((jax.nn.softmax(q @ k.T) @ v) @ w[1])

    args = [jnp.ones((64, 192)), jnp.eye(64)], jnp.ones((256, 64))
    assert stored(jax.grad(loss_fn), *args).count((256, 192)) == 1


MOVES = [jnp.flip, lambda x: x[jnp.arange(64) // 2], lambda x: jnp.rot90(x.reshape(64, 64))]


@pytest.mark.parametrize("move", MOVES)
def test_halves_move_as_halves(move):
    def loss_fn(w, x):
        return mean_square(jnp.tanh(move(jnp.tanh(x @ w[0]) @ w[1])) @ w[0])

    args = [jnp.eye(64)] * 2, jnp.ones((64, 64))
    [plan] = plans_of(jax.grad(loss_fn), "mixed_bfloat16", *args)
    pieces = [q for step in plan.steps if isinstance(step, Part) for q in step.segment]
    moved = [e for piece in pieces for e in piece.moved]
    assert moved
    found, full = (
        jnp.stack(jax.jit(f)(*args))
        for f in (autocast(jax.grad(loss_fn), "mixed_bfloat16"), jax.grad(loss_fn))
    )
    assert jnp.abs(found - full).max() <= 0.02 * jnp.abs(full).max()


def test_halves_are_looked_up_at_places_that_are_computed_with_them():
    def loss_fn(w, x):
        y = jnp.tanh(x @ w)
        places = jnp.argsort(y[:, 0]) + 1
        return mean_square(jnp.zeros((66, 64)).at[places].set(y, unique_indices=True) @ w)

    w = jax.random.normal(jax.random.key(0), (64, 64)) / 8
    x = jax.random.normal(jax.random.key(1), (64, 64))
    full = jax.grad(loss_fn)(w, x)
    found = autocast(jax.grad(loss_fn), "mixed_bfloat16")(w, x)
    assert jnp.abs(found - full).max() <= 0.02 * jnp.abs(full).max()


@pytest.mark.parametrize(("value", "is_moved"), [(0.0, True), (-jnp.inf, True), (0.1, False)])
def test_halves_are_padded_with_what_half_has(value, is_moved):
    def loss_fn(w, x):
        h = jax.lax.pad(jnp.tanh(x @ w[0]) @ w[1], value, [(0, 8, 0), (0, 0, 0)])
        return mean_square(jnp.maximum(h, -1.0) @ w[0])

    args = [jnp.eye(64)] * 2, jnp.ones((64, 64))
    [plan] = plans_of(jax.grad(loss_fn), "mixed_bfloat16", *args)
    pieces = [q for step in plan.steps if isinstance(step, Part) for q in step.segment]
    names = [e.primitive.name for piece in pieces for e in piece.moved]
    assert ("pad" in names) == is_moved


def test_a_custom_derivative_is_no_wall():
    """A ReLU is computed in each pass that takes it, and written in float32 for none."""

    def loss_fn(params, x):
        h = jax.nn.relu(group_norm(x @ params["in"]) * params["scale"])
        return mean_square(h @ params["out"])

    weight, scale = jnp.eye(64), jnp.ones(64)
    params = {"in": weight, "out": weight, "scale": scale}
    [plan] = plans_of(jax.grad(loss_fn), "mixed_bfloat16", params, jnp.ones((8, 16, 16, 64)))
    wide = [
        v
        for part in plan.steps
        if isinstance(part, Part)
        for piece in part.segment
        for v in piece.results
        if v.aval.shape == (8, 16, 16, 64) and not (v in part.stored and part.stored[v].form)
    ]
    assert not wide


def recurrent(params, x):
    """A linear recurrence whose decay and change are gated, by an associative scan."""
    x = x @ params["in"]
    gates = (jax.nn.sigmoid(x @ params[name] + params["bias"]) for name in ("decay", "enter"))
    rate, enter = (-8 * next(gates), next(gates))
    decay, change = jnp.exp(rate), jnp.sqrt(1 - jnp.exp(2 * rate)) * enter * x
    if "states" in params:
        decay, change = (v[..., None] * params["states"] for v in (decay, change))
    _, state = lax.associative_scan(after, (decay, change), axis=1)
    y = jnp.tanh(x) * (state.sum(-1) if "states" in params else state)
    return mean_square(y @ params["in"])


def between_passes(params, x, recompute=True, loss_fn=recurrent):
    """What the backward pass's kernels of their own take of others, of the size of all times."""
    step = jax.value_and_grad(loss_fn)
    [plan] = plans_of(step, "mixed_bfloat16", params, x, recompute=recompute)
    pieces = [p for step in plan.steps if isinstance(step, Part) for p in step.segment]
    taken = {v for p in pieces for v in p.apart}
    made = {v: e for p in pieces for e in p.eqns for v in e.outvars if v in p.results}
    ends = taken & made.keys()
    return [v.aval.shape for v in ends if made[v].primitive.name == "add_any"]


def test_what_an_associative_scan_ends_in_is_there_for_all_who_take_it():
    """In float32: they would cut and join once more. Not what is larger than what it is made of.

    That is, of decays that a number for each time gives, if no cut of them is kept.
    """
    x = jnp.ones((8, 128, 128))
    params = {name: jnp.eye(128) for name in ("in", "decay", "enter")} | {"bias": jnp.ones(128)}
    assert x.shape in between_passes(params, x)
    assert not between_passes(params | {"states": jnp.ones(8)}, x, recompute="most")


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_what_an_associative_scan_ends_in_is_written_once_for_an_h200(monkeypatch):
    weights = dict.fromkeys(("in", "decay", "enter"), (1024, 1024))
    shapes = {**weights, "bias": (1024,)}, (8, 1024, 1024)
    found = compiled(recurrent, *shapes).nbytes
    monkeypatch.setattr("jmp_kit.casting.planning._segment.ends_of_woven", lambda _: set())
    assert found <= compiled(recurrent, *shapes).nbytes - 8 * 2 * 8 * 1024 * 1024


def interpolated(params, x):
    """A state between the last one and a candidate, by an associative scan."""
    x = x @ params["in"]
    gate = jax.nn.sigmoid(x @ params["gate"] + params["bias"])
    change = gate * (x @ params["candidate"] + params["bias"])
    _, state = lax.associative_scan(after, (1 - gate, change), axis=1)
    return mean_square(state @ params["out"])


def test_what_an_associative_scan_ends_in_goes_into_two_sums_as_it_is():
    """One kernel makes these, with the cotangents that they are sums of."""
    names = ("in", "gate", "candidate", "out")
    params = {name: jnp.eye(128) for name in names} | {"bias": jnp.ones(128)}
    assert not between_passes(params, jnp.ones((8, 128, 128)), loss_fn=interpolated)


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_what_an_associative_scan_ends_in_is_not_written_before_two_sums_for_an_h200(monkeypatch):
    names = ("in", "gate", "candidate", "out")
    shapes = {**dict.fromkeys(names, (1024, 1024)), "bias": (1024,)}, (8, 1024, 1024)
    found = compiled(interpolated, *shapes).nbytes
    name = "jmp_kit.casting.planning._segment.Segment._is_in_one_kernel"
    monkeypatch.setattr(name, lambda *_: False)
    assert found <= compiled(interpolated, *shapes).nbytes - 2 * 8 * 1024 * 1024


def scored(params, x):
    """What each of a text is worth to all others, with a bias: its cotangent is a sum of sums."""
    q, k = (jnp.einsum("btc,chd->bhtd", x, params[name]) for name in ("q", "k"))
    worth = (x @ params["worth"] + params["bias"]).swapaxes(1, 2)[:, :, None]  # [b, h, 1, t]
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) + worth
    return mean_square(jnp.einsum("bhqk,bhkd->bqhd", jnp.tanh(scores), k))


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_sums_that_others_take_are_not_summed_up_from_the_start_for_an_h200(monkeypatch):
    weights = {"q": (256, 4, 64), "k": (256, 4, 64), "worth": (256, 4), "bias": (4,)}
    shapes = weights, (8, 1024, 256)
    found = compiled(scored, *shapes).nbytes
    name = "jmp_kit.casting.planning._written.Writer._of_sums"
    monkeypatch.setattr(name, lambda _, eqn: iter([eqn]))
    assert found <= compiled(scored, *shapes).nbytes - 2 * 8 * 1024 * 1024


def test_sums_that_others_take_are_behind_a_barrier():
    shapes = {"q": (8, 4, 8), "k": (8, 4, 8), "worth": (8, 4), "bias": (4,)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    [plan] = plans_of(jax.grad(scored), "mixed_bfloat16", params, jnp.ones((2, 64, 8)))
    pieces = [p.eqns for step in plan.steps if isinstance(step, Part) for p in step.segment]
    made = {v: e.primitive.name for eqns in pieces for e in eqns for v in e.outvars}
    sums = [e for eqns in pieces for e in eqns if e.primitive.name == "reduce_sum"]
    of_sums = [e for e in sums if made.get(e.invars[0]) == "optimization_barrier"]
    assert [e.outvars[0].aval.shape for e in of_sums] == [(4,)]


def of_three(params, x):
    """A recurrence whose scan ends in the cotangents of three values, each with its bias."""
    x = x @ params["in"] + params["bias"]
    decay, enter = (
        jax.nn.sigmoid(x @ params[name] + params["bias"]) for name in ("decay", "enter")
    )
    change = jnp.sqrt(1 - decay**2) * enter * x
    _, state = lax.associative_scan(after, (decay, change), axis=1)
    return mean_square(state @ params["out"])


def test_what_an_associative_scan_ends_in_goes_into_three_values_and_not_their_sums():
    """One kernel makes three values, but no three sums; these take the values as stored."""
    params = {name: jnp.eye(128) for name in ("in", "decay", "enter", "out")}
    args = params | {"bias": jnp.ones(128)}, jnp.ones((8, 128, 128))
    assert not between_passes(*args, loss_fn=of_three)


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_what_an_associative_scan_ends_in_is_not_written_before_three_values_for_an_h200(
    monkeypatch,
):
    names = ("in", "decay", "enter", "out")
    shapes = {**dict.fromkeys(names, (1024, 1024)), "bias": (1024,)}, (8, 1024, 1024)
    found = compiled(of_three, *shapes).nbytes
    monkeypatch.setattr("jmp_kit.casting.planning._planner.MOST_SUMS", 3)
    assert found <= compiled(of_three, *shapes).nbytes - 2 * 8 * 1024 * 1024


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_what_an_associative_scan_is_made_of_is_not_read_again_for_an_h200(monkeypatch):
    weights = dict.fromkeys(("in", "decay", "enter"), (1024, 1024))
    shapes = {**weights, "bias": (1024,)}, (8, 1024, 1024)
    found = compiled(recurrent, *shapes).nbytes
    sources = "jmp_kit.casting.recomputing._taken.ForwardPass._sources"
    monkeypatch.setattr(sources, lambda *_: set())
    assert found <= compiled(recurrent, *shapes).nbytes - 3 * 8 * 1024 * 1024
