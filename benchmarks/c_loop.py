"""The hand-written C loop, compiled on the spot."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data import Data
from benchmarks.worker import Ran, Run, serve

SOURCE = Path(__file__).with_name("c_loop.c")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC")
# Not for linking: gcc would then add code that makes the whole process flush subnormal numbers.
FAST = ("-ffast-math",)
RECORD_EVERY = 10
SPINS = "10000"  # of a waiting thread before it sleeps: some 20 us


class NoCompilerError(Exception):
    """There is no C compiler, or it cannot compile the loop."""


def compiler() -> str:
    """The path of the system's C compiler."""
    found = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if found is None:
        raise NoCompilerError("no C compiler")
    return found


@cache
def library(real: str, blocked: bool = True) -> ctypes.CDLL:
    """The loop for "float" or "double"; `blocked` takes eight rows at a time."""
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    with tempfile.TemporaryDirectory() as folder:
        compiled, linked = Path(folder, "c_loop.o"), Path(folder, "c_loop.so")
        chosen = f"-DREAL={real}", f"-DBLOCKED={int(blocked)}"
        _call(*FLAGS, *FAST, *chosen, "-c", str(SOURCE), "-o", str(compiled))
        _call(*FLAGS, "-shared", str(compiled), "-o", str(linked), "-lm")
        return ctypes.CDLL(str(linked))


def _call(*arguments: str) -> None:
    done = subprocess.run([compiler(), *arguments], capture_output=True, text=True)
    if done.returncode:
        raise NoCompilerError(f"the C compiler failed: {done.stderr.strip()}")


def make(data: Data, options: dict[str, Any]) -> Run:
    """Options: dtype ("float32" or "float64"), threads, blocked."""
    dtype, threads = np.dtype(options["dtype"]), options["threads"]
    real = "float" if dtype == np.float32 else "double"
    fedavg = library(real, options.get("blocked", True)).fedavg
    X, y, first = aligned(data.X, dtype), aligned(data.y, dtype), aligned(data.first, np.int64)
    N, d, info = data.n_clients, X.shape[1], data.info

    def run(rounds: int) -> Ran:
        cohorts = np.ascontiguousarray(data.cohorts[:rounds], np.int64)
        x = data.x0.astype(dtype)
        objective, gradient = np.zeros((2, rounds // RECORD_EVERY + 1))
        fedavg(
            pointer(X), pointer(y), pointer(first), _long(N), _long(d), pointer(cohorts),
            _long(cohorts.shape[1]), _long(rounds), ctypes.c_double(info["lr"]),
            ctypes.c_double(info["l2"]), _long(info["local_steps"]), _long(RECORD_EVERY),
            _long(threads), pointer(x), pointer(objective), pointer(gradient),
        )  # fmt: skip
        return Ran(x, objective=objective)

    return run


def aligned(array: np.ndarray, dtype: Any) -> np.ndarray:
    """A copy whose first byte lies at a multiple of 64."""
    dtype = np.dtype(dtype)
    room = np.empty(array.size * dtype.itemsize + 64, np.uint8)
    start = -room.ctypes.data % 64
    out = room[start : start + array.size * dtype.itemsize].view(dtype).reshape(array.shape)
    out[...] = array
    return out


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _long(n: int) -> ctypes.c_long:
    return ctypes.c_long(n)


if __name__ == "__main__":
    serve(make, "numpy")
