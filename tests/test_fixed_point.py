"""Where algorithms end up: closed forms, expansions, balls around the limit, against long runs."""

from __future__ import annotations

import math
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import fedexact as fx
from fedexact.solve import setting_of
from fedexact.theory import FixedPoint, fixed_point, predict
from fedexact.theory.fixed_point import fixed_point_of
from fedexact.theory.rounds import Rounds, run
from problems import ALGORITHMS, PARTICIPATIONS, least_squares, logistic

PROBLEM = least_squares(1)
LOGISTIC = logistic(2)
TWO_CLIENTS = fx.Problem(
    [(np.array([[0.0], [1.0]]), np.array([2.0, 2.0])), (np.array([[2.0], [2.0]]), [0.0, 1.0])],
    loss="squared",
    reduction="sum",
    weights="clients",
)
EVEN = fx.Uniform(2)
UNEVEN = fx.Bernoulli([0.9, 0.6, 0.4, 0.2])


def quadratics(problem: fx.Problem) -> tuple[np.ndarray, np.ndarray]:
    """H (N, d, d) and b (N, d) with f_k(x) = x'H_k x / 2 - b_k'x + const."""
    oracle = problem.oracles
    zero = jnp.zeros(problem.dim)
    clients = [oracle.client(k) for k in range(problem.n_clients)]
    return (
        np.array([c.hessian(zero) for c in clients]),
        np.array([-c.grad(zero) for c in clients]),
    )


def solution(A: np.ndarray, b: np.ndarray) -> np.ndarray:
    """x with sum_k (A_k x - b_k) = 0."""
    return np.linalg.solve(A.sum(axis=0), b.sum(axis=0))


# --- closed forms ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "x"),
    [
        (fx.FedAvg(lr=0.1, local_steps=2), 0.539130),
        (fx.FedAvg(lr=0.1, local_steps=10), 0.940243),
        (fx.MIFA(lr=0.1, local_steps=10, lr_server=0.1), 0.940243),
        (fx.FedProx(step=1.0), 22 / 25),
        (fx.FedProx(step=0.25), (18 + 16) / (16 + 36)),
        (fx.FOCUS(), 4 / 9),
    ],
)
def test_two_clients(algorithm: fx.Algorithm, x: float) -> None:
    found = fixed_point(algorithm, TWO_CLIENTS)
    assert found.x[0] == pytest.approx(x, abs=1e-6)
    assert found.bias[0] == pytest.approx(x - 4 / 9, abs=1e-6)
    assert found.distance == pytest.approx(abs(x - 4 / 9), abs=1e-6)
    assert found.method == ("pooled" if isinstance(algorithm, fx.FOCUS) else "closed form")
    assert found.spread == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [fx.Full(), EVEN, UNEVEN], ids=str)
def test_fedavg_and_fedau_by_matrices(pattern: fx.Participation) -> None:
    """sum_k a_k M_k (H_k x - b_k) = 0 with a = q, and a = 1 - (1 - p)^K for FedAU."""
    (H, b), lr, R, K = quadratics(PROBLEM), 0.1, 4, 6
    M = np.array([sum(np.linalg.matrix_power(np.eye(3) - lr * h, i) for i in range(R)) for h in H])
    q, p = pattern.aggregation(4), pattern.inclusion(4)
    fedau = fx.FedAU(lr=lr, local_steps=R, cutoff=K)
    for algorithm, a in (
        (fx.FedAvg(lr=lr, local_steps=R), q),
        (fedau, 1 - (1 - p) ** K),
    ):
        weighted = a[:, None, None] * M
        x = solution(weighted @ H, np.einsum("kij,kj->ki", weighted, b))
        found = fixed_point(algorithm, PROBLEM, pattern)
        np.testing.assert_allclose(found.x, x, atol=1e-12)
        assert (found.spread == 0.0) == isinstance(pattern, fx.Full)


@pytest.mark.parametrize("pattern", [fx.Full(), UNEVEN], ids=str)
def test_fedprox_by_moreau_envelopes(pattern: fx.Participation) -> None:
    (H, b), s = quadratics(PROBLEM), 0.4
    weighted = pattern.aggregation(4)[:, None, None] * np.linalg.inv(np.eye(3) + s * H)
    x = solution(weighted @ H, np.einsum("kij,kj->ki", weighted, b))
    np.testing.assert_allclose(fixed_point(fx.FedProx(step=s), PROBLEM, pattern).x, x, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["uniform", "bernoulli", "cyclic", "markov"])
def test_mifa_ends_at_the_even_fedgd_point(name: str) -> None:
    """Whoever takes part; so does a run, to rounding."""
    algorithm = fx.MIFA(local_steps=3).resolve(setting_of(PROBLEM, PARTICIPATIONS[name]))
    found = fixed_point(algorithm, PROBLEM, PARTICIPATIONS[name])
    even = fixed_point(fx.FedAvg(lr=algorithm.lr, local_steps=3), PROBLEM)
    np.testing.assert_allclose(found.x, even.x, atol=1e-12)
    result = fx.solve(PROBLEM, algorithm, PARTICIPATIONS[name], rounds=3000)
    np.testing.assert_allclose(result.x, found.x, atol=1e-9)
    assert found.spread == 0.0


def test_exact_algorithms_end_at_the_pooled_answer() -> None:
    problem = logistic(2, regularizer=fx.L1(0.02))
    for algorithm in (fx.FedDR(), fx.FedADMM()):
        found = fixed_point(algorithm, problem, EVEN)
        assert found.method == "pooled"
        assert found.distance == found.spread == 0.0
        np.testing.assert_array_equal(found.x, fx.reference(problem))


# --- the expansion --------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", [PROBLEM, LOGISTIC], ids=["squared", "logistic"])
@pytest.mark.parametrize("pattern", [fx.Full(), UNEVEN], ids=str)
def test_first_order_of_the_bias(problem: fx.Problem, pattern: fx.Participation) -> None:
    """The remainder is of second order: a quarter for half the step. Simulated spreads are left
    out of the comparison."""
    if problem is LOGISTIC and pattern is UNEVEN:
        algorithms = [lambda lr: fx.MIFA(lr=lr, local_steps=4)]
    else:
        algorithms = [lambda lr: fx.FedAvg(lr=lr, local_steps=4), lambda s: fx.FedProx(step=s)]
    for make in algorithms:
        remainders = []
        for lr in (0.02, 0.01, 0.005):
            found = fixed_point(make(lr), problem, pattern)
            assert found.first_order is not None
            remainders.append(np.linalg.norm(found.bias - found.first_order))
            assert remainders[-1] < 0.2 * found.distance
        assert remainders[0] / remainders[1] == pytest.approx(4.0, rel=0.2)
        assert remainders[1] / remainders[2] == pytest.approx(4.0, rel=0.1)


def test_bias_in_standard_errors() -> None:
    """Of the unpenalised fit at the pooled answer."""
    found = fixed_point(fx.FedAvg(local_steps=3), PROBLEM)
    rows, _ = PROBLEM.pooled()
    star = np.linalg.lstsq(rows.X, rows.y, rcond=None)[0]
    n, d = rows.X.shape
    variance = np.sum((rows.y - rows.X @ star) ** 2) / (n - d)
    se = np.sqrt(np.diag(np.linalg.inv(rows.X.T @ rows.X)) * variance)
    assert found.bias_se is not None
    np.testing.assert_allclose(found.bias_se, (found.x - star) / se, rtol=1e-9)
    assert found.distance_se == pytest.approx(float(np.max(np.abs(found.bias_se))), rel=1e-12)


# --- against long runs ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("problem", [PROBLEM, LOGISTIC], ids=["squared", "logistic"])
@pytest.mark.parametrize("name", ["FedAvg", "FedProx", "MIFA", "FedAU", "FedAWE", "FedPD 3"])
def test_runs_with_everybody_end_there(problem: fx.Problem, name: str) -> None:
    found = fixed_point(ALGORITHMS[name](), problem)
    result = fx.solve(problem, ALGORITHMS[name](), rounds=1500)
    np.testing.assert_allclose(result.x, found.x, atol=1e-8)
    assert found.distance > 1e-3
    assert (found.spread, found.spread_error) == (0.0, 0.0)


@pytest.mark.parametrize("name", ["FedAvg", "FedProx"])
def test_a_cycle_has_a_mean_and_a_radius(name: str) -> None:
    found = fixed_point(ALGORITHMS[name](), PROBLEM, fx.Cyclic(4))
    task = Rounds(PROBLEM, ALGORITHMS[name](), fx.Cyclic(4))
    _, models = task.run(task.initial(), 0, 2000)
    last = models[-4:]
    np.testing.assert_allclose(found.x, last.mean(axis=0), atol=1e-9)
    radius = math.sqrt(np.mean(np.sum((last - last.mean(axis=0)[None, :]) ** 2, axis=1)))
    assert found.spread == pytest.approx(radius, rel=1e-9)
    assert found.spread > 1e-2


def moments_over_runs(
    problem: fx.Problem, algorithm: fx.Algorithm, pattern: fx.Participation, center: np.ndarray
) -> tuple[np.ndarray, np.ndarray, float, float]:
    """Mean of the models after 150 rounds over independent runs, its standard error, the
    root-mean-square distance from `center` and its standard error."""
    task, ends = Rounds(problem, algorithm, pattern), []
    state = task.initial(center)
    for seed in range(2000):
        masks = jnp.asarray(pattern.mask(problem.n_clients, 0, 150, seed))
        ends.append(np.asarray(run(task.program, state, masks, jnp.asarray(0))[1])[-1])
    x = np.array(ends)
    square = np.sum((x - center[None, :]) ** 2, axis=1)
    rms = math.sqrt(square.mean())
    root = math.sqrt(len(x))
    return (
        x.mean(axis=0),
        x.std(axis=0, ddof=1) / root,
        rms,
        float(square.std(ddof=1)) / root / (2 * rms),
    )


@pytest.mark.parametrize("algorithm", [fx.FedAvg(local_steps=3), fx.FedProx()], ids=str)
@pytest.mark.parametrize("pattern", [EVEN, UNEVEN, fx.Categorical([4, 3, 2, 1], 2)], ids=str)
def test_the_stationary_law_of_quadratics(
    algorithm: fx.Algorithm, pattern: fx.Participation
) -> None:
    """Mean and radius are exact: 2000 independent runs agree within their standard errors."""
    found = fixed_point(algorithm, PROBLEM, pattern)
    assert (found.method, found.spread_error) == ("closed form", 0.0)
    mean, se, rms, rms_se = moments_over_runs(PROBLEM, algorithm, pattern, found.x)
    assert np.max(np.abs(mean - found.x) / se) < 4
    assert abs(rms - found.spread) < 4 * rms_se
    assert rms_se < 0.05 * rms


def test_an_unstable_ball_is_infinite() -> None:
    """One client of curvature 3 at lr = 1, half of the time: the error doubles."""
    rows = [(np.array([[1.0]]), np.array([1.0])), (np.array([[math.sqrt(3)]]), np.array([0.0]))]
    problem = fx.Problem(rows, loss="squared")
    found = fixed_point(fx.FedAvg(lr=1.0, local_steps=1), problem, fx.Uniform(1))
    assert found.spread == math.inf
    calm = fixed_point(fx.FedAvg(lr=0.1, local_steps=1), problem, fx.Uniform(1))
    # e+ = (1 - lr h_S) e - lr grad f_S(x): E e^2 (1 - E (1 - lr h)^2) = lr^2 E grad^2
    h, x = np.array([1.0, 3.0]), calm.x[0]
    grad = h * x - np.array([1.0, 0.0])
    radius = math.sqrt(0.01 * np.mean(grad**2) / (1 - np.mean((1 - 0.1 * h) ** 2)))
    assert calm.spread == pytest.approx(radius, rel=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("make", [fx.FedAvg, fx.MIFA])
def test_runs_that_move_away_have_no_limit(make: Any) -> None:
    found = fixed_point(make(lr=10.0, local_steps=2), PROBLEM)
    assert found.spread == math.inf
    assert "lower lr" in found.why
    for algorithm in (make(lr=10.0, local_steps=2), fx.FOCUS(lr=50.0)):
        said = predict(algorithm, PROBLEM)
        assert said.limit is None
        assert said.unknown == ("diverges: lower lr",)
        assert said.rounds == math.inf


@pytest.mark.slow
def test_a_heavy_tail_is_named() -> None:
    """e *= 0.1 or -1.9: shrinks almost surely and on average, and E e^2 is infinite."""
    rows = (np.sqrt([[0.9], [2.9]]), [1.0, 3.0])
    problem = fx.Problem([rows], loss="squared")
    found = fixed_point(fx.FedAvg(lr=1.0, local_steps=1, batch_size=1), problem)
    assert found.spread_error > 0.2 * found.spread
    assert "heavy-tailed" in found.why


def test_exact_algorithms_need_no_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys.modules["fedexact.theory.fixed_point"], "Rounds")
    assert fixed_point(fx.FOCUS(), PROBLEM, EVEN).method == "pooled"
    with pytest.raises(fx.CapabilityError, match="no prox step"):
        fixed_point(fx.FOCUS(), least_squares(1, regularizer=fx.L1(0.1)))


@pytest.mark.slow
def test_many_coefficients_have_exact_second_moments() -> None:
    """d = 70; a simulation agrees within its error."""
    problem = least_squares(1, (80, 80, 80), d=70, l2=1.0)
    algorithm = fx.FedAvg(local_steps=2)
    found = fixed_point(algorithm, problem, EVEN)
    assert found.spread_error == 0.0
    task = Rounds(problem, algorithm, EVEN)
    distance = np.linalg.norm(task.run(task.initial(found.x), 0, 4000)[1] - found.x[None], axis=1)
    squares = (distance[400:] ** 2).reshape(20, -1).mean(axis=1)
    error = float(squares.std(ddof=1)) / math.sqrt(20)
    assert abs(squares.mean() - found.spread**2) < 4 * error
    assert error < 0.1 * squares.mean()


def test_simulations_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By `rounds`, by work, and by a small error."""
    task = Rounds(PROBLEM, fx.FedAWE(local_steps=3), UNEVEN)
    module = sys.modules["fedexact.theory.fixed_point"]
    for changed, rounds, expected in (
        ({"PRECISE": 0.0}, 6000, 24 * 256),
        ({"PRECISE": 0.0, "BUDGET": 1e3}, 20_000, 20 * 256),
        ({"PRECISE": 1.0}, 20_000, 20 * 256),
    ):
        with monkeypatch.context() as patch:
            for name, value in changed.items():
                patch.setattr(module, name, value)
            assert fixed_point_of(task, rounds).why == f"mean of {expected} simulated rounds"


def test_mini_batches_are_simulated_as_long_as_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["fedexact.theory.fixed_point"], "PRECISE", 0.0)
    algorithm, ran = fx.FedAvg(local_steps=1, batch_size=4), []
    once = Rounds.run

    def counted(self: Rounds, state: Any, start: int, stop: int) -> Any:
        ran.append(stop - start)
        return once(self, state, start, stop)

    monkeypatch.setattr(Rounds, "run", counted)
    assert fixed_point(algorithm, PROBLEM, EVEN, rounds=5120).spread > 0
    assert sum(ran) == 5120


@pytest.mark.slow
def test_simulated_limits_come_with_their_error() -> None:
    """FedAWE under random cohorts, FedAvg in a Markov chain: two seeds agree within the errors."""
    for algorithm, pattern in (
        (fx.FedAWE(local_steps=3), UNEVEN),
        (fx.FedAvg(local_steps=3), PARTICIPATIONS["markov"]),
    ):
        found: list[FixedPoint] = [
            fixed_point(algorithm, PROBLEM, pattern, seed=seed) for seed in (1, 2)
        ]
        a, b = found
        assert a.method == "simulated"
        assert np.all(np.abs(a.x - b.x) < 5 * np.hypot(a.x_error, b.x_error))
        assert abs(a.spread - b.spread) < 5 * math.hypot(a.spread_error, b.spread_error)
        assert np.all(a.x_error < 0.1 * a.spread)


@pytest.mark.slow
def test_mini_batches_move_around_the_mean_map() -> None:
    """SGFOCUS around the pooled answer; half the step, half of the squared radius, nearly."""
    star, spreads = fx.reference(PROBLEM), []
    for lr in (0.02, 0.01):
        found = fixed_point(fx.SGFOCUS(lr=lr, batch_size=4), PROBLEM, EVEN)
        np.testing.assert_allclose(found.x, star, atol=1e-9)
        assert 0 < found.spread_error < 0.1 * found.spread
        spreads.append(found.spread)
    assert (spreads[0] / spreads[1]) ** 2 == pytest.approx(2.0, rel=0.25)


def test_values_that_cannot_be_used() -> None:
    with pytest.raises(fx.InputError, match="rounds"):
        fixed_point(fx.FedAvg(), PROBLEM, rounds=10)
    with pytest.raises(fx.InputError, match="unique"):
        fixed_point(fx.FedAvg(), fx.Problem([(np.ones((3, 2)), np.arange(3.0))]))
    with pytest.raises(fx.InputError, match="FedAWE diverges"):
        fixed_point(fx.FedAWE(lr=5.0), PROBLEM, UNEVEN)
