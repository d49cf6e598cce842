"""Draws `docs/step.png`: which values of a train step are state, and which are activations.

    python docs/step.py

Everything in the picture is read off the step's shapes and its plan.
"""

import json
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from jax.extend.core import Var

import jmp_kit
from jmp_kit.casting import Barrier, Part, plans_of
from jmp_kit.programs import is_backward, names_in

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch

TOKENS, WIDTH, WORDS = 4096, 512, 1024
POLICY = "mixed_bfloat16"


def loss_fn(params, x, labels):
    """Of two layers and a head."""
    with jax.named_scope("up"):
        x = x @ params["up"]
    with jax.named_scope("gelu"):
        x = jax.nn.gelu(x)
    with jax.named_scope("down"):
        x = x @ params["down"]
    with jax.named_scope("norm"):
        x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
    with jax.named_scope("head"):
        logits = x @ params["head"]
    with jax.named_scope("loss"):
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


optimizer = optax.adamw(3e-4)


def train_step(params, opt_state, x, labels):
    """As it is written in float32."""
    loss, grads = jax.value_and_grad(loss_fn)(params, x, labels)
    with jax.named_scope("optimizer"):
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss


def arguments():
    """Shapes of the step's arguments."""
    f32 = jnp.float32
    params = {
        "up": jax.ShapeDtypeStruct((WIDTH, 4 * WIDTH), f32),
        "down": jax.ShapeDtypeStruct((4 * WIDTH, WIDTH), f32),
        "head": jax.ShapeDtypeStruct((WIDTH, WORDS), f32),
    }
    x = jax.ShapeDtypeStruct((TOKENS, WIDTH), f32)
    labels = jax.ShapeDtypeStruct((TOKENS,), jnp.int32)
    return params, jax.eval_shape(optimizer.init, params), x, labels


class Value(NamedTuple):
    """What is in memory."""

    phase: str
    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...] | None  # None of a tree
    nbytes: int


STATE = "state, float32: goes from step to step"
KEPT = "activation, bfloat16: kept for the backward pass"
PASSING = "activation or its gradient, bfloat16: soon freed"
WEIGHT = "gradient of a weight, bfloat16"
COLOURS = {STATE: "#ddaa33", KEPT: "#4477aa", PASSING: "#a9c6e3", WEIGHT: "#aa4499"}
PHASES = "before", "forward pass", "backward pass", "after"


def values():
    """All that the step takes, stores and gives, in order; without the batch and what is small."""
    args = arguments()
    wrapped = jmp_kit.autocast(train_step, POLICY)
    params, opt_state, _ = jax.eval_shape(wrapped, *args)
    [plan] = plans_of(train_step, POLICY, *args)
    return [
        *_state("before", *args[:2]),
        *_activations(plan, {p.size for p in args[0].values()}),
        *_state("after", params, opt_state),
    ]


def _state(phase, params, opt_state):
    trees = {"weights": params, "AdamW: mean": opt_state[0].mu, "AdamW: square": opt_state[0].nu}
    for name, tree in trees.items():
        leaves = jax.tree.leaves(tree)
        [dtype] = {str(leaf.dtype) for leaf in leaves}
        nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        yield Value(phase, name, STATE, dtype, None, nbytes)


def _activations(plan, of_weights):
    forward = {}  # by variable, what a later pass may take
    taken = set()  # by the backward pass
    found = []
    for step in plan.steps:
        if isinstance(step, Barrier):
            taken.update(v for v in step.eqn.invars if v in forward)
        if not isinstance(step, Part):
            continue
        eqns = [eqn for piece in step.segment for eqn in piece.eqns]
        eqns += [eqn for eqn, _ in step.products]
        late = any(is_backward(str(eqn.source_info.name_stack)) for eqn in eqns)
        made = [(s.eqn, s.var, s.dtype) for s in step.stored.values()]
        made += [(eqn, eqn.outvars[0], dtype) for eqn, dtype in step.products]
        if late:
            taken.update(v for eqn in eqns for v in eqn.invars if isinstance(v, Var))
        for eqn, var, dtype in made:
            if not late:
                forward[var] = len(found)
            found.append((eqn, var, np.dtype(dtype), late))
    for i, (eqn, var, dtype, late) in enumerate(found):
        kind = KEPT if var in taken and forward.get(var) == i else PASSING
        kind = WEIGHT if late and var.aval.size in of_weights else kind
        yield Value(
            phase=PHASES[1 + late],
            name=_name(eqn, late, kind),
            kind=kind,
            dtype=str(dtype),
            shape=var.aval.shape,
            nbytes=var.aval.size * dtype.itemsize,
        )


def _name(eqn, late, kind):
    """The scope, and what is made of it."""
    stack = str(eqn.source_info.name_stack)
    made = "weight's gradient" if kind == WEIGHT else "gradient"
    made = made if is_backward(stack) else "computed again"
    return f"{names_in(stack)}: {made}" if late else names_in(stack)


def draw(found, path):
    """A bar a value, from top to bottom in the order of the step."""
    figure, axes = plt.subplots(figsize=(8, 0.27 * len(found) + 1.7), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1)
    places, at = [], 0.0
    for i, value in enumerate(found):
        at += 1.6 if i and value.phase != found[i - 1].phase else 1
        places.append(at)
    sizes = [value.nbytes / 1e6 for value in found]
    axes.barh(places, sizes, color=[COLOURS[value.kind] for value in found])
    for place, size, value in zip(places, sizes, found, strict=True):
        shape = f"[{','.join(map(str, value.shape))}]" if value.shape else ""
        axes.text(size + 0.2, place, f"{value.dtype}{shape}", va="center", fontsize=8.5)
    axes.set_yticks(places, [value.name for value in found])
    for phase in PHASES:
        inside = [p for p, value in zip(places, found, strict=True) if value.phase == phase]
        where = {"transform": axes.get_yaxis_transform(), "rotation": 90, "weight": "bold"}
        axes.text(-0.35, (inside[0] + inside[-1]) / 2, phase, va="center", ha="center", **where)
    axes.set(
        xlabel="size, MB",
        title=f"What one train step takes, stores and gives under {POLICY}",
        xlim=(0, 1.3 * max(sizes)),
        ylim=(places[-1] + 0.8, places[0] - 0.8),
    )
    axes.spines[["top", "right"]].set_visible(False)
    handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", frameon=False)
    figure.savefig(path, dpi=120, metadata={"Description": json.dumps(found)})
    plt.close(figure)


if __name__ == "__main__":
    draw(values(), pathlib.Path(__file__).with_suffix(".png"))
