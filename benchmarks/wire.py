"""What do eight devices exchange in a step, and in which dtype?

A chain of products with AdamW, compiled for eight H200s, and not run. Needs JAX's CUDA plugin:
`pip install ".[cuda12]"`.
"""

import collections
import functools
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_kit
from benchmarks.deviceless import H200, deviceless
from benchmarks.results import Column, Options, Row

DEVICE = "8 × NVIDIA H200, compiled for and not run"
LAYERS = 4
KINDS = {"all-gather": "gathered", "reduce-scatter": "reduced to parts", "all-reduce": "reduced"}


def _column(heading: str) -> Column:
    def shown(row: Row) -> str:
        found = row["bytes"].get(heading, {})
        return ", ".join(f"{n / 1e6:,.1f} {dtype}" for dtype, n in found.items()) or "none"

    return Column(f"{heading}, MB", shown)


COLUMNS = [
    Column("contender", lambda row: row["contender"]),
    *map(_column, (*KINDS.values(), "moved between devices")),
]

CONTENDERS: dict[str, tuple[str, str | None]] = {
    # the policy, and the dtype that `gather_params` reduces in
    "float32, jit": ("float32", None),
    "jmp_kit, bfloat16, jit": ("mixed_bfloat16", None),
    "jmp_kit, bfloat16, gather_params": ("mixed_bfloat16", "float32"),
    "jmp_kit, bfloat16, gather_params, reduced in bfloat16": ("mixed_bfloat16", "bfloat16"),
}
GROUPS = {"fully sharded": True, "data parallel": False}


def run(options: Options) -> list[Row]:
    """Every contender in both groups."""
    names = [f"{group}: {name}" for group in GROUPS for name in CONTENDERS if options.takes(name)]
    if not H200.missing:
        return deviceless("benchmarks.wire", {"tiny": options.tiny, "names": names})
    parts = (name.partition(": ") for name in names)
    return [{"group": g, "contender": name, "failed": H200.missing} for g, _, name in parts]


def compiled(
    devices: Any, policy_name: str, is_split: bool, reduce_dtype: str | None, tiny: bool
) -> Any:
    """A train step for these devices."""
    width, rows = (64, 64) if tiny else (4096, 8192)
    mesh = Mesh(np.array(devices), ("data",), axis_types=(AxisType.Auto,))
    policy = jmp_kit.get_policy(policy_name)
    specs = {f"layer{i}": P("data") if is_split else P() for i in range(LAYERS)}
    by_hand = reduce_dtype is not None

    def at(shape: Any, dtype: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    params = {name: at((width, width), jnp.float32, spec) for name, spec in specs.items()}
    optimizer = jmp_kit.mixed_precision(
        optax.adamw(1e-3), jmp_kit.DynamicLossScale(), axis_name="data" if by_hand else None
    )
    state = jax.eval_shape(optimizer.init, params)
    shardings = jmp_kit.state_shardings(state, params)
    state = jax.tree.map(lambda x, s: at(x.shape, x.dtype, s.spec), state, shardings)
    state_specs = jax.tree.map(lambda s: s.spec, shardings)

    @jmp_kit.autocast(policy)
    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        if reduce_dtype is not None:
            params = jmp_kit.gather_params(
                params, specs, "data", policy.compute_dtype, reduce_dtype=reduce_dtype
            )
        for weight in params.values():
            x = jnp.tanh(x @ weight.astype(jnp.float32))
        loss = jnp.mean(x)
        return lax.pmean(loss, "data") if by_hand else loss

    def step(params: Any, opt_state: Any, x: jax.Array) -> Any:
        scale = jmp_kit.loss_scale_of(opt_state)
        loss, grads = jmp_kit.value_and_grad(loss_fn, scale)(params, x)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    split: Callable[..., Any] = step
    if by_hand:
        ins, outs = (specs, state_specs, P("data")), (specs, state_specs, P())
        split = jax.shard_map(step, mesh=mesh, in_specs=ins, out_specs=outs)
    x = at((rows, width), jnp.float32, P("data"))
    kept = jax.tree.map(lambda x: x.sharding, (params, state))
    jitted = jax.jit(split, donate_argnums=(0, 1), out_shardings=(*kept, None))
    return jitted.lower(params, state, x).compile(H200.compiler_options)


def bytes_of(program: Any) -> dict[str, dict[str, int]]:
    """By what is done with them and by dtype, of whole arrays."""
    found: dict[str, dict[str, int]] = collections.defaultdict(
        functools.partial(collections.defaultdict, int)
    )
    for transfer in jmp_kit.numerics.audit(program).transfers:
        kind = KINDS.get(transfer.kind, "moved between devices")
        found[kind][transfer.dtype] += transfer.nbytes
    # Counts and checks are a few bytes.
    return {
        kind: {dtype: n for dtype, n in by_dtype.items() if n > 1000}
        for kind, by_dtype in found.items()
    }


def main() -> None:
    """Takes what to compile; prints the rows as JSON."""
    what = json.loads(sys.argv[1])
    rows, devices = [], H200.devices(8)
    for name in what["names"]:
        group, _, contender = name.partition(": ")
        print(name, file=sys.stderr)
        policy, reduce_dtype = CONTENDERS[contender]
        program = compiled(devices, policy, GROUPS[group], reduce_dtype, what["tiny"])
        rows.append({"group": group, "contender": contender, "bytes": bytes_of(program)})
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
