"""MIFA, FedAU, FedAWE, SG-FOCUS and VR-FOCUS: twins, where they land, and their noise."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedexact as fx
from fedexact.core import client_key, root_key
from fedexact.solve import setting_of
from fedexact.theory.rounds import Rounds
from problems import least_squares, logistic
from protocol import everybody, rounds
from quadratics import geometric, hessians, quadratics, relative, solution, two_clients

BERNOULLI = fx.Bernoulli([0.9, 0.6, 0.4, 0.2])
TENTHS = fx.Bernoulli(np.linspace(0.1, 0.9, 10))
PARTICIPATIONS = [
    BERNOULLI, fx.Uniform(1), fx.Categorical([4.0, 3.0, 2.0, 1.0], 2), fx.Markov(0.3, 0.3),
    fx.Cyclic(4),
]  # fmt: skip


def weighted(problem: fx.Problem, M: np.ndarray) -> np.ndarray:
    """(d,) where sum_k M_k (H_k x - b_k) = 0; M (N,) or (N, d, d)."""
    H, b = hessians(problem)
    M = M if M.ndim == 3 else M[:, None, None] * np.eye(problem.dim)[None]
    return solution(M @ H, np.einsum("kij,kj->ki", M, b))


def fedgd_point(problem: fx.Problem, lr: float, R: int) -> np.ndarray:
    """Where FedAvg with everybody present lands."""
    return weighted(problem, geometric(hessians(problem)[0], lr, R))


def own_minimisers(problem: fx.Problem) -> np.ndarray:
    """(N, d) where each client alone would land."""
    H, b = hessians(problem)
    return np.linalg.solve(H, b[..., None])[..., 0]


def lr_of(problem: fx.Problem, algorithm: fx.Algorithm, participation: fx.Participation) -> float:
    return algorithm.resolve(setting_of(problem, participation)).lr  # pyright: ignore


def mean_and_error(x: np.ndarray, batches: int = 25) -> tuple[np.ndarray, np.ndarray]:
    """(d,) time average of a (T, d) path and its standard error, from the means of batches."""
    means = x.reshape(batches, -1, x.shape[-1]).mean(axis=1)
    return means.mean(axis=0), means.std(axis=0, ddof=1) / np.sqrt(batches)


def settled(
    problem: fx.Problem, algorithm: fx.Algorithm, participation: fx.Participation, T: int
) -> np.ndarray:
    """(T, d) the models of T rounds, after T / 4 others."""
    run = Rounds(problem, algorithm, participation)
    return run.run(run.initial(), 0, T + T // 4)[1][T // 4 :]


# --- MIFA -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("participation", [fx.Full(), fx.Bernoulli([0.7, 0.3])], ids=repr)
def test_two_clients_mifa(participation: fx.Participation) -> None:
    """4/9 with one local step, FedGD's point with full participation with two."""
    one = fx.solve(two_clients(), fx.MIFA(local_steps=1), participation, rounds=1500)
    assert one.exactness.exact
    assert one.x == pytest.approx([4 / 9], abs=1e-12)
    two = fx.solve(two_clients(), fx.MIFA(lr=0.1, local_steps=2), participation, rounds=1500)
    assert not two.exactness.exact
    assert two.x == pytest.approx([(2 * 1.9 + 2 * 1.2) / (1.9 + 8 * 1.2)], abs=1e-12)
    assert two.x == pytest.approx([0.539130], abs=1e-6)


def test_mifa_is_sag_with_one_client_at_a_time() -> None:
    problem, H, b = quadratics(30)
    masks = fx.Uniform(1).mask(4, 0, 60, seed=3)
    lr, x, table, path = 0.5 / problem.constants().L, np.ones(3), np.zeros((4, 3)), []
    for mask in masks:
        k = int(np.argmax(mask))
        table[k] = H[k] @ x - b[k]
        x = x - lr * table.mean(axis=0)
        path.append(x)
    mine = rounds(problem, fx.MIFA(lr=lr, local_steps=1), masks, np.ones(3))
    np.testing.assert_allclose(mine.x, path, rtol=1e-10, atol=1e-13)


def test_mifa_is_focus_with_one_local_step_and_fedavg_with_everybody() -> None:
    problem, masks = least_squares(31), BERNOULLI.mask(4, 0, 80, seed=1)
    lr = 0.2 / problem.constants().L
    mifa = rounds(problem, fx.MIFA(lr=lr, local_steps=1), masks, np.ones(3))
    focus = rounds(problem, fx.FOCUS(lr=lr), masks, np.ones(3))
    np.testing.assert_allclose(mifa.x, focus.x, rtol=1e-10, atol=1e-13)
    hyper: dict[str, Any] = {"lr": lr, "local_steps": 3, "lr_server": 0.7, "batch_size": 4}
    mifa = rounds(problem, fx.MIFA(**hyper), everybody(problem, 40), np.ones(3))
    fedavg = rounds(problem, fx.FedAvg(**hyper), everybody(problem, 40), np.ones(3))
    np.testing.assert_allclose(mifa.x, fedavg.x, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("participation", [*PARTICIPATIONS, fx.Bernoulli(0.05)], ids=repr)
@pytest.mark.parametrize("R", [1, 5])
def test_mifa_lands_on_the_uniform_point_under_any_participation(
    participation: fx.Participation, R: int
) -> None:
    """With the default lr: drift is all its bias, and with R > 1 that stays."""
    problem, algorithm = least_squares(11), fx.MIFA(local_steps=R)
    lr = lr_of(problem, algorithm, participation)
    x = fx.solve(problem, algorithm, participation, rounds=20_000).x
    assert relative(x, fedgd_point(problem, lr, R)) < 1e-11
    bias = relative(x, fx.reference(problem))
    assert bias < 1e-11 if R == 1 else bias > 1e-4


@pytest.mark.slow
def test_mifa_on_a_larger_problem() -> None:
    """16 clients with 500 rows, d = 50, three local steps: the uniform-weight FedGD point."""
    problem = least_squares(0, (500,) * 16, 50)
    weights = np.linspace(1.0, 4.0, 16)
    for participation in (fx.Full(), fx.Uniform(4), fx.Categorical(weights, 4)):
        algorithm = fx.MIFA(local_steps=3)
        lr = lr_of(problem, algorithm, participation)
        x = fx.solve(problem, algorithm, participation, rounds=2500, record_every=2500).x
        assert relative(x, fedgd_point(problem, lr, 3)) < 1e-10
        assert relative(x, fx.reference(problem)) > 1e-3


# --- FedAvg under uneven participation ------------------------------------------------------------


def test_fedavg_aims_at_the_q_weighted_objective_on_average() -> None:
    """The mean of 20,000 rounds, within its standard error, and not at the pooled answer."""
    problem, q = least_squares(2), BERNOULLI.aggregation(4)
    algorithm = fx.FedAvg(lr=0.02 / problem.constants().L, local_steps=1)
    mean, error = mean_and_error(settled(problem, algorithm, BERNOULLI, 20_000))
    assert np.all(np.abs(mean - weighted(problem, q)) < 3.5 * error)
    assert np.max(np.abs(mean - fx.reference(problem)) / error) > 10


# --- FedAU ----------------------------------------------------------------------------------------


def fedau_weights(present: np.ndarray, K: int) -> list[float]:
    """Wang & Ji 2024, Algorithm 2, in every round: the weights before each of the T rounds."""
    M, S, omega, weights = 0, 0, 1.0, [1.0]
    for was_present in present[:-1]:
        S += 1
        if was_present or S == K:
            omega = float(S) if M == 0 else (M * omega + S) / (M + 1)
            M, S = M + 1, 0
        weights.append(omega)
    return weights


@given(
    present=st.lists(st.booleans(), min_size=1, max_size=60).map(np.array),
    K=st.integers(1, 12),
)
def test_fedau_weighs_as_the_paper_does_who_acts_in_every_round(
    present: np.ndarray, K: int
) -> None:
    problem = two_clients()
    algorithm, x = fx.FedAU(lr=0.01, local_steps=2, cutoff=K), jnp.array([1.0])
    oracle, key = problem.oracles.client(0), root_key(0)
    _, plain = fx.FedAvg(lr=0.01, local_steps=2).local((), x, oracle, key)
    client, server = algorithm.init_client(x), algorithm.init_server(x, 2)
    weights = fedau_weights(present, K)
    for r in np.flatnonzero(present):
        client, upload = algorithm.local(client, algorithm.pull(server, jnp.array(r)), oracle, key)
        assert float(upload[0] / plain[0]) == pytest.approx(weights[r], rel=1e-12)


def test_fedau_is_fedavg_with_everybody_and_weighs_regular_visits_by_their_gap() -> None:
    problem, lr = least_squares(32), 0.2 / least_squares(32).constants().L
    hyper: dict[str, Any] = {"lr": lr, "local_steps": 3, "lr_server": 0.7}
    fedau = settled(problem, fx.FedAU(**hyper), fx.Full(), 40)
    fedavg = settled(problem, fx.FedAvg(**hyper), fx.Full(), 40)
    np.testing.assert_allclose(fedau, fedavg, rtol=1e-10)
    result = fx.solve(problem, fx.FedAU(), fx.Cyclic(4), rounds=4 * 25)
    np.testing.assert_array_equal(result.clients["intervals"], 25)
    np.testing.assert_array_equal(result.clients["start"] / 25, 4 - np.arange(3, -1, -1) / 25)


@pytest.mark.parametrize(("K", "R"), [(50, 1), (2, 1), (50, 3)])
def test_fedau_aims_at_equal_weights_up_to_the_cut_off_and_the_drift(K: int, R: int) -> None:
    """On average client k weighs 1 - (1 - p_k)^K: equal for a large K, too little if it is rare."""
    problem = least_squares(2)
    lr = 0.02 / problem.constants().L
    algorithm = fx.FedAU(lr=lr, local_steps=R, cutoff=K)
    mean, error = mean_and_error(settled(problem, algorithm, BERNOULLI, 60_000))
    v = 1 - (1 - np.array(BERNOULLI.p)) ** K
    H, _ = hessians(problem)
    aim = weighted(problem, v[:, None, None] * geometric(H, lr, R))
    assert np.all(np.abs(mean - aim) < 4 * error)
    fedavg = weighted(problem, BERNOULLI.aggregation(4))
    assert np.linalg.norm(mean - aim) < 0.1 * np.linalg.norm(fedavg - aim)
    if K == 2:
        assert np.max(np.abs(mean - fx.reference(problem)) / error) > 10


# --- FedAWE ---------------------------------------------------------------------------------------


def test_fedawe_follows_the_paper() -> None:
    """Algorithm 1 of Xiang et al. 2024 by hand, under random masks with empty rounds."""
    problem, H, b = quadratics(33)
    lr, masks = 0.05 / problem.constants().L, fx.Bernoulli([0.9, 0.3, 0.2, 0.1]).mask(4, 0, 60, 1)
    X, tau, path = np.zeros((4, 3)), np.full(4, -1), []
    average = np.zeros(3)
    for t, present in enumerate(masks):
        for i in np.flatnonzero(present):
            z = X[i]
            for _ in range(2):
                z = z - lr * (H[i] @ z - b[i])
            X[i] = X[i] - 0.8 * (t - tau[i]) * (X[i] - z)
        if present.any():
            average = X[present].mean(axis=0)
            X[present], tau[present] = average, t
        path.append(average)
    run = Rounds(problem, fx.FedAWE(lr=lr, local_steps=2, lr_server=0.8), fx.Trace(masks))
    (_, clients), mine = run.run(run.initial(), 0, 60)
    np.testing.assert_allclose(mine, path, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(clients.x, X, rtol=1e-10, atol=1e-14)
    np.testing.assert_array_equal(clients.tau, tau)
    assert not masks.any(axis=1).all()


@pytest.mark.parametrize("engine", ["compiled", "loop"])
def test_fedawe_participants_keep_the_average(engine: str) -> None:
    problem = least_squares(34)
    result = fx.solve(problem, fx.FedAWE(), fx.Uniform(2), rounds=30, engine=engine)
    last = fx.Uniform(2).mask(4, 29, 30, 0)[0]
    own, tau = result.clients["x"], result.clients["tau"]
    assert np.array_equal(own[last], np.tile(result.x, (2, 1)))
    assert np.array_equal(tau == 29, last)
    assert np.all(own[~last] != result.x[None])


def test_fedawe_is_fedavg_with_everybody() -> None:
    problem = least_squares(34)
    lr = 0.2 / problem.constants().L
    hyper: dict[str, Any] = {"lr": lr, "local_steps": 3, "lr_server": 0.7}
    fedawe = settled(problem, fx.FedAWE(**hyper), fx.Full(), 40)
    fedavg = settled(problem, fx.FedAvg(**hyper), fx.Full(), 40)
    np.testing.assert_allclose(fedawe, fedavg, rtol=1e-10)


def test_fedawe_needs_cohorts_that_mix() -> None:
    """One client at a time never meets another: each walks to its own minimiser."""
    problem = least_squares(34)
    alone = fx.solve(problem, fx.FedAWE(), fx.Cyclic(4), rounds=8000)
    H, b = hessians(problem)
    for k in range(4):
        np.testing.assert_allclose(alone.clients["x"][k], np.linalg.solve(H[k], b[k]), rtol=1e-9)
    for participation, met in (
        (fx.Uniform(1), False),
        (fx.Cyclic(2), False),
        (fx.Uniform(2), True),
    ):
        setting = setting_of(problem, participation)
        assumed = dict(fx.FedAWE().resolve(setting).assumptions(setting))
        assert assumed["the cohorts mix all clients"] is met


@pytest.mark.slow
def test_whom_the_averages_serve_on_a_larger_problem() -> None:
    """16 clients with 500 rows, d = 50, 4 at a time by weights from 1 to 4, three local steps:
    FedAU and FedAWE circle around the uniform FedGD point, FedAvg around the q-weighted one."""
    problem = least_squares(0, (500,) * 16, 50)
    four = fx.Categorical(np.linspace(1.0, 4.0, 16), 4)
    q = four.aggregation(16)[:, None, None]
    for cls, lr, even in (
        (fx.FedAU, 0.02, True),
        (fx.FedAWE, 0.005, True),
        (fx.FedAvg, 0.02, False),
    ):
        M = geometric(hessians(problem)[0], lr, 3)
        aims = weighted(problem, M), weighted(problem, q * M)
        aim, other = aims if even else aims[::-1]
        x = settled(problem, cls(lr=lr, local_steps=3), four, 5000)
        assert relative(x.mean(axis=0), aim) < 0.06
        assert relative(x.mean(axis=0), other) > 0.3
        assert relative(x[-1], aim) > 0.1  # where it happens to be is no answer


@pytest.mark.parametrize(
    ("cls", "power"),
    [
        pytest.param(fx.FedAU, 0.5, id="FedAU"),
        pytest.param(fx.FedAWE, 1.0, id="FedAWE"),
        pytest.param(fx.SGFOCUS, 0.5, id="SGFOCUS", marks=pytest.mark.slow),
    ],
)
def test_the_noise_ball_shrinks_with_lr(cls: Any, power: float) -> None:
    """Its radius is proportional to sqrt(lr); to lr for FedAWE, whose gaps add up to the time."""
    problem = least_squares(35)
    center, radii = fx.reference(problem), []
    for lr in (0.02, 0.005):
        algorithm = cls(lr=lr / problem.constants().L, local_steps=1)
        x = settled(problem, algorithm, BERNOULLI, int(800 / lr))
        radii.append(np.sqrt(np.mean(np.sum((x - center[None]) ** 2, axis=1))))
    assert radii[0] / radii[1] == pytest.approx(4.0**power, rel=0.15)


# --- SG-FOCUS and VR-FOCUS ------------------------------------------------------------------------


def test_two_clients_sgfocus_ball() -> None:
    """Batches of one row: with e = x - 4/9 client 1 draws 0 or 2 (x - 2), client 2 draws 8 x or
    8 x - 4, so that E e^2 = (1 - 4.5 lr)^2 E e^2 + lr^2 / 4 (E e^2 + (14/9)^2 + 4)."""
    for lr in (0.2, 0.05):
        ball = lr**2 / 4 * ((14 / 9) ** 2 + 4) / (1 - (1 - 4.5 * lr) ** 2 - lr**2 / 4)
        x = settled(two_clients(), fx.SGFOCUS(lr=lr, batch_size=1), fx.Full(), 40_000)
        mean, error = mean_and_error((x - 4 / 9) ** 2)
        assert np.all(np.abs(mean - ball) < 4 * error)
        assert np.all(error < 0.05 * ball)


def test_two_clients_vrfocus() -> None:
    for participation in (fx.Full(), fx.Bernoulli([0.7, 0.3])):
        result = fx.solve(two_clients(), fx.VRFOCUS(batch_size=1), participation, rounds=3000)
        assert result.exactness.exact
        assert result.x == pytest.approx([4 / 9], abs=1e-12)


@pytest.mark.parametrize("algorithm", [fx.SGFOCUS(batch_size=2), fx.VRFOCUS(batch_size=2)])
@pytest.mark.parametrize("local_steps", [1, 3])
def test_mini_batch_gradients_track_the_sum(algorithm: Any, local_steps: int) -> None:
    algorithm = type(algorithm)(batch_size=2, local_steps=local_steps)
    for participation in PARTICIPATIONS:
        result = fx.solve(least_squares(11), algorithm, participation, rounds=300)
        assert result.invariant < 1e-12


@pytest.mark.parametrize("local_steps", [1, 3])
@pytest.mark.parametrize("participation", PARTICIPATIONS, ids=lambda p: p.name)
def test_vrfocus_to_rounding(participation: fx.Participation, local_steps: int) -> None:
    problem = least_squares(11, (40,) * 4)
    algorithm = fx.VRFOCUS(batch_size=4, local_steps=local_steps)
    x = fx.solve(problem, algorithm, participation, rounds=12_000, record_every=12_000).x
    assert relative(x, fx.reference(problem)) < 1e-12


@pytest.mark.slow
def test_vrfocus_on_a_logistic_regression() -> None:
    problem = logistic(36, (60, 60, 60, 60))
    result = fx.solve(problem, fx.VRFOCUS(batch_size=6, local_steps=3), BERNOULLI, rounds=4000)
    assert relative(result.x, fx.reference(problem)) < 1e-11
    assert result.certificate is not None
    assert result.certificate.verdict == "certified"


@pytest.mark.slow
def test_vrfocus_is_exact_where_sgfocus_is_not() -> None:
    """Batches of 6 of 60 rows, p from 0.1 to 0.9, eta L_sum = 0.1, tau = 3."""
    problem = least_squares(37, (60,) * 10, 5)
    hyper: dict[str, Any] = {"batch_size": 6, "local_steps": 3}
    hyper["lr"] = 0.1 * 10 / (10 * problem.constants().L_F)
    exact = fx.solve(problem, fx.VRFOCUS(**hyper), TENTHS, rounds=1000)
    assert relative(exact.x, fx.reference(problem)) < 1e-12
    ball = settled(problem, fx.SGFOCUS(**hyper), TENTHS, 1000)
    errors = np.linalg.norm(ball - fx.reference(problem)[None], axis=1)
    assert np.min(errors) > 1e-2 * np.linalg.norm(fx.reference(problem))


def test_vrfocus_with_all_rows_is_focus() -> None:
    problem, masks = least_squares(38), BERNOULLI.mask(4, 0, 100, seed=2)
    lr = 0.2 / problem.constants().L
    vr = rounds(problem, fx.VRFOCUS(lr=lr, batch_size=8), masks, np.ones(3))
    focus = rounds(problem, fx.FOCUS(lr=lr), masks, np.ones(3))
    np.testing.assert_allclose(vr.x, focus.x, rtol=1e-10, atol=1e-13)


def visits(algorithm: Any, client: Any, x: jax.Array, n: int) -> tuple[Any, np.ndarray, np.ndarray]:
    """The client after each of n visits with keys of their own, uploads and counted gradients."""
    oracle = least_squares(39, (40,) * 4).oracles.client(1)
    pulled = algorithm.pull(algorithm.init_server(x, 4), jnp.array(0))

    def visit(r: jax.Array) -> Any:
        key = client_key(root_key(0), r, 1)
        after, upload = algorithm.local(client, pulled, oracle, key)
        return after, upload, algorithm.row_gradients(client, pulled, oracle, key)

    after, uploads, rows = jax.jit(jax.vmap(visit))(jnp.arange(n))
    return after, np.asarray(uploads), np.asarray(rows)


def test_vrfocus_counts_the_full_gradients_it_takes() -> None:
    """Forced at the first visit, then with probability tau B / n_k; counted where they happen."""
    algorithm, old, x = fx.VRFOCUS(lr=0.1, batch_size=2, local_steps=3), -jnp.ones(3), jnp.ones(3)
    first, _, rows = visits(algorithm, algorithm.init_client(old), x, 50)
    assert np.all(rows == 2 * 3 * 2 + 40)
    np.testing.assert_array_equal(first.w, np.tile(x, (50, 1)))
    client = algorithm.init_client(old)._replace(seen=jnp.ones(()))
    later, _, rows = visits(algorithm, client, x, 4000)
    refreshed = np.all(np.asarray(later.w) == 1.0, axis=1)
    np.testing.assert_array_equal(rows, 12 + 40 * refreshed)
    assert np.mean(refreshed) == pytest.approx(6 / 40, abs=4 * np.sqrt(0.15 * 0.85 / 4000))


def test_vrfocus_draws_the_same_rows_for_both_gradients_and_is_unbiased() -> None:
    algorithm, x = fx.VRFOCUS(lr=0.1, batch_size=2), jnp.ones(3)
    oracle = least_squares(39, (40,) * 4).oracles.client(1)
    w, full = -jnp.ones(3), oracle.grad(-jnp.ones(3))
    client = algorithm.init_client(w)._replace(h=full, seen=jnp.ones(()))
    same, _, _ = visits(algorithm, client, w, 200)
    np.testing.assert_allclose(same.g, np.tile(full, (200, 1)), rtol=1e-12)
    apart, uploads, rows = visits(algorithm, client, x, 20_000)
    np.testing.assert_array_equal(uploads, apart.g)
    noisy = np.asarray(apart.g)[rows == 4]
    mean, error = noisy.mean(axis=0), noisy.std(axis=0) / np.sqrt(len(noisy))
    assert np.all(np.abs(mean - oracle.grad(x)) < 4 * error)
    assert np.all(error > 0)


def cost_to(problem: fx.Problem, algorithm: fx.Algorithm, tol: float, rounds: int) -> int:
    """Row gradients up to the first recorded round within tol of the answer, relatively."""
    reference = fx.reference(problem)
    result = fx.solve(problem, algorithm, rounds=rounds, record_every=20, reference=reference)
    distance = np.array(result.history["distance"].to_pylist()) / np.linalg.norm(reference)
    return result.history["gradient_evaluations"].to_pylist()[
        int(np.flatnonzero(distance < tol)[0])
    ]


@pytest.mark.slow
def test_vrfocus_is_cheaper_than_focus_on_many_rows() -> None:
    """20 clients with 5,000 rows, columns of scales from 1 to 5: condition number 25; defaults."""
    rng = np.random.default_rng(1)
    X = rng.normal(size=(20, 5000, 20)) * np.geomspace(1, 5, 20)
    y = np.einsum("kij,kj->ki", X, rng.normal(size=(20, 20))) + 0.1 * rng.normal(size=(20, 5000))
    problem = fx.Problem(list(zip(X, y, strict=True)), loss="squared")
    full = cost_to(problem, fx.FOCUS(), 1e-8, 600)
    reduced = cost_to(problem, fx.VRFOCUS(), 1e-8, 3200)
    assert reduced < 0.2 * full


@pytest.mark.parametrize(
    ("algorithm", "rows"),
    [
        (fx.MIFA(local_steps=3), 3 * 24),
        (fx.FedAU(local_steps=3), 3 * 24),
        (fx.FedAWE(local_steps=3), 3 * 24),
        (fx.FedAWE(local_steps=3, batch_size=2), 3 * 2 * 3),
        (fx.SGFOCUS(local_steps=3, batch_size=2), 3 * 2 * 3),
        (fx.VRFOCUS(local_steps=3, batch_size=6), 2 * 3 * 6 * 3 + 24),  # 3 * 6 >= n_k: always
    ],
    ids=repr,
)
def test_row_gradients_of_a_round(algorithm: fx.Algorithm, rows: int) -> None:
    """Three clients with 8, 6 and 10 rows, everybody present."""
    result = fx.solve(least_squares(42, (8, 6, 10)), algorithm, rounds=5)
    assert result.history["gradient_evaluations"].to_pylist() == [rows * r for r in range(6)]


# --- defaults and borders -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "participation", [*PARTICIPATIONS, fx.Bernoulli(0.05), fx.Full()], ids=repr
)
@pytest.mark.parametrize("cls", [fx.FedAU, fx.FedAWE, fx.SGFOCUS], ids=lambda c: c.__name__)
def test_defaults_stay_bounded(cls: Any, participation: fx.Participation) -> None:
    """The noise balls of the default lr are no larger than the way to the answer, by and large."""
    problem = least_squares(40, (20,) * 4)
    x = settled(problem, cls(local_steps=5), participation, 4000)
    local = np.linalg.norm(x - fx.reference(problem)[None], axis=1)
    H, b = hessians(problem)
    apart = max(
        np.linalg.norm(np.linalg.solve(H[k], b[k]) - fx.reference(problem)) for k in range(4)
    )
    assert np.median(local) < 2 * apart
    assert np.max(local) < 20 * apart


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: fx.FedAU(cutoff=0), "FedAU cutoff"),
        (lambda: fx.SGFOCUS(batch_size=cast(Any, None)), "SGFOCUS batch_size"),
        (lambda: fx.VRFOCUS(batch_size=0), "VRFOCUS batch_size"),
        (lambda: fx.MIFA(lr_server=-1.0), "MIFA lr_server"),
        (lambda: fx.FedAWE(local_steps=0), "FedAWE local_steps"),
    ],
)
def test_bad_counts_are_named(build: Any, named: str) -> None:
    with pytest.raises(fx.InputError, match=named):
        build()


@pytest.mark.parametrize(
    ("algorithm", "exact"),
    [
        (fx.MIFA(local_steps=1), (True, True)),
        (fx.MIFA(local_steps=2), (False, False)),
        (fx.MIFA(local_steps=1, batch_size=4), (False, False)),
        (fx.FedAU(local_steps=1), (True, False)),
        (fx.FedAU(local_steps=2), (False, False)),
        (fx.FedAWE(local_steps=1), (True, False)),
        (fx.FedAWE(local_steps=1, batch_size=4), (False, False)),
        (fx.SGFOCUS(), (False, False)),
        (fx.VRFOCUS(local_steps=5), (True, True)),
    ],
    ids=repr,
)
def test_exact_or_biased(algorithm: fx.Algorithm, exact: tuple[bool, bool]) -> None:
    """With everybody present, and with some."""
    for participation, expected in zip((fx.Full(), BERNOULLI), exact, strict=True):
        setting = setting_of(least_squares(41), participation)
        assert algorithm.resolve(setting).exactness(setting).exact is expected


# --- defaults where rows or clients are unlike ----------------------------------------------------


def rare_dummy(seed: int) -> fx.Problem:
    """Six clients in which one row in a hundred is ten times as long."""
    rng, clients = np.random.default_rng(seed), []
    for _ in range(6):
        X = np.column_stack([rng.normal(size=300), 10.0 * (rng.random(300) < 0.01)])
        clients.append((X, X @ [0.3, -0.3] + rng.normal(size=300)))
    return fx.Problem(clients, fit_intercept=True)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [6, 32])
def test_rows_of_unequal_leverage_do_not_make_mini_batches_diverge(batch_size: int) -> None:
    """A batch of the steepest row alone decides on the default lr."""
    problem = rare_dummy(0)
    for algorithm in (fx.VRFOCUS(batch_size=batch_size), fx.SGFOCUS(batch_size=batch_size)):
        result = fx.solve(problem, algorithm, fx.Bernoulli(0.4), rounds=2000)
        assert result.status == "finished"
    exact = fx.solve(problem, fx.VRFOCUS(batch_size=batch_size), fx.Bernoulli(0.4), rounds=4000)
    assert relative(exact.x, fx.reference(problem)) < (1e-12 if batch_size == 32 else 1e-2)


def test_the_steepest_row_in_numbers() -> None:
    """Rows 1, 1, 3 of a mean of squares: L = 11/3 and n max_i x_i^2 / n = 9."""
    problem = fx.Problem([([[1.0], [1.0], [3.0]], [0.0, 0.0, 0.0])])
    assert problem.constants().L_k == pytest.approx([11 / 3])
    assert problem.constants().row_L_k == pytest.approx([9.0])


@pytest.mark.parametrize("participation", [fx.Bernoulli(0.2), fx.Markov(0.1, 0.5)], ids=repr)
@pytest.mark.parametrize(
    "algorithm", [fx.FOCUS(), fx.MIFA(local_steps=1), fx.SCAFFOLD(), fx.FedAU(local_steps=1)]
)
def test_a_client_alone_is_never_stale(
    algorithm: fx.Algorithm, participation: fx.Participation
) -> None:
    """Rounds without it change nothing, so that its steps are those of full participation."""
    problem = logistic(5, (60,))
    result = fx.solve(problem, algorithm, participation, rounds=3000)
    assert relative(result.x, fx.reference(problem)) < 1e-10
    if algorithm.name != "FedAU":  # it multiplies its update by its gap
        chosen = fx.solve(problem, algorithm, rounds=1).chosen
        assert result.chosen == chosen
