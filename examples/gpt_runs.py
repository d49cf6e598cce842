"""What runs of `examples/gpt.py` cost and reached: their table and their figure."""

import dataclasses
import itertools
import math
import pathlib
import statistics

import jax
import matplotlib
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

matplotlib.use("Agg")
import matplotlib.pyplot as plt


@dataclasses.dataclass(frozen=True)
class Run:
    """What training under one policy and seed cost and reached."""

    policy: str
    seed: int
    parameters: int
    looks: list[int]  # the steps after which the validation text was looked at
    curve: list[float]  # bits per byte there
    skipped: int  # batches that did not count
    loss_scale: float  # at the end
    bytes_per_second: float  # NaN if all steps were trained before
    minutes: float  # the whole run here: compiling, training, looking at the validation text
    written: str  # by the model


def table_of(runs: list[Run]) -> Table:
    """The comparison, a row per policy, means over the seeds."""
    device = f"{jax.devices()[0].device_kind} ({jax.default_backend()})"
    table = Table(title=f"GPT of {runs[0].parameters:,} parameters on {device}", box=SIMPLE_HEAD)
    table.add_column("policy", no_wrap=True)
    for heading in (
        "bits per byte,\nvalidation",
        "of each\nseed",
        "skipped\nbatches",
        "loss\nscale",
        "bytes\na second",
        "minutes\na run",
    ):
        table.add_column(heading, justify="right")
    for policy, group in grouped(runs).items():
        last = [run.curve[-1] for run in group]
        table.add_row(
            policy,
            f"{statistics.fmean(last):.3f}",
            " ".join(f"{x:.3f}" for x in last),
            " ".join(str(run.skipped) for run in group),
            " ".join(dict.fromkeys(f"2^{math.log2(run.loss_scale):g}" for run in group)),
            f"{statistics.fmean(run.bytes_per_second for run in group):,.0f}",
            f"{statistics.fmean(run.minutes for run in group):.1f}",
        )
    return table


def grouped(runs: list[Run]) -> dict[str, list[Run]]:
    """The runs of each policy."""
    return {
        policy: [run for run in runs if run.policy == policy]
        for policy in dict.fromkeys(run.policy for run in runs)
    }


def plot(runs: list[Run], path: pathlib.Path) -> None:
    """Bits per byte over the steps: the mean over the seeds, and the range they cover."""
    plt.style.use("tableau-colorblind10")
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for (policy, group), style in zip(grouped(runs).items(), itertools.cycle(("-", "--", ":"))):
        curves = np.array([run.curve for run in group])
        (line,) = axes.plot(group[0].looks, curves.mean(0), style, marker="o", label=policy)
        axes.fill_between(
            group[0].looks, curves.min(0), curves.max(0), color=line.get_color(), alpha=0.2
        )
    axes.set(xlabel="step", ylabel="validation, bits per byte", title="GPT under each policy")
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
