"""Other dtypes for some products, by the path of a parameter or by name scope."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import jmp_kit
from jmp_kit import autocast, full_precision
from tests.casting.test_zoo import products_of
from tests.casting.zoo import KEYS, X, mean_square, weights

BF16, F16, F32 = "bfloat16", "float16", "float32"


def dtypes_of(fun, *args):
    """Of each product, forward and backward, its dtype."""
    names = [{d.name for d in dtypes} for dtypes in products_of(fun, *args)]
    assert all(len(found) == 1 for found in names)
    return [found.pop() for found in names]


def three_layers(params, x):
    for name in ("embed", "body", "head"):
        layer = params["decoder"][name]
        x = jnp.tanh(x @ layer["kernel"].T.astype(jnp.float32) * 2.0 + layer["bias"])
    return mean_square(x)


PARAMS = {
    "decoder": {
        name: {"kernel": w, "bias": jnp.ones(16)}
        for name, w in zip(("embed", "body", "head"), weights(*[(16, 16)] * 3), strict=True)
    }
}


@pytest.mark.parametrize(
    ("rules", "policy", "forward"),
    [
        ({"params/decoder/head/kernel": F32}, BF16, [BF16, BF16, F32]),
        ({"head|body": jnp.float16}, BF16, [BF16, F16, F16]),
        ({"body": jmp_kit.get_policy("mixed_float16"), "": "f32"}, BF16, [F32, F16, F32]),
        ({"decoder": F16, "head": F32}, BF16, [F16] * 3),  # the first to match wins
        ({"^x$": F32}, BF16, [F32, BF16, BF16]),
        ({"body/kernel": "mixed_bfloat16"}, F32, [F32, BF16, F32]),  # in half by rule alone
        ({"body": "f64"}, F16, [F16, F32, F16]),  # as traced
        ({}, BF16, [BF16] * 3),
    ],
)
def test_the_path_of_a_parameter_decides_forward_and_backward(rules, policy, forward):
    half = autocast(three_layers, policy, rules=rules)
    assert dtypes_of(half, PARAMS, X) == forward
    first, second, third = forward
    gradient = dtypes_of(jax.grad(half), PARAMS, X)
    assert gradient == [*forward, third, third, second, second, first]
    np.testing.assert_allclose(half(PARAMS, X), three_layers(PARAMS, X), rtol=0.02)


def test_a_bias_does_not_decide_about_the_next_layer():
    with pytest.raises(ValueError, match="'body/bias' matches no product"):
        autocast(three_layers, BF16, rules={"body/bias": F32})(PARAMS, X)


def scoped(w, x):
    with jax.named_scope("encoder"):
        x = jnp.tanh(x @ w[0])
    with jax.named_scope("decoder"):
        return mean_square(x @ w[1])


W = weights((16, 16), (16, 16))


def test_a_name_scope_decides_and_backward_products_share_it():
    assert dtypes_of(autocast(scoped, BF16, rules={"^decoder$": F32}), W, X) == [BF16, F32]
    step = autocast(
        jax.grad(scoped), BF16, rules={"decoder": F32}, reduce_dtype=BF16
    )  # backward products within
    assert dtypes_of(step, W, X) == [BF16, F32, F32, F32, BF16]


def test_a_function_called_by_two_layers_is_cast_for_each():
    """One jaxpr, traced once, called from two places."""
    layer = jax.jit(lambda w, x: jnp.tanh(x @ w))
    half = autocast(lambda w, x: mean_square(layer(w[1], layer(w[0], x))), BF16, rules={"w/1": F32})
    assert dtypes_of(half, W, X) == [BF16, F32]

    def named(w, x):
        with jax.named_scope("first"):
            x = layer(w[0], x)
        return mean_square(layer(w[1], x))

    assert dtypes_of(autocast(named, BF16, rules={"first": F32}), W, X) == [F32, BF16]


def test_inside_loops_branches_and_checkpoints():
    def fun(params, x):
        @jax.checkpoint
        def block(x, w):
            with jax.named_scope("block"):
                x = lax.cond(x[0, 0] > 9, lambda x: x, lambda x: jnp.tanh(x @ w), x)
            return x @ params["shared"], None

        return mean_square(lax.scan(block, x, params["stack"])[0])

    params = {"shared": W[0], "stack": jnp.stack(W)}
    for rules, want in (
        ({"stack": F32}, [F32, BF16]),
        ({"/shared": F32}, [BF16, F32]),
        ({"^block": F16}, [F16, BF16]),
    ):
        half = autocast(fun, BF16, rules=rules)
        assert dtypes_of(half, params, X) == want
        assert set(dtypes_of(jax.grad(half), params, X)) == set(want)
    # From its second round on the carry depends on a product.
    with pytest.raises(ValueError, match="'x' matches no product"):
        autocast(
            lambda x: lax.scan(lambda c, _: (c @ W[0], None), x, None, 2)[0], BF16, rules={"x": F32}
        )(X)


def test_while_loops():
    half = autocast(
        lambda w, x: lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ w[0]) @ w[1], x),
        BF16,
        rules={"w/1": F32},
    )
    assert dtypes_of(half, W, X) == [BF16, F32]


@pytest.mark.parametrize("dtype", [F32, F16])
def test_a_call_with_a_derivative_rule_is_decided_as_a_whole(dtype):
    @jax.custom_vjp
    def layer(x, w):
        return x @ w

    layer.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, d: (d @ kept[1].T, kept[0].T @ d))

    @jax.custom_jvp
    def forward(x, w):
        return x @ w

    forward.defjvp(lambda x, t: (x[0] @ x[1], t[0] @ x[1] + x[0] @ t[1]))

    for call in (layer, forward):

        def fun(w, x, call=call):
            return mean_square(call(jnp.tanh(call(x, w[0])), w[1]))

        gradient = jax.grad(autocast(fun, BF16, rules={"w/1": dtype}, reduce_dtype=BF16))
        # None by what the first takes.
        assert sorted(dtypes_of(gradient, W, X)) == sorted([BF16] * 2 + [dtype] * 3)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4, name="lm_head")(nn.gelu(nn.Dense(32)(x)))


def test_flax_linen_nnx_and_equinox(standard_promotion):
    variables = Model().init(KEYS[0], X)
    for rule in ("params/lm_head/kernel", "Model/lm_head"):
        half = autocast(lambda params, x: Model().apply(params, x), BF16, rules={rule: F32})
        assert dtypes_of(half, variables, X) == [BF16, F32]

    model = nnx.Sequential(nnx.Linear(16, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 4, rngs=nnx.Rngs(1)))
    half = autocast(lambda model, x: model(x), BF16, rules={"model/layers/1/kernel": F32})
    assert dtypes_of(functools.partial(half, model), X) == [BF16, F32]

    mlp = eqx.nn.MLP(16, 4, 8, 1, key=KEYS[1])
    half = autocast(lambda mlp, x: jax.vmap(mlp)(x), BF16, rules={"layers/1/weight": F32})
    assert dtypes_of(functools.partial(half, mlp), X) == [BF16, F32]


def test_full_precision_regions_and_nested_autocast_come_before_rules():
    def fun(w, x):
        with full_precision():
            x = x @ w[0]
        return autocast(jnp.matmul, "mixed_float16")(x, w[1]) @ w[1]

    assert dtypes_of(autocast(fun, BF16, rules={"": "bf16"}), W, X) == [F32, F16, BF16]
    inner = autocast(scoped, BF16, rules={"decoder": F16})
    assert dtypes_of(autocast(inner, F16), W, X) == [BF16, F16]


def test_paths_begin_with_the_argument():
    def fun(first, *rest, key):
        return mean_square(X @ first["w"] @ rest[0] @ key)

    for rule, want in (("^first/w$", 0), ("^rest/0$", 1), ("^key$", 2)):
        got = dtypes_of(
            lambda *w, rule=rule: autocast(fun, BF16, rules={rule: F32})(
                {"w": w[0]}, w[1], key=w[2]
            ),
            *weights(*[(16, 16)] * 3),
        )
        assert got == [F32 if i == want else BF16 for i in range(3)]


def test_a_rule_that_matches_nothing_says_what_there_is():
    with pytest.raises(ValueError, match="The rule 'lm_haed' matches no product") as caught:
        autocast(three_layers, BF16, rules={"head": F32, "lm_haed": F32})(PARAMS, X)
    assert str(caught.value).split("\n")[1:] == [
        "  params/decoder/body/kernel",
        "  params/decoder/embed/kernel",
        "  params/decoder/head/kernel",
        "  x",
    ]
    with pytest.raises(ValueError, match="nothing, for there is no product"):
        autocast(jnp.tanh, BF16, rules={"x": F32})(X)


@pytest.mark.parametrize(
    ("rules", "error", "words"),
    [
        (
            {"lm_head(": F32},
            ValueError,
            r"'lm_head\(' is no regular expression .*backslash before a",
        ),
        ({3: F32}, ValueError, "The rule 3 is no regular expression"),
        ({"lm_head": "f31"}, ValueError, "Unknown dtype 'f31'"),
        (["lm_head"], TypeError, r"rules are a dict, but got \['lm_head'\]"),
    ],
)
def test_bad_rules_teach(rules, error, words):
    with pytest.raises(error, match=words):
        autocast(scoped, BF16, rules=rules)
