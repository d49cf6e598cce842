"""The audit: every product, its dtypes, its line, counted independently from the StableHLO."""

import collections
import json
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jmp_kit
from jmp_kit.numerics import audit
from tests.casting.zoo import ZOO

pytestmark = pytest.mark.usefixtures("standard_promotion")  # for Flax's sake

X, W = jnp.ones((4, 8)), jnp.ones((8, 8))


def line_of(mark):
    """The line of this file that ends with a comment."""
    with open(__file__) as file:
        found = [i for i, line in enumerate(file, start=1) if line.rstrip().endswith(f"# {mark}")]
    (number,) = found
    return f"test_audit.py:{number}"


def lowered_products(fun, *args):
    """The dtypes of the products of a function's StableHLO, of functions as often as called."""
    text = jax.jit(fun).lower(*args).as_text()
    functions = {}
    for function in text.split("func.func ")[1:]:
        name = re.search(r'@("[^"]+"|[\w.]+)\(', function)[1]
        products = re.findall(
            r"stablehlo\.(?:dot_general|convolution).*: \(tensor<([^>]*)>, tensor<([^>]*)>\)",
            function,
        )
        functions[name] = (
            [tuple(t.rpartition("x")[2] for t in types) for types in products],
            re.findall(r'call @("[^"]+"|[\w.]+)\(', function),
        )

    def count(name):
        own, called = functions[name]
        return sum((count(other) for other in called), collections.Counter(own))

    return count("main"), "while" in text


SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}


@pytest.mark.parametrize("name", ZOO)
def test_it_agrees_with_the_stablehlo_of_every_program(name):
    fun, params, x = ZOO[name]
    for program in (fun, jmp_kit.autocast(fun, "mixed_bfloat16")):
        program = program if name == "looping" else jax.grad(program)
        lowered, has_loops = lowered_products(program, params, x)
        found = collections.Counter()
        for p in audit(program, params, x).products:
            # JAX writes short loops out.
            found[SHORT[p.lhs_dtype], SHORT[p.rhs_dtype]] += 1 if has_loops else p.times
        assert found == lowered


def test_flops_of_products():
    found = audit(lambda x, w: x @ w, X, W)
    assert [p.flops for p in found.products] == [2 * 4 * 8 * 8]
    images, kernel = jnp.ones((2, 6, 6, 4)), jnp.ones((3, 3, 2, 8))

    def conv(images, kernel):
        return jax.lax.conv_general_dilated(
            images,
            kernel,
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=2,
        )

    (product,) = audit(conv, images, kernel).products
    assert (product.shape, product.flops) == ((2, 6, 6, 8), 2 * 2 * 6 * 6 * 8 * 3 * 3 * 2)

    def ragged(x, w):
        return jax.lax.ragged_dot(x, w, jnp.array([1, 3], jnp.int32))

    (product,) = audit(ragged, X, jnp.ones((2, 8, 5))).products
    assert product.flops == 2 * 4 * 8 * 5
    found = audit(jax.grad(lambda x, w: jnp.sum(ragged(x, w)), (0, 1)), X, jnp.ones((2, 8, 5)))
    assert [p.flops for p in found.products] == [2 * 4 * 8 * 5] * 2


def test_what_a_loop_repeats_counts_as_often():
    def loop(x, w):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=7)[0]

    (product,) = audit(jax.jit(loop), X, W).products
    assert product.flops == 7 * 2 * 4 * 8 * 8


def test_planted_products_are_found_with_their_lines():
    @jax.custom_vjp
    def custom(x, w):
        return x @ w

    def forward(x, w):
        return custom(x, w), (x, w)

    def backward(saved, g):
        x, w = saved
        return g @ w.T, x.T @ g

    custom.defvjp(forward, backward)

    @jmp_kit.autocast("mixed_bfloat16")
    def loss_fn(w, x):
        with jmp_kit.full_precision():
            x = x @ w  # planted float32
        half = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
        x = jnp.matmul(*half, preferred_element_type=jnp.float32)  # planted preferred
        return jnp.sum(custom(x, w) ** 2)  # call of custom

    found = audit(jax.value_and_grad(loss_fn, (0, 1)), W, X)
    wide = [p for p in found.products if not p.is_half]
    assert {p.source for p in wide} == {line_of("planted float32")}
    assert [p.backward for p in wide] == [False, True, True]
    # JAX keeps of the rules of a custom derivative the line of the call.
    sources = [p.source for p in found.products if p.is_half]
    lines = [line_of("planted preferred"), line_of("call of custom")]
    assert sorted(sources) == sorted(lines * 3)
    with pytest.raises(
        AssertionError, match=r"3 of 9 products do not take half(.|\n)*float32"
    ) as e:
        found.assert_half()
    assert line_of("planted float32") in str(e.value)
    assert "planted preferred" not in str(e.value)
    found.assert_half(except_=line_of("planted float32"))


def test_a_preferred_type_by_hand_makes_the_backward_products_float32():
    def loss_fn(w, x):
        return jnp.sum(jnp.matmul(x, w, preferred_element_type=jnp.float32))  # by hand

    found = audit(jax.grad(loss_fn), W.astype(jnp.bfloat16), X.astype(jnp.bfloat16))
    wide = [p for p in found.products if not p.is_half]
    assert wide
    assert {(p.source, p.backward) for p in wide} == {(line_of("by hand"), True)}
    assert found.half_fraction < 1


def test_paths_of_linen_and_nnx():
    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(4, name="head")(nn.Dense(8, name="body")(x))

    params = Network().init(jax.random.key(0), X)
    found = audit(jax.value_and_grad(lambda p, x: Network().apply(p, x).sum()), params, X)
    assert [p.path for p in found.products] == [
        f"Network/{n}" for n in ("body", "head", "head", "head", "body")
    ]
    assert {p.source.partition(":")[0] for p in found.products} == {"test_audit.py"}

    class Model(nnx.Module):
        def __init__(self):
            self.body, self.head = (
                nnx.Linear(8, 8, rngs=nnx.Rngs(0)),
                nnx.Linear(8, 4, rngs=nnx.Rngs(1)),
            )

        def __call__(self, x):
            x = self.body(x)
            return self.head(x)

    graphdef, state = nnx.split(Model())
    found = audit(jax.value_and_grad(lambda s, x: nnx.merge(graphdef, s)(x).sum()), state, X)
    names = ["body", "head", "head", "head", "body"]
    assert all(f"{n}/kernel" in p.path for n, p in zip(names, found.products, strict=True)), found


def test_what_runs_as_traced_is_listed():
    def solve(x, w):
        matvec, inverse = (lambda v: w @ v), (lambda f, b: b)
        return jax.lax.custom_linear_solve(matvec, x, inverse, symmetric=True)  # solve

    found = audit(solve, jnp.ones(8), W)
    (where,) = found.opaque
    assert where.startswith("custom_linear_solve")
    assert line_of("solve") in where
    assert "run as traced: custom_linear_solve" in str(found)
    with pytest.raises(AssertionError, match="run as traced"):
        found.assert_half()


def test_a_table_of_no_products_and_of_abstract_arrays():
    found = audit(jnp.tanh, X)
    assert (found.products, found.half_fraction) == ((), 1.0)
    assert str(found).startswith("0 products, 0 FLOP, 100.0% of it half (traced, ")
    found.assert_half()
    huge = jax.ShapeDtypeStruct((10**6, 10**6), jnp.float16)
    assert str(audit(jnp.matmul, huge, huge)).startswith("1 products, 2e+03 PFLOP")
    shape = jax.ShapeDtypeStruct((2000, 8), jnp.float16)
    found = audit(lambda x, w, scale: x @ w * scale, shape, W.astype(jnp.float16), 2.0)
    head, _, row = str(found).splitlines()
    assert head.startswith("1 products, 256 kFLOP")
    assert row.split()[4:] == ["forward", "float16→float16", "w", "x"]


def test_it_is_json():
    again = json.loads(json.dumps(audit(lambda x, w: x @ w, X, W).to_dict()))
    assert again["half_fraction"] == 0.0
    assert again["products"][0]["shape"] == [4, 8]
    assert np.prod(again["products"][0]["shape"]) == 32
