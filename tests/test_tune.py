"""Tuned hyperparameters against closed forms, and predictions against runs."""

from __future__ import annotations

import math
from importlib import import_module

import numpy as np
import pytest

import fedexact as fx
from fedexact.errors import InputError
from fedexact.result import hyperparameters
from fedexact.theory.cost import cost
from fedexact.theory.observe import slope
from fedexact.theory.rate import Rate
from fedexact.theory.tune import Tuned, counts, tune
from problems import least_squares, logistic

PROBLEM = least_squares(1, (8, 5, 4, 9))
MODULE = import_module("fedexact.theory.tune")  # in the package the name is the function's


def spectrum(problem: fx.Problem) -> tuple[float, float]:
    eigenvalues = np.linalg.eigvalsh(problem.hessian(np.zeros(problem.dim)))
    return float(eigenvalues[0]), float(eigenvalues[-1])


def observed(problem: fx.Problem, algorithm: fx.Algorithm, rounds: int, **kwargs: object) -> float:
    result = fx.solve(
        problem, algorithm, rounds=rounds, record_every=1, reference=fx.reference(problem),
        **kwargs,  # pyright: ignore[reportArgumentType]
    )  # fmt: skip
    found = slope(result.history["round"].to_numpy(), result.history["distance"].to_numpy())
    assert found is not None
    return found


# --- closed forms ---------------------------------------------------------------------------------


def test_gradient_descent_gets_the_best_step_there_is() -> None:
    """lr = 2/(l + L) and the rate (kappa - 1)/(kappa + 1), l and L the extreme curvatures of F."""
    l, L = spectrum(PROBLEM)  # noqa: E741
    tuned = tune(fx.FedAvg(local_steps=1), PROBLEM)
    assert tuned.hyperparameters["lr"] == pytest.approx(2 / (l + L), rel=1e-3)
    assert tuned.prediction.per_round == pytest.approx((L - l) / (L + l), rel=1e-3)
    assert tuned.rounds == math.ceil(math.log(1e-8) / math.log(tuned.prediction.per_round))


@pytest.mark.slow
def test_the_same_for_focus_which_is_gradient_descent_with_everybody_present() -> None:
    l, L = spectrum(PROBLEM)  # noqa: E741
    tuned = tune(fx.FOCUS(), PROBLEM, over={"lr": (0.1 / L, 10 / L)})
    assert tuned.hyperparameters["lr"] == pytest.approx(2 / (l + L), rel=1e-3)


@pytest.mark.slow
def test_peaceman_rachford_on_two_scalars() -> None:
    """One coefficient, curvatures 1 and 8: the rate is sqrt|r_1 r_8|, r_h = (1 - s h)/(1 + s h),
    and vanishes at s = 1 and at s = 1/8, where one of the two reflected proxes is constant."""
    clients = [([[1.0]], [2.0]), ([[math.sqrt(8.0)]], [0.0])]
    problem = fx.Problem(clients, loss="squared", weights="clients", reduction="sum")
    tuned = tune(fx.FedSplit(relax=1.0), problem)
    s = tuned.tried["step"].to_numpy()
    r = [(1 - s * h) / (1 + s * h) for h in (1.0, 8.0)]
    assert tuned.tried["per_round"].to_numpy() == pytest.approx(
        np.sqrt(np.abs(r[0] * r[1])), abs=1e-6
    )
    assert (
        min(abs(tuned.hyperparameters["step"] - 1.0), abs(tuned.hyperparameters["step"] - 1 / 8))
        < 0.01
    )
    assert tuned.prediction.per_round < 0.1


@pytest.mark.slow
def test_fedsplit_is_at_least_as_fast_as_with_the_step_of_its_bound() -> None:
    c = PROBLEM.constants()
    tuned = tune(fx.FedSplit(relax=1.0), PROBLEM)
    worst_case = fx.FedSplit(step=1 / math.sqrt(c.l * c.L), relax=1.0)
    assert tuned.prediction.per_round < observed(PROBLEM, worst_case, 200) * 1.001
    assert tuned.prediction.per_round < 1 - 2 / (math.sqrt(c.kappa) + 1)


# --- predictions and runs -------------------------------------------------------------------------


def check_against_runs(given: fx.Algorithm, tuned: Tuned, problem: fx.Problem) -> None:
    """Never worse than the default in prediction, and as fast in a run as predicted."""
    assert tuned.default is not None
    assert tuned.prediction.per_round <= tuned.default.per_round
    rounds = int(tuned.rounds * 1.5)
    assert observed(problem, tuned.algorithm, rounds) == pytest.approx(
        tuned.prediction.per_round, rel=0.03
    )
    distance = {}
    for name, algorithm in {"tuned": tuned.algorithm, "given": given}.items():
        x = fx.solve(problem, algorithm, rounds=rounds).x
        distance[name] = np.linalg.norm(x - fx.reference(problem))
    assert distance["tuned"] <= 1.1 * distance["given"]


@pytest.mark.slow
@pytest.mark.parametrize("given", [fx.FOCUS(local_steps=3), fx.SCAFFOLD(local_steps=3)])
def test_a_tuned_algorithm_runs_as_predicted(given: fx.Algorithm) -> None:
    check_against_runs(given, tune(given, PROBLEM), PROBLEM)


@pytest.mark.slow
def test_two_hyperparameters_on_a_logistic_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "GRID", 5)
    monkeypatch.setattr(MODULE, "SWEEPS", 2)
    problem = logistic(3)
    tuned = tune(fx.FedDR(), problem)
    assert {"step", "relax"} <= set(tuned.tried.column_names)
    check_against_runs(fx.FedDR(), tuned, problem)


@pytest.mark.slow
def test_under_random_participation() -> None:
    pattern = fx.Bernoulli([0.9, 0.6, 0.5, 0.4])
    tuned = tune(fx.FOCUS(), PROBLEM, pattern, over={"lr": (0.05, 0.6)})
    assert tuned.prediction.error > 0
    assert tuned.default is not None
    assert tuned.prediction.per_round <= tuned.default.per_round
    slopes = [
        observed(PROBLEM, tuned.algorithm, 120, participation=pattern, seed=seed)
        for seed in range(12)
    ]
    error = np.std(slopes, ddof=1) / math.sqrt(len(slopes))
    assert abs(np.mean(slopes) - tuned.prediction.per_round) < 4 * error + 0.01


# --- budgets --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_fewer_local_steps_where_row_gradients_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "GRID", 5)
    over = {"lr": (0.05, 0.6), "local_steps": (1, 4)}
    tuned = {
        budget: tune(fx.SCAFFOLD(), PROBLEM, budget=budget, over=over)
        for budget in ("rounds", "gradients")
    }
    assert tuned["gradients"].gradients <= tuned["rounds"].gradients
    assert tuned["rounds"].rounds <= tuned["gradients"].rounds
    assert (
        tuned["gradients"].hyperparameters["local_steps"]
        <= tuned["rounds"].hyperparameters["local_steps"]
    )


def test_the_cost_of_a_round_is_what_the_engine_counts() -> None:
    for algorithm in (fx.FedAvg(local_steps=3), fx.SCAFFOLD(option=1), fx.FedSplit(), fx.FOCUS()):
        row = fx.solve(PROBLEM, algorithm, rounds=10).history.to_pylist()[-1]
        per_round = cost(algorithm, PROBLEM)
        assert 10 * per_round.bytes_up == row["bytes_up"]
        assert 10 * per_round.bytes_down == row["bytes_down"]
        assert 10 * per_round.gradients == row["gradient_evaluations"]


def test_the_cost_of_a_round_is_the_mean_over_random_cohorts() -> None:
    pattern = fx.Bernoulli([0.9, 0.6, 0.4, 0.2])
    n_rows, p = np.array([8, 5, 4, 9]), np.array([0.9, 0.6, 0.4, 0.2])
    per_round = cost(fx.FedAvg(local_steps=3), PROBLEM, pattern)
    assert per_round.visits == pytest.approx(2.1)
    assert per_round.bytes_up == pytest.approx(2.1 * 8 * 3)
    assert per_round.gradients == pytest.approx(3 * p @ n_rows)


# --- what it keeps, and what it refuses -----------------------------------------------------------


@pytest.mark.slow
def test_what_is_given_stays_and_what_was_tried_is_told() -> None:
    tuned = tune(fx.FedSplit(relax=0.7), PROBLEM)
    assert hyperparameters(tuned.algorithm)["relax"] == 0.7
    assert list(tuned.hyperparameters) == ["step"]
    assert tuned.tried.column_names == ["step", "per_round", "cost"]
    costs = tuned.tried["cost"].to_numpy()
    assert tuned.tried["step"][int(np.argmin(costs))].as_py() == tuned.hyperparameters["step"]
    assert "FedSplit: step = " in str(tuned)


def test_an_exact_algorithm_stays_exact() -> None:
    """Though relax > 1 would converge faster on this problem, it needs more than convexity."""
    tuned = tune(fx.FedSplit(step=0.5), PROBLEM, over={"relax": (0.5, 1.5)})
    assert tuned.hyperparameters["relax"] <= 1.0


@pytest.mark.parametrize(
    ("algorithm", "name", "largest"),
    [
        (fx.ProxSkip(lr=0.1), "probability", 1.0),
        (fx.FedSplit(step=0.5), "relax", 1.0),
        (fx.FedDR(step=0.5), "relax", 2.0),
    ],
)
def test_the_range_left_out_ends_where_the_hyperparameter_does(
    algorithm: fx.Algorithm, name: str, largest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for the rate, that is best at the largest value."""

    def faster_the_larger(algorithm: fx.Algorithm, *_: object) -> Rate:
        return Rate(math.exp(-getattr(algorithm, name)), 0.0, None, "stand-in", 0.0)

    monkeypatch.setattr(MODULE, "rate", faster_the_larger)
    tuned = tune(algorithm, PROBLEM)
    assert list(tuned.hyperparameters) == [name]
    assert tuned.hyperparameters[name] == largest
    assert max(tuned.tried[name].to_pylist()) == largest


@pytest.mark.parametrize("budget", ["rounds", "gradients"])
def test_values_that_the_algorithm_refuses_cost_infinity(
    budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MODULE, "rate", lambda *_: Rate(0.5, 0.0, None, "stand-in", 0.0))
    tuned = tune(fx.ProxSkip(lr=0.1), PROBLEM, budget=budget, over={"probability": (0.5, 4.0)})
    assert tuned.hyperparameters["probability"] <= 1.0
    for row in tuned.tried.to_pylist():
        refused = row["probability"] > 1.0
        assert math.isinf(row["cost"]) == refused
        assert (row["per_round"] is None) == refused
    assert math.inf in tuned.tried["cost"].to_pylist()


def test_a_superlinear_algorithm_keeps_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its rate, 0 with any damping, there is nothing to tune."""
    monkeypatch.setattr(MODULE, "rate", lambda *_: Rate(0.0, 0.0, 0.0, "spectral radius", 0.0))
    tuned = tune(fx.PushNewton(), PROBLEM)
    assert tuned.hyperparameters["damping"] == PROBLEM.constants().L
    assert tuned.tried.num_rows == 1
    assert str(tuned).endswith("superlinear: at an asymptotic rate of 0 there is nothing to tune")


def test_a_default_that_nothing_beats_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with Anderson's safeguard, which late in a run does nothing."""
    monkeypatch.setattr(MODULE, "rate", lambda *_: Rate(0.5, 0.0, None, "stand-in", 0.0))
    tuned = tune(fx.Anderson(), PROBLEM)
    assert tuned.hyperparameters == {"safeguard": 10.0}
    assert str(tuned).endswith("no other safeguard tried is better")
    assert "27 rounds" in str(tuned)  # log(1e-8) / log(0.5)


def test_a_client_that_never_takes_part_is_the_reason_given() -> None:
    with pytest.raises(InputError, match="tune FOCUS: client '3' never takes part"):
        tune(fx.FOCUS(), PROBLEM, fx.Bernoulli([0.5, 0.5, 0.5, 0.0]))


def test_counts() -> None:
    assert counts(1, 10) == [1, 2, 3, 4, 6, 9, 10]
    assert counts(3, 5) == [3, 4, 5]


@pytest.mark.parametrize(
    ("algorithm", "kwargs", "message"),
    [
        (fx.FOCUS(lr=0.1), {}, "nothing is left out"),
        (fx.FOCUS(), {"over": {"lrr": (0.1, 1.0)}}, "over: unknown value 'lrr'.*'lr'"),
        (fx.FOCUS(), {"over": {"lr": (1.0, 0.1)}}, "over lr must be two numbers"),
        (fx.FOCUS(), {"over": {"lr": 0.1}}, "over lr must be two numbers"),
        (fx.FOCUS(), {"over": {"local_steps": (1.0, 2.5)}}, "two whole numbers"),
        (fx.FOCUS(), {"budget": "seconds"}, "budget: unknown value 'seconds'"),
        (fx.FOCUS(), {"tol": 0.0}, "tol must be"),
        (fx.FOCUS(), {"tol": 2.0}, "tol is the factor .* below 1, got 2"),
        (fx.FOCUS(), {"over": ["lr"]}, r"over maps .* name -> \(lowest, highest\), got \['lr'\]"),
        (fx.FOCUS(), {"over": {"lr": (100.0, 200.0)}}, "no value of lr in the range converges"),
    ],
)
def test_refusals(algorithm: fx.Algorithm, kwargs: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        tune(algorithm, PROBLEM, **kwargs)  # pyright: ignore[reportArgumentType]
