"""The pooled answer of many rows against scikit-learn and statsmodels."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import statsmodels.api as sm
from sklearn.linear_model import LogisticRegression

import benchmarks.cores  # noqa: F401 - a device per core
import fedexact as fx
from benchmarks.result import Result, Table, Target, number
from fedexact.clients import Clients

N_ROWS, D, N_CLIENTS, LIMIT = 1_000_000, 100, 100, 3.0
ACCURATE = 1e-9  # gradient of the mean loss, against its size at 0

Fit = Callable[[], np.ndarray]


def main(name: str, quick: bool) -> Result:
    """Logistic regression without a ridge."""
    n, repeats = (20_000, 2) if quick else (N_ROWS, 5)
    X, y = make_rows(n)
    problem = fx.Problem(Clients(X, y, np.full(N_CLIENTS, n // N_CLIENTS)), loss="logistic")
    fits: dict[str, Fit] = {
        "fedexact": lambda: fx.reference(problem),
        "scikit-learn, newton-cholesky": lambda: by_sklearn("newton-cholesky", X, y),
        "scikit-learn, lbfgs": lambda: by_sklearn("lbfgs", X, y),
        "statsmodels, newton": lambda: by_statsmodels(X, y),
    }
    times: dict[str, list[float]] = {label: [] for label in fits}
    answers: dict[str, np.ndarray] = {}
    for _ in range(repeats + 1):
        for label, fit in fits.items():
            start = time.perf_counter()
            answers[label] = fit()
            times[label].append(time.perf_counter() - start)
    scale = np.linalg.norm(problem.grad(np.zeros(D)))
    accuracy = {k: float(np.linalg.norm(problem.grad(x)) / scale) for k, x in answers.items()}
    median = {label: statistics.median(found[1:]) for label, found in times.items()}
    others = [median[k] for k in fits if k != "fedexact" and accuracy[k] <= ACCURATE]
    rows = [
        (label, number(median[label]), number(times[label][0]), number(accuracy[label], 2))
        for label in sorted(fits, key=median.__getitem__)
    ]
    return Result(
        name,
        "Reference: the pooled answer of a million rows",
        [
            f"Logistic regression, {n:,} rows × {D} columns, float64. The others' tolerances are "
            "set so that they go on to rounding; the last column is the norm of the gradient at "
            "the answer against that at 0. The first call of fedexact compiles."
        ],
        [Table(("program", "s", "first call, s", "gradient"), rows)],
        [
            Target(
                "reference of a million rows: time against the fastest other that is as accurate",
                median["fedexact"] / min(others) if others else None,
                LIMIT,
            )
        ],
        data={"seconds": times, "gradient": accuracy},
    )


def make_rows(n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, D))
    logits = X @ (rng.normal(size=D) / np.sqrt(D))
    return X, (logits + rng.logistic(size=n) > 0).astype(float)


def by_sklearn(solver: str, X: np.ndarray, y: np.ndarray) -> np.ndarray:
    model = LogisticRegression(
        C=np.inf, solver=solver, tol=1e-11, max_iter=500, fit_intercept=False
    )
    return model.fit(X, y).coef_[0]


def by_statsmodels(X: np.ndarray, y: np.ndarray) -> np.ndarray:
    fit = sm.Logit(y, X).fit(method="newton", tol=1e-11, maxiter=100, disp=False)
    return np.asarray(fit.params)
