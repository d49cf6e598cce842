"""Compiling for a GPU that is not there takes a process of its own, which looks for none."""

import json
import os
import subprocess
import sys
from typing import Any

from benchmarks.results import Row
from jmp_kit.numerics import TARGETS

H200 = TARGETS["h200"]


def deviceless(module: str, what: dict[str, Any]) -> list[Row]:
    """The rows that `python -m module` prints as its last line, told in JSON what to compile."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", module, json.dumps(what)]
    printed = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    printed.check_returncode()
    rows: list[Row] = json.loads(printed.stdout.splitlines()[-1])
    return rows
