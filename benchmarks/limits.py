"""What the machine can do: bytes copied, and bytes of a matrix read by matrix-vector products."""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.c_loop import aligned, library, pointer

LARGE = 32 << 20  # numbers: 256 MB, more than any cache
WIDTH, TIMES = 100, 2000
IN_CACHE = 200  # rows of WIDTH that stay in a core's L2


class Limits:
    """Medians over the calls of `measure`, in float64 on all cores."""

    def __init__(self) -> None:
        self.loop, self.cores = library("double"), os.cpu_count() or 1
        self.source = aligned(np.ones(LARGE), np.float64)
        self.target = aligned(np.zeros(LARGE), np.float64)
        self.small = aligned(np.ones(self.cores * IN_CACHE * WIDTH), np.float64)
        self.z = aligned(np.ones(WIDTH), np.float64)
        self.found: dict[str, list[float]] = {"copy": [], "gemv": [], "gemv in cache": []}

    def measure(self) -> None:
        """One more measurement of each, in GB/s."""
        self._note("copy", 16 * LARGE, self._copy)
        self._note("gemv", 8 * LARGE, partial(self._gemv, self.source, 1))
        self._note(
            "gemv in cache", 8 * self.small.size * TIMES, partial(self._gemv, self.small, TIMES)
        )

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(speeds) for name, speeds in self.found.items()}

    def _note(self, name: str, n_bytes: int, call: Callable[[], None]) -> None:
        call()
        start = time.perf_counter()
        call()
        self.found[name].append(n_bytes / (time.perf_counter() - start) / 1e9)

    def _copy(self) -> None:
        self.loop.copy(
            pointer(self.source), pointer(self.target), ctypes.c_long(LARGE),
            ctypes.c_long(self.cores),
        )  # fmt: skip

    def _gemv(self, X: np.ndarray, times: int) -> None:
        self.loop.gemv(
            pointer(X), ctypes.c_long(X.size // WIDTH), ctypes.c_long(WIDTH), pointer(self.z),
            pointer(self.target), ctypes.c_long(times), ctypes.c_long(self.cores),
        )  # fmt: skip
