"""Models of every kind, in sizes that fill a GPU, in float32 or by hand in a dtype of choice."""

from benchmarks.models import causal_attention
from benchmarks.zoo import (
    convolutional,
    decoders,
    diffusion,
    graphs,
    mapped,
    recurrent,
    translation,
    vision,
)
from benchmarks.zoo.sized import Model as Model
from benchmarks.zoo.sized import Sized

_TINY = {"layers": 1, "width": 32, "batch": 2}
_WORDS = _TINY | {"time": 16, "vocabulary": 64}
_LLAMA = _WORDS | {"heads": 4, "groups": 2, "hidden": 64}
_PATCHES = _TINY | {"pixels": 32}
_STAGES = {"stages": (1, 1), "width": 8, "batch": 2, "pixels": 32}

# No large activation has as many values as a parameter or a batch: `numerics.traffic` would take it
# for one of these.
ZOO = {
    "gpt": Sized(decoders.gpt, {}, _WORDS | {"heads": 2}),
    "gpt plain": Sized(decoders.gpt, {"attention": causal_attention}, _WORDS | {"heads": 2}),
    "llama": Sized(decoders.llama, {}, _LLAMA),
    "llama scanned": Sized(decoders.llama, {"scanned": True}, _LLAMA),
    "llama remat": Sized(decoders.llama, {"scanned": True, "remat": True}, _LLAMA),
    "experts": Sized(
        decoders.llama,
        {"layers": 4, "width": 1024, "heads": 16, "hidden": 2816, "experts": 8},
        _LLAMA | {"experts": 4},
    ),
    "t5": Sized(translation.t5, {}, _WORDS | {"heads": 2, "hidden": 64}),
    "vit": Sized(vision.vit, {}, _PATCHES | {"heads": 2}),
    "mixer": Sized(vision.mixer, {}, _PATCHES | {"hidden": 16}),
    "dit": Sized(diffusion.dit, {}, _TINY | {"pixels": 8, "heads": 2}),
    "unet": Sized(
        diffusion.unet, {}, {"widths": (32, 64), "blocks": 1, "heads": 2, "batch": 2, "pixels": 8}
    ),
    "resnet": Sized(convolutional.resnet, {}, _STAGES),
    "convnext": Sized(convolutional.convnext, {}, _STAGES),
    "lstm": Sized(recurrent.lstm, {}, _WORDS),
    "mamba": Sized(recurrent.mamba, {}, _WORDS),
    "mamba2": Sized(recurrent.mamba2, {}, _WORDS | {"heads": 4}),
    "mingru": Sized(recurrent.mingru, {}, _WORDS),
    "graph": Sized(graphs.graph, {}, _TINY | {"nodes": 32, "edges": 128}),
    "mapped": Sized(mapped.mapped, {}, {"widths": (8, 16), "blocks": 1, "batch": 2, "pixels": 8}),
}

# Those whose products are large enough for float8.
WIDE = {
    "gpt 1.3B, 4 layers": Sized(
        decoders.gpt,
        {"layers": 4, "width": 2048, "heads": 16, "batch": 16},
        _WORDS | {"heads": 2},
    ),
    "llama 7B, 2 layers": Sized(
        decoders.llama,
        {"layers": 2, "width": 4096, "heads": 32, "groups": 32, "hidden": 11008, "batch": 4},
        _LLAMA,
    ),
}
