"""What do the compilers for other GPUs make of the steps?

The zoo, with one line around the train step, beside the same models by hand: the bytes that kernels
read and write, and the temporary memory. As in `programs`, nothing runs. XLA takes kernels of its
own for products.
"""

from collections.abc import Iterator

from benchmarks.programs import BY_HAND, Program, compile_all, compiled_by
from benchmarks.results import Column, Options, Row, number
from benchmarks.training import by_hand, with_jmp_kit
from benchmarks.zoo import ZOO

DEVICE = "NVIDIA A100, RTX A6000 and B200, compiled for and not run"

GPUS = {"a100": "A100", "a6000": "RTX A6000", "b200": "B200"}
RATIOS = {"bytes_moved_ratio": "bytes", "temporary_mib_ratio": "memory"}

COLUMNS = [
    Column("one line, relative to by hand", lambda row: row["contender"]),
    *(
        Column(f"{gpu}, {title}", number(f"{target}_{key}", ".2f"))
        for target, gpu in GPUS.items()
        for key, title in RATIOS.items()
    ),
]


def run(options: Options) -> list[Row]:
    """A row for each model."""
    rows: dict[str, Row] = {}
    for found in compiled_by("benchmarks.gpus", _programs, options):
        target, model = found["group"], found["model"]
        row = rows.setdefault(model, {"contender": model})
        if "failed" in found:
            row["failed"] = f"{GPUS[target]}, {found['contender']}: {found['failed']}"
        elif found["contender"] != BY_HAND:
            row |= {f"{target}_{key}": found[key] for key in RATIOS if key in found}
    return list(rows.values())


def _programs(tiny: bool) -> Iterator[Program]:
    for name in list(ZOO)[:1] if tiny else ZOO:
        model = ZOO[name].at(tiny)
        for contender in by_hand(model.task)[:1] + with_jmp_kit(model.task)[1:2]:
            for target in GPUS:
                yield Program(target, name, contender, model.batch, target=target)


if __name__ == "__main__":
    compile_all(_programs)
