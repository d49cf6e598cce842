"""What does a GPU's compiler make of the steps, on a machine without a GPU?

Compiled for an H200, and not run: no times, but the dtypes of products, the memory, and the bytes
that kernels read and write. Needs JAX's CUDA plugin: `pip install ".[cuda12]"`.
"""

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jmp_kit
from benchmarks import gpt, optimizer
from benchmarks.compiled import bytes_moved, product_dtypes, program_bytes
from benchmarks.deviceless import MISSING, deviceless, h200s, has_plugin
from benchmarks.measuring import Contender
from benchmarks.models import ResNet
from benchmarks.results import Column, Options, Row, number
from benchmarks.stand_in import stand_in
from benchmarks.training import Task, by_hand, contenders, peers, with_jmp_kit

DEVICE = "NVIDIA H200, compiled for and not run"

ADAMW = "AdamW, 1.3 billion parameters"

COLUMNS = [
    Column("contender", lambda row: row["contender"]),
    Column(
        "products", lambda row: ", ".join(f"{n} {d}" for d, n in row["products"].items()) or "none"
    ),
    Column("memory, GiB", number("program_mib", ",.2f", 1 / 1024)),
    Column("read and written, GB", number("bytes_moved", ",.1f", 1e-9)),
]


def run(options: Options) -> list[Row]:
    """Every train step of both models, serving, and every optimizer, where no GPU is seen."""
    found = [(group, c.name) for group, c, _ in _programs(options.tiny)]
    names = [f"{group}: {name}" for group, name in found if options.takes(name)]
    if not has_plugin():
        return [
            {"group": group, "contender": name, "failed": MISSING}
            for group, _, name in (name.partition(": ") for name in names)
        ]
    return deviceless("benchmarks.programs", {"tiny": options.tiny, "names": names})


def _programs(tiny: bool) -> Iterator[tuple[str, Contender, Sequence[Any]]]:
    """Groups, contenders, and the shapes that they are compiled for.

    To compile cuDNN's attention takes a device: the GPT has a stand-in for it, or plain attention.
    """
    size = gpt.TINY["gpt 124M"] if tiny else dataclasses.replace(gpt.SIZES["gpt 124M"], batch=16)
    tokens = jax.ShapeDtypeStruct((size.batch, size.time), jnp.int32)
    task = gpt.task(size, attention=stand_in)
    scattered = dataclasses.replace(task, error=optax.softmax_cross_entropy_with_integer_labels)
    name = "jmp_kit, bfloat16, loss of integer labels"
    scattering = dataclasses.replace(with_jmp_kit(scattered)[0], name=name)
    for contender in [*with_jmp_kit(task), scattering, *by_hand(task), *peers(task)]:
        yield "gpt 124M, attention as one kernel", contender, (tokens, tokens)
    task = gpt.task(size, fused=False)
    yield from (("gpt 124M", contender, (tokens, tokens)) for contender in contenders(task))
    one = jax.ShapeDtypeStruct((1, size.time), jnp.int32)
    yield from (("gpt 124M, serving one text", contender, (one,)) for contender in _serving(task))

    stages, width, batch, pixels = ((1, 1), 8, 4, 32) if tiny else ((3, 4, 6, 3), 64, 128, 224)
    images = jax.ShapeDtypeStruct((batch, pixels, pixels, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    resnet = Task(
        lambda dtype, half: ResNet(stages, width, 1000, dtype),
        jnp.zeros((1, pixels, pixels, 3)),
        optax.sgd(0.1, momentum=0.9),
    )
    yield from (("resnet", contender, (images, labels)) for contender in contenders(resnet))
    for name in optimizer.optimizers():
        contender, grads = optimizer.contender(name, optimizer.count(tiny))
        yield ADAMW, contender, grads


def _serving(task: Task) -> Iterator[Contender]:
    """The likeliest next words, with float32 weights and with weights cast once."""

    def served(name: str, policy: str, weights: str) -> Contender:
        def words(params: Any, tokens: Any) -> jax.Array:
            return jnp.argmax(task.module(None, None).apply({"params": params}, tokens), axis=-1)

        run = jmp_kit.autocast(words, policy)
        cast = jmp_kit.get_policy(weights).cast_to_param
        return Contender(name, lambda p, t: (p, run(p, t)), lambda: cast(task.variables[0]))

    yield served("float32", "float32", "float32")
    yield served("jmp_kit, bfloat16, float32 weights", "mixed_bfloat16", "float32")
    yield served("jmp_kit, bfloat16, cast once", "mixed_bfloat16", "bfloat16")


def _compiled(contender: Contender, batch: Sequence[Any], device: Any, make: bool) -> Row:
    step, state = contender.flat() if make else (contender.step, jax.eval_shape(contender.state))
    sharding = jax.sharding.SingleDeviceSharding(device)

    def there(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    with jax.default_matmul_precision(contender.precision):
        traced = jax.jit(step, donate_argnums=0).trace(there(state), *there(batch))
    program = traced.lower().compile()
    text = program.as_text()
    return {
        "contender": contender.name,
        "products": product_dtypes(program),
        "program_mib": program_bytes(program) / 2**20,
        "bytes_moved": bytes_moved(text),
    }


def main() -> None:
    """Takes what to compile; prints the rows as JSON."""
    what = json.loads(sys.argv[1])
    [device] = h200s(1)
    rows = []
    for group, contender, batch in _programs(what["tiny"]):
        if f"{group}: {contender.name}" in what["names"]:
            print(group, contender.name, file=sys.stderr)
            # jmp's loss scale has to be made; what the optimizers keep has no room here.
            compiled = _compiled(contender, batch, device, make=group != ADAMW)
            rows.append({"group": group, **compiled})
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
