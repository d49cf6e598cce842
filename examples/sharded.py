"""The GPT of `examples/gpt.py` on many devices and in many processes, in mixed precision.

    python examples/sharded.py
    python examples/sharded.py --layout fully_sharded --processes 2 --policy mixed_bfloat16
    python examples/sharded.py --layout tensor --steps 200 --checkpoint-dir checkpoints

On a machine without accelerators eight are simulated. Data parallelism keeps every parameter on
every device; fully sharded, a device keeps its part, and parameters are gathered in half where
they are needed; tensor parallelism splits products as well, over groups of devices. It is one train
step, `make_step`: only the partition specs differ. `--processes N` starts N processes here, which
find each other as they would on a cluster.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jmp_kit
import jmp_kit.checkpoint
from examples import digits, gpt, gpt_model
from examples.stdlib_text import load_text

LAYOUTS = ("data", "fully_sharded", "tensor")
CONFIG = gpt_model.Config(layers=2, heads=8, width=64, time=32, batch=16, accumulate=1, warmup=20)


def make_mesh(layout: str) -> Mesh:
    """All devices along "data", or groups of up to four of them along "model"."""
    n = jax.device_count()
    group = next(size for size in (4, 2, 1) if n % size == 0) if layout == "tensor" else 1
    return jax.make_mesh((n // group, group), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def spec_of(layout: str, mesh: Mesh, path: str, shape: tuple[int, ...]) -> P:
    """How a parameter is split: its first dimension over "data", its products over "model"."""
    parts: list[str | None] = [None] * len(shape)
    if layout == "tensor" and len(shape) > 1:
        # What one product splits, the next one sums: one exchange for two products.
        parts = ["model", None] if "out/" in path or "down/" in path else [None, "model"]
    if layout == "fully_sharded" and len(shape) > 1:
        parts[0] = "data"
    sizes = dict(mesh.shape)
    return P(
        *(a if a and size % sizes[a] == 0 else None for a, size in zip(parts, shape, strict=True))
    )


def along(axis: str, specs: Any) -> Any:
    """Of partition specs, the part that is along one axis."""
    return jax.tree.map(lambda spec: P(*(name if name == axis else None for name in spec)), specs)


def make_step(
    mesh: Mesh, policy: jmp_kit.Policy, optimizer: Any, shape: Any, specs: Any, state_specs: Any
) -> Any:
    """The train step of a device: its rows of the batch, its parts of parameters and state.

    Along "data" it is written out; along "model" XLA's partitioner does what the arrays' shardings
    ask for.
    """
    split = along("data", specs)
    # Beside parameters it has counts of random numbers, of which it draws none.
    graphdef, _, *rest = nnx.split(shape, nnx.Param, ...)

    @jmp_kit.autocast(policy.with_output_dtype(jnp.float32))  # a loss is never half
    def loss_fn(params: Any, text: jax.Array, weights: jax.Array) -> jax.Array:
        whole = jmp_kit.gather_params(params, split, "data", policy.compute_dtype)
        whole = jax.tree.map(lambda x: x.astype(jnp.float32), whole)  # as the model is written
        model = nnx.merge(graphdef, whole, *rest)
        targets = text[:, 1:].astype(jnp.int32)
        losses = optax.softmax_cross_entropy_with_integer_labels(model(text[:, :-1]), targets)
        return lax.pmean(jnp.mean(losses.mean(axis=1) * weights), "data")

    def step(params: Any, opt_state: Any, text: jax.Array, weights: jax.Array) -> Any:
        loss_scale = jmp_kit.loss_scale_of(opt_state)
        loss, grads = jmp_kit.value_and_grad(loss_fn, loss_scale)(params, text, weights)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    state_split, rows = along("data", state_specs), P("data")
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        axis_names={"data"},
        in_specs=(split, state_split, rows, rows),
        out_specs=(split, state_split, P()),
    )
    return jax.jit(mapped, donate_argnums=(0, 1))


@dataclasses.dataclass(frozen=True)
class Run:
    """What training in one layout gave."""

    layout: str
    devices: int
    processes: int
    losses: list[float]  # of each step that this run took
    loss_scale: float
    skipped: int
    step_ms: float
    device_mib: float  # of parameters and state, on one device


def train(
    layout: str,
    steps: int,
    policy_name: str = "mixed_float16",
    seed: int = 0,
    *,
    overflows: tuple[int, ...] = (),
    checkpoint_dir: pathlib.Path | None = None,
    checkpoint_every: int = 10,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> Run:
    """Train on all devices; at the steps in `overflows`, a row on one of them overflows."""
    config = dataclasses.replace(CONFIG, steps=steps)
    policy, mesh = jmp_kit.get_policy(policy_name), make_mesh(layout)
    schedule = optax.warmup_cosine_decay_schedule(0, 4e-3, config.warmup, max(steps, 21))
    loss_scale: jmp_kit.LossScale = jmp_kit.NoOpLossScale()
    if policy.compute_dtype == jnp.float16:
        loss_scale = jmp_kit.DynamicLossScale(2.0**12, period=20)
    optimizer = jmp_kit.mixed_precision(optax.adamw(schedule), loss_scale, axis_name="data")

    def start() -> tuple[Any, Any]:
        params = policy.cast_to_param(nnx.state(gpt_model.GPT(config, nnx.Rngs(seed)), nnx.Param))
        return params, optimizer.init(params)

    # Made where they belong: nothing is ever whole in one place.
    abstract, abstract_state = jax.eval_shape(start)

    def sharded(path: Any, x: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        sharding = NamedSharding(mesh, spec_of(layout, mesh, name, x.shape))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    abstract = jax.tree_util.tree_map_with_path(sharded, abstract)
    places = (
        jax.tree.map(lambda x: x.sharding, abstract),
        jmp_kit.state_shardings(abstract_state, abstract),
    )
    specs, state_specs = jax.tree.map(lambda sharding: sharding.spec, places)
    params, opt_state = jax.jit(start, out_shardings=places)()
    shape = nnx.eval_shape(lambda: gpt_model.GPT(config, nnx.Rngs(seed)))
    step_fn = make_step(mesh, policy, optimizer, shape, specs, state_specs)

    text, _ = load_text()
    rows = NamedSharding(mesh, P("data"))
    losses, seconds, done = [], [], 0
    with gpt.checkpoints_in(checkpoint_dir, checkpoint_every) as manager:
        if manager and manager.latest_step() is not None:
            like = {"params": params, "opt_state": opt_state}
            restored = jmp_kit.checkpoint.restore(checkpoint_dir, like)
            params, opt_state = restored["params"], restored["opt_state"]
            done = manager.latest_step()
        for step in range(done + 1, steps + 1):
            [batch] = gpt.batches(text, config, seed, step)
            weights = np.ones(config.batch, np.float32)
            weights[-1] = np.inf if step in overflows else 1
            began = time.perf_counter()
            params, opt_state, loss = step_fn(
                params, opt_state, distributed(batch, rows), distributed(weights, rows)
            )
            losses.append(float(loss))
            seconds.append(time.perf_counter() - began)
            on_step(step, losses[-1])
            if manager:
                state = {"params": params, "opt_state": opt_state}
                manager.save(step, args=ocp.args.StandardSave(state))
    metrics = jmp_kit.metrics(opt_state)
    return Run(
        layout=layout,
        devices=jax.device_count(),
        processes=jax.process_count(),
        losses=losses,
        loss_scale=metrics["loss_scale"],
        skipped=metrics["skipped"],
        step_ms=1e3 * statistics.median(seconds) if seconds else float("nan"),
        device_mib=bytes_on_a_device((params, opt_state)) / 2**20,
    )


def distributed(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """An array that every process has, each device with its rows of it."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def bytes_on_a_device(tree: Any) -> int:
    """What the first device of this process holds."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def launch(processes: int, arguments: list[str]) -> int:
    """Start this program so often, and end them all where one fails. The exit code."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    command = [sys.executable, *(f"-W{w}" for w in sys.warnoptions), __file__, *arguments]
    started: list[subprocess.Popen[bytes]] = []
    # Python would end at once and leave its children behind. So would a handler that raises while a
    # process is being started, which is in no list yet.
    ended: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: ended.append(number))
        for number in (signal.SIGTERM, signal.SIGHUP)
    }
    try:
        for i in range(processes):
            own = "--coordinator", coordinator, "--process", str(i)
            started.append(subprocess.Popen([*command, *own]))
        while any(process.poll() is None for process in started):
            if ended:
                return 128 + ended[0]
            if any(process.poll() for process in started):
                time.sleep(2)  # for what they have to say
                return 1
            time.sleep(0.05)
        return int(any(process.returncode for process in started))
    finally:
        for process in started:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def main(arguments: list[str] | None = None) -> int:
    """Train in each layout and print what came of it."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    if options.processes > 1 and options.process is None:
        return launch(options.processes, arguments)
    each = options.devices // options.processes
    jax.config.update("jax_num_cpu_devices", each)
    if options.process is not None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(
            options.coordinator,
            options.processes,
            options.process,
            local_device_ids=range(options.process * each, (options.process + 1) * each),
            heartbeat_timeout_seconds=10,
        )
    for layout in options.layout:
        on_step = functools.partial(tell, layout, options.steps)
        directory = options.checkpoint_dir and pathlib.Path(options.checkpoint_dir) / layout
        run = train(
            layout,
            options.steps,
            options.policy,
            options.seed,
            overflows=tuple(options.overflow),
            checkpoint_dir=directory,
            checkpoint_every=options.checkpoint_every,
            on_step=on_step,
        )
        if jax.process_index() == 0:
            print(json.dumps(dataclasses.asdict(run)) if options.json else told(run))
    return 0


def tell(layout: str, steps: int, step: int, loss: float) -> None:
    """A line on a terminal's standard error."""
    if jax.process_index() == 0 and sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{layout}: step {step} of {steps}, loss {loss:.3f}")
        sys.stderr.write("\r\x1b[K" if step == steps else "")


def told(run: Run) -> str:
    """A run in a line."""
    where = f"{run.devices} devices, {run.processes} process{'es' * (run.processes > 1)}"
    loss = f"loss {run.losses[-1]:.3f}" if run.losses else "trained before"
    return (
        f"{run.layout:14} {where}: {loss}, scale {run.loss_scale:g}, skipped {run.skipped}, "
        f"{run.device_mib:.2f} MiB on a device, {run.step_ms:.0f} ms a step"
    )


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--policy", type=digits.policy_name, default="mixed_float16")
    parser.add_argument("--steps", type=digits.positive, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--devices", type=digits.positive, default=8, help="in all; simulated, where there are none"
    )
    parser.add_argument("--processes", type=digits.positive, default=1, help="to start here")
    parser.add_argument(
        "--overflow", type=int, nargs="*", default=[], help="steps at which one device overflows"
    )
    parser.add_argument("--checkpoint-dir", help="to save in, and to go on from")
    parser.add_argument("--checkpoint-every", type=digits.positive, default=10, help="steps")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each layout")
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.devices % options.processes:
        parser.error(f"{options.devices} devices cannot be shared by {options.processes} processes")
    if CONFIG.batch % options.devices:
        parser.error(f"{options.devices} devices cannot share a batch of {CONFIG.batch} rows")
    return options


if __name__ == "__main__":
    sys.exit(main())
