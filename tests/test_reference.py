"""The reference solution: closed forms, independent packages, optimality conditions, refusals."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.sparse
import statsmodels.api as sm
from numpy.testing import assert_allclose
from sklearn.linear_model import ElasticNet as SklearnElasticNet
from sklearn.linear_model import Lasso

from fedexact.errors import FedexactError, InputError
from fedexact.losses import CustomLoss, Huber, Rows
from fedexact.problem import Problem
from fedexact.reference import methods, reference
from fedexact.reference.qr import triangle
from fedexact.regularizers import L1, Box, ElasticNet, GroupLasso, L2Ball, NonNegative
from problems import random_targets

N, P = 60, 3


def split(X: np.ndarray, y: np.ndarray, clients: int = 3) -> list[tuple[np.ndarray, np.ndarray]]:
    """Interleaved clients of equal size."""
    return [(X[k::clients], y[k::clients]) for k in range(clients)]


def stacked(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    rows, _ = problem.pooled()
    return np.asarray(rows.X), np.asarray(rows.y)


def make(loss: Any, seed: int, scale: Any = 1.0, **options: Any) -> Problem:
    """A random problem with an intercept; columns correlated and scaled by `scale`."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(N, P)) @ (np.eye(P) + 0.4)
    eta = X @ rng.normal(size=P) * 0.5 - 0.2
    name = loss if isinstance(loss, str) else "squared"
    y = random_targets(name, eta, rng)
    options = {"fit_intercept": True} | options
    return Problem(split(X * np.asarray(scale), y), loss=loss, **options)


# --- closed forms ---------------------------------------------------------------------------------


def test_two_clients_in_closed_form() -> None:
    clients = [([[0.0], [1.0]], [2.0, 2.0]), ([[2.0], [2.0]], [0.0, 1.0])]
    assert_allclose(reference(Problem(clients)), [4 / 9], rtol=1e-15)
    assert_allclose(reference(Problem(clients, reduction="sum", l2=1.0)), [4 / 10], rtol=1e-15)
    assert_allclose(reference(Problem(clients, weights=[3.0, 1.0])), [8 / 11], rtol=1e-15)
    assert_allclose(reference(Problem(clients, regularizer=L1(0.5))), [2 / 9], rtol=1e-14)


def test_huber_where_every_row_is_far_out_at_zero() -> None:
    clients = [(np.ones((2, 1)), [500.0, 500.0]), (np.ones((2, 1)), [500.0, 1500.0])]
    assert_allclose(reference(Problem(clients, loss=Huber(1.0))), [500 + 1 / 3], rtol=1e-15)


@pytest.mark.parametrize("scale", [1e2, 1e6])
def test_huber_of_any_unit(scale: float) -> None:
    problem = make(Huber(0.5), 18)
    X, y = stacked(problem)
    far = Problem(split(X, y * scale + 30.0 * scale), loss=Huber(0.5 * scale))
    near = Problem(split(X, y + 30.0), loss=Huber(0.5))
    assert_allclose(reference(far) / scale, reference(near), rtol=1e-11)
    narrow = Problem(split(X, y * scale), loss=Huber(0.5))
    size = np.linalg.norm(narrow.grad(np.zeros(narrow.dim)))
    assert np.linalg.norm(narrow.grad(reference(narrow))) <= 1e-15 * size * scale


def test_polynomial_recovered_from_badly_conditioned_columns() -> None:
    t = np.arange(12.0)
    X, coefficients = t[:, None] ** np.arange(6)[None, :], np.array([7.0, -3, 2, 1, -1, 1])
    x = reference(Problem(split(X, X @ coefficients)))
    assert_allclose(x, coefficients, rtol=1e-8)


def test_poisson_and_logistic_means() -> None:
    ones = np.ones((4, 1))
    y = np.array([1.0, 0, 3, 5000])
    assert_allclose(reference(Problem([(ones, y)], loss="poisson")), [np.log(np.mean(y))], 1e-14)
    y = np.array([1.0, 0, 0, 0])
    assert_allclose(reference(Problem([(ones, y)], loss="logistic")), [np.log(1 / 3)], 1e-14)


# --- independent packages -------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, np.array([1.0, 300.0, 0.01])], ids=["even", "raw"])
@pytest.mark.parametrize(
    ("loss", "family"),
    [("logistic", sm.families.Binomial()), ("poisson", sm.families.Poisson())],
    ids=["logistic", "poisson"],
)
def test_glm_is_that_of_statsmodels(loss: str, family: Any, scale: Any) -> None:
    problem = make(loss, 0, scale)
    X, y = stacked(problem)
    fit = sm.GLM(y, X, family=family).fit(tol=1e-15, maxiter=100)
    assert_allclose(reference(problem), fit.params, rtol=1e-8)


def test_multinomial_is_that_of_statsmodels() -> None:
    problem = make("multinomial", 1)
    X, y = stacked(problem)
    fit = sm.MNLogit(y, X).fit(method="newton", tol=1e-14, disp=False)
    assert_allclose(reference(problem), fit.params.ravel(), rtol=1e-8)


def test_huber_is_that_of_scipy() -> None:
    problem = make(Huber(0.7), 2)
    X, y = stacked(problem)
    fit = scipy.optimize.least_squares(
        lambda x: X @ x - y, np.zeros(P + 1), loss="huber", f_scale=0.7, xtol=1e-15, ftol=1e-15
    )
    assert_allclose(reference(problem), fit.x, rtol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_lasso_and_elastic_net_are_those_of_scikit_learn(seed: int) -> None:
    tight = {"tol": 1e-14, "max_iter": 1_000_000}
    for g, model in [
        (L1(0.2), Lasso(alpha=0.2, **tight)),
        (ElasticNet(0.3, 0.7), SklearnElasticNet(alpha=0.3, l1_ratio=0.7, **tight)),
    ]:
        problem = make("squared", seed, regularizer=g)
        X, y = stacked(problem)
        fit = model.fit(X[:, 1:], y)
        expected = np.append(fit.intercept_, fit.coef_)
        x = reference(problem)
        assert_allclose(x, expected, rtol=1e-9, atol=1e-12)
        assert np.array_equal(x == 0.0, expected == 0.0)


def test_lasso_with_more_columns_than_rows_is_that_of_scikit_learn() -> None:
    rng = np.random.default_rng(3)
    X, y = rng.normal(size=(20, 50)), rng.normal(size=20)
    fit = Lasso(alpha=0.1, fit_intercept=False, tol=1e-15, max_iter=1_000_000).fit(X, y)
    x = reference(Problem(split(X, y, 2), regularizer=L1(0.1)))
    assert_allclose(x, fit.coef_, rtol=1e-8, atol=1e-12)


def test_bounded_least_squares_is_that_of_scipy() -> None:
    for g, bounds in [(Box(-0.2, 0.3), (-0.2, 0.3)), (NonNegative(), (0.0, np.inf))]:
        problem = make("squared", 4, regularizer=g, fit_intercept=False)
        X, y = stacked(problem)
        fit = scipy.optimize.lsq_linear(X, y, bounds, method="bvls", tol=1e-15)
        assert_allclose(reference(problem), fit.x, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_many_blocks_of_rows_are_those_of_statsmodels(loss: str) -> None:
    rng = np.random.default_rng(20)
    X = np.column_stack([np.ones(20_000), rng.normal(size=(20_000, 9)) * np.logspace(-2, 2, 9)])
    y = random_targets(loss, X @ (rng.normal(size=10) / np.abs(X).max(axis=0)), rng)
    edges = np.cumsum(np.resize([1000, 300], 30))
    problem = Problem(list(zip(np.split(X, edges), np.split(y, edges), strict=True)), loss=loss)
    model = sm.OLS(y, X) if loss == "squared" else sm.Logit(y, X)
    options = {} if loss == "squared" else {"method": "newton", "tol": 1e-14, "disp": False}
    assert_allclose(reference(problem), model.fit(**options).params, rtol=1e-9)


# --- factorised block after block -----------------------------------------------------------------


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 4 p rows in the QR factorisation."""
    monkeypatch.setattr(sys.modules["fedexact.reference.qr"], "BLOCK", 1)


@pytest.mark.usefixtures("short_blocks")
def test_triangle_is_the_factor_of_the_weighted_gram_matrix() -> None:
    problem = make("squared", 21, weights=[1.0, 2.0, 3.0], l2=0.3)
    rows, weight = problem.pooled()
    X = np.column_stack([rows.X, rows.y])
    R = triangle(problem, with_target=True)
    gram = X.T @ (weight[:, None] * X) + np.diag(np.append(problem.ridge, 0.0))
    assert_allclose(R.T @ R, gram, rtol=1e-13)
    assert_allclose(np.abs(triangle(problem)), np.abs(R[:-1, :-1]), rtol=1e-13, atol=1e-14)


@pytest.mark.usefixtures("short_blocks")
def test_ill_conditioned_least_squares_in_blocks() -> None:
    t = np.linspace(0.0, 1.0, 200)
    X, coefficients = t[:, None] ** np.arange(9)[None, :], np.array([1.0, -2, 3, 1, 1, 2, 1, 5, 1])
    x = reference(Problem(split(X, X @ coefficients)))
    assert np.linalg.cond(X) > 1e5
    assert_allclose(x, coefficients, rtol=1e-8)


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_columns_dependent_in_every_block_but_one_row_are_independent(loss: str) -> None:
    rng = np.random.default_rng(22)
    X = rng.normal(size=(N, P))
    X = np.column_stack([X, X[:, 0] - X[:, 2]])
    y = random_targets(loss, 0.3 * X[:, 1], rng)
    with pytest.raises(InputError, match=r"deficiency\): '(a|c|d)' can"):
        reference(Problem(split(X, y), loss=loss, feature_names=list("abcd")))
    X[17, 3] += 1e-2
    problem = Problem(split(X, y), loss=loss, fit_intercept=True)
    size = np.linalg.norm(problem.grad(np.zeros(problem.dim)))
    assert np.linalg.norm(problem.grad(reference(problem))) <= 1e-12 * size


# --- many coefficients: no (d, d) matrix ----------------------------------------------------------


def without_matrices(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """The reference as for more coefficients than a (d, d) matrix is formed for."""
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["fedexact.reference.pooled"], "NEWTON_LIMIT", 0)
        patch.setattr(methods, "QR_LIMIT", 0)
        return reference(problem)


@pytest.mark.parametrize("loss", ["squared", "logistic", "poisson", "huber", "multinomial"])
def test_conjugate_gradients_find_the_same(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = make(loss, 5, scale=np.array([1.0, 30.0, 0.1]), l2=1e-3)
    expected = reference(problem)
    assert_allclose(without_matrices(problem, monkeypatch), expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("loss", ["logistic", "poisson", "multinomial"])
@pytest.mark.parametrize("g", [L1(0.05), GroupLasso(0.1, [[0, 2], [1]])], ids=["l1", "group"])
def test_composite_without_matrices_is_the_same(
    loss: str, g: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if loss == "multinomial":
        g = L1(0.05)
    problem = make(loss, 4, regularizer=g)
    expected = reference(problem)
    assert_allclose(without_matrices(problem, monkeypatch), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_conjugate_gradients_of_600_coefficients(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(23)
    X = rng.normal(size=(900, 600)) * np.exp(rng.normal(size=600))
    y = random_targets("logistic", X[:, 0] - X[:, 1], rng)
    problem = Problem(split(X, y), loss="logistic", l2=0.1)
    x = reference(problem)
    monkeypatch.setattr(sys.modules["fedexact.reference.pooled"], "NEWTON_LIMIT", 600)
    assert_allclose(x, reference(problem), rtol=0, atol=1e-10 * np.abs(x).max())


@pytest.mark.slow
def test_lasso_of_600_columns_is_that_of_scikit_learn() -> None:
    rng = np.random.default_rng(24)
    X = rng.normal(size=(300, 600))
    y = X[:, :20] @ rng.normal(size=20) + 0.5 + rng.normal(size=300)
    x = reference(Problem(split(X, y), regularizer=L1(0.15), fit_intercept=True))
    order = np.concatenate([np.arange(300)[k::3] for k in range(3)])
    fit = Lasso(alpha=0.15, tol=1e-14, max_iter=1_000_000).fit(X[order], y[order])
    assert_allclose(x, np.append(fit.intercept_, fit.coef_), rtol=1e-8, atol=1e-11)


def test_more_columns_than_are_factorised() -> None:
    rng = np.random.default_rng(25)
    X = scipy.sparse.random(30, 2100, density=0.02, format="csr", rng=rng)
    y = (rng.random(30) < 0.5).astype(float)
    clients = [(X[:10], y[:10]), (X[10:], y[10:])]
    with pytest.raises(InputError, match=r"30 rows for 2100 columns.*add l2"):
        reference(Problem(clients, loss="logistic"))
    for loss in ("logistic", "squared"):
        problem = Problem(clients, loss=loss, l2=0.01)
        size = np.linalg.norm(problem.grad(np.zeros(problem.dim)))
        assert np.linalg.norm(problem.grad(reference(problem))) <= 1e-13 * size


@pytest.mark.parametrize(
    ("loss", "g"),
    [("squared", None), ("logistic", L1(0.02)), ("huber", None), ("multinomial", L1(0.02))],
)
def test_sparse_rows_give_what_dense_ones_do(loss: str, g: Any) -> None:
    rng = np.random.default_rng(26)
    X = rng.normal(size=(N, P)) * (rng.random((N, P)) < 0.4)
    y = random_targets(loss, X @ rng.normal(size=P), rng)
    options: dict[str, Any] = {"loss": loss, "regularizer": g, "fit_intercept": True}
    dense = reference(Problem(split(X, y), **options))
    sparse = [(scipy.sparse.csr_array(a), b) for a, b in split(X, y)]
    assert_allclose(reference(Problem(sparse, **options)), dense, rtol=1e-11, atol=1e-13)


# --- optimality conditions ------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["squared", "logistic", "poisson", "huber", "multinomial"])
def test_gradient_vanishes_without_regulariser(loss: str) -> None:
    for options in ({}, {"l2": 0.1, "weights": "clients"}, {"reduction": "sum"}):
        problem = make(loss, 5, **options)
        size = np.linalg.norm(problem.grad(np.zeros(problem.dim)))
        assert np.linalg.norm(problem.grad(reference(problem))) <= 1e-14 * size


@pytest.mark.parametrize(
    ("loss", "strength"),
    [("logistic", 0.05), ("poisson", 0.4), ("huber", 0.1), ("multinomial", 0.05)],
)
def test_l1_optimality(loss: str, strength: float) -> None:
    problem = make(loss, 4, regularizer=L1(strength))
    x = reference(problem)
    free = problem.dim // problem.n_features
    grad = problem.grad(x)
    assert_allclose(grad[:free], 0.0, atol=1e-14)
    grad, x = grad[free:], x[free:]
    assert 0 < np.sum(x == 0) < len(x)
    assert_allclose(grad[x != 0], -strength * np.sign(x[x != 0]), rtol=1e-12)
    assert np.all(np.abs(grad[x == 0]) <= strength)


@pytest.mark.parametrize("loss", ["squared", "poisson"])
def test_group_lasso_optimality(loss: str) -> None:
    strength, groups = 0.4, [[0, 2], [1]]
    problem = make(loss, 4, regularizer=GroupLasso(strength, groups))
    x = reference(problem)
    grad, x = problem.grad(x)[1:], x[1:]
    norms = [np.linalg.norm(x[G]) for G in groups]
    assert min(norms) == 0.0
    assert max(norms) > 0.0
    for G, norm in zip(groups, norms, strict=True):
        pull = strength * np.sqrt(len(G))
        if norm > 0:
            assert_allclose(grad[G], -pull * x[G] / norm, rtol=1e-11)
        else:
            assert np.linalg.norm(grad[G]) <= pull


def test_ball_optimality() -> None:
    problem = make("logistic", 7, regularizer=L2Ball(0.3))
    x = reference(problem)
    grad = problem.grad(x)
    assert_allclose(np.linalg.norm(x[1:]), 0.3, rtol=1e-14)
    multiplier = -(grad[1:] @ x[1:]) / 0.3**2
    assert multiplier > 0
    assert_allclose(grad[1:], -multiplier * x[1:], rtol=1e-10)


# --- losses of the user's own ---------------------------------------------------------------------


@pytest.mark.slow
def test_custom_loss_agrees_with_the_built_in_one() -> None:
    def own(x: jax.Array, rows: Rows) -> jax.Array:
        eta = rows.X @ x
        return jnp.logaddexp(0.0, eta) - rows.y * eta

    for g in (None, L1(0.05)):
        built_in = make("logistic", 8, regularizer=g)
        custom = Problem(split(*stacked(built_in)), loss=own)
        if g is None:
            assert_allclose(reference(custom), reference(built_in), rtol=1e-12)
        else:
            without = Problem(split(*stacked(built_in)), loss="logistic", regularizer=g)
            penalised = Problem(split(*stacked(built_in)), loss=own, regularizer=g)
            assert_allclose(reference(penalised), reference(without), rtol=1e-11)


@pytest.mark.slow
def test_nonconvex_loss_reaches_a_stationary_point() -> None:
    def own(x: jax.Array, rows: Rows) -> jax.Array:
        return (jnp.tanh(rows.X @ x) - rows.y) ** 2

    rng = np.random.default_rng(9)
    X, truth = rng.normal(size=(N, P)), np.array([0.5, -1.0, 0.3])
    x = reference(Problem(split(X, np.tanh(X @ truth)), loss=own))
    assert_allclose(x, truth, rtol=1e-10)


def test_loss_unbounded_below_is_refused() -> None:
    def own(x: jax.Array, rows: Rows) -> jax.Array:
        return rows.X @ x

    with pytest.raises(FedexactError, match=r"bounded\s+below"):
        reference(make(CustomLoss(own), 10))


# --- no unique finite minimiser -------------------------------------------------------------------


def test_separation_is_named_and_a_ridge_cures_it() -> None:
    rng = np.random.default_rng(11)
    X = rng.normal(size=(N, 2))
    y = (X[:, 1] > 0.1).astype(float)
    options: dict[str, Any] = {"loss": "logistic", "feature_names": ["age", "marker"]}
    with pytest.raises(InputError, match=r"'marker'.*separation.*add l2"):
        reference(Problem(split(X, y), fit_intercept=True, **options))
    problem = Problem(split(X, y), l2=1e-3, **options)
    assert_allclose(problem.grad(reference(problem)), 0.0, atol=1e-15)


@pytest.mark.slow
def test_quasi_separation_of_counts_and_a_missing_class() -> None:
    rng = np.random.default_rng(12)
    group = (np.arange(N) % 4 == 0).astype(float)[:, None]
    counts = np.where(group[:, 0] == 1, 0, rng.poisson(2.0, N)).astype(float)
    with pytest.raises(InputError, match=r"no finite minimiser.*'x0'"):
        reference(Problem(split(group, counts), loss="poisson", fit_intercept=True))
    labels = np.where(np.arange(N) % 3 == 1, 0.0, np.arange(N) % 3)  # class 1 never seen
    with pytest.raises(InputError, match="no finite minimiser"):
        reference(Problem(split(group, labels), loss="multinomial", fit_intercept=True))


@pytest.mark.parametrize("loss", ["squared", "logistic", "poisson", "huber", "multinomial"])
def test_linearly_dependent_columns_are_named(loss: str) -> None:
    problem = make(loss, 13)
    X, y = stacked(problem)
    X = np.column_stack([X[:, :3], 2.0 * X[:, 2] - X[:, 0]])
    names = ["one", "age", "dose", "mixture"]
    with pytest.raises(InputError, match=r"rank deficiency.*('one'|'dose'|'mixture').*add l2"):
        reference(Problem(split(X, y), loss=loss, feature_names=names))
    cured = Problem(split(X, y), loss=loss, feature_names=names, l2=0.1)
    size = np.linalg.norm(cured.grad(np.zeros(cured.dim)))
    assert np.linalg.norm(cured.grad(reference(cured))) <= 1e-14 * size


@pytest.mark.parametrize("loss", ["squared", "logistic", "multinomial"])
def test_constant_column_is_named_and_not_the_intercept(loss: str) -> None:
    problem = make(loss, 13)
    X, y = stacked(problem)
    for value in (1.0, 3.0, 1e-3):
        columns = np.column_stack([X[:, 1], np.full(N, value), X[:, 2]])
        names = ["age", "site", "dose"]
        with pytest.raises(
            InputError, match=r"deficiency\): 'site' can.* and the intercept in the"
        ):
            reference(
                Problem(split(columns, y), loss=loss, fit_intercept=True, feature_names=names)
            )
    dummies = np.column_stack([np.arange(N) % 2 == 0, np.arange(N) % 2 == 1]).astype(float)
    with pytest.raises(InputError, match=r"deficiency\): 'x[01]' can"):
        reference(Problem(split(dummies, y), loss=loss, fit_intercept=True))


def test_one_of_several_minimisers_of_the_lasso() -> None:
    X, y = stacked(make("squared", 17))
    twice = np.column_stack([X[:, 1], X[:, 1]])
    x = reference(Problem(split(twice, y), regularizer=L1(0.05)))
    single = reference(Problem(split(X[:, 1:2], y), regularizer=L1(0.05)))
    assert_allclose(x.sum(), single[0], rtol=1e-12)
    assert np.all(x * single[0] >= 0)


def test_fewer_rows_than_columns_is_rank_deficiency() -> None:
    rng = np.random.default_rng(14)
    with pytest.raises(InputError, match="rank deficiency"):
        reference(Problem([(rng.normal(size=(3, 5)), rng.normal(size=3))]))


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["logistic", "poisson"])
def test_intercept_that_runs_off_in_spite_of_a_regulariser(loss: str) -> None:
    y = np.full(N, 1.0 if loss == "logistic" else 0.0)
    X = np.random.default_rng(15).normal(size=(N, 2))
    for g in (L1(0.1), L2Ball(1.0)):
        problem = Problem(split(X, y), loss=loss, regularizer=g, fit_intercept=True)
        with pytest.raises(InputError, match=r"no finite minimiser.*'intercept'"):
            reference(problem)


def test_reports_the_precision_it_could_not_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["fedexact.reference.composite"], "GRADIENT_STEPS", 0)
    with pytest.raises(FedexactError, match=r"reached a gradient mapping.* of inf only"):
        reference(make("logistic", 16, regularizer=L1(0.1)))
