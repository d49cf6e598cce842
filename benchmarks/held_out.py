"""What does a GPU's compiler make of models that nobody tuned for?

Eighteen models, written and committed before any of them was compiled: as in `programs`, for an
H200, and nothing runs. Relative to by hand; float32 activations are what kernels write.
"""

from collections.abc import Iterator

from benchmarks.programs import BY_HAND, DEVICE, KERNELS, Program, compile_all, compiled_by
from benchmarks.results import Column, Options, Row, number
from benchmarks.training import by_hand, with_jmp_kit
from benchmarks.zoo.held_out import HELD_OUT

__all__ = ["DEVICE"]

WAYS = {"jmp_kit, bfloat16, one line": "one line", "jmp_kit, bfloat16": "four lines"}
RATIOS = {"bytes_moved_ratio": "bytes", "temporary_mib_ratio": "memory"}

COLUMNS = [
    Column("relative to by hand", lambda row: row["contender"]),
    *(
        Column(f"{title}, {way}", number(f"{way}_{key}", ".2f"))
        for way in WAYS.values()
        for key, title in RATIOS.items()
    ),
    Column("float32 activations, GB", number("wide", ",.1f", 1e-9)),
    Column("by hand", number("wide_by_hand", ",.1f", 1e-9)),
]


def run(options: Options) -> list[Row]:
    """A row for each model and kind of kernels."""
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
    return list(rows.values())


def _programs(tiny: bool) -> Iterator[Program]:
    for group, compiler_options in KERNELS.items():
        for name in list(HELD_OUT)[:1] if tiny else HELD_OUT:
            model = HELD_OUT[name].at(tiny)
            for contender in by_hand(model.task)[:1] + with_jmp_kit(model.task)[:2]:
                yield Program(group, name, contender, model.batch, compiler_options)


if __name__ == "__main__":
    compile_all(_programs)
