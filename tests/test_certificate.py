"""Certificates: never below the true distance, useful near the solution, honest verdicts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
import statsmodels.api as sm
from numpy.testing import assert_allclose

from fedexact.bounds import (
    CONJUGATES,
    dual_gap,
    hessian_ball,
    least_distance,
    one_pass,
    point,
)
from fedexact.certificate import Certificate, certify
from fedexact.errors import InputError
from fedexact.losses import Huber, LinearLoss, Rows
from fedexact.problem import Problem
from fedexact.reference import reference
from fedexact.regularizers import (
    L1,
    Box,
    ElasticNet,
    GroupLasso,
    L2Ball,
    NonNegative,
    Regularizer,
    SquaredL2,
)
from problems import random_targets

N, P = 48, 3
LOSSES = ["squared", "logistic", "poisson", "huber", "multinomial"]


def split(X: np.ndarray, y: np.ndarray, clients: int = 3) -> list[tuple[np.ndarray, np.ndarray]]:
    """Interleaved clients of equal size."""
    return [(X[k::clients], y[k::clients]) for k in range(clients)]


def make(loss: str, seed: int, **options: Any) -> Problem:
    """A random problem with an intercept, a few correlated columns and overlapping classes."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(N, P)) @ (np.eye(P) + rng.uniform(0, 0.8))
    eta = X @ rng.normal(size=P) * 0.4 - 0.2
    y = random_targets(loss, eta, rng)
    options = {"fit_intercept": True} | options
    return Problem(split(X, y), loss=loss, **options)


def stacked(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    rows, _ = problem.pooled()
    return np.asarray(rows.X), np.asarray(rows.y)


def weighting(seed: int) -> dict[str, Any]:
    """The four targets in turn."""
    weights, reduction = ("rows", "clients")[seed % 2], ("mean", "sum")[seed // 2 % 2]
    return {"weights": weights, "reduction": reduction}


def points_near(x: np.ndarray, seed: int, smallest: float = -16) -> Iterator[np.ndarray]:
    """Points at distances from 1e-16 to 1 in random directions, x among them."""
    rng = np.random.default_rng(seed)
    yield x
    for exponent in np.arange(smallest, 0.1, 2.0):
        direction = rng.normal(size=len(x))
        yield x + 10**exponent * direction / np.linalg.norm(direction)


def distance_bound(problem: Problem, x: Any) -> float:
    bound = certify(problem, x).distance_bound
    assert bound is not None
    return bound


# --- soundness ------------------------------------------------------------------------------------


REGULARIZERS: dict[str, Regularizer | None] = {
    "none": None,
    "l1": L1(0.05),
    "elastic net": ElasticNet(0.1, 0.5),
    "squared l2": SquaredL2(0.1),
    "box": Box(-0.1, 0.2),
    "nonnegative": NonNegative(),
    "group lasso": GroupLasso(0.1, [0, 1, 0]),
    "ball": L2Ball(0.2),
}
PAIRS = [(loss, g, 0) for loss in ("squared", "logistic") for g in REGULARIZERS]
PAIRS += [(loss, g, 0) for loss in ("poisson", "huber", "multinomial") for g in ("none", "l1")]
PAIRS += [("poisson", "box", 0), ("huber", "ball", 0)]
PAIRS += [("squared", "none", 0.1), ("logistic", "l1", 0.1), ("multinomial", "none", 0.1)]


@pytest.mark.parametrize(("loss", "g", "l2"), PAIRS)
def test_bounds_are_sound_and_useful(loss: str, g: str, l2: float) -> None:
    ratios: list[float] = []
    for seed in range(4):
        problem = make(loss, seed, regularizer=REGULARIZERS[g], l2=l2, **weighting(seed))
        solution = reference(problem)
        least = problem.objective(solution)
        errors = certify(problem, solution).standard_errors
        for x in points_near(solution, seed):
            certificate = certify(problem, x)
            error = np.abs(x - solution)
            distance = float(np.linalg.norm(error))
            if certificate.distance_bound is None:
                assert distance > 1e-3
                continue
            assert certificate.distance_bound >= distance
            assert certificate.distance_bound <= 100 * distance + 1e-10
            if distance > 1e-9:
                ratios.append(certificate.distance_bound / distance)
            if certificate.coefficient_bounds_se is not None:
                assert errors is not None
                assert np.all(certificate.coefficient_bounds_se >= error / errors)
            if certificate.objective_gap_bound is not None:
                gap = problem.objective(x) - least
                assert certificate.objective_gap_bound >= gap - 1e-13 * abs(least)
    assert np.median(ratios) < 3


def gradient_in_long_double(problem: Problem, x: np.ndarray) -> np.ndarray:
    """Of a linear loss without regulariser, to about 1e-19."""
    rows, weight = problem.pooled()
    X, y, w = (np.asarray(a, np.longdouble) for a in (rows.X, rows.y, weight))
    x = x.astype(np.longdouble)
    eta = X @ x
    derivative = {
        "squared": lambda: eta - y,
        "logistic": lambda: 1 / (1 + np.exp(-eta)) - y,
        "poisson": lambda: np.exp(eta) - y,
    }[problem.loss.name]()
    return X.T @ (w * derivative) + problem.ridge.astype(np.longdouble) * x


def minimiser_in_long_double(problem: Problem, start: np.ndarray) -> np.ndarray:
    inverse = np.linalg.inv(problem.hessian(start)).astype(np.longdouble)
    x = start.astype(np.longdouble)
    for _ in range(10):
        x = x - inverse @ gradient_in_long_double(problem, x)
    return x


@pytest.mark.parametrize("loss", ["squared", "logistic", "poisson"])
def test_rounding_is_allowed_for(loss: str) -> None:
    for seed in range(6):
        problem = make(loss, seed, l2=[0.0, 1e-3][seed % 2], **weighting(seed))
        start = reference(problem)
        solution = minimiser_in_long_double(problem, start)
        for x in points_near(start, seed):
            here = one_pass(problem, x)
            error = np.abs(here.grad - gradient_in_long_double(problem, x))
            assert np.all(error <= here.rounding)
            bound = certify(problem, x).distance_bound
            assert bound is None or bound >= np.linalg.norm(x - solution)
        assert distance_bound(problem, start) < 1e-11


def test_rounding_of_large_sums_with_cancellation() -> None:
    rng = np.random.default_rng(0)
    X = 1e3 + rng.normal(size=(N, 2)) * 1e-3
    problem = Problem(split(X, 1e6 + rng.normal(size=N)), loss="squared")
    for _ in range(10):
        x = 1e6 * rng.normal(size=2)
        here = one_pass(problem, x)
        error = np.abs(here.grad - gradient_in_long_double(problem, x))
        assert np.all(error <= here.rounding)
        assert np.all(here.rounding <= 1e-13 * np.abs(X).max() * (1e6 + 1e3 * np.abs(x).sum()))


def test_poisson_bound_is_exact_from_above_and_absent_from_far_below() -> None:
    problem = Problem([(np.ones((4, 1)), np.array([1.0, 2, 3, 6]))], loss="poisson")
    solution = np.log(3.0)
    for distance in (1e-6, 1e-2, 0.3, 1.0, 5.0):
        assert_allclose(distance_bound(problem, [solution + distance]), distance, rtol=1e-6)
    assert distance_bound(problem, [solution - 0.6]) > 0.6
    assert certify(problem, [solution - 0.7]).distance_bound is None  # log 2 is the limit


def test_quadratic_bounds_are_exact() -> None:
    problem = make("squared", 1, l2=0.01)
    x = np.array([1.0, -2.0, 0.5, 3.0])
    solution = reference(problem)
    assert_allclose(distance_bound(problem, x), np.linalg.norm(x - solution), rtol=1e-10)
    gap = problem.objective(x) - problem.objective(solution)
    assert_allclose(certify(problem, x).objective_gap_bound or 0.0, gap, rtol=1e-10)


def test_lower_bounds_on_the_distance() -> None:
    for loss, g in [("logistic", L1(0.05)), ("squared", Box(-0.1, 0.2)), ("logistic", None)]:
        problem = make(loss, 2, regularizer=g)
        solution, step = reference(problem), 1 / problem.constants().L_F
        for x in points_near(solution, 3, smallest=-10):
            here, mapping = one_pass(problem, x), certify(problem, x).gradient_mapping
            lower = least_distance(problem, here, mapping, step)
            distance = np.linalg.norm(x - solution)
            assert lower <= distance * (1 + 1e-9)
            assert lower >= 1e-3 * distance or distance < 1e-9


def test_lower_bound_from_self_concordance() -> None:
    for seed in range(3):
        for loss in ("squared", "poisson", "multinomial"):
            problem = make(loss, seed)
            solution = reference(problem)
            for x in points_near(solution, 3, smallest=-8):
                at = point(problem, x, one_pass(problem, x), 1.0)
                assert at is not None
                least = hessian_ball(problem, at).least
                assert least <= np.linalg.norm(x - solution) * (1 + 1e-9)
                assert least > 0 or np.linalg.norm(x - solution) < 1e-9


def test_huber_loss_without_ridge_is_bounded_by_the_rows_that_stay_quadratic() -> None:
    problem = make("huber", 3)
    loss = problem.loss
    assert isinstance(loss, Huber)
    X, y = stacked(problem)
    x = reference(problem) + 1e-6
    inside = np.abs(X @ x - y) < float(loss.delta) - 1e-3
    assert 0 < inside.sum() < N
    hessian = X[inside].T @ X[inside] / N
    largest = np.linalg.norm(problem.grad(x)) / np.linalg.eigvalsh(hessian)[0]
    certificate = certify(problem, x)
    assert distance_bound(problem, x) <= 1.01 * largest
    assert certificate.standard_errors is None
    assert certificate.verdict == "not certified"


# --- the objective gap ----------------------------------------------------------------------------


@pytest.mark.parametrize("loss", list(CONJUGATES))
def test_conjugates(loss: type[LinearLoss]) -> None:
    rng = np.random.default_rng(4)
    y = jnp.asarray(rng.integers(0, 2, 200).astype(float))
    eta, other = (jnp.asarray(3 * rng.normal(size=200)) for _ in range(2))
    phi, conjugate = loss(), CONJUGATES[loss]
    theta = phi.d1(eta, y)
    value = np.asarray(conjugate(phi, theta, y))
    assert_allclose(
        value, theta * eta - phi.phi(eta, y), atol=1e-12
    )  # Fenchel and Young's equality
    assert np.all(value >= theta * other - phi.phi(other, y) - 1e-12)  # and inequality


@pytest.mark.parametrize("loss", ["squared", "logistic", "poisson", "huber"])
@pytest.mark.parametrize("g", [L1(0.05), ElasticNet(0.05, 0.9)], ids=["l1", "elastic net"])
def test_dual_gap_is_sound_and_closes(loss: str, g: Regularizer) -> None:
    problem = make(loss, 5, regularizer=g)
    solution = reference(problem)
    least = problem.objective(solution)
    for x in points_near(solution, 6, smallest=-8):
        gap = dual_gap(problem, x, one_pass(problem, x))
        assert gap >= problem.objective(x) - least - 1e-14
        assert gap < 1e-11 or np.linalg.norm(x - solution) > 1e-9


@pytest.mark.slow
def test_small_objective_gap_is_no_claim_about_the_coefficients() -> None:
    rng = np.random.default_rng(7)
    X = rng.normal(size=(20, 40))
    X[:, 1] = X[:, 0]  # not even unique
    y = X[:, 0] + 0.1 * rng.normal(size=20)
    for loss, targets in (("squared", y), ("logistic", (y > 0).astype(float))):
        problem = Problem(split(X, targets, 2), loss=loss, regularizer=L1(0.05))
        solution = reference(problem)
        other = solution.copy()  # as good, and elsewhere
        other[:2] = solution[:2].sum(), 0.0
        assert np.linalg.norm(other - solution) > 0.1
        for x in (solution, other):
            certificate = certify(problem, x)
            assert certificate.verdict == "cannot certify"
            assert certificate.distance_bound is None
            assert "the objective is within" in certificate.reason
            assert "nothing bounds the distance" in certificate.reason
            assert "add l2" in certificate.reason
        worse = certify(problem, solution + 1e-3)
        assert worse.verdict == "not certified"
        assert certify(problem, solution + 1e-3, tol=1.0).verdict == "cannot certify"
        assert worse.objective_gap_bound is not None
        assert worse.objective_gap_bound >= problem.objective(solution + 1e-3) - problem.objective(
            solution
        )


def test_bounded_domains_bound_the_objective() -> None:
    rng = np.random.default_rng(8)
    X, y = rng.normal(size=(10, 15)), rng.normal(size=10)
    for g in (Box(-0.05, 0.05), L2Ball(0.1)):
        problem = Problem(split(X, y, 2), regularizer=g)
        solution = reference(problem)
        assert certify(problem, solution).verdict == "cannot certify"
        x = 0.5 * solution
        gap = certify(problem, x).objective_gap_bound
        assert gap is not None
        true = problem.objective(x) - problem.objective(solution)
        assert true <= gap <= 100 * true
        assert certify(problem, solution + 1.0).objective_gap_bound is None  # outside


# --- standard errors ------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["rows", "clients"])
def test_standard_errors_are_those_of_statsmodels(weights: str) -> None:
    fits = {
        "squared": lambda X, y: sm.OLS(y, X).fit(),
        "logistic": lambda X, y: sm.GLM(y, X, family=sm.families.Binomial()).fit(tol=1e-14),
        "poisson": lambda X, y: sm.GLM(y, X, family=sm.families.Poisson()).fit(tol=1e-14),
        "multinomial": lambda X, y: sm.MNLogit(y, X).fit(method="newton", disp=False, tol=1e-14),
    }
    for loss, fit in fits.items():
        problem = make(loss, 9, weights=weights)
        result = fit(*stacked(problem))
        certificate = certify(problem, result.params.ravel())
        assert certificate.standard_errors is not None
        assert_allclose(certificate.standard_errors, result.bse.ravel(), rtol=1e-6)
        if weights == "rows":
            assert certificate.verdict == "certified"


def test_standard_errors_far_out_do_not_hide_the_distance() -> None:
    # at x every row is saturated: the information vanishes and the standard errors there are huge
    problem = make("logistic", 10, l2=1.0, fit_intercept=False)
    x = np.full(P, 25.0)
    certificate = certify(problem, x, tol=0.5)
    assert certificate.standard_errors is not None
    assert distance_bound(problem, x) < 0.5 * certificate.standard_errors.min()
    assert certificate.verdict == "not certified"


def test_data_without_noise_are_judged_by_the_relative_distance() -> None:
    noiseless = make("squared", 10)
    X, _ = stacked(noiseless)
    exact = Problem(split(X, X @ np.ones(4)), fit_intercept=False)
    certificate = certify(exact, np.ones(4))
    assert certificate.verdict == "certified"
    assert "relative distance" in certificate.reason
    assert certify(exact, np.ones(4) + 1e-3).verdict == "not certified"


def small_problem(size: float, g: Regularizer | None, l2: float) -> Problem:
    """More columns than rows, so without standard errors; targets of the given size."""
    rng = np.random.default_rng(22)
    return Problem(split(rng.normal(size=(6, 9)), size * rng.normal(size=6)), regularizer=g, l2=l2)


@pytest.mark.parametrize("l2", [0.1, 0.0], ids=["bounded", "only from below"])
def test_verdict_does_not_depend_on_the_unit_of_the_targets(l2: float) -> None:
    unit = small_problem(1.0, L1(0.02), l2)
    solution = reference(unit)
    points = [solution, solution + 1e-7, solution + 1e-3, np.zeros(9)]
    expected = [certify(unit, x) for x in points]
    solved = "certified" if l2 else "cannot certify"
    assert expected[0].verdict == solved
    assert [c.verdict for c in expected[2:]] == ["not certified"] * 2
    for size in (2.0**-40, 2.0**40):  # powers of 2, so that even the rounding is the same
        problem = small_problem(size, L1(0.02 * size), l2)
        for x, certificate in zip(points, expected, strict=True):
            assert certify(problem, size * x).reason == certificate.reason


def test_zero_is_not_close_to_a_small_minimiser() -> None:
    for g in (None, ElasticNet(1e-10, 0.5)):
        problem = small_problem(1e-8, g, 0.1)
        assert 0 < np.linalg.norm(reference(problem)) < 1e-7
        assert certify(problem, reference(problem)).verdict == "certified"
        assert certify(problem, np.zeros(9)).verdict == "not certified"
    problem = small_problem(1e-8, L1(1e-6), 0.1)  # here it is the minimiser
    assert certify(problem, np.zeros(9)).verdict == "certified"


def test_zero_minimiser_of_the_smooth_part() -> None:
    nothing = small_problem(0.0, None, 0.1)
    certificate = certify(nothing, np.zeros(9))
    assert (certificate.verdict, certificate.distance_bound) == ("certified", 0.0)
    assert certify(nothing, np.full(9, 1e-3)).verdict == "not certified"
    assert certify(small_problem(0.0, Box(1.0, 2.0), 0.1), np.zeros(9)).verdict == "not certified"
    X, y = stacked(make("huber", 23))
    y = 0.1 * (y - X @ np.linalg.lstsq(X, y)[0]) / np.abs(y).max()  # gradient at 0: rounding
    problem = Problem(split(X, y), loss="huber")
    assert 0 < np.linalg.norm(problem.grad(np.zeros(4))) < 1e-16
    assert certify(problem, np.zeros(4)).verdict == "certified"


@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_rounding_is_told_from_a_run_that_is_too_short(loss: str) -> None:
    X, y = stacked(make(loss, 24))
    far_from_zero = np.column_stack([X[:, 1], 1e5 + X[:, 2]])
    problem = Problem(split(far_from_zero, y), loss=loss, fit_intercept=True)
    solution = reference(problem)
    certificate = certify(problem, solution)
    assert certificate.verdict == "not certified"
    assert "below its own rounding error" in certificate.reason
    assert "standardise the columns" in certificate.reason
    assert "run longer" not in certificate.reason
    assert "run longer" in certify(problem, solution + np.array([1.0, 0, 0])).reason
    standardised = (far_from_zero - far_from_zero.mean(axis=0)) / far_from_zero.std(axis=0)
    cured = Problem(split(standardised, y), loss=loss, fit_intercept=True)
    assert certify(cured, reference(cured)).verdict == "certified"


def test_rounding_is_told_from_a_kink_not_yet_reached() -> None:
    # orthogonal columns: one proximal gradient step from anywhere ends at the minimiser
    problem = Problem(
        split(2.0 * np.eye(4), np.array([1.0, -2.0, 0.1, 3.0]), 2), regularizer=L1(0.2)
    )
    solution = reference(problem)
    assert np.any(solution == 0)
    assert np.any(solution != 0)
    assert "below its own rounding error" in certify(problem, solution, tol=1e-17).reason
    assert "run longer" in certify(problem, solution + 1e-6, tol=1e-17).reason


def test_no_bound_at_a_gradient_that_is_all_rounding() -> None:
    X = np.array([[-1.0], [1.0]])  # separated: the gradient vanishes far out
    problem = Problem([(X, np.array([0.0, 1.0]))], loss="logistic")
    certificate = certify(problem, [36.0])
    assert certificate.verdict == "cannot certify"
    assert "below its own rounding error, and yet no bound" in certificate.reason
    assert "run longer" not in certificate.reason
    assert "run longer" in certify(problem, [10.0]).reason


# --- verdicts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", LOSSES)
def test_reference_is_certified_and_a_small_step_is_not_convergence(loss: str) -> None:
    problem = make(loss, 11)
    solution = reference(problem)
    certificate = certify(problem, solution)
    assert certificate.verdict == "certified"
    assert certificate.clients == ("0", "1", "2")
    assert certificate.rows == N
    assert certificate.target == problem.target()
    moved = solution + 1e-4
    assert certify(problem, moved).verdict == "not certified"
    assert certify(problem, moved, tol=0.1).verdict == "certified"
    x, step = np.zeros(problem.dim), 1e-9  # a run whose steps are far below any tolerance
    for _ in range(3):
        x = x - step * problem.grad(x)
    assert np.linalg.norm(step * problem.grad(x)) < 1e-8
    assert certify(problem, x).verdict == "not certified"


@pytest.mark.parametrize("loss", ["squared", "logistic", "poisson"])
def test_average_of_local_fits_is_not_certified(loss: str) -> None:
    problem = make(loss, 12, l2=0.01)
    X, y = stacked(problem)
    parts = [(X[k * 16 : (k + 1) * 16, 1:], y[k * 16 : (k + 1) * 16]) for k in range(3)]
    local = [reference(Problem([p], loss=loss, l2=0.01, fit_intercept=True)) for p in parts]
    certificate = certify(problem, np.mean(local, axis=0))
    assert certificate.verdict == "not certified"
    assert "run longer" in certificate.reason


def test_pooled_answer_of_another_weighting_is_not_certified() -> None:
    rng = np.random.default_rng(13)
    clients = [(rng.normal(size=(n, 2)), rng.normal(size=n)) for n in (10, 40)]
    by_clients = reference(Problem(clients, weights="clients"))
    assert certify(Problem(clients, weights="clients"), by_clients).verdict == "certified"
    certificate = certify(Problem(clients), by_clients)
    assert certificate.verdict == "not certified"
    assert certificate.distance_bound_se is not None
    assert certificate.distance_bound_se > 0.01


def test_absent_client_cannot_be_certified() -> None:
    rng = np.random.default_rng(14)
    clients = [(rng.normal(size=(n, 2)), rng.normal(size=n)) for n in (8, 8, 16)]
    problem = Problem(clients, names=["Cleveland", "Hungary", "VA"])
    x = reference(problem)
    certificate = certify(problem, x, absent=["Hungary"])
    assert certificate.verdict == "cannot certify"
    assert certificate.reason == "client 'Hungary' was never present: the target is not reached"
    assert (certificate.clients, certificate.absent) == (("Cleveland", "VA"), ("Hungary",))
    assert certificate.rows == 24
    assert certify(problem, x, absent=["VA", "Hungary"]).reason.startswith(
        "clients 'VA', 'Hungary'"
    )


def test_cannot_certify_without_a_unique_minimiser() -> None:
    rng = np.random.default_rng(15)
    X, y = rng.normal(size=(6, 10)), rng.normal(size=6)
    x = np.linalg.lstsq(X, y)[0]  # one minimiser of many
    certificate = certify(Problem(split(X, y)), x)
    assert certificate.verdict == "cannot certify"
    assert "add l2" in certificate.reason
    assert certificate.distance_bound is None
    assert certify(Problem(split(X, y), l2=0.1), x).verdict == "not certified"


def test_cannot_certify_a_separated_fit_however_small_its_gradient() -> None:
    rng = np.random.default_rng(16)
    X = rng.normal(size=(N, 1))
    problem = Problem(split(X, (X[:, 0] > 0).astype(float)), loss="logistic")
    x = np.array([1e6])
    assert np.linalg.norm(problem.grad(x)) < 1e-12
    certificate = certify(problem, x)
    assert certificate.verdict == "cannot certify"
    assert certificate.distance_bound is None


def test_cannot_certify_a_loss_that_need_not_be_convex() -> None:
    def own(x: jax.Array, rows: Rows) -> jax.Array:
        return (jnp.tanh(rows.X @ x) - rows.y) ** 2

    X, _ = stacked(make("squared", 17))
    problem = Problem(split(X, np.tanh(X @ np.ones(4) * 0.3)), loss=own, l2=0.1)
    certificate = certify(problem, reference(problem))
    assert certificate.verdict == "cannot certify"
    assert "convex" in certificate.reason
    assert certificate.gradient_mapping < 1e-12
    assert certificate.distance_bound is None
    assert certificate.objective_gap_bound is None


def test_overflow_near_x_is_no_certificate() -> None:
    problem = make("poisson", 18)
    for x in (np.full(4, 500.0), np.array([800.0, 0, 0, 0])):
        certificate = certify(problem, x)
        assert certificate.verdict == "cannot certify"
        assert "overflows" in certificate.reason
        text = json.dumps(certificate.to_dict(), allow_nan=False)
        assert Certificate.from_dict(json.loads(text)).gradient_mapping == np.inf


def test_ridge_certifies_where_there_are_too_many_coefficients_for_a_hessian() -> None:
    rng = np.random.default_rng(19)
    X, y = rng.normal(size=(8, 2100)), rng.normal(size=8)
    dual = np.linalg.solve(X @ X.T / 8 + 0.5 * np.eye(8), y / 8)
    problem = Problem(split(X, y, 2), l2=0.5)
    solution = X.T @ dual
    certificate = certify(problem, solution)
    assert certificate.verdict == "certified"
    assert certify(problem, solution + 1e-3).verdict == "not certified"
    assert distance_bound(problem, solution + 1e-3) >= 1e-3 * np.sqrt(2100)
    interpolating = np.linalg.lstsq(X, y)[0]
    certificate = certify(Problem(split(X, y, 2)), interpolating)
    assert certificate.verdict == "cannot certify"
    assert "add l2" in certificate.reason


# --- the object -----------------------------------------------------------------------------------


def test_bad_input_is_refused() -> None:
    problem = make("squared", 20)
    for x in (np.ones(3), np.array([1.0, np.nan, 0, 0]), np.ones((4, 1))):
        with pytest.raises(InputError):
            certify(problem, x)
    with pytest.raises(InputError, match="tol"):
        certify(problem, np.zeros(4), tol=0.0)
    with pytest.raises(InputError, match=r"'Paris'.*clients: 0, 1, 2"):
        certify(problem, np.zeros(4), absent=["Paris"])


def test_round_trip_through_json_and_printed_form() -> None:
    problem = make("logistic", 21)
    for x in (reference(problem), np.full(4, 9.0)):
        certificate = certify(problem, x, absent=["1"])
        copy = Certificate.from_dict(json.loads(json.dumps(certificate.to_dict())))
        assert copy.to_dict() == certificate.to_dict()
        printed = str(copy)
        assert printed.startswith("cannot certify: client '1'")
        for part in (problem.target(), "0, 2 (32 rows)", "gradient mapping", "standard errors"):
            assert part in printed


# --- sparse rows, many coefficients ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "g"),
    [("squared", L1(0.02)), ("logistic", L1(0.02)), ("huber", None), ("multinomial", None)],
)
def test_sparse_rows_give_the_bounds_of_dense_ones(loss: str, g: Regularizer | None) -> None:
    rng = np.random.default_rng(41)
    X = rng.normal(size=(N, P)) * (rng.random((N, P)) < 0.6)
    y = random_targets(loss, 0.4 * X[:, 0], rng)
    sparse = [(scipy.sparse.csr_array(a), b) for a, b in split(X, y)]
    options: dict[str, Any] = {"loss": loss, "regularizer": g, "fit_intercept": True}
    one, other = (Problem(c, **options) for c in (split(X, y), sparse))
    x = reference(one) + 1e-4
    a, b = certify(one, x), certify(other, x)
    assert a.verdict == b.verdict
    for name in ("gradient_mapping", "distance_bound", "distance_bound_se"):
        bounds = getattr(a, name), getattr(b, name)
        assert (bounds[0] is None) == (bounds[1] is None)
        if bounds[0] is not None:
            assert_allclose(*bounds, rtol=1e-9)


@pytest.mark.slow
def test_beyond_2000_coefficients_a_ridge_on_all_of_them_is_needed() -> None:
    rng = np.random.default_rng(42)
    X = scipy.sparse.random(40, 2001, density=0.02, format="csr", rng=rng)
    y = (rng.random(40) < 0.5).astype(float)
    clients = [(X[:15], y[:15]), (X[15:], y[15:])]
    options: dict[str, Any] = {"loss": "logistic", "l2": 0.01}
    problem = Problem(clients, **options)
    x = reference(problem)
    shift = np.full(2001, 1e-5)
    near = certify(problem, x + shift)
    assert certify(problem, x).verdict == "certified"
    assert near.distance_bound is not None
    assert near.distance_bound >= np.linalg.norm(shift)
    assert near.standard_errors is None
    with_intercept = Problem(clients, fit_intercept=True, **options)
    refused = certify(with_intercept, reference(with_intercept))
    assert refused.verdict == "cannot certify"
    assert "without an intercept" in refused.reason
