import json

import jax
import jax.numpy as jnp
import pytest

from jmp_kit import numerics

PARAMS = {"up": jnp.ones((8, 32)), "down": jnp.ones((32, 8)), "head": jnp.ones((8, 4))}
X = jnp.ones((16, 8))

pytestmark = pytest.mark.filterwarnings("ignore:Gradients are computed in float16")


def loss_fn(params, x):
    with jax.named_scope("stem"):
        x = x @ params["head"] @ params["head"].T
    with jax.named_scope("mlp"):
        x = x + jnp.tanh(x @ params["up"]) @ params["down"]
    return jnp.mean((jnp.sin(x) @ params["head"]) ** 2)


def step(params, x):
    """Two steps, written one after the other."""
    for _ in range(2):
        grads = jax.grad(loss_fn)(params, x)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return params


def test_activations():
    found = numerics.plan(loss_fn, "mixed_bfloat16", PARAMS, X)
    rows = [(v.path, v.shape, v.dtype, v.why, v.nbytes) for v in found.values]
    assert rows == [
        ("mlp", (16, 32), "bfloat16", "products take it", 16 * 32 * 2),
        ("", (16, 8), "bfloat16", "products take it", 16 * 8 * 2),
    ]
    assert found.state == ()
    assert all(v.source.startswith("test_plan.py:") for v in found.values)


def test_state():
    found = numerics.plan(step, "mixed_float16", PARAMS, X)
    updated = [v for v in found.state if v.why == "state"]
    assert {v.shape for v in updated} == {w.shape for w in PARAMS.values()}
    assert {v.shape for v in updated if v.primitive == "sub"} == {v.shape for v in updated}
    assert any(v.backward for v in found.values)


def test_a_loop():
    def solve(w, y):
        return jax.lax.fori_loop(0, 9, lambda _, y: y + 0.1 * jnp.tanh(y @ w), y) @ w

    [carried, made] = numerics.plan(solve, "mixed_float16", jnp.eye(8), X).values
    assert (carried.why, carried.dtype) == ("carried by a loop, state", "float32")
    assert (made.why, made.dtype, made.primitive) == ("state", "float32", "add")


def test_rules_and_abstract_arguments():
    abstract = jax.eval_shape(lambda: PARAMS), jax.ShapeDtypeStruct(X.shape, X.dtype)
    every = numerics.plan(loss_fn, "mixed_bfloat16", *abstract)
    fewer = numerics.plan(loss_fn, "mixed_bfloat16", *abstract, rules={"head": "float32"})
    assert len(fewer.values) < len(every.values)
    with pytest.raises(ValueError, match="matches no product"):
        numerics.plan(loss_fn, "mixed_bfloat16", *abstract, rules={"tail": "float32"})


def test_printed():
    found = numerics.plan(step, "mixed_bfloat16", PARAMS, X)
    first, heading, *rows = str(found).splitlines()
    assert first.startswith(f"{len(found.values) - len(found.state)} values stored in half")
    assert heading.split()[:2] == ["stored", "in"]
    [second] = (i for i, row in enumerate(rows) if row.startswith(f"{len(found.parts)} parts"))
    values, (heading, *parts) = rows[:second], rows[second + 1 :]
    assert heading.split()[:2] == ["pass", "times"]
    assert sum(int(row.split()[3]) for row in values) == len(found.values)  # behind "131 kB"
    assert sum(int(row.split()[1]) for row in parts) == len(found.parts)
    assert json.loads(json.dumps(found.to_dict()))["values"][0]["dtype"] == "bfloat16"


def test_layers_are_printed_once():
    """However deep a network is."""

    def printed(layers):
        def deep(params, x):
            for i in range(layers):
                with jax.named_scope(f"layer_{i}"):
                    x = x + jnp.tanh(x @ params) @ params
            return jnp.mean(x**2)

        params, x = jnp.ones((64, 64)) / 64, jnp.ones((128, 64))
        return str(numerics.plan(jax.grad(deep), "mixed_bfloat16", params, x))

    assert len(printed(24).splitlines()) == len(printed(12).splitlines())
    assert "layer_{0..23}" in printed(24)


def test_parts_of_a_gradient():
    """What its backward pass takes from memory, and what it computes again."""
    found = numerics.plan(jax.grad(loss_fn), "mixed_bfloat16", PARAMS, X)
    forward, backward = ([p for p in found.parts if p.backward is flag] for flag in (False, True))
    assert [p.path for p in forward if p.products][-2:] == ["mlp", ""]
    assert sum(len(p.products) for p in forward) == 5
    assert sum(len(p.products) for p in backward) == 9  # of the first, none by the input
    # Half results of products, what they are made of, and what is there at the peak in any case.
    values = 2 * 16 * 32 + 5 * 16 * 8 + 2 * 16 * 4
    assert 0 < found.kept == sum(p.kept for p in forward) <= 2 * values
    assert sum(p.again for p in backward) > 0 == sum(p.again for p in forward)
    assert all(p.products == ("dot_general bfloat16",) * len(p.products) for p in found.parts)


def test_what_the_forward_pass_alone_takes_is_not_kept():
    """Of a scan of layers, what each round takes, and what its first product gives."""

    def scanned(params, x):
        def layer(x, w):
            return jnp.tanh(x @ w) @ w + x @ w, None

        return jnp.mean(jax.lax.scan(layer, x @ params[0], params)[0] ** 2)

    params, x = jnp.ones((4, 64, 64)), jnp.ones((32, 64))
    found = numerics.plan(jax.grad(scanned), "mixed_bfloat16", params, x)
    assert found.kept == 2 * (2 * 32 * 64)
    # JAX's backward pass, of the loss alone, takes what products take.
    assert numerics.plan(scanned, "mixed_bfloat16", params, x).kept > 0


def test_parts_of_a_loss_and_of_a_loop():
    """What a backward pass would take that JAX makes; what is inside a loop, once."""
    found = numerics.plan(loss_fn, "mixed_bfloat16", PARAMS, X)
    assert not any(p.backward for p in found.parts)
    assert found.kept > 0

    def scanned(w, x):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, 5)[0].sum()

    [part, *_] = numerics.plan(scanned, "mixed_bfloat16", jnp.eye(8), X).parts
    assert part.products == ("dot_general bfloat16",)


def test_nothing_to_store():
    assert numerics.plan(loss_fn, "float32", PARAMS, X).values == ()
    assert "0 values" in str(numerics.plan(lambda x: x + 1, "mixed_float16", X))
