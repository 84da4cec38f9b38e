"""ProxSkip, FedDyn, FedPD, FedADMM and AsyncFedDR: closed forms, equivalences, what fails."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import Lasso

import fedexact as fx
from fedexact.solve import setting_of
from fedexact.theory.rounds import Rounds
from problems import least_squares, logistic
from protocol import everybody, rounds
from quadratics import hessians, relative, two_clients

BERNOULLI = fx.Bernoulli([0.9, 0.6, 0.4, 0.2])
PROXIMAL = [fx.FedDyn(), fx.FedPD(), fx.FedADMM(), fx.AsyncFedDR()]


@pytest.mark.parametrize("participation", [fx.Full(), fx.Bernoulli([0.7, 0.3])], ids=repr)
@pytest.mark.parametrize("algorithm", [fx.ProxSkip(), *PROXIMAL], ids=lambda a: a.name)
def test_two_clients(algorithm: fx.Algorithm, participation: fx.Participation) -> None:
    result = fx.solve(two_clients(), algorithm, participation, rounds=1500)
    assert result.exactness.exact
    assert result.x == pytest.approx([4 / 9], abs=1e-12)


# --- ProxSkip -------------------------------------------------------------------------------------


def coins(algorithm: fx.ProxSkip, T: int) -> np.ndarray:
    """(T,) local steps before each of T communications, as `pull` draws them."""
    server = algorithm.init_server(jnp.zeros(1), 1)
    steps = jax.jit(jax.vmap(lambda r: algorithm.pull(server, r).steps))(jnp.arange(T))
    return np.asarray(steps)


def scaffnew(
    H: np.ndarray, b: np.ndarray, gamma: float, p: float, theta: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Algorithm 1 of Mishchenko et al. 2022 on the consensus, a coin theta_t at every step: the
    models (T, N, d) and control variates (T, N, d) after each step, all started at 0."""
    x, h = np.zeros_like(b), np.zeros_like(b)
    path = []
    for heads in theta:
        x_hat = x - gamma * (np.einsum("kij,kj->ki", H, x) - b - h)
        if heads:
            moved = x_hat - gamma / p * h
            x = np.tile(moved.mean(axis=0), (len(b), 1))
        else:
            x = x_hat
        h = h + p / gamma * (x - x_hat)
        path.append((x, h))
    return np.array([x for x, _ in path]), np.array([h for _, h in path])


@pytest.mark.slow
@pytest.mark.parametrize("p", [0.15, 0.5, 1.0])
def test_proxskip_is_the_papers_coin_at_every_step(p: float) -> None:
    problem = least_squares(60)
    H, b = hessians(problem)
    algorithm = fx.ProxSkip(probability=p, coin_seed=3)
    gamma = 1 / problem.constants().L
    steps = coins(algorithm, 25)
    theta = np.zeros(steps.sum(), bool)
    theta[np.cumsum(steps) - 1] = True
    x, h = scaffnew(H, b, gamma, p, theta)
    result = fx.solve(problem, algorithm, rounds=25)
    np.testing.assert_allclose(result.x, x[-1, 0], rtol=1e-11)
    np.testing.assert_allclose(result.clients["h"], h[-1], rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_proxskip_draws_geometric_steps_anew_by_the_coins_seed() -> None:
    p, T = 0.2, 20_000
    steps = coins(fx.ProxSkip(probability=p, coin_seed=0), T)
    k = np.arange(1, 30)
    seen = np.array([np.mean(steps == j) for j in k])
    expected = p * (1 - p) ** (k - 1)
    assert np.all(np.abs(seen - expected) < 5 * np.sqrt(expected / T))
    assert abs(np.corrcoef(steps[1:], steps[:-1])[0, 1]) < 5 / np.sqrt(T)
    other = coins(fx.ProxSkip(probability=p, coin_seed=1), T)
    assert abs(np.corrcoef(steps, other)[0, 1]) < 5 / np.sqrt(T)
    assert np.all(coins(fx.ProxSkip(probability=1.0, coin_seed=0), 100) == 1)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["compiled", "loop"])
def test_proxskip_counts_the_steps_it_took(engine: str) -> None:
    problem = least_squares(61, (8, 5, 3, 9))
    algorithm = fx.ProxSkip(probability=0.3, coin_seed=0)
    result = fx.solve(problem, algorithm, rounds=20, record_every=5, engine=engine)
    counted = result.history["gradient_evaluations"].to_numpy()
    assert list(counted[1:]) == list(25 * np.cumsum(coins(algorithm, 20))[4::5])


def test_proxskip_contracts_at_least_as_fast_as_proved() -> None:
    """E[Psi_t] <= (1 - min(gamma l, p^2))^t Psi_0, Psi = sum_k |x_k - x*|^2 + (gamma/p)^2
    |h_k - h_k*|^2 after t local steps: so Psi/(1 - ...)^t is a supermartingale, also when it is
    looked at after communications."""
    problem = least_squares(62)
    c, star = problem.constants(), fx.reference(problem)
    H, b = hessians(problem)
    gamma, p = 1 / c.L, 1 / np.sqrt(c.kappa)
    factor = 1 - min(gamma * c.l, p**2)
    h_star = np.einsum("kij,j->ki", H, star) - b
    T, at, scaled = 24, [0, 7, 15, 23], []
    for drawn in coins(fx.ProxSkip(probability=p, coin_seed=0), 40 * T).reshape(40, T):
        steps = np.cumsum(drawn)
        theta = np.zeros(steps[-1], bool)
        theta[steps - 1] = True
        x, h = scaffnew(H, b, gamma, p, theta)
        psi = np.sum((x - star) ** 2 + (gamma / p) ** 2 * (h - h_star) ** 2, axis=(1, 2))
        scaled.append(psi[steps[at] - 1] / factor ** steps[at])
    psi_0 = 4 * star @ star + (gamma / p) ** 2 * np.sum(h_star**2)
    levels = [psi_0, *np.mean(scaled, axis=0)]
    assert all(later <= earlier for earlier, later in pairwise(levels))


@pytest.mark.slow
def test_proxskip_communicates_less_than_gradient_descent() -> None:
    """kappa = 400: about sqrt(kappa) rounds per digit instead of kappa, for as many gradients."""
    rng = np.random.default_rng(63)
    clients = []
    for _ in range(4):
        X = np.linalg.qr(rng.normal(size=(12, 3)))[0] * np.array([1.0, 0.3, 0.05])
        clients.append((X, X @ rng.normal(size=3)))
    problem = fx.Problem(clients)
    assert problem.constants().kappa == pytest.approx(400, rel=1e-6)
    reference = fx.reference(problem)
    needed = []
    for algorithm in (fx.ProxSkip(), fx.ProxSkip(probability=1.0)):
        result = fx.solve(problem, algorithm, rounds=20_000, record_every=10, tol=1e-9)
        assert relative(result.x, reference) < 1e-5
        needed.append(result.rounds)
    assert needed[0] < needed[1] / 5


MIXING = {
    "bernoulli": (BERNOULLI, True),
    "pairs": (fx.Uniform(2), True),
    "markov": (fx.Markov(0.3, 0.4), True),
    "chain": (fx.Trace(np.array([[1, 1, 0, 0], [0, 0, 1, 1], [0, 1, 1, 0]], bool)), True),
    "one at a time": (fx.Uniform(1), False),
    "fixed pairs": (fx.Cyclic(2), False),
    "taking turns": (fx.Cyclic(4), False),
    "halves": (fx.Trace(np.array([[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0]], bool)), False),
}


@pytest.mark.parametrize("name", MIXING)
def test_proxskip_lands_where_cohorts_mix_and_nowhere_else(name: str) -> None:
    """Partial participation has no theory. Cohorts conserve the sum of their h_k: clients that are
    never linked cannot learn each other's gradients."""
    participation, mixes = MIXING[name]
    problem = least_squares(64)
    result = fx.solve(problem, fx.ProxSkip(), participation, rounds=4000, record_every=4000)
    assert result.exactness.exact is mixes
    assert result.invariant < 1e-11
    distance = relative(result.x, fx.reference(problem))
    if mixes:
        assert distance < 1e-11
    else:
        assert distance > 1e-2
        assert "do not mix" in result.exactness.why


def test_proxskip_chooses_and_says() -> None:
    problem = logistic(65, l2=0.0)
    setting = setting_of(problem, fx.Uniform(2))
    algorithm = fx.ProxSkip().resolve(setting)
    assert algorithm.lr == 1 / problem.constants().L
    assert 0.02 <= algorithm.probability <= 1.0
    assumed = dict(algorithm.assumptions(setting))
    assert not assumed["every f_k is strongly convex"]
    assert not assumed["every client takes part in every round"]
    flat = least_squares(66, (1, 1, 1, 1), 5)  # F itself is flat: m is its floor, 1e-6 L
    assert fx.ProxSkip().resolve(setting_of(flat, fx.Full())).probability == 0.02
    with pytest.raises(fx.InputError, match=r"probability must be a probability .* got 1\.5"):
        fx.ProxSkip(probability=1.5)
    with pytest.raises(fx.InputError, match="coin_seed must be an integer >= 0, got -1"):
        fx.ProxSkip(coin_seed=-1)


@pytest.mark.parametrize("algorithm", [fx.ProxSkip(), fx.AsyncFedDR()], ids=lambda a: a.name)
def test_what_the_server_draws_follows_the_seed_of_the_run(algorithm: fx.Algorithm) -> None:
    """With everybody present nothing else is random."""
    problem = least_squares(67)
    first, again, other = (fx.solve(problem, algorithm, rounds=7, seed=s) for s in (0, 0, 1))
    assert np.array_equal(first.x, again.x)
    assert not np.array_equal(first.x, other.x)
    (name,) = (name for name in first.chosen if name.endswith("_seed"))
    fixed = dataclasses.replace(algorithm, **{name: 0})
    assert np.array_equal(fx.solve(problem, fixed, rounds=7, seed=1).x, first.x)


# --- the proximal ones are FedDR in other variables -----------------------------------------------


@given(st.integers(0, 50), st.floats(0.02, 2.0))
def test_fedadmm_and_fedpd_are_feddr_under_random_participation(seed: int, step: float) -> None:
    problem = least_squares(67)
    masks = np.random.default_rng(seed).random((60, 4)) < np.array([0.9, 0.6, 0.4, 0.2])
    start = np.linspace(-1.0, 1.0, 3)
    one = rounds(problem, fx.FedDR(step=step, relax=1.0), masks, start).x
    for algorithm in (fx.FedADMM(step=step), fx.FedPD(step=step)):
        np.testing.assert_allclose(rounds(problem, algorithm, masks, start).x, one, atol=1e-12)


def test_fedadmm_is_feddr_with_a_regulariser() -> None:
    problem = least_squares(68, regularizer=fx.L1(1.0))
    masks = BERNOULLI.mask(4, 0, 80, seed=1)
    start = np.linspace(-1.0, 1.0, 3)
    one = rounds(problem, fx.FedDR(step=0.3, relax=1.0), masks, start)
    two = rounds(problem, fx.FedADMM(step=0.3), masks, start)
    np.testing.assert_allclose(two.x, one.x, atol=1e-12)
    np.testing.assert_allclose(0.3 * two.clients.z, one.clients.x - one.clients.y, atol=1e-12)
    assert np.any(one.x[-1] == 0)


def test_feddyn_with_everybody_is_feddr_and_otherwise_not() -> None:
    problem = least_squares(69)
    start = np.linspace(-1.0, 1.0, 3)
    full, masks = everybody(problem, 60), BERNOULLI.mask(4, 0, 60, seed=2)
    dyn, dr = (
        [rounds(problem, a, present, start) for present in (full, masks)]
        for a in (fx.FedDyn(step=0.2), fx.FedDR(step=0.2, relax=1.0))
    )
    np.testing.assert_allclose(dyn[0].x, dr[0].x, atol=1e-12)
    np.testing.assert_allclose(
        0.2 * dyn[0].clients.g, dr[0].clients.y - dr[0].clients.x, atol=1e-12
    )
    assert np.max(np.abs(dyn[1].x - dr[1].x)) > 1e-2


def test_feddyn_is_the_papers_round() -> None:
    """theta_k by the normal equations, mu = 1/step, h over all N, the model over S."""
    problem, mu = least_squares(70), 7.0
    H, b = hessians(problem)
    masks = BERNOULLI.mask(4, 0, 25, seed=4)
    x, h, g = np.ones(3), np.zeros(3), np.zeros((4, 3))
    path = []
    for present in masks:
        S = np.flatnonzero(present)
        if len(S):
            theta = np.array(
                [np.linalg.solve(H[k] + mu * np.eye(3), b[k] + g[k] + mu * x) for k in S]
            )
            g[S] -= mu * (theta - x)
            h -= mu / 4 * np.sum(theta - x, axis=0)
            x = theta.mean(axis=0) - h / mu
        path.append(x)
    mine = rounds(problem, fx.FedDyn(step=1 / mu), masks, np.ones(3))
    np.testing.assert_allclose(mine.x, path, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(mine.clients.g, g, rtol=1e-10, atol=1e-12)


def test_asyncfeddr_without_delay_is_feddr() -> None:
    problem = least_squares(71, regularizer=fx.ElasticNet(0.1, 0.5))
    masks = fx.Uniform(1).mask(4, 0, 80, seed=0)
    start = np.linspace(-1.0, 1.0, 3)
    one = rounds(problem, fx.FedDR(), masks, start)
    two = rounds(problem, fx.AsyncFedDR(delay=0), masks, start)
    assert np.array_equal(one.x, two.x)


@pytest.mark.slow
def test_asyncfeddr_sends_the_model_of_the_drawn_age() -> None:
    problem = least_squares(72)
    runs = Rounds(problem, fx.AsyncFedDR(delay=3, delay_seed=5), fx.Uniform(1))
    state, models, ages = runs.initial(np.ones(3)), [np.ones(3)], []
    for r in range(25):
        sent = np.asarray(runs.algorithm.pull(state[0], jnp.asarray(r)))
        age = next(a for a in range(4) if np.array_equal(sent, models[max(-1 - a, -len(models))]))
        ages.append(age)
        state, after = runs.run(state, r, r + 1)
        models.append(after[0])
    assert set(ages[4:]) == {0, 1, 2, 3}
    draws = jax.vmap(lambda r: runs.algorithm.pull(state[0], r)[0])(jnp.arange(4000))
    past = np.asarray(state[0].past)[:, 0]
    seen = np.array([np.mean(np.asarray(draws) == value) for value in past])
    assert np.all(np.abs(seen - 0.25) < 5 * np.sqrt(0.25 * 0.75 / 4000))


# --- FedPD with several local steps ---------------------------------------------------------------


@pytest.mark.parametrize("R", [1, 2, 5])
def test_fedpd_fixed_point(R: int) -> None:
    """sum_k (I - Q_k^R)(I - eta H_k Q_k^R)^-1 (x - m_k) = 0, H_k m_k = b_k."""
    problem, eta = least_squares(73), 0.2
    H, b = hessians(problem)
    weights, one = [], np.eye(3)
    for H_k in H:
        power = np.linalg.matrix_power(np.linalg.inv(one + eta * H_k), R)
        weights.append((one - power) @ np.linalg.inv(one - eta * H_k @ power))
    W = np.array(weights)
    m = np.linalg.solve(H, b[..., None])
    x = np.linalg.solve(W.sum(axis=0), (W @ m).sum(axis=0)[:, 0])
    for participation in (fx.Full(), BERNOULLI):
        result = fx.solve(
            problem, fx.FedPD(step=eta, local_steps=R), participation, rounds=3000,
            record_every=3000,
        )  # fmt: skip
        np.testing.assert_allclose(result.x, x, atol=1e-11)
        assert result.exactness.exact == (R == 1)
    distance = np.linalg.norm(x - fx.reference(problem))
    assert distance < 1e-12 if R == 1 else distance > 1e-2


@pytest.mark.slow
def test_fedpd_with_many_local_steps_averages_the_local_fits() -> None:
    """R to infinity: 2 and 1/4 average to 9/8. One client is never biased."""
    result = fx.solve(two_clients(), fx.FedPD(step=5.0, local_steps=12), rounds=200)
    assert result.x == pytest.approx([9 / 8], abs=1e-9)
    alone = least_squares(74, (8,))
    result = fx.solve(alone, fx.FedPD(local_steps=3), fx.Bernoulli(0.5), rounds=500)
    assert result.exactness.exact
    assert relative(result.x, fx.reference(alone)) < 1e-12


def test_fedpd_pays_for_every_local_prox() -> None:
    problem = least_squares(75)
    paid = [
        fx.solve(problem, fx.FedPD(local_steps=R), rounds=10).history["gradient_evaluations"][-1]
        for R in (1, 4)
    ]
    assert paid[1].as_py() == 4 * paid[0].as_py() == 4 * 10 * 32


# --- exact under any participation ----------------------------------------------------------------

HARD = {
    "one at a time": fx.Uniform(1),
    "bernoulli": BERNOULLI,
    "cyclic": fx.Cyclic(4),
    "markov": fx.Markov(0.1, 0.2),
    "rare": fx.Bernoulli([1.0, 1.0, 1.0, 0.05]),
}


@pytest.mark.parametrize("participation", HARD)
@pytest.mark.parametrize("algorithm", PROXIMAL, ids=lambda a: a.name)
def test_the_proximal_ones_land_under_any_participation(
    algorithm: fx.Algorithm, participation: str
) -> None:
    """Also with clients that have fewer rows than columns, l = 0."""
    problem = least_squares(76, (2, 2, 8, 8))
    assert problem.constants().l == 0.0
    result = fx.solve(
        problem, algorithm, HARD[participation], rounds=4000, record_every=4000, seed=1
    )
    assert result.exactness.exact
    assert relative(result.x, fx.reference(problem)) < 1e-11
    assert result.invariant < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("participation", HARD)
@pytest.mark.parametrize("algorithm", PROXIMAL, ids=lambda a: a.name)
def test_the_proximal_ones_land_without_strong_convexity(
    algorithm: fx.Algorithm, participation: str
) -> None:
    """Logistic regression, unequal clients, one of them separable by itself."""
    problem = logistic(77, (60, 40, 20, 4), l2=0.0, fit_intercept=True)
    assert problem.constants().l == 0.0
    result = fx.solve(problem, algorithm, HARD[participation], rounds=2500, record_every=2500)
    assert relative(result.x, fx.reference(problem)) < 1e-9


def sparse_rows(seed: int) -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(seed)
    centre = np.array([2.0, -1.0, 0.0, 0.0, 0.0, 1.5, 0.0, 0.0])
    clients = []
    for n in (30, 20, 12, 9):
        X = rng.normal(size=(n, 8))
        clients.append((X, X @ (centre + 0.2 * rng.normal(size=8)) + 0.1 * rng.normal(size=n)))
    return clients


@pytest.mark.slow
@pytest.mark.parametrize("participation", [fx.Full(), BERNOULLI], ids=lambda p: p.name)
@pytest.mark.parametrize("algorithm", [fx.FedADMM(), fx.AsyncFedDR()], ids=lambda a: a.name)
def test_scikit_learns_lasso(algorithm: fx.Algorithm, participation: fx.Participation) -> None:
    clients = sparse_rows(78)
    problem = fx.Problem(clients, regularizer=fx.L1(0.2))
    result = fx.solve(problem, algorithm, participation, rounds=3000, record_every=3000)
    X, y = (np.concatenate(part) for part in zip(*clients, strict=True))
    model = Lasso(alpha=0.2, fit_intercept=False, tol=1e-14, max_iter=10**6).fit(X, y)
    np.testing.assert_allclose(result.x, model.coef_, atol=1e-10)
    assert 2 < np.sum(model.coef_ != 0) < 8


def late_problem(name: str, seed: int) -> fx.Problem:
    if name == "lasso":
        return fx.Problem(sparse_rows(seed), regularizer=fx.L1(0.2))
    few = (2, 3, 8, 8)
    return least_squares(seed, few) if name == "squared" else logistic(seed, l2=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["squared", "logistic", "lasso"])
def test_asyncfeddr_lands_with_delays_up_to_40(name: str, seed: int) -> None:
    """One client per tick, each with a model up to ten rounds of everybody old."""
    problem = late_problem(name, 80 + seed)
    algorithm = fx.AsyncFedDR(delay=40)
    result = fx.solve(problem, algorithm, fx.Uniform(1), rounds=8000, record_every=8000, seed=seed)
    assert relative(result.x, fx.reference(problem)) < 1e-10


@pytest.mark.slow
def test_late_models_and_a_large_relaxation_do_not_agree() -> None:
    """Why the default is relax 1, where 1.8 is stable without delays."""
    problem = least_squares(84, (2, 2, 2, 2))
    with pytest.warns(fx.DivergenceWarning, match="lower relax"):
        late = fx.solve(problem, fx.AsyncFedDR(delay=40, relax=1.8), rounds=4000)
    assert late.status == "diverged"
    assert fx.AsyncFedDR().resolve(setting_of(problem, fx.Full())).relax == 1.0
    assert fx.AsyncFedDR(delay=0).resolve(setting_of(problem, fx.Full())).relax == 1.8


def test_bad_choices_are_refused() -> None:
    with pytest.raises(fx.InputError, match="delay must be an integer >= 0, got -1"):
        fx.AsyncFedDR(delay=-1)
    with pytest.raises(fx.InputError, match=r"delay_seed must be an integer >= 0, got 0\.5"):
        fx.AsyncFedDR(delay_seed=0.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(fx.InputError, match="local_steps must be an integer >= 1, got 0"):
        fx.FedPD(local_steps=0)
    regularised = least_squares(85, regularizer=fx.L1(0.1))
    for algorithm in (fx.ProxSkip(), fx.FedDyn(), fx.FedPD()):
        with pytest.raises(fx.CapabilityError, match=f"{algorithm.name} has no prox step"):
            fx.solve(regularised, algorithm)


def test_the_step_for_losses_that_need_not_be_convex() -> None:
    """The prox is then well defined, step L < 1, and FedDR's guarantee applies."""
    loss = fx.CustomLoss(lambda x, rows: jnp.sin(rows.X @ x))
    X = np.random.default_rng(86).normal(size=(6, 2))
    setting = setting_of(fx.Problem([(X, np.zeros(6)), (2 * X, np.zeros(6))], loss=loss), fx.Full())
    L = setting.constants.L
    chosen = {a.name: a.resolve(setting) for a in PROXIMAL}
    steps = {name: algorithm.step * L for name, algorithm in chosen.items()}
    expected = {"FedDyn": 0.15, "FedPD": 0.45, "FedADMM": 0.45, "AsyncFedDR": 0.45}
    assert steps == pytest.approx(expected, rel=1e-12)
