"""The bytes that kernels move: what they take and give, each once, and no table whole."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from jmp_kit import autocast
from jmp_kit.numerics import TARGETS, _targets, traffic
from jmp_kit.numerics._traffic import Traffic, traffic_of
from tests.casting.by_hand import MODELS

PROGRAM = """HloModule jit_f

%picks (p: f32[1000,8], i: s32[4,1]) -> bf16[4,8] {
  %p = f32[1000,8]{1,0} parameter(0)
  %b = f32[1000,8]{1,0} bitcast(%p)
  %i = s32[4,1]{1,0} parameter(1)
  %g = f32[4,8]{1,0} gather(%b, %i), slice_sizes={1,8}
  %h = bf16[4,8]{1,0} convert(%g), metadata={op_name="jit(f)/embed/gather"}
  ROOT %h2 = bf16[4,8]{1,0} copy(%h), metadata={op_name="jit(f)/copy"}
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
  %m = (bf16[4,4]{1,0}, s8[4194304]{0}) custom-call(%f, %f), custom_call_target="__cublas$gemm"
  %d2 = f32[1000,8]{1,0} dynamic-update-slice(%e, %row, %k, %k)
  %w = f32[64]{0} custom-call(%y), custom_call_target="other"
  %v = (s32[], f32[64]{0}) tuple(%k, %w)
  %l = (s32[], f32[64]{0}) while(%v), condition=%condition, body=%body, KNOWN
  ROOT %o = bf16[4,8]{1,0} copy(%f)
}
""".replace("KNOWN", 'backend_config={"known_trip_count":{"n":"5"}}')


def test_what_each_kernel_moves():
    found = {kernel.name: kernel for kernel in traffic_of(PROGRAM, "a device").kernels}
    assert set(found) == {"f", "e", "g2", "m", "d2", "w", "t", "o"}
    assert (found["m"].written, found["m"].dtype) == (4 * 4 * 2, "bfloat16")  # no work space
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
    assert head.startswith("8 kernels move 3.98 kB on a device; float32 activations are 1.54 kB")
    assert titles.split()[:4] == ["bytes", "share", "kernels", "float32"]
    assert "backward  float32" in first
    assert first.endswith("loop")
    told = json.loads(json.dumps(found.to_dict()))
    assert told["nbytes"] == found.nbytes == sum(k["read"] + k["written"] for k in told["kernels"])
    many = [dataclasses.replace(k, path=f"{k.path}{c}") for k in found.kernels for c in "abcdefghi"]
    assert "and 6 more, which move" in str(Traffic("a device", tuple(many)))
    deep = [dataclasses.replace(k, path=f"{k.path}/{i}") for k in found.kernels for i in range(9)]
    assert len(str(Traffic("a device", tuple(deep))).splitlines()) == len(str(found).splitlines())
    assert "embed/{0..8}" in str(Traffic("a device", tuple(deep)))


SCATTER = """HloModule jit_s

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%adds (p: f32[1000,8], q: s32[4,1], r: bf16[4,8]) -> f32[1000,8] {
  %p = f32[1000,8]{1,0} parameter(0)
  %q = s32[4,1]{1,0} parameter(1)
  %r = bf16[4,8]{1,0} parameter(2)
  %u = f32[4,8]{1,0} convert(%r)
  ROOT %s = f32[1000,8]{1,0} scatter(%p, %q, %u), to_apply=%add
}

ENTRY %main (table: f32[1000,8], rows: s32[4,1], new: bf16[4,8], x: f32[2,8]) -> f32[1000,8] {
  %table = f32[1000,8]{1,0} parameter(0)
  %rows = s32[4,1]{1,0} parameter(1)
  %new = bf16[4,8]{1,0} parameter(2)
  %x = f32[2,8]{1,0} parameter(3)
  %n = f32[4,8]{1,0} convert(%new)
  %w = f32[2,8]{1,0} scatter(%x, %rows, %n), to_apply=%add
  ROOT %f = f32[1000,8]{1,0} fusion(%table, %rows, %new), kind=kInput, calls=%adds
}
"""


def test_what_is_scattered_is_added_to_rows_alone():
    found = {k.name: k for k in traffic_of(SCATTER, "a device").kernels}
    rows = 4 * 8 * 4
    assert (found["f"].read, found["f"].written) == (rows + 4 * 4 + rows // 2, rows)
    # More than there is room for: no more than the room.
    assert (found["w"].read, found["w"].written) == (2 * 8 * 4 + 4 * 4 + rows, 2 * 8 * 4)
    assert found["f"].wide == 0  # the table is no activation


LIBRARY = """HloModule jit_l

%into (p: bf16[4,8], q: bf16[8,8], r: bf16[9,4,8], i: s32[]) -> (bf16[9,4,8], s8[4096]) {
  %p = bf16[4,8]{1,0} parameter(0)
  %q = bf16[8,8]{1,0} parameter(1)
  %r = bf16[9,4,8]{2,1,0} parameter(2)
  %i = s32[] parameter(3)
  %z = s32[] constant(0)
  %m = (bf16[4,8]{1,0}, s8[4096]{0}) custom-call(%p, %q), custom_call_target="__cublas$lt$matmul"
  %g = bf16[4,8]{1,0} get-tuple-element(%m), index=0
  %b = bf16[1,4,8]{2,1,0} bitcast(%g)
  %d = bf16[9,4,8]{2,1,0} dynamic-update-slice(%r, %b, %i, %z, %z)
  %w = s8[4096]{0} get-tuple-element(%m), index=1
  ROOT %t = (bf16[9,4,8]{2,1,0}, s8[4096]{0}) tuple(%d, %w)
}

ENTRY %main (x: bf16[4,8], y: bf16[8,8], s: bf16[9,4,8], k: s32[]) -> bf16[9,4,8] {
  %x = bf16[4,8]{1,0} parameter(0)
  %y = bf16[8,8]{1,0} parameter(1)
  %s = bf16[9,4,8]{2,1,0} parameter(2)
  %k = s32[] parameter(3)
  %f = (bf16[9,4,8]{2,1,0}, s8[4096]{0}) fusion(%x, %y, %s, %k), kind=kCustom, calls=%into
  ROOT %o = bf16[9,4,8]{2,1,0} get-tuple-element(%f), index=0
}
"""


def test_the_room_that_a_librarys_kernel_works_in_is_not_what_it_writes():
    [kernel] = traffic_of(LIBRARY, "a device").kernels
    assert (kernel.read, kernel.written) == (2 * (4 * 8 + 8 * 8) + 4, 2 * 4 * 8)


CUT = """HloModule jit_g

%cut (p: f32[64,8]) -> bf16[4,8] {
  %p = f32[64,8]{1,0} parameter(0)
  %n = f32[64,8]{1,0} negate(%p)
  LAST
}

ENTRY %main (x: f32[64,8]) -> bf16[4,8] {
  %x = f32[64,8]{1,0} parameter(0)
  ROOT %f = bf16[4,8]{1,0} fusion(%x), kind=kLoop, calls=%cut
}
"""

# Each is looked at once, or this would take for ever.
DOUBLED = "%n0 = f32[64,8]{1,0} add(%n, %n)\n"
DOUBLED += "".join(f"  %n{i} = f32[64,8]{{1,0}} add(%n{i - 1}, %n{i - 1})\n" for i in range(1, 100))


@pytest.mark.parametrize(
    ("last", "rows"),
    [
        (
            "%s = f32[4,8]{1,0} slice(%n), slice={[0:4], [0:8]}\n  ROOT %r = bf16[4,8] convert(%s)",
            4,
        ),
        ("%t = f32[64,8]{1,0} tanh(%n)\n  ROOT %r = bf16[64,8]{1,0} convert(%t)", 64),
        ("ROOT %r = f32[64,8]{1,0} add(%n, %n)", 64),
        (
            (
                "%h = f32[32,8]{1,0} slice(%n), slice={[0:32], [0:8]}\n"
                "  %a = f32[32,8]{1,0} subtract(%h, %h)\n"
                "  ROOT %s = f32[4,8]{1,0} slice(%a), slice={[1:5], [0:8]}"
            ),
            4,
        ),
        (
            (
                "%e = f32[64,8]{1,0} exponential(%n)\n"
                "  %s = f32[4,8]{1,0} slice(%e), slice={[0:4], [0:8]}\n"
                "  %z = f32[] constant(0)\n"
                "  %p4 = f32[64,8]{1,0} pad(%s, %z), padding=0_60x0_0\n"
                "  ROOT %r = f32[64,8]{1,0} tanh(%p4)"
            ),
            4,
        ),
        (DOUBLED + "  ROOT %s = f32[4,8]{1,0} slice(%n99), slice={[1:5], [0:8]}", 4),
    ],
)
def test_what_is_cut_of_an_operand_behind_other_operations(last, rows):
    [kernel] = traffic_of(CUT.replace("LAST", last), "a device").kernels
    assert kernel.read == rows * 8 * 4


TWICE = """HloModule jit_step

%sum (p: f32[64,8], q: f32[64,8], r: f32[64,8]) -> f32[64,8] {
  %p = f32[64,8]{1,0} parameter(0)
  %q = f32[64,8]{1,0} parameter(1)
  %r = f32[64,8]{1,0} parameter(2)
  %s = f32[64,8]{1,0} multiply(%p, %q)
  ROOT %t = f32[64,8]{1,0} multiply(%s, %r)
}

ENTRY %main (x: f32[512], y: f32[64,8]) -> f32[64,8] {
  %x = f32[512]{0} parameter(0)
  %y = f32[64,8]{1,0} parameter(1)
  %b = f32[64,8]{1,0} bitcast(%x)
  %behind = (f32[64,8]{1,0}, f32[64,8]{1,0}) tuple(%y, %b)
  %a = f32[64,8]{1,0} get-tuple-element(%behind), index=0
  %c = f32[64,8]{1,0} get-tuple-element(%behind), index=1
  ROOT %f = f32[64,8]{1,0} fusion(%b, %OTHER, %c), kind=kLoop, calls=%sum
}
"""


@pytest.mark.parametrize(("other", "values"), [("c", 1), ("a", 2), ("y", 2)])
def test_what_a_kernel_takes_twice_is_read_once(other, values):
    """Behind a barrier, which leaves a tuple, it has another name."""
    [kernel] = traffic_of(TWICE.replace("OTHER", other), "a device").kernels
    assert kernel.read == values * 64 * 8 * 4


def test_what_is_cut_behind_a_cast_counts_as_what_is_read():
    widened = CUT.replace("x: f32", "x: bf16").replace("p: f32", "p: bf16")
    widened = widened.replace("%p = f32", "%p = bf16").replace("%x = f32", "%x = bf16")
    widened = widened.replace("negate", "convert")
    last = "%s = f32[4,8]{1,0} slice(%n), slice={[0:4], [0:8]}\n  ROOT %r = bf16[4,8] convert(%s)"
    [kernel] = traffic_of(widened.replace("LAST", last), "a device").kernels
    assert kernel.read == 4 * 8 * 2


@pytest.mark.parametrize("name", ["resnet_batch", "gru"])
def test_a_loop_counts_as_often_as_it_runs(name):
    model = MODELS[name]
    loss_fn = autocast(model.loss(), "mixed_bfloat16")
    program = jax.jit(loss_fn).lower(*model.draw(0)).compile()
    found = traffic(program)
    once = sum(k.nbytes // k.times for k in found.kernels)
    assert found.nbytes == once if name == "resnet_batch" else found.nbytes > 2 * once
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
    for program in (jitted.lower(x), jitted.lower(x).compile()):
        with pytest.raises(TypeError, match=r"and its device already: write traffic\(program\)"):
            traffic(program, x)
        with pytest.raises(TypeError, match=f"A {type(program).__name__} program has its"):
            traffic(program, target="h200")


H200 = TARGETS["h200"]

ELSEWHERE = """
import jax, jax.numpy as jnp
from jmp_kit.numerics import TARGETS, traffic

x = jnp.ones((256, 256), jnp.bfloat16)
layer = jax.jit(lambda x, scale: jnp.tanh(x @ x) * scale, donate_argnums=0)
for target in TARGETS:
    for options in ({}, {"xla_gpu_enable_triton_gemm": False}):
        found = traffic(layer, x, 2.0, target=target, compiler_options=options)
        print(found.device, found.kernels[0].name, sep=";")
"""


@pytest.mark.skipif(H200.missing is not None, reason=str(H200.missing))
def test_it_compiles_for_a_gpu_on_a_machine_without_one():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", ELSEWHERE]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    names = ["A100", "RTX A6000", "H100", "H200", "B200"]
    kernels = ["gemm_fusion_dot", "custom-call.1"]
    assert told.stdout.split("\n")[:-1] == [f"NVIDIA {n};{k}" for n in names for k in kernels]


@pytest.fixture
def stood_in(monkeypatch):
    """A device of this machine that stands for those of the target."""
    other = jax.devices()[3]

    def described(platform, target_config, topology):
        assert (platform, topology) == ("cuda", "1x1x1")
        assert "H200" in target_config
        return types.SimpleNamespace(devices=[other])

    _targets._devices.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name != "jax_plugins.xla_cuda12")
    monkeypatch.setattr(topologies, "get_topology_desc", described)
    yield other
    _targets._devices.cache_clear()


def test_of_what_it_may_be_called_with_for_a_target(stood_in):
    def fun(x, key, flag):
        assert flag is True
        return jnp.tanh(x) + jax.random.normal(key, x.shape)

    x, key = jnp.ones((64, 64)), jax.random.key(0)
    here = traffic(fun, x, key, True)
    for function in (fun, jax.jit(fun, static_argnums=2)):
        there = traffic(function, x, key, True, target="h200")
        assert there.nbytes == here.nbytes
    assert traffic(lambda: jnp.arange(1e3) * 2, target="h200").nbytes == 4000
    [placed, same] = H200.placed([key, "a word"])
    assert same == "a word"
    assert placed.sharding.device_set == {stood_in}
    with pytest.raises(ValueError, match=r"because it takes no arrays: give it without jit"):
        traffic(jax.jit(lambda: jnp.arange(1e3)), target="h200")


def test_the_compiler_takes_options():
    x = jnp.ones((64, 64))
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        traffic(jnp.tanh, x, compiler_options={"no_such_option": 1})
    fast = {"xla_cpu_enable_fast_math": True}
    assert traffic(jnp.tanh, x, compiler_options=fast).nbytes == 2 * x.nbytes


def test_what_a_target_needs_is_told(stood_in, monkeypatch):
    with pytest.raises(ValueError, match="target is 'h300', but there are 'a100', .*'h200'"):
        traffic(jnp.tanh, 1.0, target="h300")

    def left_out(**_):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", left_out)
    with pytest.raises(RuntimeError, match="start Python with JAX_PLATFORMS=cpu"):
        traffic(jnp.tanh, 1.0, target="h200")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "jmp-kit\[cuda12\]", or in a checkout'):
        traffic(jnp.tanh, 1.0, target="h200")


def between_products(x, v, w):
    """What autocast casts at its end."""
    return jax.nn.gelu(x @ v) @ w


def test_what_autocast_adds_at_the_end_of_a_kernel_has_the_line_of_the_rest():
    args = [jnp.ones((32, 32))] * 3
    found = traffic(jax.jit(autocast(between_products, "mixed_bfloat16")), *args)
    line = between_products.__code__.co_firstlineno + 2
    more_than_casts = [k for k in found.kernels if not k.name.startswith(("wrapped", "convert"))]
    assert {kernel.source for kernel in more_than_casts} == {f"test_traffic.py:{line}"}


ADD = """%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

"""


@pytest.mark.parametrize(("cut", "rows"), [("slice={[0:4]}", 4), ("slice={[0:64]}", 64)])
def test_of_what_is_summed_up_and_cut_only_what_is_summed_up_there_is_read(cut, rows):
    """A product's parts, say, that a kernel adds up, one of which takes three gates' first."""
    last = (
        "%z = f32[] constant(0)\n"
        "  %s = f32[64]{0} reduce(%n, %z), dimensions={1}, to_apply=%add\n"
        f"  ROOT %r = f32[{rows}]{{0}} slice(%s), {cut}"
    )
    text = CUT.replace("LAST", last).replace("%cut (", ADD + "%cut (", 1)
    [kernel] = traffic_of(text, "a device").kernels
    assert kernel.read == rows * 8 * 4
