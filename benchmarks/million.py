"""A million clients on one machine."""

from __future__ import annotations

from benchmarks.million_clients import COHORT, LEAST, MOST, D
from benchmarks.processes import fresh
from benchmarks.result import Result, Table, Target, number

FEW, MANY, ROUNDS, LIMIT, MEGABYTES = 10_000, 1_000_000, 500, 1.3, 8 * 1024**3 / 1e6
MEASURED = ("FedAvg", "SCAFFOLD", "MIFA", "FOCUS")


def main(name: str, quick: bool) -> Result:
    """The same cohort out of FEW and out of MANY clients."""
    few, many = (1_000, 20_000) if quick else (FEW, MANY)
    names = ["FedAvg", "FOCUS"] if quick else MEASURED
    found = fresh("million_clients", few, many, 20 if quick else ROUNDS, *names)
    rows, targets = [], []
    for label, ms in found["algorithms"].items():
        if isinstance(ms["many"], str) or isinstance(ms["few"], str):
            rows.append((label, f"not measured: {ms['many']}", "", ""))
            continue
        ratio = ms["many"] / ms["few"]
        rows.append((label, number(ms["few"]), number(ms["many"]), number(ratio)))
        targets.append(
            Target(f"{label}: {COHORT} clients out of {many:,} against {few:,}", ratio, LIMIT)
        )
    size = found["clients"][str(many)]
    peak = max(ms["peak"] for ms in found["algorithms"].values())
    before = size["peak"]
    targets.append(Target(f"{many:,} clients, d = {D}: peak memory in MB", peak, MEGABYTES))
    return Result(
        name,
        "A million clients",
        [
            f"Logistic regression, d = {D}, {LEAST} to {MOST} rows a client, {COHORT} clients a "
            "round, `fx.solve` with the defaults of each algorithm; milliseconds a round between "
            "recordings, the recordings taken off.",
            f"{many:,} clients are {number(size['megabytes'])} MB of rows; the problem is made in "
            f"{number(size['problem'])} s, a pass over all rows takes {number(size['pass'])} s. "
            f"Peak memory {number(before)} MB with the data, {number(peak)} MB over all "
            f"algorithms: {number((peak - before) * 1e6 / many)} bytes a client for the largest "
            "state.",
        ],
        [Table(("algorithm", f"out of {few:,}, ms", f"out of {many:,}, ms", "ratio"), rows)],
        targets,
        data=found,
    )
