"""Memory and traffic of a train step by formula, beside those of a mesh of eight devices.

    python docs/scale.py        # writes docs/scale.md

Fully sharded, a device keeps an equal part of everything; parameters are gathered for the forward
pass and kept, or gathered again for the backward pass, and gradients are reduced to parts
(`gather_params`). Counted are parameters and what an optimizer keeps of them, AdamW's two moments;
activations come on top.
"""

import dataclasses
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_kit

DEVICES = 8
WIDTH, LAYERS = 32, 4  # of what is measured


@dataclasses.dataclass(frozen=True)
class Regime:
    """What is kept of a parameter and what is sent of it, in bytes."""

    name: str
    param: int
    master: int  # what completes it
    moments: int
    gathered: int
    reduced: int

    @property
    def kept(self) -> int:
        """In all, between steps."""
        return self.param + self.master + self.moments


REGIMES = (
    Regime("float32", 4, 0, 8, gathered=4, reduced=4),
    Regime("mixed, float32 parameters", 4, 0, 8, gathered=2, reduced=4),
    Regime("mixed, bfloat16 and masters", 2, 4, 8, gathered=2, reduced=4),
    Regime("mixed, bfloat16 and remainders", 2, 2, 8, gathered=2, reduced=4),
    Regime("the same, bfloat16 moments", 2, 2, 4, gathered=2, reduced=4),
    Regime("the same, reduced in bfloat16", 2, 2, 4, gathered=2, reduced=2),
)


def memory(regime: Regime, parameters: float, devices: int) -> float:
    """Bytes on a device: parameters, what completes them, and moments."""
    return regime.kept * parameters / devices


def traffic(regime: Regime, parameters: float, devices: int, gathers: float) -> float:
    """Bytes that a device receives in a step; of a ring it sends as many.

    A gathered array comes from the other devices; of a reduced one each device gets its part of
    the sums, and adds what comes: (devices - 1) / devices of the whole in both.
    """
    each = gathers * regime.gathered + regime.reduced
    return each * parameters * (devices - 1) / devices


def replicated(regime: Regime, parameters: float, devices: int) -> tuple[float, float]:
    """The same for data parallelism: everything on every device, gradients reduced to all."""
    return (
        regime.kept * parameters,
        2 * regime.reduced * parameters * (devices - 1) / devices,
    )


def measured(regime: Regime, again: bool) -> tuple[float, float, float]:
    """Of eight simulated devices, per parameter: bytes on one, bytes gathered and reduced by one.

    A chain of products, fully sharded, by `mixed_precision` and `gather_params`. Bytes on the wire
    are of the program that the compiler gets.
    """
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    dtype = jnp.bfloat16 if regime.param == 2 else jnp.float32
    params = {f"layer{i}": jnp.eye(WIDTH, dtype=dtype) for i in range(LAYERS)}
    specs = dict.fromkeys(params, P("data"))
    params = jax.device_put(params, dict.fromkeys(params, NamedSharding(mesh, P("data"))))
    optimizer = jmp_kit.mixed_precision(
        optax.adamw(1e-3),
        master={0: "none", 4: "float32", 2: "remainder"}[regime.master],
        moment_dtype="bfloat16" if regime.moments == 4 else None,
        axis_name="data",
    )
    opt_state = jax.jit(optimizer.init)(params)
    wire = jnp.bfloat16 if regime.gathered == 2 else jnp.float32
    reduce_dtype = jnp.bfloat16 if regime.reduced == 2 else jnp.float32

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        whole = jmp_kit.gather_params(params, specs, "data", wire, reduce_dtype=reduce_dtype)
        for weight in whole.values():
            x = jnp.tanh(x @ weight.astype(jnp.float32))
        return lax.pmean(jnp.mean(x), "data")

    state_specs = jax.tree.map(lambda s: s.spec, jmp_kit.state_shardings(opt_state, params))

    if again:
        loss_fn = jax.checkpoint(loss_fn, policy=jax.checkpoint_policies.dots_saveable)
    loss_fn = jmp_kit.autocast(loss_fn, wire)

    def step(params: Any, opt_state: Any, x: jax.Array) -> Any:
        loss, grads = jmp_kit.value_and_grad(loss_fn, jmp_kit.NoOpLossScale())(params, x)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates), opt_state, loss

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(specs, state_specs, P("data")),
        out_specs=(specs, state_specs, P()),
    )
    lowered = jax.jit(mapped).lower(params, opt_state, jnp.ones((DEVICES, WIDTH)))
    count = LAYERS * WIDTH**2
    arrays = [x for x in jax.tree.leaves((params, opt_state)) if x.ndim > 1]
    held = sum(x.addressable_shards[0].data.nbytes for x in arrays)
    received = dict.fromkeys(("all-gather", "reduce-scatter", "all-reduce"), 0.0)
    for transfer in jmp_kit.numerics.audit(lowered).transfers:
        received[transfer.kind] += transfer.nbytes * (DEVICES - 1) / DEVICES
    return held / count, received["all-gather"] / count, received["reduce-scatter"] / count


SIZES = {"1B": 1e9, "8B": 8e9, "70B": 70e9}
GPUS = (8, 64, 1024)
AGAIN = (2 * LAYERS - 1) / LAYERS  # the first layer of a chain is not needed again

TEXT = f"""# At scale, on paper

Written by `python docs/scale.py`; the tests compare each formula with what a mesh of {DEVICES} simulated devices holds, and
with what the program that the compiler gets sends. Nothing here was timed. Activations come on top.

## Of each parameter, in bytes

Fully sharded with `gather_params`. What is kept lies on one device; gathered and reduced is what a device receives in a
step, from the other {DEVICES - 1} of {DEVICES}. Gathered once, a whole copy stays on every device while a step runs. Gathered again
for the backward pass, it does not; of a chain of {LAYERS} layers all but the first are, so {AGAIN:g} times are measured where a long
chain comes to 2.

    kept on a device             = kept × parameters / devices
    received in a step           = (n gathered + reduced) × parameters × (devices - 1) / devices
    a copy on a device, n = 1    = gathered × parameters

"""  # noqa: E501


def table(heads: list[str], rows: list[list[str]]) -> str:
    """In Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [heads, ["---"] * len(heads), *rows])


def each_parameter() -> list[list[str]]:
    """A row for each regime: what the formulas say and what was measured."""
    rows, part = [], (DEVICES - 1) / DEVICES
    for regime in REGIMES:
        held, once, reduced = measured(regime, again=False)
        _, again, _ = measured(regime, again=True)
        numbers = [
            (regime.kept, held * DEVICES),
            (regime.gathered * part, once),
            (AGAIN * regime.gathered * part, again),
            (regime.reduced * part, reduced),
        ]
        parts = f"{regime.param} + {regime.master} + {regime.moments}"
        rows.append([regime.name, parts, *(f"{x:.4g}, {y:.4g}" for x, y in numbers)])
    return rows


def at_scale(of: Callable[[Regime, float, int], tuple[float, float]]) -> str:
    """GiB on a device and GB received, for each size and number of devices."""
    pairs = [(size, n) for size in SIZES for n in GPUS]
    rows = []
    for regime in REGIMES:
        found = [of(regime, SIZES[size], n) for size, n in pairs]
        rows.append([regime.name, *(f"{a / 2**30:,.3g}, {b / 1e9:,.3g}" for a, b in found)])
    return table(["regime", *(f"{size} on {n:,}" for size, n in pairs)], rows)


def sharded(gathers: int) -> Callable[[Regime, float, int], tuple[float, float]]:
    """Memory, with the copy that stays if it is gathered once, and traffic."""

    def of(regime: Regime, parameters: float, devices: int) -> tuple[float, float]:
        copy = regime.gathered * parameters if gathers == 1 else 0
        held = memory(regime, parameters, devices) + copy
        return held, traffic(regime, parameters, devices, gathers)

    return of


def document() -> str:
    """The whole of docs/scale.md."""
    heads = ["regime", "parameter + completes it + moments", "kept: formula, measured"]
    heads += ["gathered once", f"gathered again, {AGAIN:g} times", "reduced"]
    copied = (
        "everything on every device, 2 × reduced × parameters × (devices - 1) / devices received"
    )
    parts = {
        "Fully sharded, gathered again": sharded(2),
        "Fully sharded, gathered once, the copy included": sharded(1),
        f"Data parallelism: {copied}": replicated,
    }
    text = TEXT + table(heads, each_parameter())
    text += "\n\n## GiB on a device and GB received in a step\n"
    return text + "".join(f"\n{name}:\n\n{at_scale(of)}\n" for name, of in parts.items())


if __name__ == "__main__":
    (ROOT / "docs" / "scale.md").write_text(document())
