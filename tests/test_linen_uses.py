"""What can be done with a linen module can be done with it under a policy, to the same end."""

import copy
import functools
import inspect
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import jmp_kit
from jmp_kit.linen import apply_policy
from tests.test_nnx_uses import POLICIES, assert_like, policies

# optax itself promotes: see the fixture.
pytestmark = pytest.mark.usefixtures("standard_promotion")

X = jax.random.normal(jax.random.key(1), (4, 6))
KEYS = {"params": jax.random.key(0), "dropout": jax.random.key(2)}


class Network(nn.Module):
    """With something of everything."""

    features: int = 8
    inner: nn.Module | None = None

    @nn.compact
    def __call__(self, x, train=True, *, scale=1.0):
        """Of rows."""
        x = nn.Dense(self.features, name="first")(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        self.sow("intermediates", "hidden", x)
        if self.inner is not None:
            x = self.inner(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(3)(x) * scale

    def describe(self, x):
        return "network", len(x), {"shape": x.shape}, self.features

    @property
    def width(self):
        return self.features

    @staticmethod
    def rows(x):
        return x.shape[0]

    @nn.nowrap
    def plus(self, x):
        return x + self.features


class Coder(nn.Module):
    """With parts made in advance, and a method for each half."""

    features: int = 5

    def setup(self):
        self.down, self.up = nn.Dense(self.features), nn.Dense(6)
        self.count = self.variable("state", "count", jnp.zeros, ())

    def __call__(self, x):
        return self.decode(self.encode(x))

    def encode(self, x):
        if not self.is_initializing() and self.is_mutable_collection("state"):
            self.count.value += 1
        return nn.tanh(self.down(x))

    def decode(self, x):
        return self.up(x)


class Step(nn.Module):
    """Of a scan."""

    @nn.compact
    def __call__(self, x, _):
        return nn.tanh(nn.Dense(x.shape[-1])(x)), None


class Parts(nn.Module):
    """Made of what `wrap` gives of modules and of classes."""

    wrap: object

    @nn.compact
    def __call__(self, x):
        x = self.wrap(nn.Dense(6))(x)
        x = self.wrap(nn.Dense)(6, name="named")(x)
        axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        x, _ = nn.scan(self.wrap(Step), length=3, **axes)()(x, None)
        x = nn.remat(self.wrap(nn.Dense))(6)(x)
        x = self.wrap(nn.Sequential([nn.Dense(6), nn.relu, self.wrap(nn.Dense(4))]))(x)
        ensemble = nn.vmap(
            self.wrap(nn.Dense),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=None,
            axis_size=2,
        )
        return ensemble(3)(x).sum(0)


def wrapping(policy):
    return (
        (lambda module: module)
        if policy is None
        else functools.partial(apply_policy, policy=policy)
    )


def initialised(wrap):
    model = wrap(Network())
    y, variables = model.init_with_output(KEYS, X)
    lazily = model.lazy_init(KEYS, jax.ShapeDtypeStruct(X.shape, X.dtype))
    shapes = jax.eval_shape(model.init, KEYS, X)
    assert jax.tree.structure(shapes) == jax.tree.structure(variables)
    return y, variables, model.init(KEYS, X), lazily


def applied(wrap):
    model = wrap(Network())
    variables = model.init(KEYS, X)
    trained = model.apply(variables, X, rngs=KEYS, mutable=["batch_stats"], scale=2.0)
    seen = model.apply(variables, X, False, mutable=["intermediates"], capture_intermediates=True)
    by_function = model.apply(variables, X, method=lambda model, x: model(x, train=False))
    return trained, seen, by_function, model.apply(variables, X, train=False)


def attributes(wrap):
    model = wrap(Network(features=4))
    other = model.clone(features=7)
    had = model.features, model.width, other.width, model.rows(X), model.plus(X), model.name
    kinds = (
        isinstance(model, Network),
        isinstance(other, type(model)),
        issubclass(type(model), nn.Module),
    )
    signature = str(inspect.signature(type(model).__call__)), model.__call__.__doc__, model.__doc__
    names = type(model).__name__, type(model).__module__, repr(model)
    described = model.apply(model.init(KEYS, X), X, method="describe")
    same = model == wrap(Network(features=4)), hash(model) == hash(wrap(Network(features=4)))
    return had, kinds, signature, names, described, [type(x) for x in described[:2]], same


def bound(wrap):
    model = wrap(Coder())
    variables = model.init(KEYS, X)
    bound = model.bind(variables)
    unbound, again = bound.unbind()
    code = bound.encode(X)
    methods = [model.apply(variables, X, method=m) for m in ("encode", Coder.encode)]
    counted = model.apply(variables, X, mutable=["state"], method=Coder.encode)
    return code, bound.decode(code), bound.variables, unbound.apply(again, X), methods, counted


def tabulated(wrap):
    model = wrap(Coder())
    table = model.tabulate(KEYS, X)
    return [word in table for word in ("Coder Summary", "down", "Dense", "Total Parameters: 72")]


def of_parts(wrap):
    model = Parts(wrap)
    variables = model.init(KEYS, X)
    return variables, model.apply(variables, X)


def as_a_part(wrap):
    inner = wrap(nn.Sequential([nn.Dense(8), nn.relu]))
    model = wrap(Network(inner=inner))
    variables = model.init(KEYS, X)
    sequence = nn.Sequential([wrap(nn.Dense(5)), nn.relu, wrap(nn.Dense(2))])
    return variables, model.apply(variables, X, train=False), sequence.init_with_output(KEYS, X)


def copied(wrap):
    model = wrap(Coder())
    variables = model.init(KEYS, X)
    others = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model), copy.copy(model)]
    return [(o == model, type(o) is type(model), o.apply(variables, X)) for o in others]


def trained(wrap):
    model = wrap(Network())
    variables = model.init(KEYS, X)
    params, rest = variables["params"], {"batch_stats": variables["batch_stats"]}
    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(params, rest, state):
        def loss_fn(params):
            y, changed = model.apply({"params": params, **rest}, X, rngs=KEYS, mutable=list(rest))
            return jnp.mean(y**2), changed

        (loss, rest_), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, state = optimizer.update(grads, state)
        return loss, optax.apply_updates(params, updates), rest_, state

    state, losses = optimizer.init(params), []
    for _ in range(3):
        loss, params, rest, state = step(params, rest, state)
        losses.append(loss)
    return jnp.stack(losses), rest


USES = [initialised, applied, attributes, bound, tabulated, of_parts, as_a_part, copied, trained]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@policies
def test_what_can_be_done_with_a_module(use, policy):
    tolerance = POLICIES[policy] * (3 if use is trained else 1)
    assert_like(use(wrapping(policy)), use(wrapping(None)), tolerance)


def test_a_part_may_have_a_policy_of_its_own():
    head = apply_policy(nn.Dense(3), "p=f32,c=f16,o=f32")
    model = apply_policy(nn.Sequential([nn.Dense(8), nn.relu, head, nn.Dense(2)]), "mixed_bfloat16")
    variables = model.init(KEYS, X)
    found = jmp_kit.numerics.audit(model.apply, variables, X)
    assert [p.lhs_dtype for p in found.products] == ["bfloat16", "float16", "bfloat16"]
    alone = nn.Sequential([nn.Dense(8), head])
    found = jmp_kit.numerics.audit(alone.apply, alone.init(KEYS, X), X)
    assert [p.lhs_dtype for p in found.products] == ["float32", "float16"]


def test_another_policy_takes_the_place_of_the_first_and_the_module_is_not_changed():
    module = nn.Dense(3)
    first = apply_policy(module, "p=f16,c=f16,o=f16")
    second = apply_policy(first, "p=f32,c=bf16,o=f32")
    for model, dtype in ((module, "float32"), (first, "float16"), (second, "bfloat16")):
        found = jmp_kit.numerics.audit(model.apply, model.init(KEYS, X), X)
        assert [p.lhs_dtype for p in found.products] == [dtype]
    assert len(type(second).__mro__) == len(nn.Dense.__mro__) + 1
    assert apply_policy(nn.Dense, "half") is apply_policy(nn.Dense, "half")


def test_what_parameters_begin_with_is_made_in_float32():
    def orthogonal(key, shape, dtype=jnp.float32):
        x = jax.random.normal(key, shape, dtype)
        return jnp.linalg.qr(x @ x.T @ x)[0]

    module = nn.Dense(6, kernel_init=orthogonal)
    model = apply_policy(module, "mixed_bfloat16")
    assert_like(model.init(KEYS, X), module.init(KEYS, X), 0)


def test_what_flax_makes_of_a_class_under_a_policy_keeps_what_that_does():
    rematerialised = nn.remat(apply_policy(nn.Dense, "half"))
    assert issubclass(apply_policy(rematerialised, "mixed_bfloat16"), rematerialised)
