"""Models that nobody tuned for: written, and committed, before any of them was compiled.

What came of them at first is in `benchmarks/results/first`. Who adds one writes that down before
looking at what the planner makes of it.
"""

import functools

from benchmarks.zoo.held_out import images, others, words
from benchmarks.zoo.sized import Sized

_WORDS = {"layers": 1, "width": 32, "batch": 2, "time": 16, "vocabulary": 64}
_SMALL = {"layers": 1, "width": 32, "batch": 2}


def _words(module: type, **toy: int) -> Sized:
    mixer = functools.partial(module, **toy) if toy else module
    return Sized(words.language, {"module": module}, _WORDS | {"module": mixer})


HELD_OUT = {
    "gated recurrence": _words(words.GatedRecurrence),
    "matrix memory": _words(words.MatrixMemory),
    "linear attention": _words(words.LinearAttention, heads=2, chunk=8),
    "long convolution": _words(words.LongConvolution),
    "relative attention": _words(words.RelativeAttention, heads=2),
    "low rank": _words(words.LowRank, heads=2),
    "albert": Sized(
        words.albert, {}, _WORDS | {"heads": 2, "narrow": 16, "hidden": 4, "layers": 2, "time": 64}
    ),
    "clip": Sized(images.clip, {}, _SMALL | {"pixels": 32, "time": 8}),
    "masked": Sized(
        images.masked, {}, {"layers": (1, 1), "widths": (32, 16), "batch": 2, "pixels": 32}
    ),
    "soft experts": Sized(images.soft_experts, {}, _SMALL | {"heads": 2, "pixels": 32}),
    "volumes": Sized(images.volumes, {}, {"widths": (4, 8), "batch": 2, "side": 8, "classes": 64}),
    "autoencoder": Sized(
        images.autoencoder, {}, {"widths": (8, 16), "batch": 2, "pixels": 16, "latent": 8}
    ),
    "points": Sized(images.points, {}, _SMALL | {"count": 64, "near": 4}),
    "speech": Sized(others.speech, {}, _SMALL | {"time": 32, "said": 3, "letters": 64}),
    "tables": Sized(others.tables, {}, _SMALL | {"heads": 2, "columns": 8, "classes": 64}),
    "wanted": Sized(others.wanted, {}, {"batch": 8, "history": 4, "things": 64, "hidden": (32,)}),
    "splines": Sized(others.splines, {}, {"layers": 2, "hidden": 16, "batch": 8, "width": 8}),
    "agent": Sized(others.agent, {}, {"width": 32, "batch": 2, "time": 3, "actions": 64}),
}
