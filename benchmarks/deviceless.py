"""Compiling for a GPU on a machine without one, in a process of its own."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from jax.experimental import topologies

from benchmarks.results import Row

MISSING = "JAX's CUDA plugin is not installed: pip install jmp-kit[cuda12]"

# What XLA has to know of the device.
H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  l2_cache_size: 52428800
  memory_bandwidth: 4800000000000
  device_memory_size: 150000000000
  clock_rate_ghz: 1.98
}
platform_name: "CUDA"
runtime_version { major: 12 minor: 9 }
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""


def h200s(count: int) -> Sequence[Any]:
    """Devices to compile for."""
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=H200, topology=f"1x{count}x1"
    )
    return topology.devices


def has_plugin() -> bool:
    """Whether JAX can compile for a GPU here."""
    return importlib.util.find_spec("jax_plugins") is not None and any(
        importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13)
    )


def deviceless(module: str, what: dict[str, Any]) -> list[Row]:
    """The rows that `python -m module` prints as its last line, told in JSON what to compile."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
    command = [sys.executable, "-m", module, json.dumps(what)]
    printed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    printed.check_returncode()
    rows: list[Row] = json.loads(printed.stdout.splitlines()[-1])
    return rows
