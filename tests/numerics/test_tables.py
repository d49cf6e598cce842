"""Tables that fit a terminal."""

import sys

import pytest

from jmp_kit.numerics import _progress
from jmp_kit.numerics._tables import count, of_layers, percent, table

ROWS = [("times", "path"), ("3", "a/long/path/to/somewhere/kernel"), ("10", "b")]


def test_the_last_column_gives_way(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    assert table(ROWS) == ("times  path\n3      …th/to/somewhere/kernel\n10     b")
    monkeypatch.setenv("COLUMNS", "200")
    assert "a/long/path/to/somewhere/kernel" in table(ROWS)
    monkeypatch.setenv("COLUMNS", "1")
    assert "…" in table(ROWS)


@pytest.mark.parametrize(
    ("paths", "told"),
    [
        ([f"Net/Block_{i}/Dense_1" for i in range(12)], ["Net/Block_{0..11}/Dense_1"]),
        ([f"blocks/{i}/w" for i in (0, 1, 2, 4, 7, 8)], ["blocks/{0..2,4,7..8}/w"]),
        # The outermost number alone: others tell apart what is in a layer.
        (
            [f"Net_0/Block_{i}/Dense_{j}" for i in range(3) for j in (1, 2)],
            ["Net_0/Block_{0..2}/Dense_1", "Net_0/Block_{0..2}/Dense_2"],
        ),
        # Two are read as they are, and so is what has no number.
        (["Dense_0", "Dense_1"], ["Dense_0", "Dense_1"]),
        (["head", "tail", "head"], ["head", "tail"]),
    ],
)
def test_layers_that_are_alike_are_one_row(paths, told):
    rows = of_layers((("add",), path, i) for i, path in enumerate(paths))
    assert [path for _, path, _ in rows] == told
    assert sorted(i for *_, which in rows for i in which) == [*range(len(paths))]
    others = of_layers(((str(i),), path, i) for i, path in enumerate(paths))
    assert len(others) == len(paths)  # no two are alike


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0.0%"), (1e-9, "0.1%"), (0.5, "50.0%"), (1 - 1e-9, "99.9%"), (1, "100.0%")],
)
def test_nothing_and_all_are_said_of_nothing_and_all(share, text):
    assert percent(share) == text


def test_counts():
    assert [count(n) for n in (0, 999, 999.8, 1e3, 2.5e12, 3e15, 4e18)] == [
        "0 ",
        "999 ",
        "1 k",
        "1 k",
        "2.5 T",
        "3 P",
        "4e+03 P",
    ]


def test_progress_is_for_terminals(monkeypatch, capsys):
    _progress.line("working")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    _progress.line("working")
    assert capsys.readouterr().err == "\r\x1b[Kworking"
