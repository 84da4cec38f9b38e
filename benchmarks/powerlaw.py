"""Clients of very different sizes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import fedexact as fx
from benchmarks.result import Result, Table, Target, number
from benchmarks.solving import interleaved, medians

N_CLIENTS, D, SMALLEST, LARGEST = 500, 50, 2, 20_000
SAMPLED, ROUNDS, LIMIT = 50, 100, 1.5


def main(name: str, quick: bool) -> Result:
    """FedAvg on sizes by a power law against equal ones with the same number of rows."""
    sizes = power_law(N_CLIENTS)
    equal = np.full(N_CLIENTS, round(sizes.mean()))
    calls: dict[tuple[str, str], Callable[[], fx.Result]] = {}
    for law, n_rows in (("power law", sizes), ("equal", equal)):
        problem = make_problem(n_rows)
        for who in (fx.Full(), fx.Uniform(SAMPLED)):
            calls[law, str(who)] = _solve(problem, who)
    rows = {
        key: call().history.to_pylist()[-1]["gradient_evaluations"] for key, call in calls.items()
    }
    found = interleaved(calls, 3 if quick else 7)
    median = medians(found)
    table, targets = [], []
    for who in (fx.Full(), fx.Uniform(SAMPLED)):
        power, same = ("power law", str(who)), ("equal", str(who))
        ratio = median[power] / rows[power] / (median[same] / rows[same])
        table.append(
            (
                str(who),
                *(number(1e3 * median[key] / ROUNDS) for key in (power, same)),
                *(number(1e9 * median[key] / rows[key]) for key in (power, same)),
                number(ratio),
            )
        )
        targets.append(Target(f"power law against equal sizes per row, {who}", ratio, LIMIT))
    heading = (
        "participation", "power law, ms a round", "equal", "power law, ns a row gradient", "equal",
        "ratio",
    )  # fmt: skip
    return Result(
        name,
        "Power law: clients of 2 to 20,000 rows",
        [
            f"{N_CLIENTS} clients, {sizes.sum():,} rows in all (equal: {equal.sum():,}), d = {D}, "
            f"logistic, FedAvg with 5 full-batch local steps, `fx.solve` over {ROUNDS} rounds, "
            "recorded once at the end. The cohorts of a sampled run differ in rows: time per row "
            "gradient is compared."
        ],
        [Table(heading, table)],
        targets,
        data={f"{law}, {who}": times for (law, who), times in found.items()},
    )


def power_law(n_clients: int) -> np.ndarray:
    """(N,) sizes from SMALLEST to LARGEST, the quantiles of a density falling as size^-1.5."""
    u = (np.arange(n_clients) + 0.5) / n_clients
    low, high = SMALLEST**-0.5, LARGEST**-0.5
    sizes = np.round((low - u * (low - high)) ** -2).astype(int)
    sizes[-1] = LARGEST
    return np.random.default_rng(0).permutation(sizes)


def make_problem(n_rows: np.ndarray) -> fx.Problem:
    rng = np.random.default_rng(1)
    x = rng.normal(size=D) / np.sqrt(D)
    clients = []
    for n in n_rows:
        X = rng.normal(size=(n, D))
        clients.append((X, (X @ x + rng.normal(size=n) > 0).astype(float)))
    return fx.Problem(clients, loss="logistic", l2=0.1, weights="clients")


def _row_gradients(result: fx.Result) -> int:
    return result.history["gradient_evaluations"][-1].as_py()


def _solve(problem: fx.Problem, who: fx.Participation) -> Callable[[], fx.Result]:
    algorithm = fx.FedAvg(lr=0.1, local_steps=5)
    return lambda: fx.solve(problem, algorithm, who, rounds=ROUNDS, record_every=ROUNDS)
