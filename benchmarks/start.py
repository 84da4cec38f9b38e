"""The time to the first result in a fresh process, and what another call compiles."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from benchmarks.data import save
from benchmarks.processes import fresh
from benchmarks.result import Result, Table, Target, number
from benchmarks.workloads import WORKLOADS

LIMIT = 3.0


def main(name: str, quick: bool) -> Result:
    """W1, from the start of the interpreter; the repeats are processes."""
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder, "data.npz"), WORKLOADS["W1"]())
        found = [fresh("first_solve", path) for _ in range(2 if quick else 5)]
    median = {key: statistics.median(run[key] for run in found) for key in found[0]}
    rows = [
        ("import", number(median["import"]), ""),
        ("fx.Problem", number(median["problem"]), ""),
        *(
            (
                f"{which} fx.solve, {rounds} rounds",
                number(median[which]),
                f"{median[f'{which} compilations']:.0f} ({number(median[f'{which} compiling'])} s)",
            )
            for which, rounds in (("first", 10), ("second", 30))
        ),
        ("whole process", number(median["process"]), ""),
    ]
    first = median["import"] + median["problem"] + median["first"]
    return Result(
        name,
        "Start: the first result of a fresh process",
        [
            f"W1 in {len(found)} fresh processes, medians, no compilation cache. The second call "
            "has another step, seed and number of rounds."
        ],
        [Table(("what", "s", "compilations"), rows)],
        [
            Target("seconds to the first result on W1, 10 rounds", first, LIMIT),
            Target(
                "compilations of a second call with other floats, seed and rounds",
                median["second compilations"],
                0,
            ),
        ],
        data=found,
    )
