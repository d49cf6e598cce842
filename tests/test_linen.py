"""linen modules as they are, under a policy."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jmp_kit
from jmp_kit.linen import apply_policy, paths
from tests.casting.test_rules import dtypes_of
from tests.casting.test_zoo import distance, products_of
from tests.compiling import quick_or_slow

# optax itself promotes: see the fixture.
pytestmark = pytest.mark.usefixtures("standard_promotion")

KEY = jax.random.key(0)
IMAGES = jax.random.normal(jax.random.key(1), (2, 8, 8, 3))
WORDS = jax.random.normal(jax.random.key(2), (2, 6, 16))
TOKENS = jnp.arange(12).reshape(2, 6) % 7


class Between(nn.Module):
    """A module of Flax between two products, so that what it does to dtypes shows."""

    inner: nn.Module

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(self.inner(nn.Dense(16)(x)))


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.Dropout(0.5, deterministic=False)(nn.Dense(16)(x)))


class Tied(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(7, 16)
        return embed.attend(nn.Dense(16)(embed(tokens)))


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.BatchNorm(use_running_average=False)(nn.Dense(16)(x)))


class Layers(nn.Module):
    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return nn.tanh(nn.Dense(16)(x)), None

        stack = nn.scan(
            nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        )
        return nn.Dense(4)(stack()(x, None)[0])


MODULES = {
    "dense": (nn.Dense(4), WORDS),
    "dense_general": (nn.DenseGeneral((2, 3), axis=(-2, -1)), WORDS),
    "einsum": (nn.Einsum((16, 4), "btd,dk->btk"), WORDS),
    "conv": (nn.Conv(4, (3, 3)), IMAGES),
    "conv_transpose": (nn.ConvTranspose(4, (3, 3), strides=(2, 2)), IMAGES),
    "embed": (Tied(), TOKENS),
    "attention": (nn.MultiHeadDotProductAttention(2), WORDS),
    "layer_norm": (Between(nn.LayerNorm()), WORDS),
    "rms_norm": (Between(nn.RMSNorm()), WORDS),
    "group_norm": (Between(nn.GroupNorm(4)), WORDS),
    "batch_norm": (Normed(), WORDS),
    "lstm": (nn.RNN(nn.OptimizedLSTMCell(8)), WORDS),
    "gru": (nn.RNN(nn.GRUCell(8)), WORDS),
    "dropout": (Dropped(), WORDS),
    "scan_of_remat": (Layers(), WORDS),
}

QUICK = ("dense", "conv", "attention", "batch_norm", "dropout")
modules = pytest.mark.parametrize("name", quick_or_slow(MODULES, QUICK))


def loss_of(applied, name, variables):
    """The loss of a module's parameters, and all that it gives."""
    statistics = {k: v for k, v in variables.items() if k != "params"}
    mutable = list(statistics) or False

    def loss_fn(params):
        variables = {**statistics, "params": params}
        result = applied.apply(variables, MODULES[name][1], rngs={"dropout": KEY}, mutable=mutable)
        y, changed = result if mutable else (result, {})
        return jnp.mean(jnp.square(y.astype(jnp.float32))), (y, changed)

    return loss_fn


def trained(applied, name):
    """Variables, the products of a gradient, and what it gives."""
    variables = applied.init({"params": KEY, "dropout": jax.random.key(3)}, MODULES[name][1])
    loss_fn, params = loss_of(applied, name, variables), variables["params"]
    products = products_of(jax.grad(lambda p: loss_fn(p)[0]), params)
    scaled = jmp_kit.value_and_grad(loss_fn, jmp_kit.StaticLossScale(2.0**8), has_aux=True)
    return variables, products, *jax.jit(scaled)(params)


@functools.cache
def in_float32(name):
    return trained(MODULES[name][0], name)


@modules
@pytest.mark.parametrize("policy", ["mixed_float16", "p=bf16,c=bf16,o=bf16"])
def test_modules_of_flax(name, policy):
    policy = jmp_kit.get_policy(policy)
    plain, full_products, (full_loss, (full_y, full_changed)), full_grads = in_float32(name)
    model = apply_policy(MODULES[name][0], policy)
    variables, products, (loss, (y, changed)), grads = trained(model, name)
    assert jax.tree.structure(variables) == jax.tree.structure(plain)
    assert {p.dtype for p in jax.tree.leaves(variables["params"])} == {policy.param_dtype}
    assert products
    assert all(found == {policy.compute_dtype} for found in products)
    assert len(products) == len(full_products)
    assert y.dtype == policy.output_dtype
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    assert {s.dtype for s in jax.tree.leaves(changed)} <= {jnp.dtype("float32")}
    limit = 0.01 if policy.compute_dtype == jnp.float16 else 0.1
    assert distance(y, full_y) < limit
    assert distance(grads, full_grads) < limit
    assert abs(loss - full_loss) < limit * full_loss
    if full_changed:
        assert distance(changed, full_changed) < limit


def test_half_parameters_are_not_what_lies_between_products_is_computed_in():
    """An embedding and a norm of bfloat16 parameters, whose values would be bfloat16 as written."""
    module = nn.Sequential([nn.Embed(7, 64), nn.LayerNorm(), nn.Dense(16)])
    model = apply_policy(module, "bfloat16")
    variables = model.init(KEY, TOKENS)
    text = str(jax.make_jaxpr(model.apply)(variables, TOKENS))
    assert "f32[2,6,64] = rsqrt" not in text  # of a row
    widths = [line for line in text.splitlines() if " = mul " in line or " = sub " in line]
    assert widths
    assert all("bf16[2,6,64]" not in line.split("=")[0] for line in widths)


def test_rules_move_the_products_they_name_and_no_other():
    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Dense(16, name="embed")(x))
            for i in range(2):
                x = x + nn.relu(nn.Dense(16, name=f"layer_{i}")(x))
            return nn.Dense(4, name="head")(x)

    def found(rules, policy="mixed_bfloat16"):
        model = apply_policy(Network(), policy, rules)
        return dtypes_of(model.apply, model.init(KEY, WORDS), WORDS)

    assert found({"head": "float32"}) == ["bfloat16"] * 3 + ["float32"]
    assert found({"layer_[01]": "float16"}) == ["bfloat16", "float16", "float16", "bfloat16"]
    assert found({"layer_1": "float32", "layer": "float16"})[1:3] == ["float16", "float32"]
    assert found({"embed/kernel": "bfloat16"}, "float32") == ["bfloat16"] + ["float32"] * 3
    for module in (Network(), apply_policy(Network(), "half")):
        found_paths = paths(module, KEY, jax.eval_shape(lambda: WORDS))
        assert len(found_paths) == 4
        assert "layer_1" in " ".join(found_paths[2])
    with pytest.raises(ValueError, match=r"'tail' matches no product(.|\n)*params/head/kernel"):
        found({"tail": "float32"})


def test_paths_of_a_module_that_takes_flags_and_random_keys():
    class Network(nn.Module):
        @nn.compact
        def __call__(self, x, *, train):
            x = nn.BatchNorm(use_running_average=not train)(nn.Dense(16)(x))
            return nn.Dense(4)(nn.Dropout(0.5)(x, deterministic=not train))

    rngs = {"params": KEY, "dropout": KEY}
    found = paths(Network(), rngs, WORDS, train=True)
    assert len(found) == 2
    head, *rows = str(found).splitlines()
    assert head == "product  paths"
    assert rows[1].endswith("variables/params/Dense_1/kernel")


def test_methods_intermediates_and_several_outputs():
    class Coder(nn.Module):
        def setup(self):
            self.down, self.up = nn.Dense(4), nn.Dense(16)

        def __call__(self, x):
            return self.up(self.encode(x))

        def encode(self, x):
            code = self.down(x)
            self.sow("intermediates", "code", code)
            return code

    model = apply_policy(Coder(), "p=f32,c=f16,o=f16")
    variables = model.init(KEY, WORDS)
    for method in ("encode", Coder.encode):
        code = model.apply(variables, WORDS, method=method)
        assert (code.shape, code.dtype) == ((2, 6, 4), jnp.float16)
    y, state = model.apply(variables, WORDS, mutable=["intermediates"], capture_intermediates=True)
    assert y.dtype == jnp.float16
    sown = state["intermediates"]
    assert sown["code"][0].dtype == jnp.float32
    assert set(sown) >= {"code", "down", "up", "__call__"}


def test_a_skipped_step_with_batch_norm_and_dropout_leaves_no_trace():
    class State(TrainState):
        batch_stats: dict
        key: jax.Array

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.BatchNorm(use_running_average=False)(nn.Dense(16)(x))
            return nn.Dense(4)(nn.Dropout(0.5, deterministic=False)(x))

    model = apply_policy(Network(), "mixed_float16")
    variables = model.init({"params": KEY, "dropout": KEY}, WORDS)
    optimizer = jmp_kit.mixed_precision(optax.adam(1e-3), jmp_kit.DynamicLossScale(2.0**10))
    state = State.create(apply_fn=model.apply, tx=optimizer, key=KEY, **variables)

    @jax.jit
    def step(state, x):
        def loss_fn(params):
            y, changed = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                x,
                rngs={"dropout": state.key},
                mutable=["batch_stats"],
            )
            return jnp.mean(y**2), changed

        scale = jmp_kit.loss_scale_of(state.opt_state)
        (_, changed), grads = jmp_kit.value_and_grad(loss_fn, scale, has_aux=True)(state.params)
        new = state.apply_gradients(grads=grads)
        finite = jmp_kit.metrics(new.opt_state)["finite"]
        rest = {"batch_stats": changed["batch_stats"], "key": jax.random.split(state.key)[0]}
        old = {"batch_stats": state.batch_stats, "key": state.key}
        rest = jmp_kit.select_tree(finite, rest, old)
        return new.replace(**rest)

    def kept(state):
        key = jax.random.key_data(state.key)
        tree = (state.params, state.batch_stats, key, state.opt_state.inner_state)
        return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]

    skipped = step(state, WORDS.at[0, 0, 0].set(jnp.inf))
    assert kept(skipped) == kept(state)
    assert int(skipped.opt_state.skipped) == 1
    applied = step(skipped, WORDS)
    assert all(a != b for a, b in zip(kept(applied), kept(state), strict=True))


def test_a_model_is_hashable_and_can_be_initialised_without_values():
    model = apply_policy(nn.Dense(4), "half", {"Dense|kernel": "float32"})
    assert hash(model) == hash(apply_policy(nn.Dense(4), "half", {"Dense|kernel": "float32"}))
    shapes = jax.eval_shape(model.init, KEY, WORDS)
    assert shapes["params"]["kernel"].dtype == jmp_kit.half_dtype()
    apply = jax.jit(lambda model, *args: model.apply(*args), static_argnums=0)
    assert apply(model, model.init(KEY, WORDS), WORDS).dtype == jmp_kit.half_dtype()


def test_a_module_without_parameters():
    model = apply_policy(nn.Dropout(0.5, deterministic=True), "half")
    assert model.init(KEY, WORDS) == {}
    assert model.apply({}, WORDS).dtype == jmp_kit.half_dtype()


def test_a_float32_policy_is_the_module():
    module = MODULES["attention"][0]
    model = apply_policy(module, "float32")
    variables = model.init(KEY, WORDS)
    assert (model.apply(variables, WORDS) == module.apply(variables, WORDS)).all()


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: apply_policy(jnp.tanh, "half"), TypeError, "for functions jmp_kit.autocast"),
        (lambda: apply_policy(nn.Dense(4), "c=f17"), ValueError, "f17"),
        (lambda: apply_policy(nn.Dense(4), "half", {"(": "float32"}), ValueError, "no regular exp"),
        (lambda: apply_policy(nn.Dense(4), "half", "head"), TypeError, "rules are a dict"),
    ],
)
def test_bad_input_teaches(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_a_method_need_not_use_what_a_rule_names():
    class Encoder(nn.Module):
        def setup(self):
            self.body, self.head = nn.Dense(4), nn.Dense(2)

        def __call__(self, x):
            return self.head(self.body(x))

        def encode(self, x):
            return self.body(x)

    x = jnp.ones((2, 4))
    model = apply_policy(Encoder(), "mixed_bfloat16", {"head": "float32"})
    variables = model.init(jax.random.key(0), x)
    assert model.apply(variables, x, method="encode").shape == (2, 4)
    found = jmp_kit.numerics.audit(model.apply, variables, x).products
    assert [p.lhs_dtype for p in found] == ["bfloat16", "float32"]
    typo = apply_policy(Encoder(), "mixed_bfloat16", {"haed": "float32"})
    for method in ("encode", "__call__"):
        with pytest.raises(ValueError, match="The rule 'haed' matches no product"):
            typo.apply(variables, x, method=method)
