"""Policies: the grammar, what a cast touches, and equality."""

import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_kit
from jmp_kit import Policy, get_policy

f16, bf16, f32, f64 = (jnp.dtype(d) for d in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mixed_float16", (f32, f16, f32)),
        ("mixed_bfloat16", (f32, bf16, f32)),
        (" mixed_bfloat16 ", (f32, bf16, f32)),
        ("float32", (f32, f32, f32)),
        ("full", (f32, f32, f32)),
        ("float16", (f16, f16, f16)),
        ("bfloat16", (bf16, bf16, bf16)),
        ("half", (f16, f16, f16)),
        ("f64", (f64, f64, f64)),
        ("p=f32,c=bf16,o=f32", (f32, bf16, f32)),
        ("params=float32,compute=float16,output=full", (f32, f16, f32)),
        ("params = f32 , compute = half, o= bfloat16 ", (f32, f16, bf16)),
        ("o=f32,c=f16,p=bf16", (bf16, f16, f32)),
        ("c=f16", (f32, f16, f16)),
        ("p=f16", (f16, f16, f16)),
        ("o=bf16", (f32, f32, bf16)),
    ],
)
def test_grammar(name, expected):
    policy = get_policy(name)
    assert (policy.param_dtype, policy.compute_dtype, policy.output_dtype) == expected


SPELLINGS = {
    bf16: [jnp.bfloat16, "bfloat16", "bf16", jnp.dtype(jnp.bfloat16)],
    f16: [jnp.float16, np.float16, "float16", "half", np.dtype("float16")],
    f32: [jnp.float32, np.float32, "full", np.dtype("f4")],
    f64: [jnp.float64, np.float64, "f64"],
}


def test_one_policy_however_it_was_spelled():
    for param, compute in itertools.permutations(SPELLINGS, 2):
        built = [
            Policy(p, c, c) for p, c in itertools.product(SPELLINGS[param], SPELLINGS[compute])
        ]
        assert len(set(built)) == 1
        assert {get_policy(str(policy)) for policy in built} == set(built)
        assert pickle.loads(pickle.dumps(built[0])) == built[0]


def test_a_policy_is_static_under_jit():
    cast = jax.jit(lambda policy, x: policy.cast_to_compute(x), static_argnums=0)
    assert cast(get_policy("mixed_float16"), jnp.ones(2)).dtype == f16


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("compute_float16", "Unknown dtype 'compute_float16'.*half, bf16"),
        ("c=float61", "Unknown dtype 'float61'.*In the policy 'c=float61'"),
        ("c=int8", "Unknown dtype 'int8'.*floating-point values only"),
        ("c=f16=f32", "Unknown dtype 'f16=f32'"),
        ("c=", "Unknown dtype ''"),
        ("", "Unknown dtype ''"),
        ("k=f16", "Unknown key 'k' in the policy 'k=f16'.*p, params, c, compute, o, output"),
        ("c=f16,", "Unknown key ''"),
        ("c=f16,f32", "Unknown key 'f32'"),
        ("c=f16,compute=f32", "'c=f16,compute=f32' gives the compute dtype twice.*mixed_bfloat16"),
    ],
)
def test_a_wrong_policy_says_what_is_wrong(name, words):
    with pytest.raises(ValueError, match=words):
        get_policy(name)


@pytest.mark.parametrize("bad", [None, float, jnp.int32, "int32", 7, np.complex64, object()])
def test_a_policy_of_what_is_no_float_is_refused(bad):
    with pytest.raises(ValueError, match="Unknown dtype"):
        Policy(jnp.float32, bad, jnp.float32)


def test_get_policy_reads_strings_only():
    with pytest.raises(TypeError, match=r"reads a string, but got .*float16.*Policy\(param"):
        get_policy(jnp.float16)


def test_casts_touch_floating_arrays_only():
    key = jax.random.key(0)
    tree = {
        "jax": jnp.ones((2, 3)),
        "numpy": np.ones(2, np.float64),
        "scalar": np.float32(1),
        "int": jnp.arange(3),
        "bool": np.array([True]),
        "key": key,
        "number": 1.5,
        "text": "text",
        "function": len,
        "none": None,
        "complex": jnp.ones(1, jnp.complex64),
    }
    policy = get_policy("p=bf16,c=f16,o=f32")
    for cast, dtype in (
        (policy.cast_to_param, bf16),
        (policy.cast_to_compute, f16),
        (policy.cast_to_output, f32),
        (jmp_kit.cast_to_half, f16),
        (jmp_kit.cast_to_full, f32),
    ):
        result = cast(tree)
        for name in ("jax", "numpy", "scalar"):
            assert result[name].dtype == dtype
        assert isinstance(result["numpy"], np.ndarray)
        for name in set(tree) - {"jax", "numpy", "scalar"}:
            assert result[name] is tree[name]


def test_casting_an_empty_tree_and_a_bare_array():
    policy = get_policy("half")
    assert policy.cast_to_compute({}) == {}
    assert policy.cast_to_compute(jnp.ones(())).dtype == f16


def test_a_float32_policy_leaves_no_trace():
    policy = get_policy("float32")
    jaxpr = jax.make_jaxpr(policy.cast_to_compute)({"w": jnp.ones(2), "n": 3})
    assert not jaxpr.eqns
