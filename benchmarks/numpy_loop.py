"""NumPy, one client after the other."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.data import Data
from benchmarks.worker import Ran, Run, serve


def make(data: Data, options: dict[str, Any]) -> Run:
    """Options: dtype."""
    clients, info = data.clients(options["dtype"]), data.info
    lr, l2, steps = info["lr"], info["l2"], info["local_steps"]

    def visit(x: np.ndarray, X: np.ndarray, y: np.ndarray) -> np.ndarray:
        z = x
        for _ in range(steps):
            residual = 1.0 / (1.0 + np.exp(-(X @ z))) - y
            z = z - lr * (residual @ X / len(y) + l2 * z)
        return z - x

    def run(rounds: int) -> Ran:
        x = data.x0.astype(options["dtype"])
        for cohort in data.cohorts[:rounds]:
            x = x + sum(visit(x, *clients[k]) for k in cohort) / len(cohort)
        return Ran(x)

    return run


if __name__ == "__main__":
    serve(make, "numpy")
