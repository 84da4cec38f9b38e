"""Timing `fx.solve` in this process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import benchmarks.cores  # noqa: F401 - a device per core
import fedexact as fx
from benchmarks.data import Data

Key = TypeVar("Key")


def problem_of(data: Data, **kwargs: Any) -> fx.Problem:
    """The logistic problem of a workload."""
    settings = {"loss": "logistic", "l2": data.info["l2"], "weights": "clients", **kwargs}
    return fx.Problem(data.clients(), **settings)


def solved(*args: Any, **kwargs: Any) -> tuple[fx.Result, float]:
    """`fx.solve`, and the seconds of a round: those between its first and its last recording, so
    without what it does once (reading the arguments, the certificate)."""
    times: list[tuple[int, float]] = []
    result = fx.solve(
        *args, **kwargs, callback=lambda seen: times.append((seen.round, time.perf_counter()))
    )
    (first, start), (last, end) = times[0], times[-1]
    return result, (end - start) / max(1, last - first)


def seconds(call: Callable[[], Any]) -> float:
    """How long the call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def interleaved(calls: Mapping[Key, Callable[[], Any]], repeats: int) -> dict[Key, list[float]]:
    """Seconds of each call in every repeat, after one that is not counted."""
    for call in calls.values():
        call()
    found: dict[Key, list[float]] = {key: [] for key in calls}
    for _ in range(repeats):
        for key, call in calls.items():
            found[key].append(seconds(call))
    return found


def medians(found: Mapping[Key, Iterable[float]]) -> dict[Key, float]:
    return {key: statistics.median(times) for key, times in found.items()}
