"""Sparse rows, as of texts."""

from __future__ import annotations

import statistics

from benchmarks.processes import fresh
from benchmarks.result import Result, Table, Target, number
from benchmarks.sparse_rows import LOCAL_STEPS

N_CLIENTS, N_ROWS, D, PER_ROW, ROUNDS = 100, 200, 47_000, 94, 50
MEGABYTES = 8 * 1024**3 / 1e6


def main(name: str, quick: bool) -> Result:
    """FedAvg on a matrix like rcv1's against a loop with SciPy, which it must agree with."""
    shape = (20, 50, 2_000, 10, 10) if quick else (N_CLIENTS, N_ROWS, D, PER_ROW, ROUNDS)
    found = fresh("sparse_rows", *shape)
    n_clients, n_rows, d, per_row, rounds = shape
    ms = {label: 1e3 * statistics.median(s) / rounds for label, s in found["seconds"].items()}
    rows = [(label, number(value), number(value / ms["fedexact"])) for label, value in ms.items()]
    dense = n_clients * n_rows * d * 8 / 1e6
    return Result(
        name,
        "Sparse rows",
        [
            f"{n_clients} clients × {n_rows} rows, d = {d:,}, {per_row} nonzeros a row, logistic, "
            f"{LOCAL_STEPS} full-batch local steps, everybody; `fx.solve` records every 10 rounds. "
            f"The matrix takes {number(found['megabytes'])} MB, dense it would be "
            f"{number(dense)} MB. Peak memory: {number(found['before'])} MB with the matrix, "
            f"{number(found['peak'])} MB in all. Models off by {number(found['off'], 1)}."
        ],
        [Table(("program", "ms a round", "ratio"), rows)],
        [Target("sparse rows: peak memory in MB", found["peak"], MEGABYTES)],
        data=found,
    )
