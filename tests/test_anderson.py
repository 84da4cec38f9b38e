"""Anderson: the textbook method on the stacked vector, from sums; never much worse than without."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from sklearn.linear_model import Lasso

import fedexact as fx
import protocol
from fedexact import config
from fedexact.algorithms.extrapolation import coefficients, decide, empty
from fedexact.solve import setting_of
from problems import THREE_SITES, least_squares, logistic

SPREAD = np.logspace(0, -2, 20)  # of the columns: condition number 1e4


def ill_conditioned(**kwargs: Any) -> fx.Problem:
    rng = np.random.default_rng(0)
    true = rng.normal(size=20) * (rng.random(20) < 0.4)
    clients = [
        (X, X @ true + 0.1 * rng.normal(size=60)) for X in rng.normal(size=(6, 60, 20)) * SPREAD
    ]
    return fx.Problem(clients, loss="squared", **kwargs)


def rounds_to(problem: fx.Problem, algorithm: fx.Algorithm, error: float, **kwargs: Any) -> int:
    """Rounds after which the distance from the pooled answer stays below `error`, relative."""
    most = kwargs.pop("most", 4000)
    x = protocol.rounds(problem, algorithm, protocol.everybody(problem, most), **kwargs).x
    pooled = fx.reference(problem)
    above = np.linalg.norm(x - pooled[None], axis=1) > error * np.linalg.norm(pooled)
    assert not above[-1]
    return int(np.flatnonzero(above)[-1]) + 2


# --- the textbook method --------------------------------------------------------------------------


def classical(problem: fx.Problem, algorithm: fx.Anderson, rounds: int) -> np.ndarray:
    """(T, d) models of Anderson's type-II method in NumPy: min |r_t - dR gamma| over the stack."""
    resolved = algorithm.resolve(setting_of(problem, fx.Full()))
    inner: Any = resolved.inner
    oracle, N, d = protocol.oracle_of(problem, algorithm), problem.n_clients, problem.dim
    tau = inner.relax / 2 if isinstance(inner, fx.FedDR) else inner.relax

    def model(z: np.ndarray) -> np.ndarray:
        return problem.prox(z.mean(axis=0), inner.step)

    def image(z: np.ndarray) -> np.ndarray:
        x = model(z)
        proxes = [oracle.client(k).prox(2 * x - z[k], inner.step, jnp.asarray(x)) for k in range(N)]
        return z + 2 * tau * (np.stack(proxes) - x[None])

    z = np.zeros((N, d))
    images, residuals, path = [], [], []
    for _ in range(rounds):
        images, residuals = [*images, image(z)], [*residuals, (image(z) - z).ravel()]
        images, residuals = images[-1 - algorithm.memory :], residuals[-1 - algorithm.memory :]
        z = images[-1]
        if len(images) > 1:
            dR = np.stack([b - a for a, b in pairwise(residuals)], axis=1)
            gamma = np.linalg.lstsq(dR, residuals[-1], rcond=None)[0]
            moves = [b - a for a, b in pairwise(images)]
            z = z - sum(c * move for c, move in zip(gamma, moves, strict=True))
        path.append(model(z))
    return np.array(path)


@pytest.mark.parametrize("memory", [1, 2, 4])
@pytest.mark.parametrize("inner", [fx.FedSplit(), fx.FedDR(relax=1.0)], ids=["FedSplit", "FedDR"])
def test_it_is_the_textbook_method(inner: Any, memory: int) -> None:
    """While no safeguard steps in."""
    problem = least_squares(1, (8,) * 5, d=4)
    algorithm = fx.Anderson(inner=inner, memory=memory, safeguard=1e6)
    path = protocol.rounds(problem, algorithm, protocol.everybody(problem, 8))
    assert float(path.server.window.trusted) == 7
    assert_allclose(path.x, classical(problem, algorithm, 8), rtol=0, atol=1e-9)


@pytest.mark.slow
def test_without_memory_it_is_fedsplit() -> None:
    problem = logistic(2)
    masks = np.random.default_rng(0).random((40, 4)) < 0.7
    plain = protocol.rounds(problem, fx.FedSplit(), masks)
    none = protocol.rounds(problem, fx.Anderson(inner=fx.FedSplit(), memory=0), masks)
    assert_allclose(none.x, plain.x, rtol=0, atol=1e-13)


def test_coefficients_are_those_of_the_constrained_least_squares() -> None:
    R = np.random.default_rng(3).normal(size=(30, 4)) * np.logspace(0, -6, 4)
    gram = np.zeros((5, 5))
    gram[:4, :4] = R.T @ R
    alpha = np.asarray(coefficients(jnp.asarray(gram), jnp.array(4.0)))
    # alpha = e_0 + Z gamma with Z of columns that sum to 0
    Z = np.concatenate([-np.ones((1, 3)), np.eye(3)])
    gamma = np.linalg.lstsq(R @ Z, -R[:, 0], rcond=None)[0]
    assert_allclose(alpha[:4], np.eye(4)[0] + Z @ gamma, rtol=0, atol=1e-9)
    assert alpha[4] == 0.0


# --- faster ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_four_times_faster_on_an_ill_conditioned_quadratic() -> None:
    """Condition number 1e4: 4 times fewer rounds with memory 5, 6 times fewer with 10."""
    problem = ill_conditioned()
    plain = rounds_to(problem, fx.FedSplit(), 1e-8)
    assert 4 * rounds_to(problem, fx.Anderson(), 1e-8) < plain
    assert 6 * rounds_to(problem, fx.Anderson(memory=10), 1e-8) < plain


@pytest.mark.slow
@pytest.mark.parametrize("relax", [1.0, 1.8])
def test_lasso_faster_and_that_of_scikit_learn(relax: float) -> None:
    """The map has kinks; the safeguard lets extrapolation do its work all the same."""
    problem = ill_conditioned(regularizer=fx.L1(0.01))
    inner = fx.FedDR(relax=relax)
    assert 2 * rounds_to(problem, fx.Anderson(inner=inner), 1e-8) < rounds_to(problem, inner, 1e-8)
    rows, _ = problem.pooled()
    lasso = Lasso(alpha=0.01, fit_intercept=False, tol=1e-15, max_iter=1_000_000)
    coef = lasso.fit(np.asarray(rows.X), np.asarray(rows.y)).coef_
    result = fx.solve(problem, fx.Anderson(inner=inner), rounds=1000)
    assert_allclose(result.x, coef, rtol=0, atol=1e-9)
    assert (coef == 0.0).any()


# --- safe -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("step", [None, 0.05, 10.0])
def test_not_much_worse_from_a_far_start(step: float | None) -> None:
    """Logistic loss from where it is linear: at most twice the rounds of the plain method."""
    problem = logistic(4, (20,) * 4, d=4, l2=0.01)
    x0 = np.full(4, 30.0)
    inner = fx.FedSplit(step=step)
    plain = rounds_to(problem, inner, 1e-6, x0=x0, most=6000)
    assert rounds_to(problem, fx.Anderson(inner=inner), 1e-6, x0=x0, most=6000) <= 2 * plain


def test_a_bad_extrapolation_is_taken_back() -> None:
    """The next iterate is the plain image of the point from which it started."""
    window = empty(1, jnp.zeros(1))
    window, alpha = decide(window, jnp.array([4.0, 0.0]), 10.0)
    assert_allclose(alpha, [1.0, 0.0])
    window, alpha = decide(window, jnp.array([0.0, 1.0]), 10.0)
    assert_allclose(alpha, [0.2, 0.8], rtol=1e-9)
    assert float(window.trial) == 1.0
    window, alpha = decide(window, jnp.array([9.0, 0.0]), 10.0)  # |r|^2 = 9 > 1
    assert_allclose(alpha, [0.0, 1.0])
    assert float(window.trial) == 0.0


def test_idle_extrapolation_comes_to_an_end() -> None:
    """Residuals that do not shrink: only so many extrapolations as the bound allows."""
    window, trusted = empty(1, jnp.zeros(1)), []
    for i in range(60):
        row = jnp.eye(2)[i % 2]
        window, _ = decide(window, row, 10.0)
        trusted.append(float(window.trusted))
    allowed = np.ceil(10.0 ** (1 / 1.1))
    assert trusted[-1] == trusted[-20] <= allowed
    assert trusted[-1] >= allowed - 1


@pytest.mark.slow
def test_rounds_with_somebody_missing_are_plain_ones() -> None:
    """Full rounds first, so that a combination is pending when clients stay away."""
    problem = logistic(5)
    rng = np.random.default_rng(1)
    masks = rng.random((400, 4)) < 0.6
    masks[:6] = True
    path = protocol.rounds(problem, fx.Anderson(), masks)
    assert float(path.server.window.trusted) > 5
    assert np.max(np.abs(path.invariant)) < 1e-12
    assert_allclose(path.x[-1], fx.reference(problem), rtol=0, atol=1e-10)


def test_rounding_does_not_pile_up() -> None:
    """Thousands of extrapolations with large coefficients leave the mean where the clients are."""
    problem = ill_conditioned()
    path = protocol.rounds(problem, fx.Anderson(), protocol.everybody(problem, 3000))
    assert float(path.server.window.trusted) > 1000
    assert_allclose(path.x[-1], fx.reference(problem), rtol=0, atol=1e-12)


# --- the border -----------------------------------------------------------------------------------


def test_the_inner_algorithm_is_chosen_by_the_regulariser() -> None:
    for regularizer, cls in ((None, fx.FedSplit), (fx.L1(0.1), fx.FedDR)):
        setting = setting_of(least_squares(0, regularizer=regularizer), fx.Full())
        assert isinstance(fx.Anderson().resolve(setting).inner, cls)


def test_what_it_cannot_do_is_said() -> None:
    lasso = least_squares(0, regularizer=fx.L1(0.1))
    with pytest.raises(fx.CapabilityError, match=r"inner=FedDR\(\)"):
        fx.solve(lasso, fx.Anderson(inner=fx.FedSplit()), rounds=1)
    for inner in (fx.FedSplit(per_client=True), fx.FedDR(server_block=True), fx.FOCUS()):
        with pytest.raises(fx.InputError, match="inner"):
            fx.Anderson(inner=inner)  # pyright: ignore[reportArgumentType]
    with pytest.raises(fx.InputError, match="memory"):
        fx.Anderson(memory=-1)


def test_what_it_assumes_is_said() -> None:
    setting = setting_of(least_squares(0), fx.Bernoulli(0.5))
    met = [a.met for a in fx.Anderson().assumptions(setting)]
    assert met == [True, False, True]
    assert fx.Anderson().exactness(setting).exact
    assert not fx.Anderson(inner=fx.FedDR(relax=3.0)).exactness(setting).exact


def experiment(inner: str, tmp_path: Any) -> config.Experiment:
    table = f'rounds = 5\n{THREE_SITES}\n[[algorithms]]\nname = "Anderson"\nmemory = 3\n{inner}\n'
    path = tmp_path / "experiment.toml"
    path.write_text(table)
    (tmp_path / "table.csv").write_text("site,age,dose,y\na,1,2,0\nb,2,1,1\nc,3,3,0\n")
    return config.load(path)


@pytest.mark.parametrize(
    ("inner", "expected"),
    [
        ("", None),
        ('inner = "FedDR"', fx.FedDR()),
        ('inner = { name = "FedSplit", relax = 0.5 }', fx.FedSplit(relax=0.5)),
    ],
)
def test_in_an_experiment_file(inner: str, expected: Any, tmp_path: Any) -> None:
    loaded = experiment(inner, tmp_path)
    algorithm = loaded.build_algorithms()["Anderson"]
    assert algorithm == fx.Anderson(inner=expected, memory=3)
    (tmp_path / "again.toml").write_text(loaded.to_toml())
    assert config.load(tmp_path / "again.toml").build_algorithms()["Anderson"] == algorithm


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        ('inner = { name = "FedSplit", relaxx = 0.5 }', r"inner \(FedSplit\): relaxx"),
        ('inner = "FedSplt"', "did you mean 'FedSplit'"),
        ('inner = "FOCUS"', "inner must be"),
        ("inner = 3", "inner must be"),
    ],
)
def test_a_bad_inner_table_is_named(inner: str, message: str, tmp_path: Any) -> None:
    with pytest.raises(fx.InputError, match=message):
        experiment(inner, tmp_path)


def test_the_chosen_hyperparameters_of_the_inner_one_are_reported(tmp_path: Any) -> None:
    result = fx.solve(least_squares(0), fx.Anderson(), rounds=3)
    assert result.hyperparameters["inner"] == "FedSplit"
    assert result.chosen["inner.relax"] == 0.9
    result.save(tmp_path / "run.npz")
    assert fx.Result.load(tmp_path / "run.npz").hyperparameters == result.hyperparameters
    assert jax.tree.leaves(fx.Anderson(safeguard=2.0)) == [2.0]
