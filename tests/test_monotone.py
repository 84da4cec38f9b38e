"""Resolvents, Cayley operators, and FedSplit and FedDR as compositions of them."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

import fedexact as fx
from fedexact.theory import monotone
from fedexact.theory.monotone import (
    averaged,
    cayley_factor,
    consensus,
    gradients,
    iterate,
    proxes,
    reflected,
    splitting,
    stacked,
    with_server_block,
)
from problems import least_squares, logistic

N, D = 4, 3
SQUARES = least_squares(11, n_rows=(8, 20, 5, 9))
LOGISTIC = logistic(12, n_rows=(20, 9, 33, 20))
PROBLEMS = {"least squares": SQUARES, "logistic": LOGISTIC}
RESOLVENTS: dict[str, Callable[[], monotone.Resolvent]] = {
    "least squares": lambda: proxes(SQUARES),
    "logistic": lambda: proxes(LOGISTIC),
    "consensus": consensus,
    "lasso": lambda: consensus(fx.L1(0.3)),
    "box": lambda: consensus(fx.Box(-0.5, 0.2)),
    "group": lambda: consensus(fx.GroupLasso(0.4, [[0, 1], [2]])),
    "block": lambda: with_server_block(proxes(least_squares(11, n_rows=(8, 20, 5)))),
}
SEEDS = st.integers(0, 10_000)
STEPS = st.floats(0.01, 10.0)


def points(seed: int, scale: float = 3.0) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.random.default_rng(seed).normal(size=(2, N, D)) * scale
    return a, b


def optimum(problem: fx.Problem, step: float) -> tuple[np.ndarray, np.ndarray]:
    """x*, and the stack z* = x* - s grad f_k(x*)."""
    x = fx.reference(problem)
    X = stacked(x, N)
    return x, X - step * gradients(problem)(X)


# --- resolvents -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROBLEMS)
@given(seed=SEEDS, step=STEPS)
def test_proxes_solve_their_inclusion(name: str, seed: int, step: float) -> None:
    """u + s grad f(u) = z, client by client, in client order."""
    problem, z = PROBLEMS[name], points(seed)[0]
    u = proxes(problem)(z, step)
    assert u + step * gradients(problem)(u) == pytest.approx(z, abs=1e-10)


def test_gradients_are_in_client_order() -> None:
    rng = np.random.default_rng(0)
    X = [rng.normal(size=(n, D)) for n in (8, 20, 5, 9)]
    problem = fx.Problem([(A, np.zeros(len(A))) for A in X], weights="clients")
    z = points(1)[0]
    expected = [A.T @ A @ zk / len(A) for A, zk in zip(X, z, strict=True)]
    assert gradients(problem)(z) == pytest.approx(np.array(expected), abs=1e-13)


@pytest.mark.parametrize("rows", [4, 5])
def test_consensus_minimises_over_the_diagonal(rows: int) -> None:
    """n g(u) + sum_i |u - z_i|^2 / (2 s), by a general-purpose solver; g = 2.5 |u|^2 / 2."""
    z, s, n = np.random.default_rng(rows).normal(size=(rows, D)), 0.7, 4
    g = fx.SquaredL2(2.5)

    def objective(u: np.ndarray) -> float:
        return n * float(g.value(jnp.asarray(u))) + float(np.sum((u[None, :] - z) ** 2)) / (2 * s)

    best = minimize(objective, np.zeros(D), method="BFGS", options={"gtol": 1e-10}).x
    u = consensus(g, n)(z, s)
    assert u == pytest.approx(np.broadcast_to(best, z.shape), abs=1e-6)
    assert u[0] == pytest.approx(z.mean(axis=0) / (1 + 2.5 * s * n / rows), abs=1e-14)


@pytest.mark.parametrize("name", RESOLVENTS)
@given(seed=SEEDS, step=STEPS)
def test_firmly_nonexpansive_and_cayley_nonexpansive(name: str, seed: int, step: float) -> None:
    J, (a, b) = RESOLVENTS[name](), points(seed)
    moved = J(a, step) - J(b, step)
    assert np.sum(moved**2) <= np.sum(moved * (a - b)) * (1 + 1e-9) + 1e-12
    mirrored = reflected(J)(a, step) - reflected(J)(b, step)
    assert np.linalg.norm(mirrored) <= np.linalg.norm(a - b) * (1 + 1e-9)


def test_the_consensus_is_reflected_without_loss() -> None:
    a, b = points(2)
    R = reflected(consensus())
    assert R(R(a, 0.3), 1.7) == pytest.approx(a, abs=1e-14)
    assert np.linalg.norm(R(a, 1.0) - R(b, 1.0)) == pytest.approx(np.linalg.norm(a - b))


# --- the factor of the Cayley operator ------------------------------------------------------------


def with_curvatures(l: float, L: float) -> fx.Problem:  # noqa: E741
    """Four clients, each with the Hessian diag(l, (l + L)/2, L) and an optimum of its own."""
    X = np.diag(np.sqrt([l, (l + L) / 2, L]))
    targets = np.random.default_rng(3).normal(size=(N, D))
    return fx.Problem([(X, X @ x) for x in targets], reduction="sum", weights="clients")


@given(l=st.floats(0.1, 1.0), ratio=st.floats(1.0, 1e3), step=STEPS)
def test_cayley_factor_is_the_spectral_norm(l: float, ratio: float, step: float) -> None:  # noqa: E741
    H = np.diag([l, l * ratio])
    cayley = 2 * np.linalg.inv(np.eye(2) + step * H) - np.eye(2)
    factor = cayley_factor(step, l, l * ratio)
    assert factor == pytest.approx(np.linalg.norm(cayley, 2), abs=1e-12)
    best = cayley_factor(1 / np.sqrt(l * l * ratio), l, l * ratio)
    root = np.sqrt(ratio)
    assert best == pytest.approx((root - 1) / (root + 1), abs=1e-12)
    assert best <= factor + 1e-12


@pytest.mark.parametrize("step", [0.05, 0.2, 1.0, 5.0])
def test_cayley_factor_is_attained_and_bounds(step: float) -> None:
    problem = with_curvatures(0.5, 40.0)
    factor, R = cayley_factor(step, 0.5, 40.0), reflected(proxes(problem))
    z, ratios = points(4)[0], []
    for axis in np.eye(D):
        shifted = R(z + axis[None, :], step) - R(z, step)
        ratios.append(np.linalg.norm(shifted) / np.sqrt(N))
    assert max(ratios) == pytest.approx(factor, abs=1e-12)
    c = LOGISTIC.constants()
    for seed in range(20):
        a, b = points(seed)
        shrunk = reflected(proxes(LOGISTIC))(a, step) - reflected(proxes(LOGISTIC))(b, step)
        bound = cayley_factor(step, c.l, c.L) * np.linalg.norm(a - b)
        assert np.linalg.norm(shrunk) <= bound * (1 + 1e-9)


# --- splitting ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("name", PROBLEMS)
def test_fixed_points_are_shadows_of_the_optimum(name: str, tau: float) -> None:
    """z* = x* - s grad f_k(x*) one way round, x* + s grad f_k(x*) the other; J z* = x*."""
    problem, s = PROBLEMS[name], 0.4
    x, z = optimum(problem, s)
    ways = {(proxes, consensus): z, (consensus, proxes): 2 * stacked(x, N) - z}
    for (first, second), fixed in ways.items():
        J1, J2 = (J(problem) if J is proxes else J() for J in (first, second))
        assert splitting(J1, J2, s, tau)(fixed) == pytest.approx(fixed, abs=1e-9)
        assert J2(fixed, s) == pytest.approx(stacked(x, N), abs=1e-9)


@given(seed=SEEDS, tau=st.floats(0.05, 0.95))
def test_averaged_operators_lose_what_they_move(seed: int, tau: float) -> None:
    """|Ta - Tb|^2 <= |a - b|^2 - (1 - tau)/tau |(I - T)a - (I - T)b|^2, T tau-averaged."""
    T, (a, b) = splitting(proxes(SQUARES), consensus(), 0.3, tau), points(seed)
    after, lost = T(a) - T(b), (a - T(a)) - (b - T(b))
    allowed = np.sum((a - b) ** 2) - (1 - tau) / tau * np.sum(lost**2)
    assert np.sum(after**2) <= allowed + 1e-9 * np.sum((a - b) ** 2)


def test_peaceman_rachford_needs_more_than_convexity() -> None:
    """f = 0 everywhere: tau = 1 reflects for ever, tau = 1/2 is the mean after one round."""
    z, flat = points(5)[0], consensus(None)
    nothing: monotone.Resolvent = lambda z, s: z  # noqa: E731
    restless = splitting(nothing, flat, 1.0, 1.0)
    assert np.linalg.norm(restless(z) - z) > 1.0
    assert restless(restless(z)) == pytest.approx(z, abs=1e-13)
    settled = splitting(nothing, flat, 1.0, 0.5)(z)
    assert settled == pytest.approx(flat(z, 1.0), abs=1e-14)


# --- the algorithms -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 2, 150])
@pytest.mark.parametrize("tau", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("name", PROBLEMS)
def test_fedsplit_is_the_splitting(name: str, tau: float, rounds: int) -> None:
    problem, s, x0 = PROBLEMS[name], 0.3, np.array([1.0, -2.0, 0.5])
    z = iterate(splitting(proxes(problem), consensus(), s, tau), stacked(x0, N), rounds)
    run = fx.solve(problem, fx.FedSplit(step=s, relax=tau), rounds=rounds, x0=x0)
    assert run.clients["z"] == pytest.approx(z, abs=1e-12)
    assert run.x == pytest.approx(z.mean(axis=0), abs=1e-12)


@pytest.mark.parametrize(
    ("g", "block"), [(fx.Zero(), False), (fx.L1(0.1), False), (fx.L1(0.1), True)]
)
@pytest.mark.parametrize("tau", [0.5, 0.9])
def test_feddr_is_the_splitting_the_other_way_round(
    tau: float, g: fx.Regularizer, block: bool
) -> None:
    """Its y after t rounds is T^(t-1) x0, since the first round finds y = x0; the server block is
    one row more."""
    s, x0 = 0.3, np.zeros(D)
    problem = least_squares(11, n_rows=(8, 20, 5, 9), regularizer=g)
    of_f, of_g = proxes(problem), consensus(g, N)
    if block:
        of_f = with_server_block(of_f)
    T = splitting(of_g, of_f, s, tau)
    for rounds in (1, 2, 150):
        y = iterate(T, stacked(x0, N + block), rounds - 1)
        x = of_g(reflected(of_f)(y, s), s)[0]
        algorithm = fx.FedDR(step=s, relax=2 * tau, server_block=block)
        run = fx.solve(problem, algorithm, rounds=rounds, x0=x0)
        assert run.clients["y"] == pytest.approx(y[:N], abs=1e-12)
        assert run.x == pytest.approx(x, abs=1e-12)


def test_without_memory_it_is_fedprox() -> None:
    """J_C J_A instead of their reflections forgets the z_k, and lands elsewhere."""
    problem, s = SQUARES, 0.3
    forget = iterate(lambda z: consensus()(proxes(problem)(z, s), s), stacked(np.zeros(D), N), 200)
    run = fx.solve(problem, fx.FedProx(step=s), rounds=200)
    assert run.x == pytest.approx(forget[0], abs=1e-12)
    assert np.linalg.norm(run.x - fx.reference(problem)) > 1e-3


# --- refusals -------------------------------------------------------------------------------------


def custom() -> fx.Problem:
    clients = [(np.eye(2), np.ones(2))] * 2
    return fx.Problem(clients, loss=lambda x, rows: (rows.X @ x - rows.y) ** 2)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: averaged(lambda z: z, 1.5), fx.InputError, r"tau must be within \(0, 1\]"),
        (lambda: averaged(lambda z: z, 0.0), fx.InputError, "tau must be"),
        (lambda: splitting(consensus(), consensus(), -1.0, 1.0), fx.InputError, "step must be"),
        (lambda: proxes(custom()), fx.CapabilityError, "the prox of the custom loss .* inexact"),
        (lambda: gradients(SQUARES)(np.zeros((3, 3))), fx.InputError, r"\(4, 3\), got \(3, 3\)"),
    ],
)
def test_refusals(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
