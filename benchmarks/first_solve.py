"""The first `fx.solve` of a process, and what a second one compiles; prints JSON."""

from __future__ import annotations

import json
import sys
import time

START = time.perf_counter()

import jax  # noqa: E402 - the time of the imports is measured

import benchmarks.cores  # noqa: E402, F401 - a device per core
import fedexact as fx  # noqa: E402
from benchmarks.data import load  # noqa: E402
from benchmarks.solving import problem_of  # noqa: E402

IMPORTED = time.perf_counter()
COMPILED = "/jax/core/compile/backend_compile_duration"


def main(path: str) -> None:
    data, compilations = load(path), []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == COMPILED:
            compilations.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    found = {"import": IMPORTED - START}
    since = time.perf_counter()
    problem = problem_of(data)
    found["problem"] = time.perf_counter() - since
    for name, lr, seed, rounds in (("first", 0.5, 0, 10), ("second", 0.25, 1, 30)):
        since, before = time.perf_counter(), len(compilations)
        fx.solve(
            problem, fx.FedAvg(lr=lr, local_steps=5), rounds=rounds, record_every=10, seed=seed
        )
        found[name] = time.perf_counter() - since
        found[f"{name} compilations"] = len(compilations) - before
        found[f"{name} compiling"] = sum(compilations[before:])
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
