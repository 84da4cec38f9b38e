"""Rounds of 1,000 clients out of few and out of many, in one process; prints JSON."""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import benchmarks.cores  # noqa: F401 - a device per core
import fedexact as fx
from benchmarks.processes import own_peak
from benchmarks.solving import seconds
from fedexact.clients import Clients, aligned

D, LEAST, MOST, COHORT, STRETCHES = 20, 2, 50, 1000, 4


def main(few: int, many: int, rounds: int, names: list[str]) -> None:
    problems, found = {}, {}
    for N in (few, many):
        start = time.perf_counter()
        problems[N] = make_problem(N)
        took = time.perf_counter() - start
        found[N] = {
            "problem": took,
            "megabytes": problems[N].n_rows.sum() * (D + 1) * 8 / 1e6,
            "peak": own_peak(),
            "pass": _pass(problems[N]),
        }
    algorithms: dict[str, Any] = {}
    for name in names:
        algorithms[name] = {"few": ms(problems[few], name, rounds, found[few]["pass"])}
        algorithms[name]["many"] = ms(problems[many], name, rounds, found[many]["pass"])
        algorithms[name]["peak"] = own_peak()
        print(name, algorithms[name], file=sys.stderr)
    print(json.dumps({"clients": found, "algorithms": algorithms}))


def make_problem(n_clients: int) -> fx.Problem:
    """Logistic regression, LEAST to MOST rows a client, columns filled one by one."""
    rng = np.random.default_rng(0)
    n_rows = rng.integers(LEAST, MOST + 1, n_clients)
    X = aligned((int(n_rows.sum()), D))  # which JAX uses in place
    logits = rng.normal(size=len(X))
    for j, x in enumerate(rng.normal(size=D) / np.sqrt(D)):
        X[:, j] = rng.normal(size=len(X))
        logits += x * X[:, j]
    y = (logits > 0).astype(float)
    return fx.Problem(Clients(X, y, n_rows), loss="logistic", l2=0.1, weights="clients")


def _pass(problem: fx.Problem) -> float:
    """Seconds of one recording."""
    x = np.full(D, 0.1)
    problem.value_and_grad(x)
    return statistics.median(seconds(lambda: problem.value_and_grad(x)) for _ in range(3))


def ms(problem: fx.Problem, name: str, rounds: int, recording: float) -> float | str:
    """Milliseconds a round between recordings that are `rounds` apart, themselves taken off; or
    why there is no such number."""
    times: list[float] = []
    make: Callable[[], fx.Algorithm] = fx.ALGORITHMS[name]  # with its defaults
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", fx.DivergenceWarning)
            fx.solve(
                problem, make(), fx.Uniform(COHORT), rounds=STRETCHES * rounds,
                record_every=rounds, callback=lambda _: times.append(time.perf_counter()),
            )  # fmt: skip
    except fx.FedexactError as error:
        return str(error)
    stretches = np.diff(times)[1:]  # the first one compiles
    if not len(stretches):
        return "it diverges with its defaults"
    return 1e3 * (statistics.median(stretches) - recording) / rounds


if __name__ == "__main__":
    first, second, third = map(int, sys.argv[1:4])
    main(first, second, third, sys.argv[4:])
