"""What is looked up in a table that a segment makes, as a graph's edges do in its nodes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jmp_kit
from jmp_kit import autocast
from jmp_kit.casting import plans_of
from jmp_kit.casting.planning._plan import Part
from jmp_kit.programs import every_equation
from jmp_kit.programs._marks import is_backward, stack_of
from tests.casting.planning.test_passes import H200, layer_norm
from tests.casting.rewritten import farthest, gradient_error
from tests.casting.stream import norm, step_of
from tests.casting.zoo import mean_square


def graph(nodes, edges):
    """The nodes at both ends of edges."""
    return jax.random.randint(jax.random.key(7), (2, edges), 0, nodes)


def messages(params, x, ends):
    """Edges begin with a difference, and change by what is at their ends."""
    sources, targets = ends
    x = x @ params["in"] + params["bias"]
    edges = (x[sources] - x[targets]) @ params["edge"]
    rows = layer_norm(jnp.concatenate([x[sources], x[targets], edges], -1))
    edges = jnp.tanh(rows @ params["join"])
    x = x + jnp.zeros_like(x).at[targets].add(edges)
    return mean_square(x @ params["edge"])


def attending(params, x, ends):
    """Each node adds up what it lets through of its neighbours."""
    x = x @ params["in"] + params["bias"]
    neighbours = x[ends.reshape(len(x), -1)]
    return mean_square((jax.nn.sigmoid(neighbours) * neighbours).sum(1) @ params["edge"])


def args(nodes, edges, width, make=jnp.ones):
    """Weights, nodes and the ends of edges."""
    shapes = {"in": (width, width), "edge": (width, width), "join": (3 * width, width)}
    params = {name: make(shape) for name, shape in {**shapes, "bias": (width,)}.items()}
    return params, make((nodes, width)), graph(nodes, edges)


def forward_parts(loss_fn):
    """The parts of the forward pass of a train step."""
    found = plans_of(jax.value_and_grad(loss_fn), "mixed_bfloat16", *args(64, 1024, 128))
    parts = [s for plan in found for s in plan.steps if isinstance(s, Part)]
    return [p for p in parts if not any(is_backward(stack_of(e)) for e, _ in p.products)]


@pytest.mark.parametrize(("loss_fn", "is_stored"), [(messages, True), (attending, False)])
def test_tables_are_made_once_and_looked_up_where_they_are_taken(loss_fn, is_stored):
    """They are rounded if others take them as well, and not for it."""
    parts = forward_parts(loss_fn)
    pieces = [piece for part in parts for piece in part.segment]
    made = {v for piece in pieces for v in piece.results}
    lookups = [e for piece in pieces for e in piece.eqns if e.primitive.name == "gather"]
    assert made.isdisjoint(v for e in lookups for v in e.outvars)
    [table] = {e.invars[0] for e in lookups}
    assert table in made
    rounded = {v for part in parts for v, s in part.stored.items() if s.form}
    assert (table in rounded) == is_stored


def test_rows_that_are_joined_are_no_kernel_of_rows():
    """Which joins nothing: all of them would be written before it, in float32."""
    pieces = [piece for part in forward_parts(messages) for piece in part.segment]
    [norm] = [p for p in pieces if any(v.aval.shape == (1024, 384) for v in p.results)]
    assert norm.matrices is None
    assert not norm.apart
    assert any(v.aval.shape == (1024,) for piece in pieces for v in piece.results)


def test_halves_are_joined_as_halves():
    step = autocast(jax.value_and_grad(messages), "mixed_bfloat16")
    eqns = every_equation(jax.make_jaxpr(step)(*args(64, 1024, 128)).jaxpr)
    joins = [e.outvars[0].aval for e, _ in eqns if e.primitive.name == "concatenate"]
    assert {a.dtype for a in joins if a.shape == (1024, 384)} == {jnp.dtype(jnp.bfloat16)}


def drawn(loss_fn):
    """A loss of random weights and nodes, and these."""

    def normal(shape):
        return jax.random.normal(jax.random.key(len(shape)), shape) / np.sqrt(shape[0])

    params, x, ends = args(64, 1024, 128, normal)
    taken = {name: w for name, w in params.items() if name != "join" or loss_fn is messages}
    return lambda params, x: loss_fn(params, x, ends), taken, x


@pytest.mark.parametrize("loss_fn", [messages, attending])
def test_the_gradient_is_near_to_float32(loss_fn):
    assert gradient_error(*drawn(loss_fn)) <= 0.01


@pytest.mark.parametrize("loss_fn", [messages, attending])
def test_devices_that_share_the_nodes_learn_the_same(loss_fn):
    loss, params, x = drawn(loss_fn)
    gradient = jax.jit(autocast(jax.grad(loss), "mixed_bfloat16"))
    mesh = jax.make_mesh((8,), ("nodes",), axis_types=(AxisType.Auto,))
    shared = jax.device_put(x, NamedSharding(mesh, PartitionSpec("nodes")))
    assert farthest(gradient(params, shared), gradient(params, x)) <= 0.01


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
@pytest.mark.parametrize(
    ("name", "without", "loss_fn", "saved"),  # in bytes of an edge's numbers
    [
        ("planning._passes._Grouping._is_moved", lambda *_: False, messages, 15),
        ("planning._segment.looked_up", lambda _: set(), attending, 12),
        ("rewriting._sunk._SPREADS", set(), messages, 20),
    ],
)
def test_an_h200_moves_less(name, without, loss_fn, saved, monkeypatch):
    def moved():
        def given(shape):
            return jax.ShapeDtypeStruct(shape, jnp.float32)

        params, x, _ = args(4096, 65536, 256, given)
        ends = jax.ShapeDtypeStruct((2, 65536), jnp.int32)

        @functools.partial(autocast, policy="mixed_bfloat16")
        def step(params, x, ends):
            return step_of(lambda params, x: loss_fn(params, x, ends))(params, x)

        return jmp_kit.numerics.traffic(step, params, x, ends, target="h200").nbytes

    found = moved()
    monkeypatch.setattr(f"jmp_kit.casting.{name}", without)
    assert found <= moved() - saved * 65536 * 256


def of_experts(params, x):
    """A norm of a stream and of what two of three experts give."""
    x = x @ params["in"]
    words = x.reshape(-1, x.shape[-1])
    given = jnp.einsum("tw,ewh->eth", jax.nn.relu(words), params["experts"])
    places = [jnp.argsort(words[:, 0]), len(words) + jnp.argsort(words[:, 1])]
    weights = jax.nn.softmax(words[:, :2])[..., None]
    found = given.reshape(-1, x.shape[-1])[jnp.stack(places, 1)] * weights
    return mean_square(norm(x + found.sum(1).reshape(x.shape)) @ params["out"])


LOOKS_UP = "jmp_kit.casting.planning._passes._Grouping._is_looked_up"

WEIGHTS = {"in": (512, 512), "experts": (3, 512, 512), "out": (512, 512)}


def test_a_norm_of_what_is_looked_up_is_no_kernel_of_rows(monkeypatch):
    """XLA would write what is looked up before it."""
    weights = {name: jnp.ones(shape) for name, shape in WEIGHTS.items()}

    def rows():
        gradient = jax.value_and_grad(of_experts)
        [plan] = plans_of(gradient, "mixed_bfloat16", weights, jnp.ones((8, 8, 512)))
        pieces = [p for step in plan.steps if isinstance(step, Part) for p in step.segment]
        lookups = [e for p in pieces for e in p.moved if e.primitive.name == "gather"]
        found = {v for eqn in lookups for v in eqn.outvars}
        return [p for p in pieces if p.matrices and not found.isdisjoint(p.apart)]

    assert not rows()
    monkeypatch.setattr(LOOKS_UP, lambda *_: False)
    assert rows()


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_what_a_norm_looks_up_is_not_written_for_an_h200(monkeypatch):
    weights = {n: jax.ShapeDtypeStruct(shape, jnp.float32) for n, shape in WEIGHTS.items()}
    x = jax.ShapeDtypeStruct((8, 1024, 512), jnp.float32)

    def traffic():
        step = autocast(step_of(of_experts), "mixed_bfloat16")
        return jmp_kit.numerics.traffic(step, weights, x, target="h200")

    found = traffic()
    monkeypatch.setattr(LOOKS_UP, lambda *_: False)
    before = traffic()
    assert found.nbytes <= before.nbytes - 6 * 8192 * 512
