"""Devices to compile for on a machine without them."""

import dataclasses
import functools
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental import topologies

from jmp_kit.numerics._lowered import device_of
from jmp_kit.programs import on_arrays


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU, by the description that XLA compiles from."""

    description: str
    # There is no device to time kernels on.
    compiler_options: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {"xla_gpu_autotune_level": 0}
    )

    @property
    def missing(self) -> str | None:
        """What has to be installed; None if nothing."""
        if importlib.util.find_spec("jax_plugins") is not None and any(
            importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13)
        ):
            return None
        return (
            "JAX's CUDA plugin is not installed. Install it with "
            'pip install "jmp-kit[cuda12]", or in a checkout of this repository with '
            'pip install ".[cuda12]".'
        )

    def devices(self, count: int = 1) -> Sequence[Any]:
        """Devices to lower for.

        Raises:
          ImportError: if JAX's CUDA plugin is not installed.
          RuntimeError: if JAX has started without it.
        """
        if self.missing:
            raise ImportError(self.missing)
        try:
            return _devices(self.description, count)
        except NotImplementedError as error:
            raise RuntimeError(
                "JAX found no GPU when it started, and left its CUDA plugin out. To compile for a "
                "GPU all the same, start Python with JAX_PLATFORMS=cpu in the environment."
            ) from error

    def placed(self, tree: Any) -> Any:
        """A pytree whose arrays are shapes on one of its devices."""
        sharding = jax.sharding.SingleDeviceSharding(self.devices()[0])

        def there(x: Any) -> Any:
            if not hasattr(x, "dtype"):
                return x
            weak = getattr(x, "weak_type", False)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=weak)

        return jax.tree.map(there, tree)


@functools.cache
def _devices(description: str, count: int) -> Sequence[Any]:
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=description, topology=f"1x{count}x1"
    )
    return topology.devices


# What all of them have, and what each has, as XLA itself describes them:
# https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs
_EVERY: dict[str, float] = {
    "threads_per_warp": 32,
    "threads_per_block_limit": 1024,
    "block_dim_limit_x": 2147483647,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "registers_per_block_limit": 65536,
    "registers_per_core_limit": 65536,
    "shared_memory_per_block": 49152,
}
_EACH = (
    *("core_count", "fpus_per_core", "threads_per_core_limit", "shared_memory_per_block_optin"),
    *("shared_memory_per_core", "l2_cache_size", "memory_bandwidth", "device_memory_size"),
    "clock_rate_ghz",
)


def _nvidia(name: str, capability: str, *each: float) -> Target:
    figures = _EVERY | dict(zip(_EACH, each, strict=True))
    told = "\n".join(f"  {key}: {value}" for key, value in figures.items())
    return Target(
        f"gpu_device_info {{\n  cuda_compute_capability {{ {capability} }}\n{told}\n}}\n"
        'platform_name: "CUDA"\n'
        "runtime_version { major: 12 minor: 9 }\n"
        "dnn_version_info { major: 9 minor: 10 }\n"
        f'device_description_str: "NVIDIA {name}"\n'
    )


# fmt: off
TARGETS = {
    "a100": _nvidia(
        "A100", "major: 8",
        108, 64, 2048, 166912, 167936, 41943040, 2039040000000, 85100068864, 1.41,
    ),
    "a6000": _nvidia(
        "RTX A6000", "major: 8 minor: 6",
        84, 128, 1536, 101376, 102400, 6291456, 768096000000, 51041271808, 1.8,
    ),
    "h100": _nvidia(
        "H100", "major: 9",
        132, 128, 2048, 232448, 233472, 52428800, 3352320000000, 84942979072, 1.98,
    ),
    "h200": _nvidia(
        "H200", "major: 9",
        132, 128, 2048, 232448, 233472, 52428800, 4800000000000, 150000000000, 1.98,
    ),
    "b200": _nvidia(
        "B200", "major: 10",
        148, 128, 2048, 232448, 233472, 132644864, 7672320000000, 191514411008, 1.965,
    ),
}
# fmt: on


def compiled(
    fun: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: str | None,
    compiler_options: Mapping[str, Any] | None,
) -> jax.stages.Compiled:
    """A function, jitted or not, for the present device or for one of a target."""
    options, device = dict(compiler_options or {}), None
    if target is not None:
        if target not in TARGETS:
            raise ValueError(
                f"target is {target!r}, but there are {', '.join(map(repr, TARGETS))}."
            )
        found = TARGETS[target]
        [device] = found.devices()
        options = {**found.compiler_options, **options}
        args, kwargs = found.placed((tuple(args), dict(kwargs)))
    if not hasattr(fun, "lower"):
        call, arrays = on_arrays(fun, *args, **kwargs)
        sharding = jax.sharding.SingleDeviceSharding(device) if device else None
        fun, args, kwargs = jax.jit(call, out_shardings=sharding), (arrays,), {}
    program = fun.lower(*args, **kwargs).compile(options)
    if device and device_of(program) != device:
        raise ValueError(
            f"The function is jitted for {device_of(program)}, by its shardings or because it "
            f"takes no arrays: give it without jit to compile it for {target!r}."
        )
    return program
