"""Does a GPT learn the same language in half precision?

`examples/gpt.py` at its small size: each policy with three seeds, on the same bytes of the sources
of Python's standard library, and its bits per byte on files that were kept out.
"""

import statistics

from rich.progress import track

from benchmarks.results import Column, Options, Row, number
from examples import gpt

COLUMNS = [
    Column("policy", lambda row: row["contender"]),
    Column("bits per byte", number("bits_per_byte", ".3f")),
    Column("of each seed", lambda row: ", ".join(f"{x:.3f}" for x in row["of_seeds"])),
    Column("skipped batches", lambda row: ", ".join(map(str, row["skipped"]))),
    Column("minutes a run", number("minutes", ".1f")),
]


def run(options: Options) -> list[Row]:
    """Every policy."""
    seeds = range(1 if options.tiny else 3)
    _, config = gpt.parse(["--layers=1", "--width=32", "--steps=4"] if options.tiny else [])
    rows: list[Row] = []
    for policy in gpt.POLICIES:
        if not options.takes(policy):
            continue
        runs = [gpt.train(config, policy, seed) for seed in track(seeds, f"{policy}: seeds")]
        last = [run.curve[-1] for run in runs]
        rows.append(
            {
                "contender": policy,
                "bits_per_byte": statistics.fmean(last),
                "of_seeds": last,
                "skipped": [run.skipped for run in runs],
                "minutes": statistics.fmean(run.minutes for run in runs),
            }
        )
    return rows
