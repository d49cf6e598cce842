"""Small programs that use each corner of lax once: autocast fails on none of them."""

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.experimental import pallas

from jmp_kit import autocast, full_precision
from tests.casting.test_zoo import products_of
from tests.compiling import POLICIES

pytestmark = pytest.mark.usefixtures("standard_promotion")

X = jax.random.normal(jax.random.key(0), (6, 6))
W = jax.random.normal(jax.random.key(1), (6, 6)) / 2.5


def positive(w):
    return jnp.eye(6) * 3 + w @ w.T


def streaming_softmax(w, x):
    def block(carry, keys):
        peak, total, mean = carry
        scores = x @ keys.T
        new = jnp.maximum(peak, scores.max(-1))
        weights, decay = jnp.exp(scores - new[:, None]), jnp.exp(peak - new)
        return (new, total * decay + weights.sum(-1), mean * decay[:, None] + weights @ keys), None

    start = jnp.full(6, -jnp.inf), jnp.zeros(6), jnp.zeros((6, 6))
    (_, total, mean), _ = lax.scan(block, start, jnp.stack([w, x]))
    return mean / total[:, None]


def fourier_operator(w, x):
    """One layer of an FNO: complex values between two products."""
    modes = jnp.fft.rfft(x @ w, axis=0) * jnp.arange(1.0, 5.0)[:, None]
    return jnp.tanh(jnp.fft.irfft(modes, n=6, axis=0)) @ w


def through_a_reference(w, x):
    box = jax.new_ref(jnp.zeros((6, 6)))
    box[...] = jnp.tanh(x @ w)
    box[0, :] += 1.0
    return jax.freeze(box) @ w


@jax.custom_batching.custom_vmap
def with_a_rule_for_vmap(x, w):
    return jnp.tanh(x @ w)


TAKEN = []  # how many times the rule was


@with_a_rule_for_vmap.def_vmap
def _(size, batched, x, w):
    TAKEN.append(tuple(batched))
    x = x if batched[0] else jnp.broadcast_to(x, (size, *x.shape))
    w = w if batched[1] else jnp.broadcast_to(w, (size, *w.shape))
    return jnp.tanh(jnp.einsum("nij,njk->nik", x, w)), True


def scan(body, start, n):
    return lax.scan(lambda c, i: (body(c, i), None), start, jnp.arange(n))[0]


def _behind_one_barrier(h, scale):
    h, scale = lax.optimization_barrier((h, scale))
    return h * scale.reshape(-1)


PROGRAMS = {
    "fft": lambda w, x: jnp.abs(jnp.fft.fft(x @ w)),
    "fourier_operator": fourier_operator,
    "reference": through_a_reference,
    "custom_vmap": lambda w, x: with_a_rule_for_vmap(x, w) @ w,
    "composite": lambda w, x: lax.composite(lambda a, b: a @ b, "mine.dot")(x, w) @ w,
    "root": lambda w, x: lax.custom_root(
        lambda y: y + 0.1 * jnp.tanh(y @ w) - x,
        x,
        lambda f, start: lax.fori_loop(0, 20, lambda _, y: y - f(y), start),
        lambda g, y: jnp.linalg.solve(
            jax.jacobian(lambda v: g(v).ravel())(y).reshape(36, 36), y.ravel()
        ).reshape(6, 6),
    ),
    "complex": lambda w, x: jnp.abs((x @ w).astype(jnp.complex64) @ (w + 1j)),
    "solve": lambda w, x: jnp.linalg.solve(positive(w), x @ w),
    "inverse": lambda w, x: jnp.linalg.inv(positive(w)) @ x,
    "svd": lambda w, x: jnp.linalg.svd(x @ w, compute_uv=False),
    "eigh": lambda w, x: jnp.linalg.eigh(w @ w.T)[0],
    "cholesky": lambda w, x: jnp.linalg.cholesky(positive(w)) @ x,
    "linear_solve": lambda w, x: lax.custom_linear_solve(
        lambda v: positive(w) @ v, x[0], lambda _, b: jnp.linalg.solve(positive(w), b), None, True
    ),
    "while": lambda w, x: lax.while_loop(
        lambda c: (c[1] < 3) & (jnp.sum(c[0] @ w) > -1e9),
        lambda c: (jnp.tanh(c[0] @ w), c[1] + 1),
        (x, 0),
    )[0],
    "vmapped_while": lambda w, x: jax.vmap(
        lambda row: lax.while_loop(
            lambda c: jnp.sum(c**2) < 40, lambda c: c + jnp.abs(jnp.tanh(c @ w)) + 0.5, row
        )
    )(x),
    "cond_in_scan": lambda w, x: scan(
        lambda c, i: lax.cond(i % 2 == 0, lambda c: jnp.tanh(c @ w), lambda c: c * 0.5, c), x, 4
    ),
    "scan_in_scan": lambda w, x: scan(lambda c, _: scan(lambda d, _: jnp.tanh(d @ w), c, 2), x, 3),
    "unused_carry": lambda w, x: scan(lambda c, _: (c[0] @ w, c[1]), (x, jnp.ones(3)), 2)[1],
    "accumulating": lambda w, x: scan(lambda c, i: c + x @ w * i, jnp.zeros((6, 6)), 4),
    "streaming_softmax": streaming_softmax,
    "associative_scan": lambda w, x: lax.associative_scan(jnp.matmul, jnp.stack([w, w, x, w])),
    "map": lambda w, x: lax.map(lambda row: jnp.tanh(row @ w), x),
    "vmap": lambda w, x: jax.vmap(lambda row: jax.nn.softmax(row @ w) @ w)(x),
    "einsum": lambda w, x: jnp.einsum("ij,jk,kl->il", x, w, x),
    "scalars": lambda w, x: jnp.dot(x[0], w[0]) * jnp.dot(jnp.float32(2), x[0, 0]),
    "sort": lambda w, x: jnp.sort(x @ w, axis=0) @ w,
    "top_k": lambda w, x: lax.top_k(x @ w, 3)[0] @ w[:3],
    "cumsum": lambda w, x: jnp.cumsum(x @ w, 0) @ w,
    "cumlogsumexp": lambda w, x: lax.cumlogsumexp(x @ w) @ w,
    "gather": lambda w, x: (x @ w)[jnp.argsort(x[:, 0])] @ w,
    "scatter": lambda w, x: (x @ w).at[jnp.array([0, 2])].add(1.0) @ w,
    "dynamic_update_slice": lambda w, x: lax.dynamic_update_slice(x @ w, x[:2, :2], (1, 1)) @ w,
    "dynamic_slice": lambda w, x: lax.dynamic_slice(x @ w, (jnp.argmax(x[0]) // 4, 0), (2, 6)) @ w,
    "reduce_window": lambda w, x: (
        lax.reduce_window(x @ w, -jnp.inf, lax.max, (2, 2), (1, 1), "SAME") @ w
    ),
    "stop_gradient": lambda w, x: lax.stop_gradient(x @ w) * (x @ w),
    "grad": lambda w, x: jax.grad(lambda x: jnp.sum(jnp.tanh(x @ w)))(x) @ w,
    "hessian": lambda w, x: jax.hessian(lambda row: jnp.sum(jnp.tanh(row @ w) @ w))(x[0]),
    "linearize": lambda w, x: jax.linearize(lambda a: jnp.tanh(a @ w), x)[1](x),
    "vjp": lambda w, x: jax.vjp(lambda a: jnp.tanh(a @ w), x)[1](x)[0],
    "clip": lambda w, x: jnp.clip(x @ w, -1, 1) @ w,
    "special": lambda w, x: jax.scipy.special.i0e(jax.scipy.special.erf(x @ w)) @ w,
    "integers": lambda w, x: jnp.argsort(x).astype(jnp.int32) @ jnp.ones((6, 6), jnp.int32) * 1.0,
    "half_by_hand": lambda w, x: (
        (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(x.dtype) @ w
    ),
    "random": lambda w, x: (
        jnp.where(jax.random.bernoulli(jax.random.key(1), 0.5, (6, 6)), x @ w, 0) @ w
    ),
    "switch": lambda w, x: lax.switch(
        jnp.argmax(x[0]) % 3, [lambda a: a @ w, lambda a: a, lambda a: (a @ w) @ w], x @ w
    ),
    "remat": lambda w, x: jax.checkpoint(lambda a: jnp.tanh(a @ w))(x) @ w,
    "static": lambda w, x: jax.jit(lambda a, n: a @ w * n, static_argnums=1)(x, 2),
    "attention": lambda w, x: jax.nn.dot_product_attention(*(a[None, :, None] for a in (x, w, x))),
    "barrier": lambda w, x: lax.optimization_barrier(x @ w) @ w,
    "barrier beside": lambda w, x: _behind_one_barrier(x @ w, 2 * jnp.ones((2, w.shape[1] // 2))),
    "callback": lambda w, x: (
        jax.pure_callback(
            lambda a: np.asarray(a) * 2,
            jax.ShapeDtypeStruct((6, 6), jnp.float32),
            lax.stop_gradient(x @ w),
        )
        @ w
    ),
    "named": lambda w, x: jax.ad_checkpoint.checkpoint_name(jnp.tanh(x @ w), "h") @ w,
}

# By JAX itself; a reference only where JAX takes the derivative of the loss.
NOT_REVERSIBLE = {"while", "vmapped_while", "custom_vmap", "composite"}


@pytest.mark.filterwarnings("ignore:Gradients are computed in float16|A product asks for")
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("policy", POLICIES)
def test_it_runs_and_is_right(name, policy):
    tolerance = {"mixed_bfloat16": 0.12, "mixed_float16": 0.03}[policy]

    def fun(w, x):
        return jnp.sum(PROGRAMS[name](w, x) ** 2)

    pairs = [(autocast(fun, policy), fun)]
    if name not in NOT_REVERSIBLE:
        pairs.append((jax.grad(autocast(fun, policy)), jax.grad(fun)))
        pairs.append((autocast(jax.grad(fun), policy), jax.grad(fun)))
    # As one program, which compiles in half the time.
    for got, want in jax.jit(lambda *a: [(half(*a), full(*a)) for half, full in pairs])(W, X):
        assert got.dtype == want.dtype
        assert jnp.linalg.norm(got - want) <= tolerance * (jnp.linalg.norm(want) + 1e-6)


def test_what_it_does_not_know_is_not_passed_over_in_silence():
    def kernel(x, w, out):
        out[...] = jnp.dot(x[...], w[...])

    def fun(w, x):
        with jax.named_scope("solver"):
            shape = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), jnp.float32)
            return pallas.pallas_call(kernel, out_shape=shape, interpret=True)(x, w)

    with pytest.warns(UserWarning, match="pallas_call in solver calls what is inside it"):
        autocast(fun, "mixed_bfloat16")(W, X)
    autocast(full_precision(fun), "mixed_bfloat16")(W, X)  # warnings are errors here


def test_what_solves_is_left_in_float32_by_intent():
    """Warnings are errors here."""
    solved = autocast(PROGRAMS["linear_solve"], "mixed_bfloat16")(W, X)
    np.testing.assert_allclose(solved, PROGRAMS["linear_solve"](W, X), rtol=1e-2)


def test_a_rule_for_vmap_is_taken():
    half = autocast(lambda x, w: with_a_rule_for_vmap(jnp.tanh(x @ w), w) @ w, "mixed_bfloat16")
    many = jnp.stack([X, 2 * X, -X])
    for axes in ((0, None), (None, 0), (0, 0)):
        args = [many if axis == 0 else a for axis, a in zip(axes, (X, W), strict=True)]
        batched = jax.vmap(half, axes)
        TAKEN.clear()
        jax.make_jaxpr(batched)(*args)
        assert [(True, axes[1] == 0)] == TAKEN  # its first operand is a product of both
        one_by_one = [
            half(*(a[i] if axis == 0 else a for axis, a in zip(axes, args, strict=True)))
            for i in range(3)
        ]
        np.testing.assert_allclose(batched(*args), jnp.stack(one_by_one), atol=0.1)


def test_products_of_composites_and_of_functions_with_a_rule_for_vmap_are_half():
    for name in ("custom_vmap", "composite"):
        products = products_of(autocast(PROGRAMS[name], "mixed_bfloat16"), W, X)
        assert products == [{jnp.dtype(jnp.bfloat16)}] * 2


@pytest.mark.parametrize("fun", [*"fgh"])
@pytest.mark.parametrize("axes", ["b", "b, 6", "2*b + 1"])
def test_programs_of_any_batch_size_are_exported(fun, axes):
    """Sizes that nobody knows yet: what may be small, and may be state, is not rounded."""

    def f(p, x):
        return jax.nn.gelu(jax.nn.standardize(x @ p["w"])) @ p["v"]

    def g(p, x):
        return jax.grad(lambda p: jnp.mean(f(p, x) ** 2))(p)["w"]

    def h(p, x):
        def step(y, _):
            return y + 0.1 * jnp.tanh(y @ p["w"]), y.sum(-1)

        y, sums = lax.scan(step, x, None, length=3)
        return (jnp.tanh(p["w"] @ p["w"]).sum() + sums.T @ sums) * y.mean()

    program = autocast({"f": f, "g": g, "h": h}[fun], "mixed_bfloat16")
    p, x = {"w": W, "v": W[:, :4]}, jnp.concatenate([X, X[:1]])
    shape = export.symbolic_shape(axes if "," in axes else f"{axes}, 6")
    like = jax.ShapeDtypeStruct(shape, jnp.float32)
    exported = export.export(jax.jit(program))(p, like)
    np.testing.assert_allclose(exported.call(p, x), program(p, x), rtol=0.05, atol=0.02)
