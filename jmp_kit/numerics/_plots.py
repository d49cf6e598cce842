"""Figures of what the numerics tell; with matplotlib, the extra `plot`."""

import collections
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_kit.numerics._audited import Audit
from jmp_kit.numerics._compare import Comparison, mebibytes
from jmp_kit.numerics._exponents import LOWEST, ExponentHistogram, exponent_histogram
from jmp_kit.numerics._tables import percent, shortened
from jmp_kit.numerics._watch import total_histogram

_NO_MATPLOTLIB = (
    'Plots need matplotlib. Install it with pip install "jmp-kit[plot]", or in a checkout of this '
    'repository with pip install ".[plot]".'
)
_BLUE, _RED, _GREY, _YELLOW = "#4477aa", "#cc6677", "#bbbbbb", "#ddcc77"


def plot_exponents(tree: Any, dtype: Any = jnp.float16, loss_scale: float = 1.0) -> Any:
    """Where values lie, what a dtype would flush to zero of them, and what a loss scale saves.

    In the manner of the figure of https://arxiv.org/abs/1710.03740: a bar for each exponent, zeros
    apart, a line at the smallest subnormal and one at the smallest normal number. The share is on a
    logarithmic axis.

    Args:
      tree: what `exponent_histogram` or `watched` gives, or the values themselves: of true
        gradients.
      dtype: the dtype whose limits are shown.
      loss_scale: by what the values would be multiplied.

    Returns:
      A matplotlib Figure; `figure.savefig("gradients.png")`.

    Raises:
      ValueError: if there is no histogram in the tree, and no floating-point array.
      ImportError: if matplotlib is not installed.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_kit import numerics
      >>> grads = jnp.array([0.0, 1e-3, 1e-7, 1e-9])
      >>> figure = numerics.plot_exponents(numerics.exponent_histogram(grads), loss_scale=1024.0)
      >>> figure.axes[0].get_xlabel()
      'exponent e of a value, 2^e <= |x| < 2^(e+1)'
    """
    histogram, info = total_histogram(_histograms(tree)), jnp.finfo(dtype)
    shift = math.log2(loss_scale)
    counts = np.asarray(histogram.counts, np.float64)
    share = 100 * counts / max(counts.sum() + float(histogram.zeros), 1)
    exponents = np.arange(LOWEST, LOWEST + len(counts))
    # A value of exponent e is scaled to e + shift, and lost below the smallest subnormal.
    smallest, normal = info.minexp - info.nmant, info.minexp
    lost, saved = exponents < smallest - shift, exponents < smallest
    figure, axes = _axes(8, 5)
    groups = [
        (~saved, _BLUE, "in range"),
        (saved & ~lost, _YELLOW, f"in range by a loss scale of 2^{shift:g}"),
        (lost, _RED, "below it"),
    ]
    for chosen, colour, name in groups:
        if share[chosen].any():
            label = f"{name}: {share[chosen].sum():.3g}%"
            axes.bar(exponents[chosen], share[chosen], width=0.9, color=colour, label=label)
    known = exponents[share > 0]
    low = float(min([smallest - shift, *known])) - 2
    high = float(max([normal, *known])) + 2
    zeros = 100 * float(histogram.zeros) / max(counts.sum() + float(histogram.zeros), 1)
    axes.bar([low - 3], [zeros], width=0.9, color=_GREY, label=f"zeros: {zeros:.3g}%")
    limits = (smallest, "smallest subnormal", "right"), (normal, "smallest normal", "left")
    for exponent, name, side in limits:
        axes.axvline(exponent - 0.5, color="black", linestyle=":")
        axes.annotate(
            f"{name} {jnp.dtype(dtype)}: $2^{{{exponent}}}$",
            (exponent - 0.5, 1),
            (0, 3),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha=side,
            va="bottom",
            fontsize=8,
        )
    axes.set(
        xlim=(low - 4, high),
        xlabel="exponent e of a value, 2^e <= |x| < 2^(e+1)",
        ylabel="share of all values, %",
        ylim=(min([*share[share > 0], 1]) / 2, 100),
        yscale="log",  # the tail is what matters, and it is small
    )
    figure.suptitle(f"Exponents of the values, and the limits of {jnp.dtype(dtype)}")
    _legend(figure, columns=2)
    return figure


def _histograms(tree: Any) -> Any:
    def is_one(node: Any) -> bool:
        return isinstance(node, ExponentHistogram)

    if any(map(is_one, jax.tree.leaves(tree, is_leaf=is_one))):
        return tree
    found = exponent_histogram(tree)
    if not jax.tree.leaves(found):
        raise ValueError(
            f"There is no histogram in this {type(tree).__name__}, and no floating-point array to "
            "make one of: pass gradients, or what exponent_histogram gives."
        )
    return found


def plot_loss_scale(
    loss_scales: Sequence[float] | Sequence[Mapping[str, Any]], skipped: Sequence[int] = ()
) -> Any:
    """The loss scale over a run, skipped steps marked.

    Args:
      loss_scales: of each step what `metrics` gives, or its "loss_scale" alone.
      skipped: the steps that did not apply, where they are not told by `metrics`.

    Returns:
      A matplotlib Figure.

    Raises:
      ImportError: if matplotlib is not installed.

    Example:
      >>> from jmp_kit import numerics
      >>> figure = numerics.plot_loss_scale([65536.0, 65536.0, 32768.0], skipped=[1])
      >>> figure.axes[0].get_xlabel()
      'step'
    """
    told = [step for step in loss_scales if isinstance(step, Mapping)]
    scales = [float(s["loss_scale"] if isinstance(s, Mapping) else s) for s in loss_scales]
    skipped = [*skipped, *(i for i, step in enumerate(told) if not step["finite"])]
    figure, axes = _axes(8, 3.5)
    axes.step(range(len(scales)), scales, color=_BLUE, where="post")
    heights = [scales[step] for step in skipped]
    label = f"{len(heights)} skipped step{'' if len(heights) == 1 else 's'}"
    axes.plot(list(skipped), heights, "x", color=_RED, label=label)
    axes.set_yscale("log", base=2)
    axes.set(xlabel="step", ylabel="loss scale", title="The loss scale of each step")
    _legend(figure)
    return figure


def plot_audit(audit: Audit) -> Any:
    """The FLOPs of each path, in half and wider.

    Args:
      audit: what `audit` gives.

    Returns:
      A matplotlib Figure.

    Raises:
      ImportError: if matplotlib is not installed.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_kit import numerics
      >>> found = numerics.audit(lambda x, w: x @ w, jnp.ones((4, 8)), jnp.ones((8, 2)))
      >>> [text.get_text() for text in numerics.plot_audit(found).axes[0].get_yticklabels()]
      ['w x']
    """
    flops: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for product in audit.products:
        flops[product.path or product.source][not product.is_half] += product.flops
    figure, axes = _axes(8, 1.8 + 0.3 * len(flops))
    names = [shortened(name, 40) for name in flops]
    rows = np.arange(len(names))
    most = max(map(sum, flops.values()), default=0) or 1
    unit, size = _unit(most)
    half, wide = (np.array([pair[i] for pair in flops.values()], float) / size for i in (0, 1))
    axes.barh(rows, half, color=_BLUE, label=f"half: {percent(audit.half_fraction)}")
    wider = f"wider: {percent(1 - audit.half_fraction)}"
    axes.barh(rows, wide, left=half, color=_RED, label=wider)
    axes.set_yticks(rows, names)
    axes.invert_yaxis()
    axes.set(xlabel=unit, title=f"Work of the products, {audit.level}")
    axes.set(xlim=(0, 1.05 * most / size))
    _legend(figure, columns=2)
    return figure


def _unit(most: float) -> tuple[str, float]:
    """In which numbers up to this one have few digits."""
    units = ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)
    return next((unit for unit in units if most >= unit[1]), ("FLOP", 1.0))


def plot_comparison(comparison: Comparison) -> Any:
    """Step time, memory and the gradient's error under each policy.

    Args:
      comparison: what `compare` gives.

    Returns:
      A matplotlib Figure.

    Raises:
      ImportError: if matplotlib is not installed.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_kit import numerics
      >>> loss_fn = lambda params, x: jnp.mean((x @ params["w"]) ** 2)
      >>> found = numerics.compare(loss_fn, {"w": jnp.eye(8)}, jnp.ones((4, 8)), steps=1)
      >>> [axes.get_xlabel() for axes in numerics.plot_comparison(found).axes]
      ['step, ms', 'memory, MiB', 'error of the gradient']
    """
    rows = comparison.rows
    figure, *all_axes = _axes(11, 1.4 + 0.35 * len(rows), columns=3)
    panels: list[tuple[str, list[float | None], Callable[[Any], str]]] = [
        ("step, ms", [row.step_ms for row in rows], "{:.3g}".format),
        ("memory, MiB", [row.memory_mib for row in rows], mebibytes),
        ("error of the gradient", [row.gradient_error for row in rows], "{:.1e}".format),
    ]
    places = range(len(rows))
    for axes, (label, values, written) in zip(all_axes, panels, strict=True):
        bars = axes.barh(places, [value or 0 for value in values], color=_BLUE)
        axes.bar_label(bars, list(map(written, values)), padding=3)
        first = axes is all_axes[0]
        axes.set_yticks(places, [row.policy if first else "" for row in rows])
        axes.invert_yaxis()
        axes.margins(x=0.3)
        axes.set(xlabel=label)
    figure.suptitle(comparison.device)
    return figure


def _legend(figure: Any, columns: int = 1) -> None:
    """Below the axes: beside them, long names would leave them half of the width."""
    figure.legend(loc="outside lower center", ncols=columns, frameon=False)


def _axes(width: float, height: float, columns: int = 1) -> tuple[Any, ...]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(_NO_MATPLOTLIB) from error
    # Not pyplot's: nobody else's figures and backends are touched.
    figure = Figure(figsize=(width, height), layout="constrained", dpi=120)
    all_axes = [figure.add_subplot(1, columns, i + 1) for i in range(columns)]
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, *all_axes
