"""The data of a workload in a file, so that programs in other environments read the same numbers.

Needs NumPy alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Data(NamedTuple):
    """A federation, who takes part when, and what is to be computed."""

    X: np.ndarray  # (n, d) the rows of one client after those of another
    y: np.ndarray  # (n,)
    first: np.ndarray  # (N + 1,) client k has the rows first[k] to first[k + 1]
    cohorts: np.ndarray  # (rounds, m) the clients of each round
    x0: np.ndarray  # where to start
    info: dict[str, Any]  # name, loss, lr, l2, local_steps, batch_size

    @property
    def n_clients(self) -> int:
        return len(self.first) - 1

    @property
    def everybody(self) -> bool:
        return self.cohorts.shape[1] == self.n_clients

    def clients(self, dtype: Any = float) -> list[tuple[np.ndarray, np.ndarray]]:
        """(X_k, y_k) of every client."""
        X, y = self.X.astype(dtype, copy=False), self.y.astype(dtype, copy=False)
        ends = zip(self.first[:-1], self.first[1:], strict=True)
        return [(X[start:stop], y[start:stop]) for start, stop in ends]


def save(path: Path, data: Data) -> Path:
    arrays = data._asdict()
    np.savez(path, info=json.dumps(arrays.pop("info")), **arrays)
    return path


def load(path: str | Path) -> Data:
    with np.load(path) as file:
        return Data(
            **{name: file[name] for name in Data._fields[:-1]}, info=json.loads(str(file["info"]))
        )
