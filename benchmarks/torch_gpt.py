"""The same GPT and batches in PyTorch, with its AMP and torchao, as a process of its own.

For two frameworks in one process would each keep the memory of a GPU for itself.
"""

import argparse
import dataclasses
import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.gpt_size import Size
from benchmarks.measuring import step_times, steps_in_a_block
from benchmarks.results import Options, Row

AMP = "PyTorch AMP, bfloat16", "PyTorch AMP, float16"
FLOAT8 = "PyTorch, torchao float8 rowwise"
BESIDE_FLOAT8 = AMP[0], FLOAT8


def measure(
    names: Sequence[str],
    size: Size,
    batches: Sequence[tuple[np.ndarray, ...]],
    options: Options,
) -> list[Row]:
    """A row per name; it says so where what it needs is not installed."""
    rows: dict[str, Row] = {
        name: {"contender": name, **_missing(name)} for name in names if options.takes(name)
    }
    if ready := [name for name, row in rows.items() if "failed" not in row]:
        rows |= {row["contender"]: row for row in _in_its_process(ready, size, batches, options)}
    return list(rows.values())


def _missing(name: str) -> Row:
    if not importlib.util.find_spec("torch"):
        return {"failed": 'PyTorch is not installed: pip install ".[torch]"'}
    if name == FLOAT8 and not importlib.util.find_spec("torchao"):
        return {"failed": "torchao is not installed: pip install torchao"}
    return {}


def _in_its_process(
    names: Sequence[str],
    size: Size,
    batches: Sequence[tuple[np.ndarray, ...]],
    options: Options,
) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "batches.npz"
        np.savez(file, inputs=[x for x, _ in batches], labels=[y for _, y in batches])
        what = {"size": dataclasses.asdict(size), "names": names, "steps": options.steps}
        command = [sys.executable, "-m", "benchmarks.torch_gpt", str(file), json.dumps(what)]
        run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        reason = run.stderr.strip().rpartition("\n")[2][:200]
        return [{"contender": name, "failed": reason} for name in names]
    rows: list[Row] = json.loads(run.stdout.splitlines()[-1])
    return rows


def _model(size: dict[str, int]) -> Any:
    import torch
    from torch import nn
    from torch.nn import functional

    width, heads = size["width"], size["heads"]

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-6) for _ in range(2))
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            batch, length, _ = x.shape
            qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, heads, width // heads)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(x.shape))
            y = functional.gelu(self.up(self.norms[1](x)), approximate="tanh")
            return x + self.down(y)

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(size["vocabulary"], width)
            self.position = nn.Parameter(torch.empty(size["time"], width))
            self.blocks = nn.ModuleList(Block() for _ in range(size["layers"]))
            self.norm = nn.LayerNorm(width, eps=1e-6)
            for module in self.modules():
                if isinstance(module, nn.Linear):  # as Flax's Dense
                    nn.init.trunc_normal_(module.weight, std=module.in_features**-0.5)
                    nn.init.zeros_(module.bias)
            nn.init.normal_(self.embed.weight, std=0.02)
            nn.init.normal_(self.position, std=0.02)

        def forward(self, tokens: Any, labels: Any) -> Any:
            x = self.embed(tokens) + self.position
            for block in self.blocks:
                x = block(x)
            logits = functional.linear(self.norm(x), self.embed.weight)
            return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    return GPT()


def _to_float8(model: Any, device: str) -> int:
    """Makes layers of a model float8; how many.

    The output layer is no nn.Linear, so it stays as it is, as torchao advises.

    Raises:
      ValueError: if there is none, for then this would be another row of AMP.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    config = Float8LinearConfig.from_recipe_name("rowwise")
    config = dataclasses.replace(config, emulate=device != "cuda")
    convert_to_float8_training(model, config=config, module_filter_fn=_divisible)
    if not (layers := sum(isinstance(module, Float8Linear) for module in model.modules())):
        raise ValueError("torchao makes no layer of this model float8")
    return layers


def _divisible(module: Any, _: str) -> bool:
    # What the products of NVIDIA's libraries need: see convert_to_float8_training's example.
    return module.in_features % 16 == 0 and module.out_features % 16 == 0


class _Run:
    """One contender, on its way through the batches."""

    def __init__(self, row: Row, size: dict[str, int], batches: list[Any], device: str) -> None:
        import torch

        torch.manual_seed(0)
        name = row["contender"]
        self.others = torch.cuda.memory_allocated() if device == "cuda" else 0
        self.batches, self.device = batches, device
        self.dtype = torch.float16 if name.endswith(", float16") else torch.bfloat16
        self.row = row
        model = _model(size).to(device)
        if name == FLOAT8:
            self.row["float8_layers"] = _to_float8(model, device)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), 3e-4, eps=1e-8, weight_decay=1e-4, fused=device == "cuda"
        )
        self.scaler = torch.amp.GradScaler(device, enabled=self.dtype == torch.float16)
        self.model = torch.compile(model) if device == "cuda" else model
        self.losses: list[Any] = []

    def warm_up(self) -> None:
        """Two steps: what compiling took, and the memory of a step."""
        import torch

        start = time.perf_counter()
        self.advance(1)
        self.row["compile_s"] = time.perf_counter() - start
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.advance(1)
            self.row["peak_mib"] = (torch.cuda.max_memory_allocated() - self.others) / 2**20

    def advance(self, steps: int) -> float:
        """Seconds of this many steps."""
        import torch

        start = time.perf_counter()
        for _ in range(steps):
            inputs, labels = self.batches[len(self.losses) % len(self.batches)]
            with torch.autocast(self.device, self.dtype):
                loss = self.model(inputs, labels)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)
            self.losses.append(loss.detach())
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start


def _warmed_up(row: Row, size: dict[str, int], batches: list[Any], device: str) -> _Run:
    run = _Run(row, size, batches, device)
    run.warm_up()
    return run


def main() -> None:
    """Takes batches and what to run; prints the rows as JSON."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("batches")
    parser.add_argument("what", type=json.loads)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    arrays = np.load(options.batches)
    batches = [
        tuple(torch.from_numpy(x).long().to(device) for x in pair)
        for pair in zip(arrays["inputs"], arrays["labels"], strict=True)
    ]
    rows: list[Row] = [{"contender": name} for name in options.what["names"]]
    runs = []
    for row in rows:
        try:
            runs.append(_warmed_up(row, options.what["size"], batches, device))
        except Exception as error:  # what a compiler or a kernel refuses is the row's result
            row["failed"] = f"{type(error).__name__}: {error}".split("\n")[0][:200]
    block = steps_in_a_block(min((run.advance(1) for run in runs), default=1.0))
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(options.what["steps"]):
        for found, run in zip(seconds, runs, strict=True):
            found.append(run.advance(block) / block)
    for found, run in zip(seconds, runs, strict=True):
        run.row |= step_times(found)
        run.row["losses"] = [float(loss) for loss in run.losses]
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
