"""What it costs each algorithm to get to the pooled answer."""

from __future__ import annotations

import time
import warnings
from typing import Any, NamedTuple

import numpy as np

import benchmarks.cores  # noqa: F401 - a device per core
import fedexact as fx
from benchmarks.result import Result, Table, number
from benchmarks.solving import solved

N_CLIENTS, N_ROWS, D, L2 = 20, 100, 20, 0.01
ACCURACY = 1e-10  # |x - x*| / |x*|
ROUNDS, SECONDS, RECORD_EVERY = 100_000, 20.0, 10
BIASED_ROUNDS = 2000


class Run(NamedTuple):
    """How one run ended."""

    reached: bool
    row: dict[str, Any]  # of the history
    seconds: float  # without the compilation
    closest: float  # relative distance
    why: str  # exact or biased by theory, and why


def main(name: str, quick: bool) -> Result:
    """Every algorithm with its defaults, with everybody and with half of the clients a round."""
    problem = make_problem()
    reference = fx.reference(problem)
    limit = 1.0 if quick else SECONDS
    tables, data = [], {}
    for participation in (fx.Full(), fx.Bernoulli(0.5)):
        rows = []
        for label, algorithm in fx.ALGORITHMS.items():
            try:
                run = time_to_answer(problem, algorithm(), participation, reference, limit)
            except fx.FedexactError as error:
                rows.append((label, str(error), *[""] * 4))
                continue
            rows.append(_row(label, run))
            data[f"{label}, {participation}"] = run._asdict()
        heading = (
            f"{participation}", "rounds", "MB up + down", "row gradients", "seconds", "closest",
        )  # fmt: skip
        tables.append(Table(heading, sorted(rows, key=_rank)))
    return Result(
        name,
        "Answer: cost of the pooled answer",
        [
            f"Logistic regression, {N_CLIENTS} clients × {N_ROWS} rows, d = {D}, l2 = {L2}, "
            f"columns of different scales and another model for each client. Until |x − x*| ≤ "
            f"{ACCURACY:g} |x*|, looked at every {RECORD_EVERY} rounds, x* by `fx.reference`; "
            f"at most {limit:g} s. Seconds include the recordings and not the compilation. All "
            "hyperparameters are those that fedexact chooses."
        ],
        tables,
        data=data,
    )


def make_problem() -> fx.Problem:
    rng = np.random.default_rng(0)
    common, clients = rng.normal(size=D), []
    for _ in range(N_CLIENTS):
        X = rng.normal(size=(N_ROWS, D)) * np.linspace(0.5, 1.5, D) + 0.3 * rng.normal(size=D)
        x = common + rng.normal(size=D)
        clients.append((X, (X @ x + rng.logistic(size=N_ROWS) > 0).astype(float)))
    return fx.Problem(clients, loss="logistic", l2=L2)


def time_to_answer(
    problem: fx.Problem,
    algorithm: fx.Algorithm,
    participation: fx.Participation,
    reference: np.ndarray,
    limit: float,
) -> Run:
    """Runs until the answer, the time limit, or the last round."""
    size = float(np.linalg.norm(reference))
    watch = _Watch(size, limit)

    def solve(rounds: int, **kwargs: Any) -> fx.Result:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fx.DivergenceWarning)
            return fx.solve(
                problem, algorithm, participation, rounds, record_every=RECORD_EVERY,
                reference=reference, **kwargs,
            )  # fmt: skip

    exactness = solve(2 * RECORD_EVERY).exactness  # compiles
    rounds = ROUNDS if exactness.exact else BIASED_ROUNDS
    watch.start = time.perf_counter()
    try:
        result = solve(rounds, callback=watch)
    except fx.Interrupted as end:
        if not watch.over:
            raise
        result = end.result
    reached, n = watch.closest <= ACCURACY, result.rounds
    elapsed = 0.0
    if reached:
        again = {"record_every": RECORD_EVERY, "reference": reference}
        elapsed = n * solved(problem, algorithm, participation, n, **again)[1]
    why = f"{'exact' if exactness.exact else 'biased'}: {exactness.why}"
    last = result.history.to_pylist()[-1]
    return Run(reached, last, elapsed, watch.closest, why)


class _Watch:
    """A callback that interrupts the run at the answer or when the time is over."""

    def __init__(self, size: float, limit: float) -> None:
        self.size, self.limit, self.start = size, limit, 0.0
        self.closest, self.over = np.inf, False

    def __call__(self, progress: fx.Progress) -> None:
        self.closest = min(self.closest, float(progress.distance or 0.0) / self.size)
        late = time.perf_counter() - self.start > self.limit
        self.over = self.closest <= ACCURACY or late
        if self.over:
            raise KeyboardInterrupt


def _row(label: str, run: Run) -> tuple[str, ...]:
    if not run.reached:
        return label, f"not reached; {run.why}", "", "", "", number(run.closest, 2)
    megabytes = (run.row["bytes_up"] + run.row["bytes_down"]) / 1e6
    return (
        label, f"{run.row['round']:,}", number(megabytes),
        f"{run.row['gradient_evaluations']:,}", number(run.seconds), number(run.closest, 2),
    )  # fmt: skip


def _rank(row: tuple[str, ...]) -> float:
    return float(row[4].replace(",", "")) if row[4] else np.inf
