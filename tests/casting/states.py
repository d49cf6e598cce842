"""Programs that update something, and multiply with it: functions of arrays, and their arguments.

Each is there in several forms, which are to be told from layers alike.
"""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

GENERATOR = np.random.default_rng(0)


def normals(generator):
    """What draws normal values of a shape. With a generator of its own, a module's never change."""

    def normal(*shape, scale=1.0):
        return jnp.asarray(generator.normal(size=shape) * scale, jnp.float32)

    return normal


normal = normals(GENERATOR)


def repeated(form, n, body, start):
    """`body` n times over: by a loop of one of several kinds."""
    if form == "unrolled":
        for _ in range(n):
            start = body(start)
        return start
    if form == "while":
        found = lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, body(c[1])), (0, start))
        return found[1]
    if form == "jit inside":
        return lax.fori_loop(0, n, lambda _, c: jax.jit(body)(c), start)
    if form == "branches":
        step = lambda i, c: lax.cond(i >= 0, body, lambda c: c, c)  # noqa: E731
        return lax.fori_loop(0, n, step, start)
    if form == "nested":
        inner = lambda c: lax.fori_loop(0, 10, lambda _, c: body(c), c)  # noqa: E731
        return lax.scan(lambda c, _: (inner(c), None), start, None, length=n // 10)[0]
    if form == "checkpointed":
        return lax.scan(lambda c, _: (jax.checkpoint(body)(c), None), start, None, length=n)[0]
    assert form == "scan"
    return lax.scan(lambda c, _: (body(c), None), start, None, length=n)[0]


LOOPS = ["scan", "while", "unrolled", "jit inside", "branches", "nested", "checkpointed"]
DIFFERENTIABLE = [form for form in LOOPS if form != "while"]
SPRING = -jnp.eye(4) + normal(4, 4, scale=0.1)
STARTS = normal(2, 2, 4)


def euler(form):
    n = 40 if form == "unrolled" else 400
    return lambda w, y: repeated(form, n, lambda y: y + (1 / n) * (y @ w), y)


def verlet(form):
    """Positions and velocities, 10 seconds of them."""
    n = 60 if form == "unrolled" else 600
    dt = 10 / n

    def step(state):
        x, v, a = state
        x = x + dt * v + 0.5 * dt**2 * a
        new = x @ SPRING
        return x, v + 0.5 * dt * (a + new), new

    def solve(starts):
        x, v = starts
        return repeated(form, n, step, (x, v, x @ SPRING))[0]

    return solve


def stormer(form):
    """Only positions, this one and the one before."""
    n, dt = 60, 1 / 6

    def step(state):
        before, x = state
        return x, 2 * x - before + dt**2 * (x @ SPRING)

    return lambda starts: repeated(form, n, step, (starts[0], starts[0] + dt * starts[1]))[1]


def neural_ode(form):
    """With a linear head; its gradient."""
    n = 30 if form == "unrolled" else 300

    def loss(params, x, target):
        field = lambda y: y + (1 / n) * (jnp.tanh(y @ params["in"]) @ params["out"])  # noqa: E731
        y = repeated(form, n, field, x)
        return jnp.mean((y @ params["head"] - target) ** 2)

    return loss


ODE = (
    {"in": normal(8, 32, scale=0.5), "out": normal(32, 8, scale=0.3), "head": normal(8, 4)},
    normal(16, 8),
    normal(16, 4),
)


class Field(nn.Module):
    """A step of Euler's, scanned by `nn.scan`, its parameters the same in all."""

    steps: int = 100

    @nn.compact
    def __call__(self, y, _):
        change = nn.Dense(8)(nn.tanh(nn.Dense(32)(y)))
        return y + change / self.steps, None


class Solved(nn.Module):
    @nn.compact
    def __call__(self, x):
        broadcast = {"variable_broadcast": "params", "split_rngs": {"params": False}}
        y, _ = nn.scan(Field, length=100, **broadcast)()(x, None)
        return nn.Dense(4)(y)


def linen_ode():
    model = Solved()
    params = model.init(jax.random.key(0), ODE[1])

    def loss(params, x, target):
        return jnp.mean((model.apply(params, x) - target) ** 2)

    return loss, (params, *ODE[1:])


def nnx_ode():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.inner, self.outer = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)
            self.head = nnx.Linear(8, 4, rngs=rngs)

        def __call__(self, y):
            body = lambda _, y: y + 0.01 * self.outer(nnx.tanh(self.inner(y)))  # noqa: E731
            return self.head(repeated("scan", 100, functools.partial(body, 0), y))

    graph, params = nnx.split(Model(nnx.Rngs(0)))

    def loss(params, x, target):
        return jnp.mean((nnx.merge(graph, params)(x) - target) ** 2)

    return loss, (params, *ODE[1:])


def equinox_ode():
    field = eqx.nn.MLP(8, 8, 32, 1, activation=jnp.tanh, key=jax.random.key(0))
    params, static = eqx.partition(field, eqx.is_inexact_array)

    def loss(params, x, target):
        field = jax.vmap(eqx.combine(params, static))
        y = repeated("scan", 100, lambda y: y + 0.01 * field(y), x)
        return jnp.mean((y[:, :4] - target) ** 2)

    return loss, (params, *ODE[1:])


# Optimizers.

BATCHES = normal(60, 4, 8)
SQUARE = jnp.ones((8, 8)) + normal(8, 8, scale=0.1)


def regression(w, x):
    return jnp.mean((jnp.tanh(x @ w) - 2.0) ** 2)


def training(form, optimizer):
    def step(carry, x):
        w, state = carry
        updates, state = optimizer.update(jax.grad(regression)(w, x), state, w)
        return optax.apply_updates(w, updates), state

    def epoch(w, batches):
        carry = w, optimizer.init(w)
        if form == "unrolled":
            for x in batches[:3]:
                carry = step(carry, x)
        elif form == "while":
            body = lambda i, c: step(c, batches[i])  # noqa: E731
            n = jnp.int32(len(batches))
            carry = lax.fori_loop(jnp.int32(0), n, body, carry)
        elif form == "steps per call":  # few enough to be layers
            carry = lax.scan(lambda c, x: (step(c, x), regression(c[0], x)), carry, batches[:8])[0]
        else:
            carry = lax.scan(lambda c, x: (step(c, x), None), carry, batches)[0]
        return carry

    return epoch


def accumulating(w, batches):
    """Gradients summed in a scan, then a step, then a loss of what it made."""

    def body(total, x):
        return jax.tree.map(jnp.add, total, jax.grad(regression)(w, x)), None

    total, _ = lax.scan(body, jnp.zeros_like(w), batches)
    w = w - 1e-4 * total / len(batches)
    return w, regression(w, batches[0])


def averaging(w, batches):
    """With an average of the weights, of which the loss is, and statistics."""
    optimizer = optax.adam(1e-4)

    def body(carry, x):
        w, average, mean, state = carry
        updates, state = optimizer.update(jax.grad(regression)(w, x), state, w)
        w = optax.apply_updates(w, updates)
        mean = 0.99 * mean + 0.01 * jnp.mean(x @ w, axis=0)
        return (w, 0.999 * average + 0.001 * w, mean, state), regression(average, x - mean)

    start = w, w, jnp.zeros(8), optimizer.init(w)
    (w, average, mean, _), losses = lax.scan(body, start, batches)
    return w, average, mean, losses


def adversarial(g, d, x, z):
    """The discriminator's step, then the generator's against what that made."""
    optimizer = optax.adam(1e-4)
    score = lambda d, x: jax.nn.softplus(x @ d).mean()  # noqa: E731
    grad = jax.grad(lambda d: score(d, z @ g) - score(d, x))(d)
    updates, d_state = optimizer.update(grad, optimizer.init(d), d)
    d = optax.apply_updates(d, updates)
    grad = jax.grad(lambda g: -score(d, z @ g))(g)
    updates, g_state = optimizer.update(grad, optimizer.init(g), g)
    return optax.apply_updates(g, updates), d, d_state, g_state


def actor_critic(actor, critic, target, x):
    """The critic's step, then the actor's by it, then a target that follows slowly."""
    optimizer = optax.adam(1e-4)
    value = lambda w, a: jnp.tanh(jnp.concatenate([x, a], 1) @ w[0]) @ w[1]  # noqa: E731
    policy = lambda w: jnp.tanh(x @ w)  # noqa: E731
    goal = 0.1 + 0.9 * value(target, policy(actor))
    grad = jax.grad(lambda w: jnp.mean((value(w, policy(actor)) - goal) ** 2))(critic)
    updates, critic_state = optimizer.update(grad, optimizer.init(critic), critic)
    critic = optax.apply_updates(critic, updates)
    grad = jax.grad(lambda w: -jnp.mean(value(critic, policy(w))))(actor)
    updates, actor_state = optimizer.update(grad, optimizer.init(actor), actor)
    actor = optax.apply_updates(actor, updates)
    target = jax.tree.map(lambda t, c: t + 0.005 * (c - t), target, critic)
    return actor, critic, target, critic_state, actor_state


def shampoo(w, left, x):
    """Statistics that meet products; several steps, written one after the other."""
    for _ in range(2):
        g = jax.grad(lambda w: jnp.mean((jnp.tanh(x @ w) - 1) ** 2))(w)
        left = 0.999 * left + 0.001 * g @ g.T
        # A root by Newton's iteration: eigenvectors differ in float32 already.
        root = jnp.eye(8)
        for _ in range(5):
            root = 1.5 * root - 0.5 * (root @ root @ root @ (left / 2))
        w = w - 1e-3 * root @ g
    return w, left


def muon(w, x):
    optimizer = optax.contrib.muon(1e-4)
    state = optimizer.init(w)
    for _ in range(2):
        updates, state = optimizer.update(jax.grad(regression)(w, x), state, w)
        w = optax.apply_updates(w, updates)
    return w, state


def fast_weights(form):
    """MAML: weights that an inner loop updates, and a loss of what they came to."""
    n = 4 if form == "unrolled" else 20

    def outer(w, x):
        inner = lambda w: w - 1e-3 * jax.grad(regression)(w, x)  # noqa: E731
        return jnp.mean((x @ repeated(form, n, inner, w)) ** 2)

    return outer


def fast_weights_of_batches(w, batches):
    """Each step on a batch of its own, as layers multiply by weights of their own."""
    adapted, _ = lax.scan(lambda w, x: (w - 1e-3 * jax.grad(regression)(w, x), None), w, batches)
    return jnp.mean((batches[0] @ adapted) ** 2)


def fast_weights_made(code, batches):
    """As before, but begun with what a product made."""
    return fast_weights_of_batches((code @ SQUARE) / 4, batches)


# Sequences.

LENGTH, WIDTH = 256, 16
SERIES = [normal(LENGTH, WIDTH, scale=0.3) + 0.2 for _ in range(3)]
GATES = jax.nn.sigmoid(normal(LENGTH, WIDTH) + 4)
PROJECTIONS = normal(3, WIDTH, WIDTH) / WIDTH**0.5


def linear_attention(kind, form="scan"):
    def step(s, at):
        q, k, v, gate = at
        if kind == "gated":
            s = gate[:, None] * s + k[:, None] * v[None]
        elif kind == "delta":
            s = s + 0.05 * k[:, None] * (v - k @ s)[None]
        else:
            s = s + k[:, None] * v[None]
        return s, q @ s

    def run(w, q, k, v):
        sequences = q @ w[0], k @ w[1], v @ w[2], GATES
        start = jnp.zeros((WIDTH, WIDTH))
        if form == "unrolled":
            outputs, s = [], start
            for i in range(32):
                s, output = step(s, [x[i] for x in sequences])
                outputs.append(output)
            return jnp.stack(outputs)
        if form == "chunks":  # one state a chunk, added to by a product
            outputs, s = [], start
            q, k, v, _ = (x.reshape(16, -1, WIDTH) for x in sequences)
            for i in range(16):
                s = s + k[i].T @ v[i]
                outputs.append(q[i] @ s)
            return jnp.stack(outputs)
        if form == "vmap":
            many = [jnp.stack([x, x[::-1]]) for x in sequences]
            return jax.vmap(lambda *x: lax.scan(step, start, x)[1])(*many)
        if form == "jit inside":
            return lax.scan(jax.jit(step), start, sequences)[1]
        return lax.scan(step, start, sequences)[1]

    return run


def streaming_softmax(q, k, v):
    """Attention block by block, as in ring and flash attention."""

    def block(carry, kv):
        total, most, norm = carry
        scores = q @ kv[0].T
        new = jnp.maximum(most, scores.max(-1))
        old, p = jnp.exp(most - new), jnp.exp(scores - new[:, None])
        return (total * old[:, None] + p @ kv[1], new, norm * old + p.sum(-1)), None

    start = jnp.zeros((32, 16)), jnp.full(32, -jnp.inf), jnp.zeros(32)
    blocks = k.reshape(-1, 16, 16), v.reshape(-1, 16, 16)
    (total, _, norm), _ = lax.scan(block, start, blocks)
    return total / norm[:, None]


def rows_put_back(form):
    """Rows of a table, looked up, updated and put back: a memory's, or a sparse optimizer's."""
    rows = jnp.array([3, 1])

    def solve(w, x):
        def step(w):
            updates = x.T @ jnp.tanh(x @ w) / len(x)
            return w.at[rows].set(0.999 * w[rows] + 1e-3 * updates[:2])

        return repeated(form, 200, step, w)

    return solve


Q, K, V = normal(32, 16), normal(1024, 16), normal(1024, 16) + 1

# Evaluated as they are.
PROGRAMS = {
    **{f"euler, {form}": (euler(form), (SPRING, STARTS[0])) for form in LOOPS},
    **{f"verlet, {form}": (verlet(form), (STARTS,)) for form in LOOPS},
    "verlet, vmap": (jax.vmap(verlet("scan")), (normal(3, 2, 2, 4),)),
    **{f"störmer, {form}": (stormer(form), (STARTS,)) for form in ("scan", "while", "unrolled")},
    **{
        f"{name}, {form}": (training(form, optimizer), (SQUARE, BATCHES))
        for name, optimizer in (("sgd", optax.sgd(1e-3)), ("adam", optax.adam(1e-4)))
        for form in ("scan", "while", "unrolled", "steps per call")
    },
    "muon, unrolled": (muon, (SQUARE, BATCHES[0])),
    "muon, scan": (training("steps per call", optax.contrib.muon(1e-4)), (SQUARE, BATCHES)),
    "shampoo": (shampoo, (SQUARE / 8, jnp.eye(8), BATCHES[0])),
    "rows put back, scan": (rows_put_back("scan"), (SQUARE, BATCHES[0])),
    "rows put back, while": (rows_put_back("while"), (SQUARE, BATCHES[0])),
    "accumulating": (accumulating, (SQUARE, BATCHES)),
    "averaging": (averaging, (SQUARE, BATCHES)),
    "adversarial": (adversarial, (SQUARE / 8, SQUARE, BATCHES[0], BATCHES[1])),
    "adversarial, jit inside": (
        jax.jit(adversarial), (SQUARE / 8, SQUARE, BATCHES[0], BATCHES[1])
    ),
    "adversarial, vmap": (
        jax.vmap(adversarial, (None, None, 0, 0)),
        (SQUARE / 8, SQUARE, BATCHES[:3], BATCHES[3:6]),
    ),
    "actor and critic": (
        actor_critic,
        (SQUARE, [normal(16, 8), normal(8, 1)], [normal(16, 8), normal(8, 1)], BATCHES[0]),
    ),
    **{
        f"linear attention, {kind}, {form}": (
            linear_attention(kind, form), (PROJECTIONS, *SERIES)
        )
        for kind, form in (
            *(("plain", form) for form in ("scan", "unrolled", "chunks", "vmap", "jit inside")),
            *(("gated", form) for form in ("scan", "unrolled", "vmap")),
            *(("delta", form) for form in ("scan", "unrolled", "vmap")),
        )
    },
}  # fmt: skip


def mean_square(fun):
    return lambda *args: jnp.mean(fun(*args) ** 2)


# Losses, by whose first argument is differentiated.
LOSSES = {
    **{f"neural ODE, {form}": (neural_ode(form), ODE) for form in DIFFERENTIABLE},
    "neural ODE, linen": linen_ode(),
    "neural ODE, nnx": nnx_ode(),
    "neural ODE, equinox": equinox_ode(),
    **{
        f"fast weights, {form}": (fast_weights(form), (SQUARE, BATCHES[0]))
        for form in ("scan", "unrolled", "jit inside", "checkpointed")
    },
    "fast weights, of batches": (fast_weights_of_batches, (SQUARE, BATCHES[:20])),
    "fast weights, made": (fast_weights_made, (SQUARE, BATCHES[:20])),
    **{
        f"linear attention, {kind}": (mean_square(linear_attention(kind)), (PROJECTIONS, *SERIES))
        for kind in ("plain", "gated", "delta")
    },
}
