"""Finiteness and selection."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jmp_kit import all_finite, select_tree
from jmp_kit._tree import cast_like

FLOATS = [jnp.float16, jnp.bfloat16, jnp.float32]


@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf, jnp.nan])
@pytest.mark.parametrize("dtype", FLOATS)
def test_one_bad_element_anywhere_is_seen(bad, dtype):
    good = {"a": jnp.ones((3, 4), dtype), "b": (jnp.ones((), dtype), np.ones(2, np.float32))}
    assert all_finite(good)
    leaves, treedef = jax.tree.flatten(good)
    for i, leaf in enumerate(leaves):
        spoiled = jnp.asarray(leaf).at[(-1,) * leaf.ndim].set(bad)
        assert not all_finite(treedef.unflatten([*leaves[:i], spoiled, *leaves[i + 1 :]]))


def test_what_has_no_infinity_is_finite():
    tree = [1, True, None, "text", jax.random.key(0), jnp.arange(3), np.zeros(2, jax.dtypes.float0)]
    assert all_finite(tree)
    assert all_finite({})
    assert all_finite(jnp.zeros((0, 3)))
    assert not all_finite([float("nan")])
    assert not all_finite(jnp.asarray([1.0, 1j * jnp.inf]))


def test_all_finite_is_a_boolean_scalar_under_jit():
    result = jax.jit(all_finite)({"w": jnp.full(3, jnp.nan)})
    assert result.shape == ()
    assert result.dtype == jnp.bool_
    assert not result


def layers(number):
    """Of two matrices and a bias each, two of one shape."""
    one = {"first": jnp.ones((8, 8)), "second": jnp.ones((8, 8)), "bias": jnp.ones(8)}
    return {f"layer_{i}": one for i in range(number)}


@pytest.mark.parametrize(("number", "checks"), [(1, 3), (12, 3), (40, 6)])
def test_layers_are_checked_together(number, checks):
    jaxpr = jax.make_jaxpr(all_finite)(layers(number))
    assert str(jaxpr).count("reduce_and") == checks
    for spoiled in range(number):
        tree = layers(number)
        tree[f"layer_{spoiled}"] = tree[f"layer_{spoiled}"] | {"bias": jnp.full(8, jnp.nan)}
        assert not all_finite(tree)


def test_what_is_sharded_in_different_ways_is_checked_where_it_is():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, columns = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("x",), (None, "x")))
    tree = [
        {"first": jax.device_put(jnp.ones((8, 64)), rows), "second": jnp.ones((8, 64))}
        for _ in range(3)
    ]
    tree = [layer | {"second": jax.device_put(layer["second"], columns)} for layer in tree]
    text = jax.jit(all_finite).lower(tree).compile().as_text()
    assert "all-reduce" in text
    assert "all-to-all" not in text
    assert "all-gather" not in text


@pytest.mark.parametrize("chosen", [True, False])
def test_select_keeps_every_bit(chosen):
    bits = np.arange(2**16, dtype=np.uint16)
    a = {"x": jax.lax.bitcast_convert_type(jnp.asarray(bits), jnp.float16), "n": jnp.arange(3)}
    b = {"x": -a["x"], "n": a["n"] + 1}
    result = jax.jit(select_tree)(chosen, a, b)
    expected = a if chosen else b
    for got, want in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        assert got.dtype == want.dtype
        finite = np.isfinite(np.asarray(want))
        got, want = np.asarray(got)[finite], np.asarray(want)[finite]
        assert got.tobytes() == want.tobytes()


def test_select_takes_keys_numbers_and_equal_non_arrays():
    a = {"key": jax.random.key(1), "number": 2.0, "name": "relu", "none": None}
    b = {"key": jax.random.key(2), "number": 3.0, "name": "relu", "none": None}
    result = select_tree(np.bool_(False), a, b)
    assert result["number"] == 3.0
    assert result["name"] == "relu"
    assert jax.random.key_data(result["key"]).tolist() == jax.random.key_data(b["key"]).tolist()


@pytest.mark.parametrize(
    ("pred", "words"),
    [(jnp.ones(2, bool), r"pred must be one boolean .* bool\[2\]"), (1, r"int32\[\].*all_finite")],
)
def test_select_refuses_a_predicate_that_is_none(pred, words):
    with pytest.raises(ValueError, match=words):
        select_tree(pred, jnp.ones(2), jnp.zeros(2))


def test_select_names_the_leaf_that_differs():
    with pytest.raises(ValueError, match=r"\['w'\] is float32\[2\] in one .* bfloat16\[2\]"):
        select_tree(True, {"w": jnp.ones(2)}, {"w": jnp.ones(2, jnp.bfloat16)})
    with pytest.raises(ValueError, match=r"the whole tree\) is 'relu' in one .* 'gelu' in the"):
        select_tree(True, "relu", "gelu")


def test_cast_like_changes_floating_arrays_only():
    tree = {"f": jnp.ones(2, jnp.bfloat16), "i": jnp.arange(2), "s": "text"}
    like = {"f": np.ones(2, np.float32), "i": jnp.ones(2), "s": "text"}
    result = cast_like(tree, like)
    assert result["f"].dtype == jnp.float32
    assert result["i"].dtype == jnp.int32
    assert result["s"] == "text"
