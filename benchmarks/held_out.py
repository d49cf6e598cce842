"""What does a GPU's compiler make of models that nobody tuned for?

Eighteen models, written and committed before any of them was compiled, relative to by hand. As in
`programs`, it is for an H200, and nothing runs. What came of them at first is told beside: where
that is something else, the planner was changed since, and some of them showed why.
"""

import json
import pathlib
from collections.abc import Iterator

from benchmarks.programs import BY_HAND, KERNELS, Program, compile_all, compiled_by
from benchmarks.programs import DEVICE as DEVICE
from benchmarks.results import Column, Options, Row, number
from benchmarks.training import by_hand, with_jmp_kit
from benchmarks.zoo.held_out import HELD_OUT

WAYS = {"jmp_kit, bfloat16, one line": "one line", "jmp_kit, bfloat16": "four lines"}
RATIOS = {"bytes_moved_ratio": "bytes", "temporary_mib_ratio": "memory"}

FIRST = pathlib.Path(__file__).parent / "results" / "first" / "h200compiled-2026-11-29.json"

COLUMNS = [
    Column("relative to by hand", lambda row: row["contender"]),
    *(
        Column(f"{title}, {way}", number(f"{way}_{key}", ".2f"))
        for way in WAYS.values()
        for key, title in RATIOS.items()
    ),
    Column("bytes, one line, at first", number("first", ".2f")),
    Column("float32 activations, GB", number("wide", ",.1f", 1e-9)),
    Column("by hand", number("wide_by_hand", ",.1f", 1e-9)),
]


def run(options: Options) -> list[Row]:
    """A row for each model and kind of kernels."""
    file = json.loads(FIRST.read_text())["results"]["held_out"]
    told = [] if options.tiny else file["rows"]
    first = {(r["group"], r["contender"]): r["one line_bytes_moved_ratio"] for r in told}
    rows: dict[tuple[str, str], Row] = {}
    for found in compiled_by("benchmarks.held_out", _programs, options):
        group, model, contender = (found[key] for key in ("group", "model", "contender"))
        row = rows.setdefault((group, model), {"group": group, "contender": model})
        if "failed" in found:
            row["failed"] = f"{contender}: {found['failed']}"
        elif contender == BY_HAND:
            row["wide_by_hand"] = found["wide"]
        else:
            row |= {f"{WAYS[contender]}_{key}": found[key] for key in RATIOS if key in found}
            row["wide"] = max(found["wide"], row.get("wide", 0))
            if (group, model) in first:
                row["first"] = first[group, model]
    return list(rows.values())


def _programs(tiny: bool) -> Iterator[Program]:
    for group, compiler_options in KERNELS.items():
        for name in list(HELD_OUT)[:1] if tiny else HELD_OUT:
            model = HELD_OUT[name].at(tiny)
            for contender in by_hand(model.task)[:1] + with_jmp_kit(model.task)[:2]:
                yield Program(group, name, contender, model.batch, compiler_options)


if __name__ == "__main__":
    compile_all(_programs)
