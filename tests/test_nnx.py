"""nnx models as they are, under a policy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import jmp_kit
import jmp_kit.checkpoint
import jmp_kit.nnx
from jmp_kit.nnx import apply_policy, paths
from tests.casting.test_rules import dtypes_of
from tests.casting.test_zoo import distance, products_of
from tests.compiling import quick_or_slow

# optax itself promotes: see the fixture.
pytestmark = pytest.mark.usefixtures("standard_promotion")

IMAGES = jax.random.normal(jax.random.key(1), (2, 8, 8, 3))
WORDS = jax.random.normal(jax.random.key(2), (2, 6, 16))
TOKENS = jnp.arange(12).reshape(2, 6) % 7


class Between(nnx.Module):
    """A layer between two products, so that what it does to dtypes shows."""

    def __init__(self, make, rngs):
        self.first, self.last = nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)
        self.inner = make(rngs)

    def __call__(self, x):
        return self.last(self.inner(self.first(x)))


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.body = nnx.Embed(7, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)

    def __call__(self, tokens):
        return self.embed.attend(self.body(self.embed(tokens)))


class Layers(nnx.Module):
    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return nnx.Linear(16, 16, rngs=rngs)

        self.layers = make(rngs)
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, layer):
            return jnp.tanh(layer(x))

        return self.head(run(x, self.layers))


MODELS = {
    "linear": (lambda r: nnx.Linear(16, 4, rngs=r), WORDS),
    "linear_general": (lambda r: nnx.LinearGeneral(16, (2, 3), rngs=r), WORDS),
    "einsum": (lambda r: nnx.Einsum("btd,dk->btk", (16, 4), (4,), rngs=r), WORDS),
    "conv": (lambda r: nnx.Conv(3, 4, (3, 3), rngs=r), IMAGES),
    "conv_transpose": (lambda r: nnx.ConvTranspose(3, 4, (3, 3), rngs=r), IMAGES),
    "embed": (Tied, TOKENS),
    "attention": (lambda r: nnx.MultiHeadAttention(2, 16, decode=False, rngs=r), WORDS),
    "layer_norm": (lambda r: Between(lambda r: nnx.LayerNorm(16, rngs=r), r), WORDS),
    "group_norm": (lambda r: Between(lambda r: nnx.GroupNorm(16, 4, rngs=r), r), WORDS),
    "batch_norm": (lambda r: Between(lambda r: nnx.BatchNorm(16, rngs=r), r), WORDS),
    "dropout": (lambda r: Between(lambda r: nnx.Dropout(0.5, rngs=r), r), WORDS),
    "lora": (lambda r: nnx.LoRALinear(16, 4, lora_rank=2, rngs=r), WORDS),
    "lstm": (lambda r: nnx.RNN(nnx.OptimizedLSTMCell(16, 8, rngs=r)), WORDS),
    "scan": (Layers, WORDS),
}


def bits(node):
    leaves = jax.tree.leaves(nnx.state(node))
    keys = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
    return [
        np.asarray(jax.random.key_data(x) if key else x).tobytes()
        for x, key in zip(leaves, keys, strict=True)
    ]


def mean_square(model, x):
    y = model(x)
    return jnp.mean(jnp.square(y.astype(jnp.float32))), y


def trained(model, x):
    """The products of a gradient, and what it gives; the model's statistics change."""
    graphdef, state = nnx.split(model)
    products = products_of(
        lambda state: nnx.grad(lambda m: mean_square(m, x)[0])(nnx.merge(graphdef, state)), state
    )

    @nnx.jit
    def run(model):
        scale = jmp_kit.StaticLossScale(2.0**8)
        return jmp_kit.nnx.value_and_grad(mean_square, scale, has_aux=True)(model, x)

    return model, products, *run(model)


@functools.cache
def in_float32(name):
    make, x = MODELS[name]
    return trained(make(nnx.Rngs(0)), x)


@pytest.mark.parametrize(
    "name", quick_or_slow(MODELS, ("linear", "conv", "attention", "batch_norm", "dropout"))
)
@pytest.mark.parametrize("policy", ["mixed_float16", "p=bf16,c=bf16,o=bf16"])
def test_models_of_flax(name, policy):
    (make, x), policy = MODELS[name], jmp_kit.get_policy(policy)
    plain, full_products, (full_loss, full_y), full_grads = in_float32(name)
    model = apply_policy(make(nnx.Rngs(0)), policy)
    model, products, (loss, y), grads = trained(model, x)
    assert {p.dtype for p in jax.tree.leaves(nnx.state(model, nnx.Param))} == {policy.param_dtype}
    assert products
    assert all(found == {policy.compute_dtype} for found in products)
    assert len(products) == len(full_products)
    assert y.dtype == policy.output_dtype
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    limit = 0.01 if policy.compute_dtype == jnp.float16 else 0.1
    assert distance(y, full_y) < limit
    assert distance(grads, full_grads) < limit
    assert abs(loss - full_loss) < limit * full_loss
    statistics, full = (nnx.state(m, nnx.BatchStat) for m in (model, plain))
    assert {s.dtype for s in jax.tree.leaves(statistics)} <= {jnp.dtype("float32")}
    if name == "batch_norm":
        assert distance(statistics, full) < limit
    if name == "dropout":
        counts = [int(m.inner.rngs.count[...]) for m in (model, plain)]
        assert counts == [1, 1]


class Network(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Linear(16, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(16, 16, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        x = self.dropout(self.norm(self.embed(x)))
        for layer in self.layers:
            x = x + nnx.relu(layer(x))
        return self.head(x)

    def features(self, x):
        return self.norm(self.embed(x))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16], ids=["float32", "float16"])
def test_training_with_an_nnx_optimizer_and_a_skipped_step(dtype):
    policy = jmp_kit.Policy(dtype, jnp.float16, jnp.float32)
    model = apply_policy(Network(nnx.Rngs(0)), policy)
    transform = jmp_kit.mixed_precision(optax.adam(1e-2), jmp_kit.DynamicLossScale(2.0**10))
    optimizer = nnx.Optimizer(model, transform, wrt=nnx.Param)
    traces = []

    @nnx.jit
    def train_step(model, optimizer, x):
        traces.append(None)
        scale = jmp_kit.loss_scale_of(optimizer.opt_state)
        (loss, _), grads = jmp_kit.nnx.value_and_grad(mean_square, scale, has_aux=True)(model, x)
        optimizer.update(model, grads)
        return loss

    losses = [float(train_step(model, optimizer, WORDS)) for _ in range(3)]

    def trained():
        state = optimizer.opt_state
        return bits(model), *(
            np.asarray(x).tobytes() for x in jax.tree.leaves((state.inner_state, state.master))
        )

    before = trained()
    train_step(model, optimizer, WORDS.at[0, 0, 0].set(jnp.inf))
    assert trained() == before
    numbers = jmp_kit.metrics(optimizer.opt_state)
    assert (numbers["skipped"], numbers["loss_scale"]) == (1, 2.0**9)
    losses += [float(train_step(model, optimizer, WORDS)) for _ in range(20)]
    assert losses[-1] < losses[0]
    assert len(traces) <= 2
    params, full = nnx.state(model, nnx.Param), jmp_kit.nnx.master_params(optimizer, model)
    assert jax.tree.structure(full) == jax.tree.structure(params)
    assert {p.dtype for p in jax.tree.leaves(full)} == {jnp.dtype("float32")}
    rounded = jax.tree.map(lambda p: p.astype(dtype), full)
    assert bits(rounded) == bits(params)
    assert dtype == jnp.float32 or distance(full, params) > 1e-5


def test_what_a_skipped_step_set_is_kept_if_asked_for():
    model = apply_policy(Network(nnx.Rngs(0)), "mixed_bfloat16")
    grad = jmp_kit.nnx.value_and_grad(
        mean_square, jmp_kit.NoOpLossScale(), has_aux=True, keep_skipped_state=True
    )
    grad(model, WORDS.at[0, 0, 0].set(jnp.inf))
    assert int(model.dropout.rngs.count[...]) == 1
    assert not jnp.isfinite(model.norm.mean[...]).all()


def test_rules_move_the_products_they_name_and_no_other():
    def found(rules, policy="mixed_bfloat16"):
        model = apply_policy(Network(nnx.Rngs(0)), policy, rules)
        graphdef, state = nnx.split(model)
        return dtypes_of(lambda state: nnx.merge(graphdef, state)(WORDS), state)

    assert found({"head": "float32"}) == ["bfloat16"] * 3 + ["float32"]
    assert found({"layers/1/kernel": "float16"})[1:3] == ["bfloat16", "float16"]
    assert found({"layers/1": "float32", "layers": "float16"})[1:3] == ["float16", "float32"]
    for model in (Network(nnx.Rngs(0)), apply_policy(Network(nnx.Rngs(0)), "half")):
        found_paths = paths(model, jax.eval_shape(lambda: WORDS))
        assert len(found_paths) == 4
        assert "layers/1/kernel" in " ".join(found_paths[2])
        parameters = str(paths(model)).splitlines()
        assert len(parameters) == 1 + 2 * 5
        assert any(row.endswith("  layers/1/kernel") for row in parameters)
    with pytest.raises(ValueError, match=r"'tail' matches no product(.|\n)*head/kernel"):
        found({"tail": "float32"})


def test_a_model_under_a_policy_is_the_model():
    plain = Network(nnx.Rngs(0))
    model = apply_policy(plain, "mixed_bfloat16")
    assert model is plain
    model.eval()
    features = model.features(WORDS)
    assert features.dtype == jnp.float32
    assert products_of(lambda x: model.features(x), WORDS) == [{jnp.dtype("bfloat16")}]


def test_the_decorator_keeps_what_a_function_sets():
    model, plain = Network(nnx.Rngs(0)), Network(nnx.Rngs(0))

    @jmp_kit.nnx.autocast("p=f32,c=f16,o=f16")
    def loss_fn(model, x, scale=1.0):
        return mean_square(model, x)[0] * scale

    loss = loss_fn(model, WORDS, scale=2.0)
    assert loss.dtype == jnp.float16
    full = mean_square(plain, WORDS)[0]
    np.testing.assert_allclose(float(loss), 2 * float(full), rtol=1e-2)
    assert int(model.dropout.rngs.count[...]) == 1
    assert distance(nnx.state(model, nnx.BatchStat), nnx.state(plain, nnx.BatchStat)) < 1e-2


def test_a_closed_over_model_that_sets_nothing_is_not_touched():
    model = apply_policy(nnx.Linear(16, 4, rngs=nnx.Rngs(0)), "mixed_bfloat16")
    assert jax.jit(lambda x: model(x))(WORDS).dtype == jnp.float32


@pytest.mark.parametrize("master", [None, "float32", "remainder"])
def test_one_line_around_a_train_step(master):
    """Plain autocast finds the model and its optimizer, and keeps what the step changes in them."""
    losses = {}
    for policy in ("float32", "mixed_bfloat16"):
        model = Network(nnx.Rngs(0))
        transform = optax.adam(1e-2)
        if master:
            half = jmp_kit.get_policy("p=bf16")
            nnx.update(model, half.cast_to_param(nnx.state(model, nnx.Param)))
            transform = jmp_kit.mixed_precision(transform, master=master)
        optimizer = nnx.Optimizer(model, transform, wrt=nnx.Param)

        @nnx.jit
        @jmp_kit.autocast(policy)
        def train_step(model, optimizer, x):
            (loss, _), grads = nnx.value_and_grad(mean_square, has_aux=True)(model, x)
            optimizer.update(model, grads)
            return loss

        losses[policy] = [float(train_step(model, optimizer, WORDS)) for _ in range(4)]
        assert int(model.dropout.rngs.count[...]) == 4
        assert int(optimizer.step[...]) == 4
        assert {x.dtype for x in jax.tree.leaves(nnx.state(model, nnx.Param))} == {
            jnp.dtype("bfloat16" if master else "float32")
        }
    assert losses["float32"][-1] < losses["float32"][0]
    np.testing.assert_allclose(losses["mixed_bfloat16"], losses["float32"], rtol=0.05)


@pytest.mark.parametrize("how", [lambda f: f, nnx.jit])
def test_plain_autocast_of_a_loss_keeps_counts_and_statistics(how):
    model, plain = Network(nnx.Rngs(0)), Network(nnx.Rngs(0))
    full = mean_square(plain, WORDS)[0]
    half = how(
        jmp_kit.autocast(lambda models, x: mean_square(models["one"], x)[0], "mixed_bfloat16")
    )
    np.testing.assert_allclose(float(half({"one": model}, WORDS)), float(full), rtol=2e-2)
    assert int(model.dropout.rngs.count[...]) == 1
    assert distance(nnx.state(model, nnx.BatchStat), nnx.state(plain, nnx.BatchStat)) < 2e-2
    assert bits(nnx.state(model, nnx.Param)) == bits(nnx.state(plain, nnx.Param))


@pytest.mark.parametrize("how", [lambda f: f, nnx.jit])
def test_autocast_around_a_gradient(how):
    """What it returns are variables, and nothing in the model changes."""
    model = nnx.Linear(16, 4, rngs=nnx.Rngs(0))

    def loss_fn(model, x):
        return jnp.mean(model(x) ** 2)

    step = how(jmp_kit.autocast(nnx.value_and_grad(loss_fn), "mixed_bfloat16"))
    loss, grads = step(model, WORDS)
    full, exact = nnx.value_and_grad(loss_fn)(model, WORDS)
    np.testing.assert_allclose(float(loss), float(full), rtol=2e-2)
    assert jax.tree.structure(grads) == jax.tree.structure(exact)
    assert 0 < distance(grads, exact) < 2e-2
    nnx.Optimizer(model, optax.sgd(1e-2), wrt=nnx.Param).update(model, grads)


@pytest.mark.parametrize(
    "returned",
    [
        lambda model: nnx.state(model),
        lambda model: nnx.split(model)[1],
        lambda model: model.kernel,
        lambda model: nnx.Linear(3, 3, rngs=nnx.Rngs(0)),
        lambda model: nnx.clone(model),
    ],
)
def test_what_flax_knows_is_returned_as_it_is(returned):
    model = nnx.Linear(16, 4, rngs=nnx.Rngs(0))
    output, found = jmp_kit.autocast(lambda m, x: (m(x), returned(m)), "mixed_bfloat16")(
        model, WORDS
    )
    assert output.shape == (2, 6, 4)
    assert type(found) is type(returned(model))
    assert jax.tree.structure(found) == jax.tree.structure(returned(model))
    jax.tree.map(np.testing.assert_array_equal, found, returned(model))


def test_a_model_that_is_returned_is_the_one_given():
    model = nnx.Linear(16, 4, rngs=nnx.Rngs(0))
    assert jmp_kit.autocast(lambda m: m, "mixed_bfloat16")(model) is model


def test_a_state_is_a_tree_of_arrays_as_before():
    graphdef, state = nnx.split(nnx.Linear(16, 4, rngs=nnx.Rngs(0)))
    loss = jmp_kit.autocast(
        lambda s, x: mean_square(nnx.merge(graphdef, s), x)[0], "mixed_bfloat16"
    )
    grads = jax.grad(loss)(state, WORDS)
    assert jax.tree.structure(grads) == jax.tree.structure(state)
    assert float(jnp.abs(grads["kernel"][...]).max()) > 0


class Counting(nnx.Module):
    """With attributes of every kind, and a jitted method."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(16, 16, rngs=rngs)
        self.mode, self.calls, self.history = "a", 0, ("start",)

    def __call__(self, x):
        self.calls += 1
        self.history = (*self.history, self.mode)
        return self.layer(x)

    def set_mode(self, mode):
        self.mode = mode

    def keep(self, x):
        self.mode = self.layer(x)

    @nnx.jit
    def jitted(self, x):
        return self.layer(x)


def test_an_array_for_an_attribute_is_no_variable():
    model = apply_policy(Counting(nnx.Rngs(0)), "mixed_bfloat16")
    with pytest.raises(ValueError, match="attribute 'mode' of its model to an array"):
        model.keep(WORDS)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "float32"])
def test_variables_that_hold_references_are_refused(policy):
    with nnx.var_defaults(ref=True):
        model = apply_policy(Counting(nnx.Rngs(0)), policy)
    with pytest.raises(TypeError, match=r"The variable \S+ holds a reference .* would be lost"):
        model(WORDS)


@pytest.mark.parametrize("method", ["__call__", "jitted"])
def test_jitted_methods_are_under_the_policy(method):
    model = apply_policy(Counting(nnx.Rngs(0)), "p=f32,c=bf16,o=bf16")
    assert getattr(model, method)(WORDS).dtype == jnp.bfloat16


def test_what_a_function_adds_to_its_model_is_kept():
    class Sowing(nnx.Module):
        def __call__(self, x):
            self.seen = nnx.Intermediate(x)
            self.layer = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
            return self.layer(x)

    model = Sowing()
    y = jmp_kit.autocast(lambda model, x: model(x), "mixed_bfloat16")(model, WORDS)
    np.testing.assert_array_equal(model.seen[...], WORDS)
    np.testing.assert_allclose(y, model.layer(WORDS), atol=0.02)


def test_the_gradient_alone_and_a_decision_of_all_devices():
    scale = jmp_kit.StaticLossScale(2.0**8)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    model = nnx.BatchNorm(1, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(model)

    def loss_fn(model, x):
        return jnp.sum(model(x) * x)

    def step(axis_name, state, x):
        model = nnx.merge(graphdef, state)
        grads = jmp_kit.nnx.grad(loss_fn, scale, axis_name=axis_name)(model, x)
        finite = jnp.stack([jmp_kit.all_finite(grads)])
        return finite, model.mean[...][None]

    x = jnp.array([[1.0], [jnp.inf], [1.0], [3.0]])
    for axis_name, means in ((None, [0, 0.02]), ("data", [0, 0])):
        run = jax.shard_map(
            functools.partial(step, axis_name),
            mesh=mesh,
            in_specs=(spec(), spec("data")),
            out_specs=(spec("data"), spec("data")),
            check_vma=False,
        )
        finite, mean = jax.jit(run)(state, x)
        assert finite.tolist() == [False, True]
        np.testing.assert_allclose(mean[:, 0], means, atol=1e-6)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: apply_policy(nnx.Linear, "half"), TypeError, "nnx model, but got <class"),
        (lambda: apply_policy(jnp.tanh, "half"), TypeError, "for functions jmp_kit.autocast"),
        (lambda: apply_policy(nnx.Dropout(0.5), "c=f17"), ValueError, "f17"),
        (
            lambda: apply_policy(nnx.Dropout(0.5), "half", {"(": "float32"}),
            ValueError,
            "no regular",
        ),
    ],
)
def test_bad_input_teaches(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_a_run_saved_by_its_nnx_state_goes_on_at_another_precision(tmp_path):
    def start(dtype, master):
        network = nnx.Sequential(
            nnx.Linear(16, 4, rngs=nnx.Rngs(0)),
            nnx.BatchNorm(4, rngs=nnx.Rngs(0)),
            nnx.Dropout(0.5, rngs=nnx.Rngs(0)),
        )
        model = apply_policy(network, jmp_kit.Policy(dtype, "float16", "float32"))
        transform = jmp_kit.mixed_precision(
            optax.adam(1e-2), jmp_kit.DynamicLossScale(), master=master
        )
        return model, nnx.Optimizer(model, transform, wrt=nnx.Param)

    def state_of(model, optimizer):
        return {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}

    @nnx.jit
    def train_step(model, optimizer):
        scale = jmp_kit.loss_scale_of(optimizer.opt_state)
        (loss, _), grads = jmp_kit.nnx.value_and_grad(mean_square, scale, has_aux=True)(
            model, WORDS
        )
        optimizer.update(model, grads)
        return loss

    model, optimizer = start("float32", "float32")
    for _ in range(3):
        train_step(model, optimizer)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=ocp.args.StandardSave(state_of(model, optimizer)))
    half, half_optimizer = start("bfloat16", "remainder")
    like = state_of(half, half_optimizer)
    restored = jmp_kit.checkpoint.restore(tmp_path, like, params="model")
    assert jax.tree.structure(restored) == jax.tree.structure(like)
    nnx.update(half, restored["model"])
    nnx.update(half_optimizer, restored["optimizer"])
    assert bits(jmp_kit.nnx.master_params(half_optimizer, half)) == bits(
        nnx.state(model, nnx.Param)
    )
    others = nnx.Not(nnx.Param)
    assert bits(nnx.state(half, others)) == bits(nnx.state(model, others))
    metrics = jmp_kit.metrics(half_optimizer.opt_state)
    assert {type(m) for m in metrics.values()} == {float, bool, int}
    assert float(train_step(half, half_optimizer)) == pytest.approx(
        float(train_step(model, optimizer)), rel=0.02
    )


def test_a_method_need_not_use_what_a_rule_names():
    model = apply_policy(Network(nnx.Rngs(0)), "mixed_bfloat16", {"head": "float32"})
    typo = apply_policy(Network(nnx.Rngs(0)), "mixed_bfloat16", {"haed": "float32"})
    model.features(WORDS)
    with pytest.raises(ValueError, match="The rule 'haed' matches no product"):
        typo.features(WORDS)


def test_an_argument_that_is_called_like_the_parts_of_a_model_keeps_its_path():
    def loss_fn(model, extra):
        return jnp.sum(model(WORDS) @ extra["states"]["w"]["kernel"])

    extra = {"states": {"w": {"kernel": jnp.ones((4, 2))}}}
    rules = {"^extra/states/w/kernel$": "float32", "^model/kernel": "float16"}
    half = jmp_kit.autocast(loss_fn, "mixed_bfloat16", rules=rules)
    model = nnx.Linear(16, 4, rngs=nnx.Rngs(0))
    assert dtypes_of(lambda extra: half(model, extra), extra) == ["float16", "float32"]
