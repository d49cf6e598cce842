"""Draws what autocast makes of a transformer block: `python docs/block.py` writes block.svg.

Everything in the picture is read off the plan.
"""

import collections
import itertools
import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
from jax.extend.core import Var

from jmp_kit.casting import Part, plans_of

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch, Patch

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


class Box(NamedTuple):
    """A product, or the operations before products."""

    name: str  # scopes
    colour: str
    stored: str  # what is stored of it
    taken: set[Var]
    made: set[Var]


PRODUCT, OPERATIONS = "#4477aa", "#ddaa33"
LEGEND = {"products, bfloat16": PRODUCT, "operations between them, float32": OPERATIONS}
LEFT, RIGHT, GAP, BESIDE = 0.4, 5.8, 0.2, 6.3  # of boxes, and what is stored of them


def arguments():
    """Shapes of the block's arguments."""
    shapes = {
        name: jax.ShapeDtypeStruct((WIDTH, 4 * WIDTH if name == "up" else WIDTH), jnp.float32)
        for name in ("embed", "query", "key", "value", "out", "up", "head")
    }
    shapes["down"] = jax.ShapeDtypeStruct((4 * WIDTH, WIDTH), jnp.float32)
    return shapes, jax.ShapeDtypeStruct((BATCH, TIME, WIDTH), jnp.float32)


def lines() -> list[list[Box]]:
    """The block as it is planned, from top to bottom; in a line no box waits for another."""
    [plan] = plans_of(block, "mixed_bfloat16", *arguments())
    parts = [step for step in plan.steps if isinstance(step, Part)]
    return [line for part in parts for line in _lines_of(part) if line]


def _lines_of(part: Part) -> Iterator[list[Box]]:
    segment = [eqn for piece in part.segment for eqn in piece.eqns]
    if segment:
        stored = {value.var: value.dtype for value in part.stored.values()}
        yield [_box(segment, OPERATIONS, stored or {segment[-1].outvars[0]: "float32"})]
    yield [_box([eqn], PRODUCT, {eqn.outvars[0]: dtype}) for eqn, dtype in part.products]


def _box(eqns, colour: str, stored) -> Box:
    scopes = (str(eqn.source_info.name_stack).split("/")[0] for eqn in eqns)
    texts = (f"{dtype}[{','.join(map(str, v.aval.shape))}]" for v, dtype in stored.items())
    return Box(
        name=", ".join(dict.fromkeys(scopes)),
        colour=colour,
        stored=", ".join(texts),
        taken={atom for eqn in eqns for atom in eqn.invars if isinstance(atom, Var)},
        made={var for eqn in eqns for var in eqn.outvars},
    )


def draw(found: list[list[Box]], path: pathlib.Path) -> None:
    """Boxes and arrows, and beside them what is stored."""
    settings = {"svg.fonttype": "none", "svg.hashsalt": "jmp_kit", "font.family": "sans-serif"}
    with plt.rc_context(settings):
        figure, axes = plt.subplots(figsize=(8, 0.44 * len(found) + 1.1), layout="constrained")
        axes.set(xlim=(0, 10), ylim=(-len(found), 0.6))
        axes.set_title("A transformer block under mixed_bfloat16", loc="left", weight="bold")
        axes.axis("off")
        axes.text(BESIDE, 0.15, "stored in memory", weight="bold")
        drawn: list[tuple[int, float, Box]] = []  # with their lines and middles
        for i, line in enumerate(found):
            width = (RIGHT - LEFT + GAP) / len(line) - GAP
            for column, box in enumerate(line):
                x = LEFT + column * (width + GAP)
                style = {"boxstyle": "round,pad=0,rounding_size=0.12", "edgecolor": "none"}
                patch = FancyBboxPatch((x, -i - 0.8), width, 0.66, facecolor=box.colour, **style)
                axes.add_patch(patch)
                ink = "black" if box.colour == OPERATIONS else "white"
                middle = x + width / 2
                axes.text(middle, -i - 0.47, box.name, va="center", ha="center", color=ink)
                drawn.append((i, middle, box))
            counts = collections.Counter(box.stored for box in line).items()
            text = ", ".join(f"{n} × {stored}" if n > 1 else stored for stored, n in counts)
            axes.text(BESIDE, -i - 0.47, text, va="center", family="monospace")
        for start, end in itertools.combinations(drawn, 2):
            if start[2].made & end[2].taken:
                _arrow(axes, *start[:2], *end[:2])
        handles = [Patch(color=colour, label=label) for label, colour in LEGEND.items()]
        figure.legend(handles=handles, loc="outside lower left", ncols=2, frameon=False)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def _arrow(axes, start: int, start_x: float, end: int, end_x: float) -> None:
    """From one line to another, beside the boxes between them."""
    style = {"arrowstyle": "-|>", "color": "#555555", "lw": 0.8}
    if end == start + 1:
        axes.annotate("", (end_x, -end - 0.14), (start_x, -start - 0.8), arrowprops=style)
        return
    edge, beside = (RIGHT, RIGHT + GAP) if start_x > end_x else (LEFT, LEFT - GAP)
    y, to = -start - 0.6, -end - 0.35
    axes.plot([edge, beside, beside], [y, y, to], color=style["color"], lw=style["lw"])
    axes.annotate("", (edge, to), (beside, to), arrowprops=style)


if __name__ == "__main__":
    draw(lines(), pathlib.Path(__file__).with_suffix(".svg"))
