"""Tables that fit a terminal."""

import sys

import pytest

from jmp_kit.numerics import _progress
from jmp_kit.numerics._tables import count, percent, table

ROWS = [("times", "path"), ("3", "a/long/path/to/somewhere/kernel"), ("10", "b")]


def test_the_last_column_gives_way(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    assert table(ROWS) == ("times  path\n3      …th/to/somewhere/kernel\n10     b")
    monkeypatch.setenv("COLUMNS", "200")
    assert "a/long/path/to/somewhere/kernel" in table(ROWS)
    monkeypatch.setenv("COLUMNS", "1")
    assert "…" in table(ROWS)


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0.0%"), (1e-9, "0.1%"), (0.5, "50.0%"), (1 - 1e-9, "99.9%"), (1, "100.0%")],
)
def test_nothing_and_all_are_said_of_nothing_and_all(share, text):
    assert percent(share) == text


def test_counts():
    assert [count(n) for n in (0, 999, 1e3, 2.5e12, 3e15, 4e18)] == [
        "0 ",
        "999 ",
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
