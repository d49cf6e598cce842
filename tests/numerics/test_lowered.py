"""What the compiler gets and what it gives, in numbers that JAX's own trace and text must meet."""

import collections
import functools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_kit
from jmp_kit.numerics import audit
from jmp_kit.numerics._lowered import audit_text
from tests.casting.zoo import PLAIN, ZOO
from tests.compiling import quick_or_slow

pytestmark = pytest.mark.usefixtures("standard_promotion")  # for Flax's sake

X, W = jnp.ones((4, 8)), jnp.ones((8, 8))


@pytest.mark.parametrize("name", quick_or_slow(ZOO, PLAIN))
def test_what_the_compiler_gets_is_what_was_traced(name):
    fun, params, x = ZOO[name]
    for program in (fun, jmp_kit.autocast(fun, "mixed_bfloat16")):
        program = program if name == "looping" else jax.grad(program)
        traced, lowered = (
            collections.Counter(
                (
                    (p.lhs_dtype, p.rhs_dtype, p.out_dtype, p.backward),
                    p.flops // p.times,
                    # Where autocast calls a loop again, the lowered program has the loop's line.
                    p.source if name not in ("lstm", "gru") else "",
                )
                for p in audit(program, params, x, level=level).products
                # JAX writes short loops out.
                for _ in range(p.times)
            )
            for level in ("traced", "lowered")
        )
        if name == "experts":  # a ragged product is a dense one of masks on a CPU
            traced, lowered = ({(key[0], key[2]) for key in keys} for keys in (traced, lowered))
        if name == "rematerialised":  # lowering leaves out what nobody asked for
            assert (lowered - traced, len(lowered)) == ({}, len(traced))
            continue
        assert traced == lowered


@pytest.mark.parametrize("level", ["lowered", "compiled"])
def test_loops_count_as_often_as_they_run(level):
    def flops(fun, *args):
        (product,) = audit(fun, *args, level=level).products
        assert product.flops == product.times * 2 * 4 * 8 * 8
        return product.times

    step = lambda x, w: jnp.tanh(x @ w)  # noqa: E731
    scan = lambda x, w: jax.lax.scan(lambda x, _: (step(x, w), None), x, length=7)[0]  # noqa: E731
    assert flops(scan, X, W) == 7
    part = lambda x, w: jax.lax.fori_loop(3, 21, lambda _, x: step(x, w), x)  # noqa: E731
    assert flops(part, X, W) == 18

    def unknown(x, w):
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: step(x, w), x)

    assert flops(unknown, X, W) == 1

    def counted(start, stop, step):
        def fun(x, w):
            def body(carry):
                return carry[0] + step, jnp.tanh(carry[1] @ w)

            return jax.lax.while_loop(lambda carry: carry[0] < stop, body, (start, x))[1]

        return fun

    assert flops(counted(2, 7, 1), X, W) == 5
    if level == "lowered":  # XLA knows these too
        assert flops(counted(0, 10, 2), X, W) == 1
        assert flops(counted(0.5, 9.5, 1.0), X, W) == 1
    nested = lambda x, w: jax.lax.scan(lambda x, _: (scan(x, w), None), x, length=6)[0]  # noqa: E731
    assert flops(nested, X, W) == 42


def test_the_compiled_program_is_labelled_and_counts_the_same():
    program = jax.value_and_grad(lambda w, x: jnp.sum(jnp.tanh(x @ w) @ w))
    levels = {level: audit(program, W, X, level=level) for level in ("traced", "compiled")}
    flops = [sum(p.flops for p in found.products) for found in levels.values()]
    assert flops[0] == flops[1] == 5 * 2 * 4 * 8 * 8
    for level, found in levels.items():
        assert (found.level, found.backend) == (level, "cpu")
        assert f"({level}, cpu)" in str(found)
    assert audit(jax.jit(program).lower(W, X)).level == "lowered"
    # A function that is jitted keeps its static arguments, and flags need not be arrays.
    jitted = jax.jit(lambda x, w, twice: x @ w @ w if twice else x @ w, static_argnums=2)
    assert len(audit(jitted, X, W, True, level="lowered").products) == 2
    flagged = lambda x, w, twice: x @ w @ w if twice else x @ w  # noqa: E731
    assert len(audit(flagged, X, W, twice=True, level="compiled").products) == 2


def test_a_program_for_eight_devices_counts_what_one_computes():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.ones((16, 8)), NamedSharding(mesh, P("data")))
    compiled = jax.jit(lambda x, w: x @ w).lower(x, W).compile()
    (product,) = audit(compiled).products
    assert (product.shape, product.flops) == ((2, 8), 2 * 2 * 8 * 8)


def test_what_devices_exchange():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def fun(x):
        def step(x, _):
            return jax.lax.ppermute(x, "b", [(i, (i + 1) % 4) for i in range(4)]), None

        x = jax.lax.scan(step, x, length=12)[0].astype(jnp.bfloat16)  # line of the loop
        whole = jax.lax.all_gather(x, "b", axis=0, tiled=True)
        swapped = jax.lax.all_to_all(whole, "a", 0, 1, tiled=True)
        return jax.lax.psum_scatter(swapped, "a", tiled=True), jax.lax.pmax(x.sum(), ("a", "b"))

    mapped = jax.shard_map(
        fun, mesh=mesh, in_specs=P(("a", "b")), out_specs=(P("a"), P()), check_vma=False
    )
    found = audit(mapped, jnp.ones((8, 8, 2)), level="lowered")
    assert [(t.kind, t.dtype, t.nbytes, t.times) for t in found.transfers] == [
        ("collective-permute", "float32", 12 * 16 * 4, 12),
        ("all-gather", "bfloat16", 4 * 16 * 2, 1),
        ("all-to-all", "bfloat16", 4 * 16 * 2, 1),
        ("reduce-scatter", "bfloat16", 4 * 16 * 2, 1),
        ("all-reduce", "bfloat16", 2, 1),
    ]
    assert {t.source.partition(":")[0] for t in found.transfers} == {"test_lowered.py"}
    assert "5 exchanges between devices, of 1.15 kB:" in str(found)
    started = audit_text(STARTED, "compiled", "gpu", {}).transfers
    assert [(t.kind, t.dtype, t.nbytes) for t in started] == [
        ("all-gather", "bfloat16", 2048),
        ("all-gather", "bfloat16", 64),
        ("all-reduce", "float32", 4),
    ]


STARTED = """HloModule jit_step

ENTRY %main (a: bf16[128], b: bf16[4], c: f32[]) -> f32[] {
  %a = bf16[128]{0} parameter(0)
  %b = bf16[4]{0} parameter(1)
  %c = f32[] parameter(2)
  %g = ((bf16[128]{0}, bf16[4]{0}), (bf16[1024]{0}, bf16[32]{0})) all-gather-start(%a, %b)
  %d = (bf16[1024]{0}, bf16[32]{0}) all-gather-done(%g)
  ROOT %r = f32[] all-reduce-start(%c), to_apply=%region
}

%region (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %z = f32[] add(%x, %y)
}
"""


def test_kernels_that_only_convert():
    def fun(w, x):
        return (w.astype(jnp.bfloat16), jnp.tanh(x).astype(jnp.float16)), x[0].astype(int)

    found = audit(fun, W, X, level="compiled")
    (first, second) = sorted(found.converts, key=lambda c: -c.nbytes)
    assert (first.from_dtype, first.to_dtype, first.nbytes) == ("float32", "bfloat16", 64 * 6)
    assert (second.from_dtype, second.to_dtype, second.nbytes) == ("float32", "int32", 8 * 8)
    assert first.source.startswith("test_lowered.py:")
    assert "2 kernels only convert, and move 448 B:" in str(found)
    assert audit(fun, W, X, level="lowered").converts == ()
    assert found.to_dict()["converts"][0]["times"] == 1

    @jmp_kit.autocast("mixed_bfloat16")
    def looped(w, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0] @ w[0]

    found = audit(looped, jnp.ones((60, 8, 8)), X, level="compiled")
    assert 60 in {c.times for c in found.converts}


def test_paths_of_nnx_reach_the_compiled_program():
    class Model(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.body, self.head = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

        def __call__(self, x):
            x = jnp.tanh(self.body(x))
            return self.head(x)

    graphdef, state = nnx.split(Model())
    loss_fn = lambda state, x: nnx.merge(graphdef, state)(x).sum()  # noqa: E731
    for level in ("lowered", "compiled"):
        found = audit(jmp_kit.autocast(loss_fn, "mixed_bfloat16"), state, X, level=level)
        body, head = found.products
        assert ("body/kernel" in body.path, "head/kernel" in head.path) == (True, True)


# A program for an H200, as XLA wrote it, but for what is of no concern here.
LIBRARIES = r"""HloModule jit_loss

%region (x: bf16[16,256]) -> (bf16[16,256], s8[33554432]) {
  %x = bf16[16,256]{1,0} parameter(0)
  ROOT %custom-call.24 = (bf16[16,256]{1,0}, s8[33554432]{0}) custom-call(%x, %x), custom_call_target="__cublas$lt$matmul", metadata={op_name="jit(loss)/transpose(jvp(Body))/while/body/closed_call/layer/dot_general"}, backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}}}
}

ENTRY %main (a: f32[16,32,32,64], w: bf16[128,3,3,64]) -> bf16[16,256] {
  %a = bf16[16,32,32,64]{3,2,1,0} parameter(0)
  %w = bf16[128,3,3,64]{3,2,1,0} parameter(1)
  %h = bf16[16,256]{1,0} parameter(2)
  %cudnn-conv.1 = (bf16[16,32,32,128]{3,2,1,0}, u8[0]{0}) custom-call(%a, %w), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForward", metadata={op_name="jit(loss)/jvp()/conv"}
  %y = bf16[16,32,32,128]{3,2,1,0} get-tuple-element(%cudnn-conv.1), index=0
  %dw = (bf16[128,3,3,64]{3,2,1,0}, u8[0]{0}) custom-call(%a, %y), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardFilter"
  %da = (bf16[16,32,32,64]{3,2,1,0}, u8[0]{0}) custom-call(%y, %w), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convBackwardInput"
  %one = bf16[16,256]{1,0} custom-call(%h, %h), custom_call_target="__onednn$matmul", backend_config={"onednn_matmul_config":{"transpose_b":true}}
  %fmha = (bf16[2,4,8,8]{3,2,1,0}, u8[0]{0}) custom-call(%a, %a, %a), custom_call_target="__cudnn$fmhaSoftmax", metadata={op_name="jit(loss)/jvp(Net)/attention/custom"}
  %top = (f32[4]{0}, s32[4]{0}) custom-call(%h), custom_call_target="TopK"
  %cast = ((bf16[16,256]{1,0}), f32[16,256]{1,0}, u32[]) fusion-start(%h), kind=kLoop, calls=%casting, control-predecessors={%fmha}
  %bare = f32[16,256]{1,0} convert(%h)
  ROOT %call = (bf16[16,256]{1,0}, s8[33554432]{0}) call(%h), to_apply=%region
}

%casting (h: bf16[16,256]) -> f32[16,256] {
  %p = bf16[16,256]{1,0} parameter(0)
  ROOT %c = f32[16,256]{1,0} convert(%p)
}
"""  # noqa: E501


def test_kernels_of_libraries():
    found = audit_text(LIBRARIES, "compiled", "gpu", {})
    conv = 2 * 16 * 32 * 32 * 128 * 3 * 3 * 64
    assert [(p.primitive.rpartition("$")[2], p.flops) for p in found.products] == [
        ("convForward", conv),
        ("convBackwardFilter", conv),
        ("convBackwardInput", conv),
        ("matmul", 2 * 16 * 256 * 256),
        ("fmhaSoftmax", 0),
        ("matmul", 2 * 16 * 256 * 256),
    ]
    last = found.products[-1]
    assert (last.lhs_dtype, last.backward, last.path) == ("bfloat16", True, "Body/layer")
    [kernel] = (p for p in found.products if p.is_kernel)
    assert (kernel.path, kernel.is_half, found.opaque) == ("Net/attention", True, ())
    assert "kernel, bfloat16→bfloat16" in str(found)
    wide = audit_text(LIBRARIES.replace("bf16", "f32"), "compiled", "gpu", {})
    assert wide.opaque == ("__cudnn$fmhaSoftmax  Net/attention",)
    assert "not looked into: __cudnn$fmhaSoftmax" in str(wide)
    assert [(c.from_dtype, c.nbytes) for c in found.converts] == 2 * [("bfloat16", 16 * 256 * 6)]


def test_bad_input():
    with pytest.raises(ValueError, match="level is 'optimised', but there are 'traced', 'lowered'"):
        audit(jnp.dot, X, W, level="optimised")
    lowered = jax.jit(jnp.dot).lower(X, W)
    for wrong in (
        functools.partial(audit, lowered, X),
        functools.partial(audit, lowered, level="compiled"),
    ):
        with pytest.raises(TypeError, match="has its arguments and its level already"):
            wrong()
    with pytest.raises(ValueError, match=r"except_ is '\*', which is no regular.*write '\\\\\*'"):
        audit(jnp.dot, X, W).assert_half(except_="*")
