"""What cannot be meant is said at once; what may not be meant is warned of."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jmp_kit
from jmp_kit import autocast

X = jnp.ones((2, 4))


class Linear(nn.Module):
    """A linen module."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(x)


def in_a_with_statement():
    with autocast("mixed_bfloat16"):
        pass


def loss_fn(w):
    return jnp.sum(X @ w)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: autocast(loss_fn), r'given loss_fn and no policy. Write @autocast\("mixed_bf'),
        (lambda: autocast(lambda x: x), "given <lambda> and no policy"),
        (in_a_with_statement, 'autocast is no context.*autocast\\(loss_fn, "mixed_bfloat16"\\)'),
        (lambda: autocast(Linear, "half"), "Linear is a class, whose call makes an object"),
        (lambda: autocast(Linear(), "half"), r"a linen module. Write model = jmp_kit.linen.apply"),
        (lambda: autocast(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), "half"), r"jmp_kit.nnx.apply_policy"),
        (lambda: autocast(3, "half"), "autocast wraps a function, but got 3"),
        (
            lambda: jmp_kit.mixed_precision(optax.sgd(0.1), jmp_kit.DynamicLossScale),
            r"the class DynamicLossScale: write DynamicLossScale\(\)",
        ),
        (lambda: jmp_kit.mixed_precision(jmp_kit.NoOpLossScale), "wraps an optimizer, but got"),
        (
            lambda: jmp_kit.value_and_grad(loss_fn, jmp_kit.StaticLossScale),
            r"the class StaticLossScale: write StaticLossScale\(\)",
        ),
    ],
)
def test_misuse_is_told(call, words):
    with pytest.raises(TypeError, match=words):
        call()


def test_what_is_no_policy_and_no_function_is_told():
    with pytest.raises(ValueError, match="Unknown dtype 3"):
        autocast(3)


@pytest.mark.parametrize("typo", ["mixed_bfloat61", "mixed_bf16", "bflaot16", "mixed-float16"])
def test_a_typo_is_told_the_nearest_name(typo):
    near = "mixed_float16" if "-" in typo else "mixed_bfloat16" if "mixed" in typo else "bfloat16"
    with pytest.raises(ValueError, match=f"Did you mean '{near}'.*Presets are 'mixed_float16'"):
        autocast(loss_fn, typo)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_policy_to_compute_is_the_same_however_it_is_spelled(dtype):
    name = jnp.dtype(dtype).name
    w = jnp.ones((4, 4))
    for policy in (dtype, name, f" {name} ", jnp.dtype(dtype), f"mixed_{name}"):
        assert autocast(loss_fn, policy)(w).dtype == jnp.float32
        assert autocast(policy)(loss_fn)(w).dtype == jnp.float32
    assert autocast(loss_fn, jmp_kit.get_policy(name))(w).dtype == dtype


def own_dtype(w):
    with jax.named_scope("head"):
        return jnp.sum((X.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32))


def test_another_half_than_the_policy_s_is_warned_of():
    w = jnp.ones((4, 4))
    with pytest.warns(UserWarning, match="product in head asks for float16.*policy for bfloat16"):
        jax.grad(autocast(own_dtype, "mixed_bfloat16"))(w)
    # It agrees; or another autocast, or a rule, asks for it.
    autocast(own_dtype, "mixed_float16")(w)
    nested = autocast(autocast(loss_fn, "mixed_float16"), "mixed_bfloat16")
    assert jmp_kit.numerics.audit(jax.grad(nested), w).products[0].lhs_dtype == "float16"
    autocast(own_dtype, "mixed_bfloat16", rules={"head": "float16"})(w)


def test_shares_of_several_dtypes_are_printed():
    with pytest.warns(UserWarning, match="asks for float16"):
        found = jmp_kit.numerics.audit(
            autocast(lambda w: own_dtype(w) + loss_fn(w), "mixed_bfloat16"), jnp.ones((4, 4))
        )
    assert "100.0% of it half: 50.0% bfloat16, 50.0% float16" in str(found) or (
        "100.0% of it half: 50.0% float16, 50.0% bfloat16" in str(found)
    )


def step(w):
    return w - 0.1 * jax.grad(loss_fn)(w)


def test_float16_gradients_without_a_scale_are_warned_of():
    w = jnp.ones((4, 4))
    with pytest.warns(UserWarning, match="no loss scale multiplies.*jmp_kit.value_and_grad"):
        autocast(step, "mixed_float16")(w)
    with pytest.warns(UserWarning, match="no loss scale multiplies"):
        autocast(lambda w: jmp_kit.grad(loss_fn, jmp_kit.NoOpLossScale())(w), "mixed_float16")(w)


@pytest.mark.parametrize("how", [lambda f: f, jax.jit, lambda f: jax.vmap(jax.jit(f))])
def test_a_warning_names_the_line_of_the_call(how):
    with pytest.warns(UserWarning, match="no loss scale multiplies") as warned:
        how(autocast(step, "mixed_float16"))(jnp.ones((4, 4, 4)))
    assert {warning.filename for warning in warned} == {__file__}


@pytest.mark.parametrize(
    "fun",
    [
        lambda: autocast(step, "mixed_bfloat16"),
        lambda: jax.grad(autocast(loss_fn, "mixed_float16")),
        lambda: autocast(jmp_kit.grad(loss_fn, jmp_kit.StaticLossScale(8.0)), "mixed_float16"),
        lambda: autocast(
            jax.jit(jmp_kit.grad(jax.checkpoint(loss_fn), jmp_kit.DynamicLossScale())),
            "mixed_float16",
        ),
    ],
)
def test_no_warning_where_there_is_a_scale_or_no_need(fun):
    fun()(jnp.ones((4, 4)))


def test_a_float64_batch_is_named():
    with jax.enable_x64(True):
        batch = {"image": jnp.ones((2, 4), jnp.float64), "label": jnp.arange(2)}
        w = jnp.ones((4, 4), jnp.float32)
        with pytest.warns(UserWarning, match="1 of 1 products.*arguments are: batch/image. Cast"):
            autocast(lambda w, batch: batch["image"] @ w.astype("float64"), "half")(w, batch)
        # Beside products, it is nobody's business.
        autocast(lambda w, t: (w @ w, t * 2), "half")(w, batch["image"])
