"""What is kept for a backward pass, and what is computed again."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import jmp_kit
from jmp_kit import autocast
from jmp_kit.casting import plans_of
from jmp_kit.casting.planning._plan import Part
from jmp_kit.casting.reading._joined import sums_of_halves
from jmp_kit.casting.reading._parts import living
from jmp_kit.casting.recomputing._again import Value, kept
from jmp_kit.casting.recomputing._taken import ForwardPass
from jmp_kit.programs import every_equation, is_backward, stack_of
from tests.casting.stream import WEIGHTS, X, block, loss_through, norm, step_of
from tests.casting.test_by_hand import COMPILES_AS_TRACED
from tests.casting.zoo import SQUARE, mean_square

H200 = jmp_kit.numerics.TARGETS["h200"]


def product(nbytes=100, read=False):
    """A result of a product: it cannot be made again."""
    return Value(None, nbytes, True, False, read, False, 0)


def operand(*operands, nbytes=100, again=100):
    """What a product of the backward pass takes, and one of the forward pass took."""
    return Value(operands, nbytes, True, False, False, True, again)


def test_an_operand_is_kept_where_that_is_cheaper_than_to_write_it_again():
    values = {"x": product(read=True), "gelu": operand("x")}
    assert kept(values, price=0.9) == {"x", "gelu"}
    assert kept(values, price=1.1) == {"x"}
    values["gelu"] = operand("x", again=200)  # a norm
    assert kept(values, price=1.1) == {"x", "gelu"}


def test_what_nothing_else_needs_is_not_kept_beside_what_is_made_of_it():
    scores, weights = product(), operand("scores")._replace(read=True)
    assert kept({"scores": scores, "weights": weights}, price=1.2) == {"weights"}


def test_of_choices_that_cost_the_same_that_is_kept_which_is_made_last():
    """Less of the forward pass is computed again."""
    terms = {name: product() for name in "ab"}
    total = Value(["a", "b"], 200, True, False, True, False, 0)
    assert kept({**terms, "total": total}, price=1.0) == {"total"}
    total = total._replace(nbytes=201)
    assert kept({**terms, "total": total}, price=1.0) == {"a", "b"}


def test_nothing_is_rounded_only_to_be_kept():
    inner = Value(["x"], 100, False, True, True, False, 0)
    assert kept({"x": product(), "inner": inner}, price=0.0) == {"x"}


def test_small_statistics_are_kept():
    mean = Value(None, 1, True, False, True, False, 0)
    normed = Value(["x", "mean"], 100, False, True, True, False, 0)
    assert kept({"x": product(), "mean": mean, "normed": normed}, price=1e3) == {"x", "mean"}


def test_nothing_is_needed_of_nothing():
    assert kept({}, price=1.0) == set()


def cost(values, keep, price):
    """Of this choice; infinite if something that is needed is not there."""
    made = set()

    def make(name):
        if name in keep or name in made:
            return
        made.add(name)
        for other in values[name].operands or ():
            make(other)

    for name, value in values.items():
        if value.read or value.multiplied:
            make(name)
    if any(values[name].operands is None for name in made):
        return float("inf")
    if any(values[name].is_rounded for name in keep):
        return float("inf")
    moved = sum(
        (price + (not v.is_stored) + (v.read or not v.multiplied)) * v.nbytes
        for v in map(values.__getitem__, keep)
    )
    return moved + sum(values[name].nbytes_again for name in made)


@st.composite
def networks(draw):
    names = range(draw(st.integers(1, 6)))
    values = {}
    for name in names:
        before = [n for n in range(name) if draw(st.booleans())]
        is_source = not before or draw(st.booleans())
        multiplied = draw(st.booleans())
        nbytes = draw(st.integers(1, 50))
        values[name] = Value(
            operands=None if is_source else before,
            nbytes=nbytes,
            is_stored=draw(st.booleans()),
            is_rounded=not is_source and draw(st.booleans()),
            read=draw(st.booleans()),
            multiplied=multiplied,
            nbytes_again=nbytes * draw(st.integers(1, 2)) if multiplied else 0,
        )
    return values


@settings(deadline=None, max_examples=100)
@given(networks(), st.sampled_from([0.0, 0.7, 1.2, 10.0]))
def test_no_other_choice_is_cheaper(values, price):
    choices = itertools.chain.from_iterable(
        itertools.combinations(values, n) for n in range(len(values) + 1)
    )
    best = min(cost(values, set(choice), price) for choice in choices)
    assert cost(values, kept(values, price), price) == pytest.approx(best, rel=1e-6)


def temporary(fun, *args):
    return jax.jit(fun).lower(*args).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.skipif(not COMPILES_AS_TRACED, reason="this XLA merges what is made again")
def test_the_price_says_how_much_memory():
    def loss_fn(weights, x):
        for w in weights:
            x = x + jax.nn.gelu(x @ w) @ w.T
        return mean_square(x @ weights[0])

    args = [jnp.eye(64)] * 6, jnp.ones((2048, 64))
    prices = ["most", 1.2, 0.5, False]
    least, default, more, every = (
        temporary(autocast(step_of(loss_fn), "bfloat16", recompute=price), *args)
        for price in prices
    )
    assert least <= default < more < every


@pytest.mark.parametrize("wrong", ["all", -1.0, float("nan"), float("inf")])
def test_a_price_that_is_none(wrong):
    with pytest.raises(ValueError, match=r'recompute is .*"most"'):
        autocast(LOSS, "bfloat16", recompute=wrong)


LOSS = loss_through(block)


def count(fun, name, *args):
    jaxpr = jax.make_jaxpr(fun)(*args).jaxpr
    return sum(eqn.primitive.name == name for eqn, _ in every_equation(jaxpr))


def test_exponentials_of_a_softmax_are_computed_once():
    def loss_fn(w, x):
        return mean_square(jax.nn.softmax(x @ w[0]) @ w[1])

    args = [jnp.ones((16, 64)), jnp.ones((64, 16))], X
    grad = jmp_kit.grad(autocast(loss_fn, "bfloat16"), jmp_kit.NoOpLossScale())
    assert count(grad, "exp", *args) == count(jax.grad(loss_fn), "exp", *args) == 1
    assert count(jax.grad(autocast(loss_fn, "bfloat16")), "exp", *args) == 2


@pytest.mark.parametrize("axis", [-1, 1])
def test_a_maximum_is_kept_where_another_pass_would_find_it_again(axis):
    """Along rows it is one with what is made of it; others are read for it alone."""

    def loss_fn(w, x):
        weights = jax.nn.softmax(x @ w, axis)
        return mean_square((weights * jnp.sin(x)).sum(axis, keepdims=True) * x @ w)

    grad = autocast(jax.grad(loss_fn), "bfloat16")
    times = count(grad, "reduce_max", jnp.ones((16, 16)), jnp.ones((64, 32, 16)))
    assert (times == 1) == (axis == 1)


@pytest.mark.parametrize("relu", [jax.nn.relu, lambda x: jnp.where(x > 0, jnp.maximum(x, 0), 0)])
def test_a_relu_is_kept_as_products_take_it(relu):
    """Neither where it is positive, nor what it is the positive part of."""

    def loss_fn(w, x):
        return mean_square(relu(relu(x @ w[0]) @ w[1]) @ w[0])

    args = [jnp.eye(64)] * 2, jnp.ones((512, 64))
    [plan] = plans_of(jax.grad(loss_fn), "mixed_bfloat16", *args)
    parts = [step for step in plan.steps if isinstance(step, Part)]
    masks = [v for part in parts for v in part.results if v.aval.dtype == bool]
    assert not masks
    np.testing.assert_allclose(
        *(
            np.ravel(jnp.stack(jax.jit(f)(*args)))
            for f in (autocast(jax.grad(loss_fn), "mixed_bfloat16"), jax.grad(loss_fn))
        ),
        rtol=0.02,
    )


def test_what_the_forward_pass_asks_of_an_operand_stays_as_it_was():
    """A float16 cannot tell a number this small from zero."""

    def loss_fn(x):
        h = 1e-12 * (x @ jnp.eye(16))
        return jnp.sum(jax.nn.relu(h) @ jnp.eye(16)) + jnp.sum(jnp.where(h > 0, 1.0, 0.0))

    given = jnp.ones((8, 16))
    half = jmp_kit.value_and_grad(autocast(loss_fn, "mixed_float16"), jmp_kit.StaticLossScale(2.0))
    assert half(given)[0] == 8 * 16


@pytest.mark.parametrize("x", [-1.0, 0.0, 1e-30, 1.0])
def test_the_gradient_of_a_relu_at(x):
    """Where float32's is: bfloat16 has no fewer exponents."""

    def loss_fn(x):
        return jnp.sum(jax.nn.relu(x @ jnp.eye(16)) @ jnp.eye(16))

    given = jnp.full((8, 16), x)
    half = jmp_kit.grad(autocast(loss_fn, "mixed_bfloat16"), jmp_kit.NoOpLossScale())
    np.testing.assert_array_equal(half(given), jax.grad(loss_fn)(given))


def after(first, second):
    (decay, change), (next_decay, next_change) = first, second
    return decay * next_decay, change * next_decay + next_change


def through_a_scan(weights, x):
    """A state space, its states found by an associative scan."""
    x = x @ weights["in"]
    decay = jax.nn.sigmoid(x @ weights["decay"])[..., None] * jnp.linspace(0.5, 1, 4)
    change = x[..., None] * (x @ weights["enter"])[..., None, :]
    _, state = lax.associative_scan(after, (decay, change), axis=1)
    return mean_square(jnp.einsum("btis,bts->bti", state, x @ weights["leave"]) @ weights["in"])


def forward_parts(fun, *args, **options):
    """Those before the first product of the backward pass."""
    [plan] = plans_of(fun, "mixed_bfloat16", *args, **options)
    parts = [step for step in plan.steps if isinstance(step, Part)]
    late = [any(is_backward(stack_of(e)) for e, _ in part.products) for part in parts]
    return parts[: late.index(True)]


def test_an_associative_scan_keeps_what_it_writes_in_any_case():
    """In float32, as XLA writes it; the last states as the product takes them."""
    weights = {"in": (16, 16), "decay": (16, 16), "enter": (16, 4), "leave": (16, 4)}
    weights = {name: jnp.ones(shape) for name, shape in weights.items()}

    def kept_of(recompute):
        args = weights, jnp.ones((64, 64, 16))
        parts = forward_parts(jax.grad(through_a_scan), *args, recompute=recompute)
        results = [(part, v) for part in parts for v in part.results if v.aval.shape[2:] == (16, 4)]
        whole = [v.aval.shape[1] == 64 for _, v in results]
        dtypes = [part.stored[v].dtype == jnp.float32 for part, v in results]
        assert dtypes == [not is_whole for is_whole in whole]
        return [v.aval.shape for _, v in results]

    assert (64, 8, 16, 4) in kept_of(1.2)
    assert (64, 32, 16, 4) not in kept_of(1.2)  # what is cut first is cut where it is taken
    assert len(kept_of(1.2)) > len(kept_of("most"))


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(H200.missing), reason=H200.missing or "")
def test_what_an_associative_scan_cuts_first_is_not_kept_for_an_h200(monkeypatch):
    sizes = {"in": (512, 512), "decay": (512, 512), "enter": (512, 4), "leave": (512, 4)}
    weights = {name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()}
    x = jax.ShapeDtypeStruct((16, 1024, 512), jnp.float32)

    def nbytes():
        step = autocast(step_of(through_a_scan), "mixed_bfloat16")
        return jmp_kit.numerics.traffic(step, weights, x, target="h200").nbytes

    found = nbytes()
    monkeypatch.setattr(ForwardPass, "_is_written_again", lambda self, v: v in self.cut)
    assert found <= nbytes() - 4 * 4 * 16 * 1024 * 512


SUMS = {
    "of two": lambda a, b, _: a + b,
    "turned": lambda a, b, _: (a + b).swapaxes(0, 1),
    "of what is turned": lambda a, b, _: a.swapaxes(0, 1) - b.swapaxes(0, 1),
    "of three": lambda a, b, c: a + b + c,
    "of what is scaled, too": lambda a, b, c: a + b + c * jnp.arange(32.0),
}


@pytest.mark.parametrize("name", SUMS)
def test_of_what_products_give_a_sum_is_kept_in_place_of_its_terms(name):
    """It is no less exact than they are."""

    def loss_fn(w, x):
        y = SUMS[name](x @ w[0], x @ w[1], x @ w[2])
        return mean_logits(norm(y) @ w[2])

    parts = forward_parts(jax.grad(loss_fn), [jnp.ones((32, 32))] * 3, jnp.ones((8, 64, 32)))
    halves = [s.eqn.primitive.name for part in parts for s in part.stored.values() if s.form]
    assert halves == ["sub" if "what is turned" in name else "add", "mul"]  # the norm of it


def test_sums_of_halves_are_of_what_products_give_however_it_is_moved():
    def segment(a, b, c, d):
        first = a.T + b.T
        second = first - c * 2
        return first, second.reshape(-1) + d.reshape(-1), jnp.tanh(a) + b, c + d

    jaxpr = jax.make_jaxpr(segment)(*[jnp.ones((4, 4))] * 4).jaxpr
    found = sums_of_halves(jaxpr.eqns, {*jaxpr.invars[:2]})  # which products give
    totals = [e.outvars[0] for e in jaxpr.eqns if e.primitive.name in ("add", "sub")]
    assert found == set(totals[:3])


def mean_logits(x):
    """Large ones, so that nothing else is let go of where most memory is taken."""
    return jnp.mean(jax.nn.logsumexp(x @ jnp.ones((x.shape[-1], 4096)), -1))


@pytest.mark.parametrize("is_joined", [True, False])
def test_what_a_gate_lets_through_is_kept_where_its_cotangents_are_joined(is_joined):
    """XLA makes of both, cut from one product, other kernels: it would be read once more."""

    def loss_fn(w, x):
        if is_joined:
            up, gate = jnp.split(x @ w["in"], 2, -1)
        else:
            up, gate = (x @ half for half in jnp.split(w["in"], 2, -1))
        return mean_logits(jnp.tanh(up) * jax.nn.sigmoid(gate) @ w["out"])

    args = {"in": jnp.ones((64, 256)), "out": jnp.ones((128, 64))}, jnp.ones((512, 64))
    parts = forward_parts(jax.grad(loss_fn), *args)
    made = [
        v for part in parts for e in [e for p in part.segment for e in p.eqns] for v in e.outvars
    ]
    kept = [v.aval.shape for part in parts for v in part.results if v in made]
    assert ((512, 128) in kept) == is_joined


def layers(width):
    def loss_fn(w, x):
        for up, down in zip(w["up"], w["down"], strict=True):
            x = x + jax.nn.gelu(x @ up) @ down
        return jnp.mean(jax.nn.logsumexp(x @ w["head"], -1))

    weights = {"up": [jnp.ones((64, 256))] * 4, "down": [jnp.ones((256, 64))] * 4}
    return loss_fn, {**weights, "head": jnp.ones((64, width))}, jnp.ones((1024, 64))


@pytest.mark.parametrize(("width", "count"), [(16, 1), (4096, 0)])
def test_what_is_there_at_the_peak_in_any_case_is_kept(width, count):
    """The last layer's GELU; but not beside large logits, which are let go of before it."""
    loss_fn, *args = layers(width)
    parts = forward_parts(jax.grad(loss_fn), *args)
    pieces = [piece for part in parts for piece in part.segment]
    made = [v for piece in pieces for e in piece.eqns for v in e.outvars]
    kept = [v for part in parts for v in part.results if v in made and v.aval.shape == (1024, 256)]
    assert len(kept) == count


@pytest.mark.skipif(not COMPILES_AS_TRACED, reason="this XLA merges what is made again")
def test_what_is_there_at_the_peak_costs_no_memory(monkeypatch):
    loss_fn, *args = layers(16)
    found = temporary(autocast(step_of(loss_fn), "mixed_bfloat16"), *args)
    monkeypatch.setattr("jmp_kit.casting.recomputing._repeat.there_at_the_peak", lambda *_: set())
    assert found <= 1.01 * temporary(autocast(step_of(loss_fn), "mixed_bfloat16"), *args)


def test_what_nothing_is_made_of_is_left_out():
    """A mask, say, that the backward pass makes again; but not what is printed."""
    eqns = jax.make_jaxpr(lambda x: (jnp.exp(x), jnp.sin(jnp.cos(x)))[1])(1.0).eqns
    [result] = eqns[-1].outvars
    assert living([eqns[:1], eqns[1:]], [result]) == [eqns[1:]]
    printed = jax.make_jaxpr(lambda x: jax.debug.print("{}", jnp.exp(x)))(1.0).eqns
    assert living([printed], []) == [printed]


def test_what_is_looked_up_is_looked_up_again():
    places = jnp.arange(4096) % 64

    def loss_fn(w, x):
        return mean_logits(jnp.sin((x @ w)[places]) @ w)

    forward = forward_parts(jax.grad(loss_fn), jnp.eye(16), jnp.ones((64, 16)))
    made = {v: e for part in forward for p in part.segment for e in p.eqns for v in e.outvars}
    assert "gather" in [eqn.primitive.name for eqn in made.values()]
    assert made.keys().isdisjoint(v for part in forward for v in part.results)


def test_a_transposed_product_is_turned_round():
    def loss_fn(w, x):
        return mean_square(jnp.einsum("bik,kjh->bijh", jnp.tanh(x @ w[0]), w[1]))

    args = [SQUARE[0], jnp.ones((16, 2, 3))], jnp.ones((2, 8, 16))
    half = autocast(jax.grad(loss_fn), "bfloat16")
    found, wanted = (
        jax.jit(fun).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
        for fun in (half, jax.grad(loss_fn))
    )
    assert found.count("stablehlo.transpose") < wanted.count("stablehlo.transpose")
    for a, b in zip(half(*args), jax.grad(loss_fn)(*args), strict=True):
        assert a.shape == b.shape
        assert jnp.abs(a - b).max() < 0.02 * jnp.abs(b).max()


def test_a_transposed_weight_has_its_gradient_as_the_product_gives_it():
    """Transposed by JAX and by the derivative of the transposition: not at all."""

    def loss_fn(table, x):
        return mean_square(jnp.tanh(x) @ table.T)

    args = jnp.ones((5, 3)), jnp.ones((4, 3))
    half = autocast(jax.grad(loss_fn), "mixed_bfloat16")
    assert count(jax.grad(loss_fn), "transpose", *args) == 3
    assert count(half, "transpose", *args) == 1
    np.testing.assert_allclose(half(*args), jax.grad(loss_fn)(*args), rtol=0.02)


def test_a_loop_casts_its_weights_once():
    def loss_fn(w, x):
        return mean_square(lax.scan(lambda h, _: (jnp.tanh(h @ w[0]), h @ w[1]), x, None, 5)[1])

    def casts_within(fun, *args):
        scans = [e for e in jax.make_jaxpr(fun)(*args).eqns if e.primitive.name == "scan"]
        assert scans
        return [
            e
            for scan in scans
            for e in scan.params["jaxpr"].eqns
            if e.primitive.name == "convert_element_type"
            and e.invars[0].aval.shape == (16, 16)
            and e.outvars[0].aval.dtype == jnp.bfloat16
        ]

    assert not casts_within(autocast(jax.grad(loss_fn), "bfloat16"), SQUARE, X)
    # From outside, the derivative would be summed up in half.
    assert casts_within(autocast(loss_fn, "bfloat16"), SQUARE, X)


def test_what_a_checkpoint_computes_again_is_not_computed_a_third_time():
    def loss_fn(w, x):
        layer = jax.checkpoint(lambda x, up, down: jnp.tanh(jnp.sin(x @ up) @ down))
        for up, down in zip(w[::2], w[1::2], strict=True):
            x = layer(x, up, down)
        return mean_square(x)

    half = autocast(jax.grad(loss_fn), "bfloat16")
    assert count(half, "sin", WEIGHTS, X) == count(jax.grad(loss_fn), "sin", WEIGHTS, X)
