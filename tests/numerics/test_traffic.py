"""The bytes that kernels move: what they take and give, each once, and no table whole."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from benchmarks.compiled import bytes_moved
from jmp_kit import autocast
from jmp_kit.numerics import traffic
from jmp_kit.numerics._traffic import Traffic, traffic_of
from tests.casting.by_hand import MODELS

PROGRAM = """HloModule jit_f

%picks (p: f32[1000,8], i: s32[4,1]) -> bf16[4,8] {
  %p = f32[1000,8]{1,0} parameter(0)
  %b = f32[1000,8]{1,0} bitcast(%p)
  %i = s32[4,1]{1,0} parameter(1)
  %g = f32[4,8]{1,0} gather(%b, %i), slice_sizes={1,8}
  ROOT %h = bf16[4,8]{1,0} convert(%g), metadata={op_name="jit(f)/embed/gather"}
}

%puts (q: f32[1000,8], u: f32[1,8], j: s32[]) -> f32[1000,8] {
  %q = f32[1000,8]{1,0} parameter(0)
  %u = f32[1,8]{1,0} parameter(1)
  %j = s32[] parameter(2)
  %z = s32[] constant(0)
  ROOT %d = f32[1000,8]{1,0} dynamic-update-slice(%q, %u, %j, %z)
}

%body (s: (s32[], f32[64])) -> (s32[], f32[64]) {
  %s = (s32[], f32[64]{0}) parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %x = f32[64]{0} get-tuple-element(%s), index=1
  %t = f32[64]{0} tanh(%x), metadata={op_name="jit(f)/transpose(jvp(loop))/tanh"}
  ROOT %r = (s32[], f32[64]{0}) tuple(%n, %t)
}

%condition (s: (s32[], f32[64])) -> pred[] {
  %s2 = (s32[], f32[64]{0}) parameter(0)
  ROOT %c = pred[] constant(true)
}

ENTRY %main (table: f32[1000,8], rows: s32[4,1], row: f32[1,8], k: s32[], y: bf16[128]) -> bf16 {
  %table = f32[1000,8]{1,0} parameter(0)
  %rows = s32[4,1]{1,0} parameter(1)
  %row = f32[1,8]{1,0} parameter(2)
  %k = s32[] parameter(3)
  %y = bf16[128]{0} parameter(4)
  %f = bf16[4,8]{1,0} fusion(%table, %rows), kind=kLoop, calls=%picks
  %e = f32[1000,8]{1,0} fusion(%table, %row, %k), kind=kLoop, calls=%puts
  %g2 = f32[4,8]{1,0} gather(%table, %rows), slice_sizes={1,8}
  %d2 = f32[1000,8]{1,0} dynamic-update-slice(%e, %row, %k, %k)
  %w = f32[64]{0} custom-call(%y), custom_call_target="other"
  %v = (s32[], f32[64]{0}) tuple(%k, %w)
  %l = (s32[], f32[64]{0}) while(%v), condition=%condition, body=%body, KNOWN
  ROOT %o = bf16[4,8]{1,0} copy(%f)
}
""".replace("KNOWN", 'backend_config={"known_trip_count":{"n":"5"}}')


def test_what_each_kernel_moves():
    found = {kernel.name: kernel for kernel in traffic_of(PROGRAM, "a device").kernels}
    assert set(found) == {"f", "e", "g2", "d2", "w", "t", "o"}
    # The same, not fused.
    assert (found["g2"].read, found["g2"].written) == (4 * 8 * 4 + 4 * 4, 4 * 8 * 4)
    assert (found["d2"].read, found["d2"].written) == (8 * 4 + 2 * 4, 8 * 4)
    gathered, updated, custom, looped, copied = (found[name] for name in "fewto")
    assert (gathered.read, gathered.written) == (4 * 8 * 4 + 4 * 4, 4 * 8 * 2)  # rows, no table
    assert (gathered.path, gathered.dtype) == ("embed", "bfloat16")
    assert (updated.read, updated.written) == (8 * 4 + 4, 8 * 4)  # in place
    assert (looped.times, looped.nbytes, looped.backward) == (5, 5 * 2 * 256, True)
    assert copied.nbytes == 2 * 4 * 8 * 2
    # float32, and of the size of no argument or result.
    assert [k.wide for k in (gathered, updated, custom, looped)] == [0, 0, 256, 5 * 256]


def test_the_table_and_the_numbers():
    found = traffic_of(PROGRAM, "a device")
    head, titles, first, *_ = str(found).splitlines()
    assert head.startswith("7 kernels move 3.82 kB on a device; float32 activations are 1.54 kB")
    assert titles.split()[:4] == ["bytes", "share", "kernels", "float32"]
    assert "backward  float32" in first
    assert first.endswith("loop")
    told = json.loads(json.dumps(found.to_dict()))
    assert told["nbytes"] == found.nbytes == sum(k["read"] + k["written"] for k in told["kernels"])
    many = [dataclasses.replace(k, path=f"{k.path}{i}") for k in found.kernels for i in range(9)]
    assert "and 6 more, which move" in str(Traffic("a device", tuple(many)))


@pytest.mark.parametrize("name", ["resnet_batch", "gru"])
def test_it_is_what_the_benchmarks_count(name):
    """But for loops, of which they count one round, and for gathers."""
    model = MODELS[name]
    loss_fn = autocast(model.loss(), "mixed_bfloat16")
    program = jax.jit(loss_fn).lower(*model.draw(0)).compile()
    found = traffic(program)
    once = sum(k.nbytes // k.times for k in found.kernels)
    if name == "resnet_batch":
        assert found.nbytes == once == bytes_moved(program.as_text())
    else:
        assert found.nbytes > 2 * once
    assert found.device == "cpu"
    if jax.__version_info__ >= (0, 12):
        nameless = sum(k.nbytes for k in found.kernels if not k.path)
        assert nameless < 0.5 * found.nbytes


def test_an_embedding_is_charged_its_rows():
    table, words = jnp.ones((50_000, 64)), jnp.arange(32)
    found = traffic(lambda table, words: jnp.tanh(table[words]) * 2, table, words)
    assert found.nbytes < table.nbytes / 100


def test_of_what_it_may_be_called_with():
    def fun(x, flag, scale=1.0):
        assert flag is True
        return jnp.tanh(x) * scale

    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    expected = traffic(fun, x, True).nbytes
    assert 2 * 64 * 64 * 4 <= expected <= 4 * 64 * 64 * 4
    jitted = jax.jit(lambda x: fun(x, True))
    assert traffic(jitted, x).nbytes == expected
    assert traffic(lambda: jnp.arange(1e3) * 2).device == "cpu"
    assert traffic(jitted.lower(x)).nbytes == traffic(jitted.lower(x).compile()).nbytes == expected
    with pytest.raises(TypeError, match=r"has its arguments already: write traffic\(program\)"):
        traffic(jitted.lower(x).compile(), x)
