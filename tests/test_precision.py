"""Rounds in float32: the same algorithms to single precision, judged in double precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import fedexact as fx
from problems import (
    ALGORITHMS,
    fast_only,
    least_squares,
    logistic,
    programs,
    random_targets,
)

ROUNDS = 24
SINGLE = 2e-6  # relative, of a few rounds
FAST = ("FOCUS 3", "SCAFFOLD 2", "FedSplit", "PushNewton", "FedAvg batch")
# Those that toss coins or draw delays: other numbers of other width.
TOSSES = ("ProxSkip", "VRFOCUS", "AsyncFedDR")


@pytest.mark.parametrize(
    "problem",
    [least_squares(0), pytest.param(logistic(1, n_rows=(5, 60, 20, 7)), marks=pytest.mark.slow)],
    ids=["squared", "logistic"],
)
@pytest.mark.parametrize("name", fast_only(ALGORITHMS, FAST))
def test_rounds_are_those_in_double_precision(problem: fx.Problem, name: str) -> None:
    algorithm: Callable[[], fx.Algorithm] = ALGORITHMS[name]
    double, single = (
        fx.solve(
            problem, algorithm(), fx.Bernoulli(0.6), rounds=ROUNDS, record_every=8, precision=width
        )
        for width in ("double", "single")
    )
    arrays = [*single.server.values(), *single.clients.values()]
    assert all(a.dtype.itemsize <= 4 for a in arrays)
    assert single.x.dtype == float
    if not double.algorithm.startswith(TOSSES):
        np.testing.assert_allclose(single.x, double.x, rtol=0, atol=SINGLE * np.abs(double.x).max())
        found, expected = (r.history["objective"].to_numpy() for r in (single, double))
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["FOCUS", "SCAFFOLD", "FedSplit", "FedDR", "PushNewton"])
def test_exact_algorithms_end_at_single_precision_and_double_goes_on(name: str) -> None:
    problem, who = logistic(2), fx.Bernoulli(0.5)
    star, algorithm = fx.reference(problem), fx.ALGORITHMS[name]
    single = fx.solve(problem, algorithm(), who, rounds=2000, precision="single")
    far = np.linalg.norm(single.x - star) / np.linalg.norm(star)
    assert far < 1e-5
    assert single.message.endswith("double precision goes on from here")
    assert single.certificate is not None
    assert single.certificate.distance_bound is not None
    assert single.certificate.distance_bound >= far * np.linalg.norm(star)
    double = fx.solve(problem, algorithm(), who, rounds=2000, tol=1e-12, x0=single.x)
    assert double.status == "tolerance"
    np.testing.assert_allclose(double.x, star, atol=1e-10)


LOSSES: dict[str, Callable[[], fx.Algorithm]] = {
    "huber": fx.SCAFFOLD,
    "poisson": fx.FOCUS,
    "multinomial": fx.FOCUS,
    "logistic": fx.FedDR,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_and_a_regulariser(loss: str) -> None:
    rng = np.random.default_rng(8)
    clients = []
    for n in (4, 60, 23):
        X = 0.4 * rng.normal(size=(n, 3))
        clients.append((X, random_targets(loss, X @ np.ones(3), rng)))
    g = fx.L1(0.01) if loss == "logistic" else None
    problem = fx.Problem(clients, loss=loss, regularizer=g, l2=0.05, fit_intercept=True)
    found = fx.solve(problem, LOSSES[loss](), fx.Bernoulli(0.7), rounds=2000, precision="single")
    np.testing.assert_allclose(found.x, fx.reference(problem), atol=2e-5)


def test_messages_are_half_as_long() -> None:
    problem = least_squares(3)
    double, single = (
        fx.solve(problem, fx.SCAFFOLD(), rounds=10, precision=name) for name in ("double", "single")
    )
    for column in ("bytes_up", "bytes_down"):
        whole, half = (r.history[column].to_numpy() for r in (double, single))
        np.testing.assert_array_equal(2 * half, whole)
    for column in ("uploads", "gradient_evaluations"):
        assert double.history[column].equals(single.history[column])


def test_counts_of_row_gradients_are_exact_beyond_the_integers_of_float32() -> None:
    rng = np.random.default_rng(4)
    n, steps, rounds = 3001, 997, 8  # 24 million, odd
    X = rng.normal(size=(n, 1))
    problem = fx.Problem([(X, X[:, 0])])
    algorithm = fx.FedAvg(lr=0.1, local_steps=steps)
    result = fx.solve(problem, algorithm, rounds=rounds, precision="single", record_every=1)
    counts = result.history["gradient_evaluations"].to_numpy()
    np.testing.assert_array_equal(counts, n * steps * np.arange(rounds + 1))


def test_a_stopped_run_goes_on_bit_for_bit_from_a_file(tmp_path: Path) -> None:
    problem, who = least_squares(5), fx.Bernoulli(0.5)
    run = {"participation": who, "record_every": 5, "precision": "single"}
    whole = fx.solve(problem, fx.FOCUS(), rounds=40, **run)  # type: ignore[arg-type]
    fx.solve(problem, fx.FOCUS(), rounds=15, **run).save(tmp_path / "half.npz")  # type: ignore[arg-type]
    half = fx.Result.load(tmp_path / "half.npz")
    again = fx.solve(problem, fx.FOCUS(), rounds=40, resume=half, **run)  # type: ignore[arg-type]
    np.testing.assert_array_equal(again.x, whole.x)
    assert again.history.equals(whole.history)
    with pytest.raises(fx.InputError, match="precision is 'double' here and 'single'"):
        fx.solve(problem, fx.FOCUS(), who, rounds=40, record_every=5, resume=half)


def test_compiles_once_and_not_again() -> None:
    problem = least_squares(6)
    fx.solve(problem, fx.FOCUS(lr=0.1), rounds=10, precision="single")
    before = programs()
    fx.solve(problem, fx.FOCUS(lr=0.2), fx.Uniform(2), rounds=33, seed=3, precision="single")
    assert programs() == before


def test_what_cannot_be_is_refused() -> None:
    problem = least_squares(7)
    large = fx.Problem([(np.array([[1.0], [1e30]]), np.array([0.0, 1e30]))])
    with pytest.raises(fx.InputError, match=r"overflows there; .* precision='double'"):
        fx.solve(large, fx.FOCUS(), precision="single")
    with pytest.raises(fx.InputError, match="double precision only"):
        fx.solve(problem, fx.FOCUS(), engine="loop", precision="single")
    with pytest.raises(fx.InputError, match="precision"):
        fx.solve(problem, fx.FOCUS(), precision="half")
