"""What README claims of the four hospitals, through the bundled experiments, against statsmodels
and scikit-learn on the stacked rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import statsmodels.api as sm
from sklearn.linear_model import LogisticRegression

import fedexact as fx
from fedexact import config

EXAMPLES = Path(__file__).parents[1] / "examples"
EXACT = ("SCAFFOLD", "FedSplit", "FedDR", "FOCUS")
BIASED = ("FedAvg", "FedProx")


@pytest.fixture(scope="module")
def heart() -> config.Prepared:
    return config.prepare(config.load(EXAMPLES / "heart.toml"))


def stacked(prepared: config.Prepared) -> tuple[np.ndarray, np.ndarray]:
    rows, _ = prepared.problem.pooled()
    return np.asarray(rows.X), np.asarray(rows.y)


def run(prepared: config.Prepared, label: str, seed: int = 0) -> fx.Result:
    experiment = prepared.experiment
    return fx.solve(
        prepared.problem,
        prepared.algorithms[label],
        prepared.participation,
        rounds=experiment.rounds,
        tol=experiment.tol,
        record_every=experiment.record_every,
        seed=seed,
        reference=prepared.reference,
        reference_se=prepared.reference_se,
    )


def test_the_pooled_fit_is_that_of_statsmodels(heart: config.Prepared) -> None:
    X, y = stacked(heart)
    assert X.shape == (827, 11)
    glm = sm.GLM(y, X, family=sm.families.Binomial()).fit(tol=1e-14)
    assert heart.reference is not None
    assert heart.reference_se is not None
    np.testing.assert_allclose(heart.reference, glm.params, rtol=0, atol=1e-10)
    np.testing.assert_allclose(heart.reference_se, glm.bse, rtol=1e-8)


@pytest.mark.parametrize("label", EXACT)
def test_exact_algorithms_land_on_it(heart: config.Prepared, label: str) -> None:
    X, y = stacked(heart)
    glm = sm.GLM(y, X, family=sm.families.Binomial()).fit(tol=1e-14)
    for seed in (0, 1):
        result = run(heart, label, seed)
        assert result.exactness.exact
        assert result.status == "tolerance"
        assert np.max(np.abs(result.x - glm.params) / glm.bse) < 1e-8
        certificate = result.certificate
        assert certificate is not None
        assert certificate.verdict == "certified"
        assert certificate.distance_bound_se is not None
        assert certificate.distance_bound_se < 1e-8
        assert certificate.clients == ("Cleveland", "Hungary", "Switzerland", "VA Long Beach")
        assert certificate.rows == 827


@pytest.mark.parametrize("label", BIASED)
def test_biased_algorithms_stay_away(heart: config.Prepared, label: str) -> None:
    result = run(heart, label)
    assert not result.exactness.exact
    assert result.status == "finished"
    late = result.history["distance_se"].to_numpy()[20:]
    assert late.min() > 0.5
    assert result.certificate is not None
    assert result.certificate.verdict == "not certified"


def test_equal_client_weights_are_another_problem(heart: config.Prepared) -> None:
    """By up to 1.3 standard errors, which is why the target is part of every result."""
    alike = fx.Problem(heart.data.clients, loss="logistic", fit_intercept=True, weights="clients")
    moved = np.abs(fx.reference(alike) - heart.reference) / heart.reference_se
    assert moved.max() == pytest.approx(1.3, abs=0.05)


@pytest.mark.slow
def test_lasso_with_feddr_is_that_of_scikit_learn() -> None:
    prepared = config.prepare(config.load(EXAMPLES / "heart_lasso.toml"))
    X, y = stacked(prepared)
    assert prepared.experiment.problem.regularizer is not None
    penalty = prepared.experiment.problem.regularizer["strength"]
    # liblinear and friends penalise the intercept; saga does not
    sklearn = LogisticRegression(
        C=1 / (len(y) * penalty), l1_ratio=1.0, solver="saga", tol=1e-12, max_iter=100_000
    ).fit(X[:, 1:], y)
    pooled = np.concatenate([sklearn.intercept_, sklearn.coef_[0]])
    for label in prepared.algorithms:
        result = run(prepared, label)
        np.testing.assert_allclose(result.x, pooled, rtol=0, atol=1e-8)
        assert np.array_equal(np.abs(result.x) < 1e-12, pooled == 0.0)
        assert (pooled == 0.0).any()
        assert result.certificate is not None
        assert result.certificate.verdict == "certified"
