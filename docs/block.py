"""Draws what autocast makes of a transformer block: `python docs/block.py` writes block.svg.

Everything in the picture is read off the traced program.
"""

import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib

import jmp_kit

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

BATCH, TIME, WIDTH = 8, 256, 512


def block(params, x):
    """A transformer block with one head, between the layers before and after it."""
    with jax.named_scope("embed"):
        x = x @ params["embed"]
    with jax.named_scope("norm"):
        y = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
    with jax.named_scope("query"):
        q = y @ params["query"]
    with jax.named_scope("key"):
        k = y @ params["key"]
    with jax.named_scope("value"):
        v = y @ params["value"]
    with jax.named_scope("scores"):
        scores = jnp.einsum("btd,bsd->bts", q, k)
    with jax.named_scope("softmax"):
        mask = jnp.where(jnp.tri(TIME) > 0, 0.0, -1e9)
        weights = jax.nn.softmax(scores / WIDTH**0.5 + mask)
    with jax.named_scope("mix"):
        y = jnp.einsum("bts,bsd->btd", weights, v)
    with jax.named_scope("out"):
        y = y @ params["out"]
    with jax.named_scope("residual"):
        x = x + y
    with jax.named_scope("norm"):
        y = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
    with jax.named_scope("up"):
        y = y @ params["up"]
    with jax.named_scope("gelu"):
        y = jax.nn.gelu(y)
    with jax.named_scope("down"):
        y = y @ params["down"]
    with jax.named_scope("residual"):
        x = x + y
    with jax.named_scope("head"):
        logits = x @ params["head"]
    with jax.named_scope("loss"):
        return -jax.nn.log_softmax(logits)[..., 0].mean()


class Row(NamedTuple):
    """One piece of the program, in order."""

    kind: str  # "product", "segment" or "epilogue"
    name: str
    dtype: str  # computed in
    stored: list[str]  # what is stored, dtype and shape


def row(kind: str, eqns, dtype: str, stored) -> Row:
    """The name scopes of equations, each once; casts have none."""
    scopes = (str(eqn.source_info.name_stack).split("/")[0] for eqn in eqns)
    name = ", ".join(dict.fromkeys(scope for scope in scopes if scope))
    return Row(kind, name, dtype, [var.aval.str_short() for var in stored])


def rows() -> list[Row]:
    """The block as autocast evaluates it."""
    shapes = {
        name: jax.ShapeDtypeStruct((WIDTH, 4 * WIDTH if name == "up" else WIDTH), jnp.float32)
        for name in ("embed", "query", "key", "value", "out", "up", "head")
    }
    shapes["down"] = jax.ShapeDtypeStruct((4 * WIDTH, WIDTH), jnp.float32)
    x = jax.ShapeDtypeStruct((BATCH, TIME, WIDTH), jnp.float32)
    program = jax.make_jaxpr(jmp_kit.autocast(block, "mixed_bfloat16"))(shapes, x).jaxpr
    found, segment = [], []  # what follows from products and is no part of its own yet
    depending = set()  # on a product
    choices = set()  # that XLA cannot make: so it cannot undo a cast to half
    for eqn in program.eqns:
        # A part: a segment and the products after it. Only what is repeated is wrapped.
        repeated = eqn.primitive.name == "remat2"
        eqns = eqn.params["jaxpr"].eqns if repeated else [eqn]
        products = [e for e in eqns if e.primitive.name == "dot_general"]
        follows = depending.intersection(map(id, eqn.invars))
        if products:
            segment += [e for e in eqns if e not in products]
            made = {var: e for e in products for var in e.outvars}
            leaving = eqn.params["jaxpr"].outvars if repeated else eqn.invars
            stored = [var for var in leaving if any(var in e.outvars for e in segment)]
            if segment:
                found.append(row("segment", segment, "float32", stored))
            for var, e in made.items():
                found.append(row("product", [e], var.aval.dtype.name, [var]))
            segment = []
        elif eqn.primitive.name == "optimization_barrier":
            choices.update(map(id, eqn.outvars))
        elif choices.intersection(map(id, eqn.invars)):  # what the rest reads as stored
            found.append(row("segment", segment, "float32", eqn.outvars))
            segment = []
        elif follows:
            segment.append(eqn)
        if products or follows:
            depending.update(map(id, eqn.outvars))
    found.append(row("epilogue", segment, program.outvars[0].aval.dtype.name, program.outvars))
    return found


COLOURS = {"product": "#4477aa", "segment": "#ddaa33", "epilogue": "#228833"}


def draw(found: list[Row], path: pathlib.Path) -> None:
    """A column of boxes, and beside each what is stored of it."""
    settings = {"svg.fonttype": "none", "svg.hashsalt": "jmp_kit", "font.family": "sans-serif"}
    with plt.rc_context(settings):
        figure, axes = plt.subplots(figsize=(8, 0.42 * len(found) + 0.8), layout="constrained")
        axes.set(xlim=(0, 10), ylim=(-len(found) - 0.2, 1.2))
        axes.axis("off")
        for x, heading in ((2.6, "computed"), (6.9, "stored")):
            axes.text(x, 0.55, heading, ha="center", weight="bold")
        for i, row in enumerate(found):
            y = -i - 0.8
            box = FancyBboxPatch(
                (0.3, y),
                4.6,
                0.66,
                boxstyle="round,pad=0.02,rounding_size=0.12",
                facecolor=COLOURS[row.kind],
                edgecolor="none",
                alpha=0.9,
            )
            axes.add_patch(box)
            colour = "black" if row.kind == "segment" else "white"
            text = {"va": "center", "ha": "center"}
            axes.text(2.6, y + 0.33, f"{row.kind}: {row.name}, {row.dtype}", color=colour, **text)
            axes.text(6.9, y + 0.33, ", ".join(row.stored) or "nothing", family="monospace", **text)
            if i:
                arrow = {"arrowstyle": "-|>", "color": "#555555", "lw": 0.8}
                axes.annotate("", (2.6, y + 0.67), (2.6, y + 1.0), arrowprops=arrow)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


if __name__ == "__main__":
    draw(rows(), pathlib.Path(__file__).with_suffix(".svg"))
