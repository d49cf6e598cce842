"""What can be done with an nnx model can be done with it under a policy, to the same end."""

import copy
import functools
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jmp_kit
from jmp_kit.nnx import apply_policy
from tests.compiling import quick_or_slow

# optax itself promotes: see the fixture.
pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning"),
]

X = jax.random.normal(jax.random.key(1), (4, 6))


class Network(nnx.Module):
    """With something of everything."""

    kinds = ("a", "b")

    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.mode, self.calls, self.history = "a", 0, ("start",)
        self.table, self.seen = nnx.Variable(jnp.zeros(3)), nnx.data(jnp.ones(2))
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])

    def __call__(self, x, *, scale=1.0):
        """Of rows."""
        self.calls += 1
        self.history = (*self.history, self.mode)
        x = self.encode(x)
        self.sow(nnx.Intermediate, "hidden", x)
        for layer in self.layers:
            x = x + layer(x)
        return self.last(self.dropout(x)) * scale

    def encode(self, x):
        return nnx.relu(self.norm(self.first(x)))

    @nnx.jit
    def jitted(self, x):
        return self.last(self.first(x))

    @nnx.remat
    def again(self, x):
        return self.last(self.first(x))

    half_scaled = functools.partialmethod(__call__, scale=0.5)

    def describe(self, x):
        return "network", len(x), self.mode, {"shape": x.shape}

    def grow(self, rngs):
        self.layers.append(nnx.Linear(8, 8, rngs=rngs))
        self.extra = nnx.Param(jnp.ones(3))

    def record(self, x):
        self.table[...] = self.last(self.first(x)).mean(0)

    def shrink(self):
        del self.layers[0]

    @property
    def width(self):
        return self.first.out_features

    @staticmethod
    def rows(x):
        return x.shape[0]

    @classmethod
    def names(cls):
        return cls.kinds

    def _private(self, x):
        return self.first(x)


class Parts(nnx.Module):
    """A model of models, one of which may have a policy of its own."""

    def __init__(self, rngs):
        self.body, self.head = Network(rngs), nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(self.body(x))


def made(policy, kind=Network):
    model = kind(nnx.Rngs(0))
    return model if policy is None else apply_policy(model, policy)


def called(model):
    return model(X), model(X, scale=2.0), model.calls, model.history, nnx.state(model)


def attributes(model):
    model.mode, model.first = "b", nnx.Linear(6, 8, rngs=nnx.Rngs(3))
    model.seen = model.seen + 1
    with pytest.raises(AttributeError):
        _ = model.missing
    had = model.mode, model.width, model.kinds, model.names(), model.rows(X), model.seen
    return *had, model(X), model.history, sorted(vars(model))


def identity(model):
    signature = str(inspect.signature(type(model).encode)), model.encode.__doc__
    names = type(model).__name__, type(model).__qualname__, type(model).__module__
    return isinstance(model, Network), signature, names, model.__call__.__doc__, model.__doc__


def methods(model):
    return (
        model.describe(X),
        [type(x) for x in model.describe(X)],
        model.encode(X),
        model.jitted(X),
        model.again(X),
        model.half_scaled(X),
    )


def of_jax(model):
    model.eval()
    closed_over = jax.jit(lambda x: model.encode(x))(X)
    ensemble = nnx.vmap(lambda m, x: m.jitted(x), in_axes=(None, 0))(model, X[:, None])
    jitted = nnx.jit(lambda m, x: m(x))(model, X)
    shapes = nnx.eval_shape(lambda m: m.encode(X), model)
    gradient = nnx.grad(lambda m: jnp.sum(m(X) ** 2))(model)
    return closed_over, ensemble, jitted, shapes.shape, gradient, model.calls


def by_itself(model):
    return model.first(X), model._private(X), nnx.relu(model.norm(model.first(X)))


def modes(model):
    model.eval()
    once = model(X)
    model.train()
    model.set_attributes(nnx.Dropout, rate=0.0)
    viewed = nnx.view(model, deterministic=True, use_running_average=True)
    return once, model(X), viewed(X), viewed.dropout.deterministic, model.dropout.deterministic


def taken_apart(model):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    again = nnx.merge(graphdef, params, rest)
    assert type(again) is type(model)
    paths = ["/".join(map(str, path)) for path, _ in nnx.iter_graph(model)]
    state = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    nnx.update(model, nnx.state(model))
    return again(X), nnx.clone(model)(X), paths, state, nnx.split(again)[0] == graphdef


def copied(model):
    model(X)
    nnx.pop(model, nnx.Intermediate)
    others = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model)]
    return [(type(o) is type(model), isinstance(o, Network), o(X), o.calls) for o in others]


def sown(model):
    model(X)
    model(X)
    found = nnx.pop(model, nnx.Intermediate)
    return found["hidden"], hasattr(model, "hidden")


def changed(model):
    model.grow(nnx.Rngs(5))
    grown = len(model.layers), model.extra, model(X)
    model.record(X)
    model.shrink()
    return *grown, len(model.layers), model.table, model(X)


def trained(model):
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(X) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    losses = jnp.stack([step(model, optimizer) for _ in range(3)])
    return losses, model.calls, int(optimizer.step[...]), int(model.dropout.rngs.count[...])


USES = [
    *(called, attributes, identity, methods, of_jax, by_itself, modes, taken_apart, copied),
    *(sown, changed, trained),
]


def assert_like(found, expected, tolerance):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if isinstance(y, jax.Array | np.ndarray):
            assert (x.shape, x.dtype) == (y.shape, y.dtype)
            if jnp.issubdtype(y.dtype, jax.dtypes.prng_key):
                x, y = jax.random.key_data(x), jax.random.key_data(y)
            scale = float(jnp.max(jnp.abs(y))) if y.size else 0.0
            np.testing.assert_allclose(x, y, atol=tolerance * max(scale, 1e-3), rtol=tolerance)
        else:
            assert x == y


POLICIES = {"float32": 1e-6, "mixed_bfloat16": 0.05, "mixed_float16": 0.01}
policies = pytest.mark.parametrize("policy", quick_or_slow(POLICIES, ["float32", "mixed_bfloat16"]))


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@policies
def test_what_can_be_done_with_a_model(use, policy):
    expected = use(made(None))
    # The updates of Adam's first steps are signs.
    tolerance = POLICIES[policy] * (3 if use is trained else 1)
    assert_like(use(made(policy)), expected, tolerance)


class Tabled(nnx.Module):
    """To be tabulated, which leaves traces in a class."""

    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        self.sow(nnx.Intermediate, "hidden", x)
        return self.last(x)


@pytest.mark.parametrize("policy", [None, *POLICIES])
def test_a_model_is_shown(policy):
    model = made(policy, Tabled)
    assert repr(model).startswith("Tabled(")
    table = nnx.tabulate(model, X)
    assert all(word in table for word in ("Tabled Summary", "first", "last", "Linear"))


@policies
def test_what_a_model_sows_is_captured(policy):
    expected, found = (
        nnx.capture(lambda model, x: model(x), nnx.Intermediate)(made(name, Tabled), X)
        for name in (None, policy)
    )
    assert_like(found[0], expected[0], POLICIES[policy])
    assert_like(jax.tree.leaves(found[1]), jax.tree.leaves(expected[1]), POLICIES[policy])


def test_a_part_may_have_a_policy_of_its_own():
    model = made("mixed_bfloat16", Parts)
    apply_policy(model.body, "p=f32,c=f16,o=f32")
    model.eval()
    graphdef, state = nnx.split(model)
    found = jmp_kit.numerics.audit(lambda s: nnx.merge(graphdef, s)(X), state)
    assert [p.lhs_dtype for p in found.products] == 4 * ["float16"] + ["bfloat16"]
    found = jmp_kit.numerics.audit(lambda s: nnx.merge(graphdef, s).body(X), state)
    assert {p.lhs_dtype for p in found.products} == {"float16"}
    plain = Parts(nnx.Rngs(0))
    plain.eval()
    assert_like(model(X), plain(X), 0.05)


def test_another_policy_takes_the_place_of_the_first():
    model = made("p=f16,c=f16,o=f16")
    assert apply_policy(model, "p=f32,c=bf16,o=f32") is model
    assert type(model).__mro__.count(Network) == 1
    assert len(type(model).__mro__) == len(Network.__mro__) + 1
    assert {p.dtype for p in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype("float32")}
    graphdef, state = nnx.split(model)
    found = jmp_kit.numerics.audit(lambda s: nnx.merge(graphdef, s).jitted(X), state)
    assert [p.lhs_dtype for p in found.products] == 2 * ["bfloat16"]


def test_models_of_one_class_and_policy_are_traced_once():
    traces = []

    @nnx.jit
    def run(model):
        traces.append(None)
        return model(X)

    for policy, count in (("mixed_bfloat16", 1), ("mixed_bfloat16", 1), ("mixed_float16", 2)):
        run(made(policy))
        assert len(traces) == count
