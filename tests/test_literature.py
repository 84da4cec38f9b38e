"""Who stalls where: random least squares, 16 clients with 500 rows each, d = 50, noise 0.1, 3 local
steps; everybody, 4 of 16 evenly, 4 of 16 unevenly: what the figure of docs/theory.md shows."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

import fedexact as fx
from fedexact.theory.fixed_point import fixed_point
from fedexact.theory.rounds import Rounds

MAKE = runpy.run_path(str(Path(__file__).parents[1] / "docs" / "make.py"))
ROUNDS = 4000
PANELS = pytest.mark.parametrize("pattern", MAKE["PANELS"].values(), ids=MAKE["PANELS"].keys())
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def problem() -> fx.Problem:
    return MAKE["panels_problem"]()


@pytest.fixture(scope="module")
def solution(problem: fx.Problem) -> np.ndarray:
    return fx.reference(problem)


def relative(x: np.ndarray, where: np.ndarray) -> float:
    return float(np.linalg.norm(x - where) / np.linalg.norm(where))


@PANELS
@pytest.mark.parametrize("name", ["FOCUS", "SCAFFOLD"])
def test_the_exact_ones_reach_the_pooled_answer(
    name: str, pattern: fx.Participation, problem: fx.Problem, solution: np.ndarray
) -> None:
    result = fx.solve(problem, MAKE["LINES"][name], pattern, rounds=600)
    assert result.exactness.exact
    assert relative(result.x, solution) < 1e-10
    assert result.certificate is not None
    assert result.certificate.verdict == "certified"


@PANELS
def test_mifa_stalls_at_the_uniform_fedgd_point(
    pattern: fx.Participation, problem: fx.Problem, solution: np.ndarray
) -> None:
    """sum_k M_k (H_k x - b_k) = 0, M_k = sum_{i<3} (I - lr H_k)^i, from the rows themselves."""
    result = fx.solve(problem, MAKE["LINES"]["MIFA"], pattern, rounds=1000)
    lr = result.hyperparameters["lr"]
    stalls_at = fedgd_point(problem, lr, 3)
    assert relative(result.x, stalls_at) < 1e-10
    assert relative(stalls_at, solution) > 1e-5
    predicted = fixed_point(MAKE["LINES"]["MIFA"], problem, pattern)
    assert predicted.x == pytest.approx(stalls_at, rel=0, abs=1e-11)
    assert predicted.spread == 0.0


def fedgd_point(problem: fx.Problem, lr: float, R: int) -> np.ndarray:
    """With all clients weighing alike; independent of the library's oracles."""
    rows, weight = problem.pooled()
    X, y = np.asarray(rows.X), np.asarray(rows.y)
    clients = np.array_split(np.arange(len(y)), problem.n_clients)  # 500 rows each
    left, right = np.zeros((problem.dim, problem.dim)), np.zeros(problem.dim)
    for mine in clients:
        scaled = problem.n_clients * weight[mine, None] * X[mine]
        H, b = scaled.T @ X[mine], scaled.T @ y[mine]
        M = sum(
            (np.linalg.matrix_power(np.eye(problem.dim) - lr * H, i) for i in range(R)),
            np.zeros_like(H),
        )
        left, right = left + M @ H, right + M @ b
    return np.linalg.solve(left, right)


@PANELS
@pytest.mark.parametrize("name", ["FedAvg", "FedAU"])
def test_the_biased_ones_stall_where_theory_says(
    name: str, pattern: fx.Participation, problem: fx.Problem, solution: np.ndarray
) -> None:
    """With everybody present to 1e-10. Under random cohorts the root mean square distance to the
    predicted point over 4,000 rounds is the predicted spread to 4 %, and the mean model is the
    predicted point up to four of its standard errors: the model forgets within some ten rounds."""
    algorithm = MAKE["LINES"][name]
    predicted = fixed_point(algorithm, problem, pattern)
    assert relative(predicted.x, solution) > 1e-5
    models = run_models(problem, algorithm, pattern)[400:]
    if isinstance(pattern, fx.Full):
        assert relative(models[-1], predicted.x) < 1e-10
        assert predicted.spread == 0.0
        return
    off = models - predicted.x[None, :]
    observed = np.sqrt(np.mean(np.sum(off**2, axis=1)))
    assert observed == pytest.approx(predicted.spread, rel=0.04)
    batches = off[: len(off) // 40 * 40].reshape(40, -1, problem.dim).mean(axis=1)
    error = np.sqrt(np.sum(batches.var(axis=0, ddof=1)) / len(batches))  # of the mean, as a norm
    assert np.linalg.norm(off.mean(axis=0)) < 4 * error
    assert error < predicted.spread / 5


def run_models(
    problem: fx.Problem, algorithm: fx.Algorithm, pattern: fx.Participation
) -> np.ndarray:
    """(rounds, d) the model after each round; the engine's, checked at one of them."""
    task = Rounds(problem, algorithm, pattern)
    _, models = task.run(task.initial(), 0, ROUNDS)
    engine = fx.solve(problem, algorithm, pattern, rounds=100)
    assert models[99] == pytest.approx(engine.x, rel=0, abs=1e-11)
    return models
