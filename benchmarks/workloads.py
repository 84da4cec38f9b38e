"""The workloads, with data made here; all but the MLP are logistic regression."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import fedexact as fx
from benchmarks.data import Data
from benchmarks.mlp import layers

L2, LOCAL_STEPS, ROUNDS = 0.1, 5, 2000
HIDDEN, CLASSES, BATCH = 64, 10, 16

DESCRIPTIONS = {
    "W1": "100 clients × 200 rows, d = 100, logistic, 5 full-batch local steps, everybody",
    "W2": "1000 clients × 50 rows, d = 100, logistic, 5 full-batch local steps, 50 a round",
    "W3": "digits, 50 clients by Dirichlet(0.3), MLP 64-64-10, batch 16, one epoch, 10 a round",
}


def logistic(name: str, n_clients: int, n_rows: int, d: int, per_round: int) -> Data:
    """Clients of one size."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=d) / np.sqrt(d)
    X = rng.normal(size=(n_clients * n_rows, d))
    y = (X @ x + rng.normal(size=len(X)) > 0).astype(float)
    first = np.arange(0, len(X) + 1, n_rows)
    lr = 1.0 / (_steepest(X.reshape(n_clients, n_rows, d)) / 4 + L2)
    info = {"name": name, "loss": "logistic", "lr": lr, "l2": L2, "local_steps": LOCAL_STEPS,
            "batch_size": None}  # fmt: skip
    return Data(X, y, first, draws(n_clients, per_round, ROUNDS), np.zeros(d), info)


def _steepest(X: np.ndarray) -> float:
    """The largest eigenvalue of any client's X'X / n."""
    return float(max(np.linalg.norm(rows, 2) ** 2 / len(rows) for rows in X))


def participation(n_clients: int, per_round: int) -> fx.Full | fx.Uniform:
    return fx.Full() if per_round == n_clients else fx.Uniform(per_round)


def draws(n_clients: int, per_round: int, rounds: int) -> np.ndarray:
    """(rounds, per_round) who takes part, as fedexact draws with seed 0."""
    mask = participation(n_clients, per_round).mask(n_clients, 0, rounds, 0)
    return np.nonzero(mask)[1].reshape(rounds, per_round)


def digits() -> Data:
    """scikit-learn's handwritten digits (1797 × 64), labels skewed over the clients."""
    n_clients, per_round, rng = 50, 10, np.random.default_rng(0)
    X, y = map(np.asarray, load_digits(return_X_y=True))
    owner = _dirichlet(y, n_clients, 0.3, rng)
    order = np.argsort(owner, kind="stable")
    first = np.searchsorted(owner[order], np.arange(n_clients + 1))
    steps = round(float(np.mean(np.ceil(np.diff(first) / BATCH))))
    info = {"name": "W3", "loss": "mlp", "lr": 0.1, "l2": 0.0, "local_steps": steps,
            "batch_size": BATCH}  # fmt: skip
    x0 = np.concatenate([_glorot(rng, 64, HIDDEN), _glorot(rng, HIDDEN, CLASSES)])
    cohorts = draws(n_clients, per_round, ROUNDS)
    return Data(X[order] / 16.0, y[order].astype(float), first, cohorts, x0, info)


def _dirichlet(y: np.ndarray, n_clients: int, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """(n,) the client of each row: the rows of a label are spread by Dirichlet shares, and every
    client has at least one row."""
    owner = np.empty(len(y), int)
    for label in np.unique(y):
        rows = np.flatnonzero(y == label)
        owner[rows] = rng.choice(n_clients, len(rows), p=rng.dirichlet(np.full(n_clients, alpha)))
    for empty in np.setdiff1d(np.arange(n_clients), owner):
        owner[np.argmax(owner == np.bincount(owner).argmax())] = empty
    return owner


def _glorot(rng: np.random.Generator, n_in: int, n_out: int) -> np.ndarray:
    """Weights (n_in, n_out) and zero biases (n_out,) of a layer, in one vector."""
    bound = np.sqrt(6 / (n_in + n_out))
    return np.concatenate([rng.uniform(-bound, bound, n_in * n_out), np.zeros(n_out)])


WORKLOADS: dict[str, Any] = {
    "W1": partial(logistic, "W1", 100, 200, 100, 100),
    "W2": partial(logistic, "W2", 1000, 50, 100, 50),
    "W3": digits,
}


def objective(data: Data, x: np.ndarray) -> float:
    """F(x), the mean over the clients of their mean losses, with the ridge."""
    row_loss = _mlp_losses if data.info["loss"] == "mlp" else _log_losses
    losses = [float(np.mean(row_loss(x, X, y))) for X, y in data.clients()]
    return float(np.mean(losses) + 0.5 * data.info["l2"] * x @ x)


def _log_losses(x: np.ndarray, X: np.ndarray, y: np.ndarray) -> np.ndarray:
    t = X @ x
    return np.logaddexp(0.0, t) - y * t


def _mlp_losses(x: np.ndarray, X: np.ndarray, y: np.ndarray) -> np.ndarray:
    W1, b1, W2, b2 = layers(x)
    logits = np.maximum(X @ W1 + b1, 0.0) @ W2 + b2
    return np.logaddexp.reduce(logits, axis=1) - logits[np.arange(len(y)), y.astype(int)]


def bytes_per_round(data: Data, itemsize: int) -> float:
    """Bytes of rows that the local steps of a mean round go through, each row once a step."""
    rows = data.cohorts.shape[1] * len(data.X) / data.n_clients
    per_epoch = 1 if data.info["batch_size"] else data.info["local_steps"]
    return rows * per_epoch * data.X.shape[1] * itemsize
