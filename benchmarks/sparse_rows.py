"""FedAvg on sparse rows, and the same with SciPy, in one process; prints JSON."""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from typing import Any

import numpy as np
import scipy.sparse

import benchmarks.cores  # noqa: F401 - a device per core
import fedexact as fx
from benchmarks.processes import own_peak
from benchmarks.solving import interleaved
from fedexact.clients import Clients

L2, LR, LOCAL_STEPS, REPEATS = 1e-3, 1.0, 5, 7


def main(n_clients: int, n_rows: int, d: int, per_row: int, rounds: int) -> None:
    X, y = make_rows(n_clients * n_rows, d, per_row)
    before = own_peak()
    sizes = np.full(n_clients, n_rows)
    start = time.perf_counter()
    problem = fx.Problem(Clients(X, y, sizes), loss="logistic", l2=L2, weights="clients")
    took = time.perf_counter() - start
    calls = {
        "fedexact": partial(ours, problem, rounds),
        "SciPy, loop": partial(scipy_loop, X, y, sizes, rounds),
    }
    expected, x = calls["SciPy, loop"](), calls["fedexact"]()
    off = float(np.linalg.norm(x - expected) / np.linalg.norm(expected))
    found = interleaved(calls, REPEATS)
    print(json.dumps({"before": before, "peak": own_peak(), "problem": took, "off": off,
                      "megabytes": (X.data.nbytes + X.indices.nbytes + X.indptr.nbytes) / 1e6,
                      "seconds": found}))  # fmt: skip


def make_rows(n: int, d: int, per_row: int) -> tuple[scipy.sparse.csr_array, np.ndarray]:
    """Rows of norm 1 with `per_row` positive entries, frequent columns first, as of texts."""
    rng = np.random.default_rng(0)
    columns = np.minimum((d * rng.random((n, 2 * per_row)) ** 3).astype(np.int32), d - 1)
    columns = [np.unique(row)[:per_row] for row in columns]
    indptr = np.cumsum([0, *map(len, columns)])
    indices = np.concatenate(columns)
    values = rng.exponential(size=len(indices))
    X = scipy.sparse.csr_array((values, indices, indptr), shape=(n, d))
    X.data /= np.repeat(np.sqrt(X.multiply(X).sum(axis=1)), np.diff(indptr))
    logits = X @ rng.normal(size=d) * 3
    return X, (logits + rng.logistic(size=n) > 0).astype(float)


def ours(problem: fx.Problem, rounds: int) -> np.ndarray:
    algorithm = fx.FedAvg(lr=LR, local_steps=LOCAL_STEPS)
    return fx.solve(problem, algorithm, rounds=rounds, record_every=10).x


def scipy_loop(X: Any, y: np.ndarray, sizes: np.ndarray, rounds: int) -> np.ndarray:
    x, first = np.zeros(X.shape[1]), np.cumsum(sizes) - sizes
    clients = [(X[a : a + n], y[a : a + n]) for a, n in zip(first, sizes, strict=True)]
    for _ in range(rounds):
        total = np.zeros_like(x)
        for rows, labels in clients:
            z = x
            for _ in range(LOCAL_STEPS):
                residual = 1.0 / (1.0 + np.exp(-(rows @ z))) - labels
                z = z - LR * (rows.T @ residual / len(labels) + L2 * z)
            total += z - x
        x = x + total / len(clients)
    return x


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
