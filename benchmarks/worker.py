"""A program under measurement: a process that runs rounds when told, in any environment.

It speaks JSON, one object a line: it says what it is once it has imported all it needs, then
answers each request. What libraries print goes to stderr.

    {"do": "load", "data": path, "options": {...}}   prepares; {"seconds": s}
    {"do": "run", "rounds": R}                       R rounds from the start; {"seconds": per round,
                                                     "x": [...], "objective": [...]}
    {"do": "quit"}

Needs NumPy alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np

from benchmarks.data import Data, load


class Ran(NamedTuple):
    """What a run gave."""

    x: np.ndarray  # the model
    objective: Any = ()  # every RECORD_EVERY rounds, where it is recorded
    seconds: float | None = None  # per round, of a program that times its rounds itself


Run = Callable[[int], Ran]  # runs so many rounds from the start
Make = Callable[[Data, dict[str, Any]], Run]


def serve(make: Make, *packages: str) -> None:
    """Answers requests until told to quit; the versions of `packages` are reported."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    say = _say(answers)
    say({"versions": {name: version(name) for name in packages}})
    run: Run | None = None
    for request in _requests():
        start = time.perf_counter()
        if request["do"] == "load":
            run = make(load(request["data"]), request["options"])
            say({"seconds": time.perf_counter() - start})
        elif run is not None:
            out = run(request["rounds"])
            seconds = (time.perf_counter() - start) / request["rounds"]
            say(
                {
                    "seconds": seconds if out.seconds is None else out.seconds,
                    "x": np.asarray(out.x, float).tolist(),
                    "objective": np.asarray(out.objective, float).tolist(),
                }
            )


def _say(answers: Any) -> Callable[[dict[str, Any]], None]:
    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    return say


def _requests() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "quit":
            return
        yield request
