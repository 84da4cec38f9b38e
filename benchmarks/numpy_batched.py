"""NumPy, the clients of a round in lockstep by batched products; they must have one size."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.data import Data
from benchmarks.worker import Ran, Run, serve


def make(data: Data, options: dict[str, Any]) -> Run:
    """Options: dtype."""
    clients, info = data.clients(options["dtype"]), data.info
    X, y = np.stack([X for X, _ in clients]), np.stack([y for _, y in clients])
    lr, l2 = info["lr"], info["l2"]

    def step(z: np.ndarray, X: np.ndarray, y: np.ndarray) -> np.ndarray:
        residual = 1.0 / (1.0 + np.exp(-np.matmul(X, z[:, :, None])[:, :, 0])) - y
        grad = np.matmul(residual[:, None, :], X)[:, 0] / y.shape[1]
        return z - lr * (grad + l2 * z)

    def run(rounds: int) -> Ran:
        x = data.x0.astype(options["dtype"])
        for cohort in data.cohorts[:rounds]:
            rows = (X, y) if data.everybody else (X[cohort], y[cohort])
            z = np.broadcast_to(x, (len(cohort), len(x)))
            for _ in range(info["local_steps"]):
                z = step(z, *rows)
            x = np.mean(z, axis=0)
        return Ran(x)

    return run


if __name__ == "__main__":
    serve(make, "numpy")
