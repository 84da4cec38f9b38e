"""A round of every algorithm on W1, against FedAvg's."""

from __future__ import annotations

import dataclasses
import warnings
from functools import partial
from typing import Any

import fedexact as fx
from benchmarks.result import Result, Table, Target, number
from benchmarks.solving import medians, problem_of, solved
from benchmarks.workloads import WORKLOADS

LIMITS = {"FOCUS": 1.3, "SCAFFOLD": 1.3, "MIFA": 1.3, "FedSplit": 6.0}
RECORD_EVERY = 10


def main(name: str, quick: bool) -> Result:
    """All algorithms of the registry with their defaults and everybody taking part."""
    data = WORKLOADS["W1"]()
    problem, rounds = problem_of(data), 20 if quick else 40
    calls = {
        label: partial(solve, problem, with_steps(algorithm, data.info["local_steps"]), rounds)
        for label, algorithm in fx.ALGORITHMS.items()
    }
    ran = {label: call()[0] for label, call in calls.items()}
    gradients = {label: _gradients(result, data.X.shape[0]) for label, result in ran.items()}
    found: dict[str, list[float]] = {label: [] for label in calls}
    for _ in range(3 if quick else 5):
        for label, call in calls.items():
            found[label].append(call()[1])
    ms = {label: 1e3 * s for label, s in medians(found).items()}
    ratio = {label: ms[label] / ms["FedAvg"] for label in ms}
    rows = [
        (label, number(ms[label]), number(ratio[label]), number(gradients[label]))
        for label in sorted(ms, key=ms.__getitem__)
    ]
    return Result(
        name,
        "Algorithms: a round of each on W1",
        [
            "`fx.solve` with the defaults of each but five local steps where there are any, "
            f"everybody in every round, recorded every {RECORD_EVERY} rounds, median of "
            f"{len(found['FedAvg'])} interleaved repeats of the first {rounds} rounds. The last "
            "column is the number of gradients per row and round; a Newton prox counts its own."
        ],
        [Table(("algorithm", "ms a round", "against FedAvg", "gradients per row"), rows)],
        [
            Target(f"{label}'s round against FedAvg's, W1", ratio.get(label), limit)
            for label, limit in LIMITS.items()
        ],
        data={"seconds": found, "rounds": rounds},
    )


def with_steps(algorithm: type[fx.Algorithm], steps: int) -> fx.Algorithm:
    """With that many local steps, where the algorithm has them."""
    names = {field.name for field in dataclasses.fields(algorithm)}  # pyright: ignore[reportArgumentType]
    return algorithm(local_steps=steps) if "local_steps" in names else algorithm()  # pyright: ignore[reportCallIssue]


def solve(problem: fx.Problem, algorithm: fx.Algorithm, rounds: int) -> tuple[fx.Result, float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fx.DivergenceWarning)
        return solved(problem, algorithm, rounds=rounds, record_every=RECORD_EVERY)


def _gradients(result: fx.Result, n_rows: int) -> float:
    last: Any = result.history.to_pylist()[-1]
    return last["gradient_evaluations"] / n_rows / max(1, last["round"])
