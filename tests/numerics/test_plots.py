"""The figures: what they show is what was counted."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_kit
from jmp_kit import numerics
from jmp_kit.numerics._compare import Compared, Comparison


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_exponents_and_what_a_scale_saves(tmp_path):
    grads = {"a": jnp.array([0.0, 0.0, 1.0, 2.0**-26]), "b": jnp.array([2.0**-26] * 5 + [2.0**-40])}
    found = numerics.exponent_histogram(grads)
    figure = numerics.plot_exponents(found, jnp.float16, loss_scale=2.0**10)
    assert legend(figure) == [
        "in range: 10%",
        "in range by a loss scale of 2^10: 60%",
        "below it: 10%",
        "zeros: 20%",
    ]
    lines = sorted(line.get_xdata()[0] for line in figure.axes[0].lines)
    assert lines == [-24.5, -14.5]
    file = tmp_path / "exponents.png"
    figure.savefig(file)
    assert file.stat().st_size > 10_000
    # Of the values themselves.
    figure = numerics.plot_exponents(grads, jnp.float16, loss_scale=2.0**10)
    assert legend(figure)[0] == "in range: 10%"
    for nothing in ({}, {"step": 3}, None):
        with pytest.raises(ValueError, match="no histogram in this .* pass gradients"):
            numerics.plot_exponents(nothing)


def test_the_loss_scale_and_its_skips():
    figure = numerics.plot_loss_scale([4.0, 8.0, 4.0], skipped=[1])
    scale, skips = figure.axes[0].lines
    np.testing.assert_array_equal(scale.get_ydata(), [4, 8, 4])
    assert (list(skips.get_xdata()), list(skips.get_ydata())) == ([1], [8])
    assert legend(figure) == ["1 skipped step"]


def test_the_audit_a_bar_for_each_path():
    def fun(long, x):
        return (x @ long["x" * 60]).astype(jnp.bfloat16) @ long["y"].astype(jnp.bfloat16)

    params = {"x" * 60: jnp.ones((8, 8)), "y": jnp.ones((8, 8))}
    found = numerics.audit(lambda long, x: fun(long, x).sum(), params, jnp.ones((4, 8)))
    figure = numerics.plot_audit(found)
    names = [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert len(names) == 2
    assert all(len(name) <= 40 for name in names)
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert sum(widths) == sum(p.flops for p in found.products)
    assert figure.axes[0].get_xlabel() == "FLOP"


@pytest.mark.parametrize(
    ("width", "unit", "size"), [(128, "MFLOP", 1e6), (2048, "GFLOP", 1e9), (2**15, "TFLOP", 1e12)]
)
def test_the_audit_has_a_unit_of_few_digits(width, unit, size):
    x = jax.ShapeDtypeStruct((width, width), jnp.float32)
    figure = numerics.plot_audit(numerics.audit(jnp.matmul, x, x))
    assert figure.axes[0].get_xlabel() == unit
    assert sum(bar.get_width() for bar in figure.axes[0].patches) == 2 * width**3 / size


def test_the_legend_takes_no_width_from_the_axes():
    x = jnp.ones((8, 8))
    figures = [
        numerics.plot_exponents(x, jnp.float16, loss_scale=2.0**19),
        numerics.plot_loss_scale([4.0, 8.0], skipped=[1]),
        numerics.plot_audit(numerics.audit(jnp.matmul, x, x)),
    ]
    for figure in figures:
        figure.draw_without_rendering()
        [legend] = figure.legends
        axes = figure.axes[0].get_window_extent()
        assert axes.width > 0.8 * figure.bbox.width
        assert legend.get_window_extent().y1 < axes.y0
        assert legend.get_window_extent().width < figure.bbox.width


def test_a_comparison_a_panel_for_each_question():
    def row(policy, memory):
        return Compared(policy, 2.0, memory, 1.0, 0.0, 0.01, 0.02, "w", 1.0, 1.0)

    rows = row("float32, highest", 1234.5), row("mixed_bfloat16", None)
    figure = numerics.plot_comparison(Comparison("a device", rows))
    time, memory, error = figure.axes
    assert [t.get_text() for t in time.get_yticklabels()] == ["float32, highest", "mixed_bfloat16"]
    assert [t.get_text() for t in memory.texts] == ["1,234.5", "unknown"]
    assert [bar.get_width() for bar in error.patches] == [0.01, 0.01]
    assert figure.get_suptitle() == "a device"


def test_without_matplotlib_a_plot_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(
        ImportError, match=r'Plots need matplotlib.*"jmp-kit\[plot\]".*"\.\[plot\]"'
    ):
        numerics.plot_loss_scale([1.0])


def test_a_loss_scale_as_metrics_tell_it():
    optimizer = jmp_kit.mixed_precision(optax.sgd(0.1), jmp_kit.DynamicLossScale(2.0**4))
    params = {"w": jnp.ones(2)}
    state, told = optimizer.init(params), []
    for value in (1.0, jnp.inf, 1.0):
        _, state = optimizer.update({"w": jnp.full(2, value)}, state, params)
        told.append(jmp_kit.metrics(state))
    figure = numerics.plot_loss_scale(told)
    scale, skipped = figure.axes[0].lines
    assert list(scale.get_ydata()) == [16, 8, 8]
    assert list(skipped.get_xdata()) == [1]
