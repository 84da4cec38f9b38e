"""Published bounds, with the numbers of a problem put in, hold over runs and are not vacuous."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

import fedexact as fx
from fedexact.core import record
from fedexact.theory.bounds import (
    FedAvgBound,
    FedDRBound,
    FedSplitBound,
    fedavg_bound,
    feddr_bound,
    fedsplit_bound,
)
from fedexact.theory.monotone import gradients, stacked
from problems import least_squares, logistic
from protocol import everybody, oracle_of, rounds

CLIENTS = [([[0.0], [1.0]], [2.0, 2.0]), ([[2.0], [2.0]], [0.0, 1.0])]
TWO = fx.Problem(CLIENTS, loss="squared", weights="clients", reduction="sum")
# f_1 = (m - 2)^2/2 + const, f_2 = 4 (m - 1/4)^2 + const: curvatures 1 and 8, answer 4/9
SLACK = 1 + 1e-9


def errors(problem: fx.Problem, algorithm: fx.Algorithm, T: int, **kwargs: Any) -> np.ndarray:
    """(T,) |x_t - x*|, everybody present."""
    path = rounds(problem, algorithm, everybody(problem, T), **kwargs)
    return np.linalg.norm(path.x - fx.reference(problem)[None, :], axis=1)


@record
class Wrapped:
    """A stack of oracles with another prox."""

    oracle: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.oracle, name)

    def client(self, k: Any) -> Any:
        return dataclasses.replace(self, oracle=self.oracle.client(k))


@record
class Perturbed(Wrapped):
    """Every prox is wrong by a vector of length `error`, always in the same direction."""

    error: Array

    def prox(self, v: Array, step: Any, start: Array) -> Array:
        off = jnp.ones_like(v) * self.error / jnp.sqrt(float(v.size))
        return self.oracle.prox(v, step, start) + off


@record
class Patient(Wrapped):
    """An exact prox of a smooth, weakly convex function with curvatures within +-L, s L < 1."""

    L: float

    def prox(self, v: Array, step: Any, start: Array) -> Array:
        lr = 1.0 / (self.L + 1.0 / step)

        def descend(_: Array, u: Array) -> Array:
            return u - lr * (self.oracle.grad(u) + (u - v) / step)

        return lax.fori_loop(0, 150, descend, v)


# --- FedSplit -------------------------------------------------------------------------------------

RIDGE = {
    "least squares": least_squares(31, n_rows=(9, 9, 9, 9), l2=0.3),
    "logistic": logistic(32, l2=0.05),
}
SPLITS = {
    "the paper's": {"relax": 1.0},
    "half": {"relax": 0.5},
    "long step": {"relax": 0.9, "step": 3.0},
    "per client": {"relax": 1.0, "per_client": True},
}


def split(problem: fx.Problem, **kwargs: Any) -> fx.FedSplit:
    """With the paper's step where none is given."""
    c = problem.constants()
    if "step" not in kwargs and not kwargs.get("per_client"):
        kwargs["step"] = 1 / np.sqrt(c.l * c.L)
    return fx.FedSplit(**kwargs)


def test_fedsplit_bound_in_numbers() -> None:
    """Two clients: L = 8, l = 1, s = 1/sqrt(8), f_1'(4/9) = -14/9 = -f_2'(4/9)."""
    bound = fedsplit_bound(split(TWO, relax=1.0), TWO, prox_error=1e-3)
    s, root = 1 / np.sqrt(8), np.sqrt(8)
    z = [4 / 9 + s * 14 / 9, 4 / 9 - s * 14 / 9]
    assert bound.factor == pytest.approx(1 - 2 / (root + 1), abs=1e-12)
    assert bound.initial == pytest.approx(np.linalg.norm(z) / np.sqrt(2), abs=1e-12)
    assert bound.inexact == pytest.approx((root + 1) * 1e-3, abs=1e-12)
    t, values = bound.curve(3)
    assert t.tolist() == [1, 2, 3]
    expected = [bound.factor**k * bound.initial + bound.inexact for k in (1, 2, 3)]
    assert values == pytest.approx(np.array(expected), abs=1e-14)
    assert f"{bound.factor:.6g}^t" in bound.words
    per_client = fedsplit_bound(split(TWO, relax=0.5, per_client=True), TWO)
    assert per_client.factor == pytest.approx(0.5, abs=1e-12)  # each client has kappa_k = 1


@pytest.mark.parametrize("split_kind", SPLITS)
@pytest.mark.parametrize("name", RIDGE)
def test_fedsplit_stays_below_its_bound(name: str, split_kind: str) -> None:
    problem, T = RIDGE[name], 60
    for x0 in (np.zeros(3), fx.reference(problem) + 0.01, np.array([5.0, -3.0, 1.0])):
        algorithm = split(problem, **SPLITS[split_kind])
        bound = fedsplit_bound(algorithm, problem, x0=x0)
        assert np.all(errors(problem, algorithm, T, x0=x0) <= bound.curve(T)[1] * SLACK + 1e-12)


def test_fedsplit_bound_is_the_truth_where_curvatures_are_extreme() -> None:
    """Clients with the same curvatures l and L, s = 1/sqrt(l L): the error shrinks by the factor in
    every round, and the bound is the truth times |z_0 - z*| / (sqrt(N) |x_0 - x*|), here 1.05."""
    rng, T = np.random.default_rng(33), 40
    X = np.diag(np.sqrt([0.5, 20.0]))
    clients = [(X, X @ x) for x in rng.normal(size=(5, 2))]
    problem = fx.Problem(clients, reduction="sum", weights="clients")
    algorithm, x0 = split(problem, relax=1.0), np.array([20.0, -20.0])
    bound = fedsplit_bound(algorithm, problem, x0=x0)
    truth = errors(problem, algorithm, T, x0=x0)
    assert truth[1:] / truth[:-1] == pytest.approx(np.full(T - 1, bound.factor), rel=1e-9)
    ratio = bound.curve(T)[1] / truth
    assert np.all(ratio >= 1.0)
    assert np.all(ratio < 1.1)


def test_fedsplit_bound_with_theta_in_the_place_of_z_is_violated() -> None:
    """The printed right side has |theta_0 - x*|: it vanishes at x0 = x*, the error does not."""
    for seed in range(34, 39):
        problem = least_squares(seed, n_rows=(9, 9, 9, 9), l2=0.3)
        x_star = fx.reference(problem)
        x0, algorithm = x_star + 0.01, split(problem, relax=1.0)
        bound, truth = (
            fedsplit_bound(algorithm, problem, x0=x0),
            errors(problem, algorithm, 30, x0=x0),
        )
        printed = dataclasses.replace(bound, initial=float(np.linalg.norm(x0 - x_star)))
        assert np.any(truth > 1.5 * printed.curve(30)[1])
        assert np.all(truth <= bound.curve(30)[1] * SLACK)


@pytest.mark.parametrize("relax", [0.7, 1.0])
def test_fedsplit_bound_counts_prox_errors(relax: float) -> None:
    """An error in every prox: the run ends between a tenth of the inexactness term and all of it,
    above what the bound would be without it."""
    problem, T, b = RIDGE["least squares"], 300, 1e-3
    algorithm = split(problem, relax=relax)
    oracle = Perturbed(oracle_of(problem, algorithm), jnp.asarray(b))
    truth = errors(problem, algorithm, T, oracle=oracle)
    bound = fedsplit_bound(algorithm, problem, prox_error=b)
    assert np.all(truth <= bound.curve(T)[1] * SLACK)
    assert truth[-1] > bound.inexact / 10
    assert truth[-1] > 10 * fedsplit_bound(algorithm, problem).at(T)


# --- FedDR ----------------------------------------------------------------------------------------


def geman_mcclure(x: Array, rows: fx.Rows) -> Array:
    """r^2 / (1 + r^2): bounded, not convex, second derivative within [-1/2, 2]."""
    square = (rows.X @ x - rows.y) ** 2
    return square / (1.0 + square)


def robust(seed: int, g: fx.Regularizer | None = None) -> tuple[fx.Problem, float]:
    """Robust regression with outliers, and L = 2 max_k lambda_max(X_k'X_k) / n_k."""
    rng, clients, L = np.random.default_rng(seed), [], 0.0
    for _ in range(5):
        X = rng.normal(size=(12, 2))
        y = X @ rng.normal(size=2) + np.where(rng.random(12) < 0.3, 5.0, 0.1) * rng.normal(size=12)
        clients.append((X, y))
        L = max(L, 2.0 * float(np.linalg.norm(X, 2)) ** 2 / 12)
    return fx.Problem(clients, loss=geman_mcclure, regularizer=g, weights="clients"), L


def mapping_squares(problem: fx.Problem, x: np.ndarray, s: float) -> np.ndarray:
    """(T,) |G_s(x_t)|^2."""
    return np.asarray(_mapping_squares(problem.oracles, problem.regularizer, jnp.asarray(x), s))


@jax.jit
def _mapping_squares(oracle: Any, g: Any, x: Array, s: float) -> Array:
    def square(v: Array) -> Array:
        grads = jax.vmap(lambda k: oracle.client(k).grad(v))(jnp.arange(oracle.width))
        return jnp.sum((v - g.prox(v - s * jnp.mean(grads, axis=0), s)) ** 2) / s**2

    return jax.vmap(square)(x)


def cohorts(participation: fx.Participation, T: int, N: int, seed: int) -> np.ndarray:
    """Masks with everybody in the first round."""
    masks = participation.mask(N, 0, T, seed)
    masks[0] = True
    return masks


class Traced(NamedTuple):
    """What the analysis of FedDR looks at, after each round."""

    V: np.ndarray  # (T,) the envelope
    x_bar: np.ndarray  # (T, d)
    x: np.ndarray  # (T, N + 1, d) the clients' own models and the server's block


def trace(problem: fx.Problem, algorithm: fx.FedDR, masks: np.ndarray, oracle: Any) -> Traced:
    V, models, own, state = [], [], [], None
    N, s, clients = problem.n_clients, algorithm.step, range(problem.n_clients)
    for mask in masks:
        path = rounds(problem, algorithm, mask[None], state=state, oracle=oracle)
        x_bar, state = path.x[-1], (path.server, path.clients)
        x, y, w = (np.asarray(a) for a in (path.clients.x, path.clients.y, path.server.w))
        far, block = x_bar[None, :] - x, np.sum((x_bar - w) ** 2) * algorithm.server_block
        values = [float(oracle.client(k).value(jnp.asarray(x[k]))) for k in clients]
        terms = np.sum((y - x) / s * far + far**2 / (2 * s), axis=1)
        V.append(np.mean(values + terms) + problem.penalty(x_bar) + block / (2 * N * s))
        models.append(x_bar)
        own.append(np.concatenate([x, w[None]]))
    return Traced(np.array(V), np.array(models), np.array(own))


def test_feddr_constant_in_numbers() -> None:
    """L = 8 with s = 1/32 and alpha = 1: C1 = 2 (5/4)^3 / (p/32 * 1/2)."""
    algorithm, participation = fx.FedDR(step=1 / 32, relax=1.0), fx.Bernoulli([0.5, 0.25])
    bound = feddr_bound(algorithm, TWO, participation)
    assert pytest.approx(2 * 1.25**3 * 32 * 2 / 0.25, rel=1e-12) == bound.C1
    fall = (2**2 + 8 * 0.25**2) / 4 - (1 * (14 / 9) ** 2 + 8 * (7 / 36) ** 2) / 4
    first = (1 / 64) * 1.25 * (2**2 + 2**2) / 2 / 0.75**2
    assert bound.gap == pytest.approx(fall + first, rel=1e-12)
    assert 32 * bound.step == pytest.approx(1.0, rel=1e-15)
    assert bound.at([1, 10]) == pytest.approx(bound.C1 * bound.gap / np.array([1.0, 10.0]))
    T = bound.rounds(eps := 1e-2)
    assert bound.at(T) <= eps**2
    assert bound.at(T - 1) > eps**2
    assert "probability >= 0.25" in bound.words
    block = feddr_bound(dataclasses.replace(algorithm, server_block=True), TWO, participation)
    assert pytest.approx(1.5 * bound.C1, rel=1e-12) == block.C1
    assert 48 * block.step == pytest.approx(1.0, rel=1e-12)
    assert block.gap == bound.gap


@pytest.mark.slow
@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("participation", [fx.Full(), fx.Bernoulli(0.4)], ids=["full", "bernoulli"])
def test_feddr_descends_and_stays_below_its_bound(
    participation: fx.Participation, block: bool
) -> None:
    """On a nonconvex loss with L1: each step of the proof, whoever is there, and the bound."""
    T, N = 25, 5
    problem, L = robust(41, fx.L1(0.02))
    algorithm = fx.FedDR(relax=1.0, step=0.45 / L, server_block=block)
    bound = feddr_bound(algorithm, problem, participation, smoothness=L, lowest=0.0)
    s, sL = algorithm.step, 0.45
    masks = cohorts(participation, T, N, seed=1)
    V, x_bar, x = trace(problem, algorithm, masks, Patient(oracle_of(problem, algorithm), L))
    assert V[0] <= bound.gap * SLACK

    there = np.append(masks[1:], np.full((T - 1, 1), block), axis=1)
    moved = np.sum(np.sum(np.diff(x, axis=0) ** 2, axis=2) * there, axis=1) / N
    fall = (1 + sL) * (2 - 1 - 2 * sL) / (2 * s)
    assert np.all(-np.diff(V) >= fall * moved - 1e-12)
    assert moved[0] > 1e-6

    far = np.linalg.norm(x_bar[:, None, :] - x, axis=2)[:, : N + block]
    squares = mapping_squares(problem, x_bar, bound.step)
    assert np.all(np.sqrt(squares) <= (1 + sL) / bound.step * far.mean(axis=1) + 1e-12)
    assert np.all(np.cumsum(squares) / np.arange(1, T + 1) <= bound.curve(T)[1])


@pytest.mark.parametrize("relax", [0.5, 1.0, 1.6])
def test_feddr_bound_in_expectation(relax: float) -> None:
    """The mean over 20 seeds, on a convex problem whose lowest value the bound finds by itself."""
    problem, T = least_squares(42, regularizer=fx.L1(0.1)), 200
    L = problem.constants().L
    algorithm, participation = (
        fx.FedDR(relax=relax, step=0.8 * (2 - relax) / (2 * L)),
        fx.Uniform(1),
    )
    bound = feddr_bound(algorithm, problem, participation)
    means = []
    for seed in range(20):
        path = rounds(problem, algorithm, cohorts(participation, T, 4, seed))
        means.append(np.cumsum(mapping_squares(problem, path.x, bound.step)) / np.arange(1, T + 1))
    mean = np.mean(means, axis=0)
    assert np.all(mean <= bound.curve(T)[1])
    eps = float(np.sqrt(mean[-1]))
    assert bound.rounds(eps) >= T


def test_feddr_starts_at_the_answer() -> None:
    """What is left of the gap is the first prox, also if rounding puts x0 below the minimum."""
    for seed in range(5):
        problem = least_squares(seed, regularizer=fx.L1(0.1))
        x0 = fx.reference(problem)
        s = 0.1 / problem.constants().L
        bound = feddr_bound(fx.FedDR(relax=1.0, step=s), problem, x0=x0)
        squares = np.sum(gradients(problem)(stacked(x0, 4)) ** 2) / 4
        assert bound.gap == pytest.approx(s / 2 * 1.1 * squares / 0.9**2, rel=1e-9)


def test_feddr_bound_holds_for_the_recorded_mapping() -> None:
    """The history's step 1/L_F is longer than s, so its mapping is shorter."""
    problem = least_squares(43, regularizer=fx.L1(0.1))
    c = problem.constants()
    bound = feddr_bound(fx.FedDR(relax=1.0, step=0.4 / c.L), problem)
    assert bound.step <= 1 / c.L_F
    result = fx.solve(problem, fx.FedDR(relax=1.0, step=0.4 / c.L), rounds=200, record_every=1)
    recorded = result.history["gradient_mapping"].to_numpy()[1:] ** 2
    assert np.all(np.cumsum(recorded) / np.arange(1, 201) <= bound.curve(200)[1])


# --- FedAvg ---------------------------------------------------------------------------------------


def limit(problem: fx.Problem, algorithm: fx.FedAvg) -> np.ndarray:
    return fx.solve(problem, algorithm, rounds=4000).x


def test_fedavg_bound_in_numbers() -> None:
    """Two clients, lr = 0.1, R = 2: f_k'(4/9) = -+14/9, curvatures 1 and 8."""
    bound = fedavg_bound(fx.FedAvg(lr=0.1, local_steps=2), TWO)
    shrink = (0.9**2 + 0.2**2) / 2
    assert bound.factor == pytest.approx(shrink, abs=1e-12)
    assert bound.initial == pytest.approx(4 / 9, abs=1e-12)
    assert bound.bias == pytest.approx(0.01 * 4.5 * 14 / 9 / (1 - shrink), abs=1e-12)
    assert bound.first_order == pytest.approx(np.array([0.05 * 7 * 14 / 9 / 9]), abs=1e-12)
    truth = limit(TWO, fx.FedAvg(lr=0.1, local_steps=2))[0] - 4 / 9
    assert truth == pytest.approx(0.5391304347826087 - 4 / 9, abs=1e-9)
    assert truth <= bound.bias
    assert bound.at([0, np.inf]) == pytest.approx(np.array([bound.initial, bound.bias]))
    assert "|x - x*| = 0.06049" in bound.words


@pytest.mark.parametrize("lr_server", [0.6, 1.0])
@pytest.mark.parametrize("local_steps", [1, 2, 10])
@pytest.mark.parametrize("name", RIDGE)
def test_fedavg_stays_below_its_bound(name: str, local_steps: int, lr_server: float) -> None:
    problem, T = RIDGE[name], 150
    for lr in (0.2, 1.0):
        algorithm = fx.FedAvg(lr / problem.constants().L, local_steps, lr_server)
        for x0 in (np.zeros(3), fx.reference(problem), np.array([5.0, -3.0, 1.0])):
            bound = fedavg_bound(algorithm, problem, x0=x0)
            truth = errors(problem, algorithm, T, x0=x0)
            assert np.all(truth <= bound.curve(T)[1] * SLACK + 1e-12)
            assert (bound.bias == 0.0) == (local_steps == 1)


@pytest.mark.parametrize("name", RIDGE)
def test_fedavg_bias_is_first_order_and_within_a_factor(name: str) -> None:
    """Half the lr: a quarter of what the expansion leaves; the bound is within a factor, which for
    the logistic loss has that of its global curvature and its ridge in it."""
    problem, left, factor = RIDGE[name], [], {"least squares": 10, "logistic": 40}[name]
    for lr in (0.02, 0.01):
        algorithm = fx.FedAvg(lr=lr / problem.constants().L, local_steps=3)
        bound = fedavg_bound(algorithm, problem)
        bias = limit(problem, algorithm) - fx.reference(problem)
        left.append(np.linalg.norm(bias - bound.first_order))
        assert left[-1] < 0.1 * np.linalg.norm(bias)
        assert np.linalg.norm(bias) <= bound.bias <= factor * np.linalg.norm(bias)
    assert left[0] / left[1] == pytest.approx(4.0, rel=0.1)


# --- refusals -------------------------------------------------------------------------------------

SPLIT, DR, AVG = fx.FedSplit(), fx.FedDR(relax=1.0, step=0.01), fx.FedAvg()
SINGULAR = least_squares(50, n_rows=(2, 2, 2, 2))
LASSO = least_squares(50, l2=0.1, regularizer=fx.L1(0.1))
ROBUST = robust(51)[0]
POISSON = fx.Problem([([[0.5], [1.0]], [1.0, 2.0])] * 2, loss="poisson", l2=0.1)


@pytest.mark.parametrize(
    ("bound", "arguments", "message"),
    [
        (fedsplit_bound, (SPLIT, TWO, fx.Bernoulli(0.5)), "everybody in every round"),
        (fedsplit_bound, (SPLIT, SINGULAR), "every f_k strongly convex: add l2"),
        (fedsplit_bound, (SPLIT, LASSO), "g = 0, got"),
        (fedsplit_bound, (SPLIT, POISSON), "a global L"),
        (fedsplit_bound, (fx.FedSplit(relax=1.2), TWO), "relax <= 1, got 1.2"),
        (fedsplit_bound, (DR, TWO), "this bound is FedSplit's, got FedDR"),
        (feddr_bound, (fx.FedDR(relax=1.0, step=0.1), TWO), "2 - relax - 2 step L > 0, got -0.6"),
        (feddr_bound, (fx.FedDR(relax=2.0, step=0.01), TWO), "relax below 2"),
        (feddr_bound, (DR, TWO, fx.Bernoulli([0.5, 0.0])), "p_k > 0 for every client"),
        (feddr_bound, (DR, TWO, fx.Markov(0.5, 0.5)), "drawn independently.*got markov"),
        (feddr_bound, (DR, ROBUST), "smoothness="),
        (feddr_bound, (DR, ROBUST, None, None, 1.0), "lowest="),
        (feddr_bound, (DR, TWO, None, None, None, 1e3), "lowest <= F"),
        (feddr_bound, (AVG, TWO), "this bound is FedDR's"),
        (fedavg_bound, (AVG, TWO, fx.Uniform(1)), "everybody in every round"),
        (fedavg_bound, (fx.FedAvg(batch_size=1), TWO), "leave batch_size out"),
        (fedavg_bound, (fx.FedAvg(lr=0.3), TWO), r"lr <= 2/\(l_k \+ L_k\) = 0.125, got 0.3"),
        (fedavg_bound, (fx.FedAvg(lr_server=1.5), TWO), "lr_server <= 1, got 1.5"),
        (fedavg_bound, (AVG, SINGULAR), "one of them strongly convex"),
        (fedavg_bound, (AVG, LASSO), "g = 0"),
    ],
)
def test_conditions_are_named(bound: Any, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(fx.InputError, match=message):
        bound(*arguments)


def test_bounds_leave_float64_to_the_caller() -> None:
    """The same numbers where JAX computes in float32."""
    with jax.enable_x64(False):
        found = [
            fedsplit_bound(split(TWO, relax=1.0), TWO),
            feddr_bound(fx.FedDR(relax=1.0, step=1 / 32), TWO),
            fedavg_bound(fx.FedAvg(lr=0.1), TWO),
        ]
    kinds = (FedSplitBound, FedDRBound, FedAvgBound)
    for one, kind in zip(found, kinds, strict=True):
        assert isinstance(one, kind)
    assert found[0] == fedsplit_bound(split(TWO, relax=1.0), TWO)
    assert found[1] == feddr_bound(fx.FedDR(relax=1.0, step=1 / 32), TWO)
    assert found[2].at(3) == fedavg_bound(fx.FedAvg(lr=0.1), TWO).at(3)
