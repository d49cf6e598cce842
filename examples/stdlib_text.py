"""The sources of Python's standard library, real text that every machine has, as bytes."""

import pathlib
import sysconfig
from typing import Any

import numpy as np


def load_text() -> tuple[np.ndarray, np.ndarray]:
    """The standard library as (training, validation), each uint8[n]; every 20th file is kept out.

    Its tests and tables of characters are left out, for some systems come without them.
    """
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    aside = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
    paths = [p for p in root.rglob("*.py") if not aside.intersection(p.relative_to(root).parts)]
    texts = [p.read_bytes() for p in sorted(paths)]
    validation = b"".join(texts[::20])
    training = b"".join(text for i, text in enumerate(texts) if i % 20)
    return np.frombuffer(training, np.uint8), np.frombuffer(validation, np.uint8)


def pieces(text: np.ndarray, starts: Any, length: int) -> np.ndarray:
    """uint8[len(starts), length], from these places of a text on."""
    return text[np.asarray(starts)[:, None] + np.arange(length)]


def printable(text: bytes) -> str:
    """As a terminal can show it, whatever an untrained model writes."""
    decoded = text.decode("utf-8", "replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in decoded)
