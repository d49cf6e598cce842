"""Real text that every machine has: the sources of Python's standard library, as words."""

import collections
import functools
import pathlib
import re
import sysconfig

import numpy as np

_WORD = re.compile(r"\w+|[ \t]+|\n+|[^\w\s]")


@functools.cache
def _words(limit: int | None) -> dict[str, list[str]]:
    """The words of each package, of its largest files, `limit` of them in all."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    paths = [p.relative_to(root) for p in root.rglob("*.py") if "site-packages" not in p.parts]
    paths.sort(key=lambda p: (-(root / p).stat().st_size, str(p)))
    found: dict[str, list[str]] = collections.defaultdict(list)
    for path in paths[:limit]:
        found[path.parts[0]] += _WORD.findall((root / path).read_text("utf-8", "replace"))
    return found


@functools.cache
def packages(vocabulary: int, limit: int | None = None) -> dict[str, np.ndarray]:
    """int32[n] of each package: its words by how frequent they are, 0 for those too rare."""
    counts = collections.Counter(word for text in _words(limit).values() for word in text)
    index = {word: i for i, (word, _) in enumerate(counts.most_common(vocabulary - 1), start=1)}
    return {
        name: np.asarray([index.get(word, 0) for word in text], np.int32)
        for name, text in _words(limit).items()
    }


def batches(
    count: int, batch: int, time: int, vocabulary: int, limit: int | None = None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Inputs and the words that follow them, each int32[batch, time], from random places."""
    text = np.concatenate(list(packages(vocabulary, limit).values()))
    generator = np.random.default_rng(0)
    found = []
    for _ in range(count):
        starts = generator.integers(len(text) - time, size=batch)
        rows = np.stack([text[start : start + time + 1] for start in starts])
        found.append((rows[:, :-1], rows[:, 1:]))
    return found
