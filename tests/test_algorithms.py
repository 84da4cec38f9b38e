"""Closed forms, equivalences, invariants, bounds and rates of the algorithms."""

from __future__ import annotations

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedexact as fx
from fedexact.core import client_key, root_key
from fedexact.engines.state import initial
from problems import least_squares
from protocol import everybody, one_round, oracle_of, rounds

BERNOULLI = fx.Bernoulli([0.9, 0.6, 0.4, 0.2])


def two_clients() -> fx.Problem:
    """y = m x with rows (0, 2), (1, 2) and (2, 0), (2, 1); sums of squares, clients alike."""
    rows = [([[0.0], [1.0]], [2.0, 2.0]), ([[2.0], [2.0]], [0.0, 1.0])]
    return fx.Problem(rows, loss="squared", weights="clients", reduction="sum")


def quadratics(seed: int, N: int = 4, d: int = 3) -> tuple[fx.Problem, np.ndarray, np.ndarray]:
    """A problem whose client k is x'H_k x / 2 - b_k'x + const, with H (N, d, d) and b (N, d)."""
    problem = least_squares(seed, (8,) * N, d, weights="clients", reduction="sum")
    return problem, *hessians(problem)


def hessians(problem: fx.Problem) -> tuple[np.ndarray, np.ndarray]:
    (oracle,) = problem.oracles
    clients = [oracle.client(k) for k in range(problem.n_clients)]
    zero = jnp.zeros(problem.dim)
    H = np.array([client.hessian(zero) for client in clients])
    return H, -np.array([client.grad(zero) for client in clients])


def solution(H: np.ndarray, b: np.ndarray) -> np.ndarray:
    """x* of the mean of the quadratics; with weights M_k H_k, M_k b_k for biased fixed points."""
    return np.linalg.solve(H.sum(axis=0), b.sum(axis=0))


def geometric(H: np.ndarray, lr: float, R: int) -> np.ndarray:
    """(N, d, d) M_k = sum_{i<R} (I - lr H_k)^i."""
    one = np.eye(H.shape[-1])[None]
    return sum((np.linalg.matrix_power(one - lr * H, i) for i in range(R)), np.zeros_like(H))


# --- the two-client example ------------------------------------------------------------------------


def test_two_clients_local_fits_and_their_average() -> None:
    problem = two_clients()
    for k, fit in ((0, 2.0), (1, 0.25)):
        X, y = problem.pooled()[0]
        rows = slice(2 * k, 2 * k + 2)
        alone = fx.Problem([(X[rows], y[rows])], loss="squared")
        assert fx.reference(alone) == pytest.approx([fit], abs=1e-14)
    averaged = fx.solve(problem, fx.FedAvg(lr=0.1, local_steps=400), rounds=2)
    assert averaged.x == pytest.approx([9 / 8], abs=1e-12)
    assert fx.reference(problem) == pytest.approx([4 / 9], abs=1e-14)


@pytest.mark.parametrize("mu", [0.1, 1.0, 3.0, 10.0])
def test_two_clients_fedprox(mu: float) -> None:
    result = fx.solve(two_clients(), fx.FedProx(step=1 / mu), rounds=300)
    assert result.x == pytest.approx([(18 + 4 * mu) / (16 + 9 * mu)], abs=1e-12)


@pytest.mark.parametrize(("R", "printed"), [(2, 0.539130), (10, 0.940243)])
def test_two_clients_fedgd(R: int, printed: float) -> None:
    M = [sum((1 - 0.1 * h) ** i for i in range(R)) for h in (1, 8)]
    x = (2 * M[0] + 2 * M[1]) / (M[0] + 8 * M[1])
    result = fx.solve(two_clients(), fx.FedAvg(lr=0.1, local_steps=R), rounds=300)
    assert result.x == pytest.approx([x], abs=1e-12)
    assert x == pytest.approx(printed, abs=1e-6)


@pytest.mark.parametrize("participation", [fx.Full(), fx.Bernoulli([0.7, 0.3])], ids=repr)
@pytest.mark.parametrize(
    "algorithm",
    [
        fx.FedSplit(),
        fx.FedSplit(relax=0.5),
        fx.FedSplit(per_client=True),
        fx.FedDR(),
        fx.FedDR(server_block=True),
        fx.FOCUS(),
        fx.FOCUS(local_steps=3),
        fx.SCAFFOLD(option=1),
        fx.SCAFFOLD(option=2),
    ],
    ids=repr,
)
def test_two_clients_exact(algorithm: fx.Algorithm, participation: fx.Participation) -> None:
    result = fx.solve(two_clients(), algorithm, participation, rounds=1500)
    assert result.exactness.exact
    assert result.x == pytest.approx([4 / 9], abs=1e-12)


# --- closed forms of the biased ones ---------------------------------------------------------------


@pytest.mark.parametrize("R", [1, 2, 7])
def test_fedavg_fixed_point(R: int) -> None:
    problem, H, b = quadratics(0)
    lr = 0.7 / problem.constants().L
    M = geometric(H, lr, R)
    x = solution(M @ H, np.einsum("kij,kj->ki", M, b))
    result = fx.solve(problem, fx.FedAvg(lr=lr, local_steps=R), rounds=2000)
    np.testing.assert_allclose(result.x, x, atol=1e-12)
    distance = np.linalg.norm(x - solution(H, b))
    assert distance < 1e-12 if R == 1 else distance > 1e-3


def test_fedavg_fixed_point_under_the_server_step() -> None:
    """lr_server moves the server along, not the fixed point."""
    problem, H, b = quadratics(0)
    lr = 0.7 / problem.constants().L
    M = geometric(H, lr, 3)
    x = solution(M @ H, np.einsum("kij,kj->ki", M, b))
    result = fx.solve(problem, fx.FedAvg(lr=lr, local_steps=3, lr_server=0.5), rounds=3000)
    np.testing.assert_allclose(result.x, x, atol=1e-12)


def test_fedavg_bias_to_first_order() -> None:
    """x - x* = lr (R - 1)/2 (sum H)^-1 sum H_k grad f_k(x*) + O(lr^2)."""
    problem, H, b = quadratics(1)
    star = solution(H, b)
    gradients = np.einsum("kij,kj->ki", H, star[None] - b * 0) - b
    direction = solution(H, np.einsum("kij,kj->ki", H, gradients))
    errors = []
    for R, lr in ((2, 0.02), (2, 0.01), (5, 0.01)):
        lr = lr / problem.constants().L
        x = fx.solve(problem, fx.FedAvg(lr=lr, local_steps=R), rounds=40_000).x
        predicted = lr * (R - 1) / 2 * direction
        errors.append(np.linalg.norm(x - star - predicted) / np.linalg.norm(predicted))
    assert max(errors) < 0.1
    assert errors[0] / errors[1] == pytest.approx(2.0, rel=0.05)


def test_fedavg_aims_at_the_q_weighted_objective_even_with_one_local_step() -> None:
    """In expectation over all 2^N cohorts, one round is a step on sum_k q_k f_k."""
    problem, H, b = quadratics(2)
    q = BERNOULLI.aggregation(4)
    p = np.array(BERNOULLI.p)
    algorithm = fx.FedAvg(lr=0.5 / problem.constants().L, local_steps=1)
    x = solution(q[:, None, None] * H, q[:, None] * b)
    oracle, (server, clients) = oracle_of(problem, algorithm), initial(algorithm, problem, x)
    expected = np.zeros_like(x)
    for cohort in product([False, True], repeat=4):
        mask = np.array(cohort)
        after, _ = one_round(algorithm, oracle, server, clients, jnp.asarray(mask))
        expected += np.prod(np.where(mask, p, 1 - p)) * np.asarray(after.x)
    np.testing.assert_allclose(expected, x, atol=1e-12)
    assert np.linalg.norm(x - solution(H, b)) > 1e-2


def test_fedavg_and_scaffold_draw_a_new_batch_in_every_local_step() -> None:
    problem, _, _ = quadratics(3)
    (oracle,) = problem.oracles
    client, key = oracle.client(1), client_key(root_key(0), 5, 1)
    x = jnp.linspace(-1.0, 1.0, 3)
    z = x
    for i in range(4):
        z = z - 0.01 * client.stochastic_grad(z, jax.random.fold_in(key, i), 2)
    average = fx.FedAvg(lr=0.01, local_steps=4, batch_size=2)
    _, upload = average.local((), x, client, key)
    np.testing.assert_allclose(upload, z - x, atol=1e-15)
    scaffold = fx.SCAFFOLD(lr=0.01, local_steps=4, batch_size=2)
    pulled = scaffold.pull(scaffold.init_server(x, 4), jnp.array(0))
    _, (change, _) = scaffold.local(scaffold.init_client(x), pulled, client, key)
    np.testing.assert_allclose(change, z - x, atol=1e-15)


@pytest.mark.parametrize("mu", [0.3, 3.0, 30.0])
def test_fedprox_fixed_point(mu: float) -> None:
    problem, H, b = quadratics(4)
    M = np.linalg.inv(H + mu * np.eye(3)[None])
    x = solution(M @ H, np.einsum("kij,kj->ki", M, b))
    result = fx.solve(problem, fx.FedProx(step=1 / mu), rounds=1000)
    np.testing.assert_allclose(result.x, x, atol=1e-12)


@pytest.mark.parametrize("algorithm", [fx.FedProx(), fx.FedAvg()], ids=["FedProx", "FedAvg"])
def test_one_client_is_never_biased(algorithm: fx.Algorithm) -> None:
    problem, H, b = quadratics(5, N=1)
    result = fx.solve(problem, algorithm, fx.Bernoulli(0.5), rounds=2000)
    assert result.exactness.exact
    np.testing.assert_allclose(result.x, solution(H, b), atol=1e-12)


# --- equivalences ----------------------------------------------------------------------------------


def gradient_descent() -> tuple[fx.Problem, np.ndarray, np.ndarray]:
    problem, H, b = quadratics(6)
    lr, x, path = 0.9 / problem.constants().L_F, np.ones(3), []
    for _ in range(30):
        x = x - lr * (np.einsum("kij,j->ki", H, x) - b).mean(axis=0)
        path.append(x)
    return problem, np.array(lr), np.array(path)


@pytest.mark.parametrize("cls", [fx.FedAvg, fx.SCAFFOLD, fx.FOCUS])
def test_one_local_step_with_everybody_is_gradient_descent(cls: Any) -> None:
    """lr means the same in each: a step on the mean objective."""
    problem, lr, path = gradient_descent()
    mine = rounds(problem, cls(lr=float(lr), local_steps=1), everybody(problem, 30), np.ones(3))
    np.testing.assert_allclose(mine.x, path, rtol=1e-11)


def test_feddr_with_alpha_2_is_peaceman_rachford() -> None:
    problem, _, _ = quadratics(7)
    masks = everybody(problem, 40)
    split = rounds(problem, fx.FedSplit(step=0.1, relax=1.0), masks, np.ones(3))
    dr = rounds(problem, fx.FedDR(step=0.1, relax=2.0), masks, np.ones(3))
    np.testing.assert_allclose(dr.x, split.x, rtol=1e-10)


def test_the_server_block_is_a_client_with_f_zero() -> None:
    """FedDR with the block = FedDR over one more client and N/(N + 1) of g."""
    problem, _, _ = quadratics(8)
    X, y = problem.pooled()[0]
    clients = [(X[8 * k : 8 * k + 8], y[8 * k : 8 * k + 8]) for k in range(4)]
    more = [*clients, (np.zeros((8, 3)), np.zeros(8))]
    one = fx.Problem(clients, weights="clients", reduction="sum", regularizer=fx.L1(2.0))
    two = fx.Problem(more, weights="clients", reduction="sum", regularizer=fx.L1(2.0 * 4 / 5))
    block = rounds(one, fx.FedDR(step=0.1, server_block=True), everybody(one, 40), np.ones(3))
    plain = rounds(two, fx.FedDR(step=0.1), everybody(two, 40), np.ones(3))
    np.testing.assert_allclose(block.x, plain.x, rtol=1e-10, atol=1e-13)


def test_per_client_steps_on_equal_clients_are_one_step() -> None:
    X, y = least_squares(9, (8,), 3).pooled()[0]
    problem = fx.Problem([(X, y), (X, -y), (X, 2 * y)], reduction="sum", weights="clients")
    masks = everybody(problem, 40)
    one = rounds(problem, fx.FedSplit(), masks, np.ones(3))
    own = rounds(problem, fx.FedSplit(per_client=True), masks, np.ones(3))
    np.testing.assert_allclose(own.x, one.x, rtol=1e-10)


# --- exact under any participation, with the invariant all along -----------------------------------

INVARIANT = {
    "SCAFFOLD 1": fx.SCAFFOLD(local_steps=3, option=1),
    "SCAFFOLD 2": fx.SCAFFOLD(local_steps=3, option=2),
    "FedSplit": fx.FedSplit(),
    "FedSplit per client": fx.FedSplit(per_client=True),
    "FedDR": fx.FedDR(),
    "FedDR block": fx.FedDR(server_block=True),
    "FOCUS": fx.FOCUS(),
    "FOCUS 4": fx.FOCUS(local_steps=4),
}


@pytest.mark.parametrize("name", INVARIANT)
@given(masks=st.lists(st.tuples(*[st.booleans()] * 4), min_size=60, max_size=60))
def test_invariant_under_any_masks(name: str, masks: list[tuple[bool, ...]]) -> None:
    problem = least_squares(10)
    path = rounds(problem, INVARIANT[name], np.array(masks), np.ones(3), BERNOULLI)
    scale = max(1.0, float(np.max(np.abs(path.x))))
    assert float(np.max(np.abs(path.invariant))) < 1e-12 * scale


@given(st.lists(st.tuples(*[st.booleans()] * 4), min_size=1, max_size=7).filter(
    lambda trace: np.any(trace, axis=0).all()
))  # fmt: skip
def test_focus_lands_under_any_recurrent_masks(trace: list[tuple[bool, ...]]) -> None:
    """Whatever the trace, as long as every client is in it, with the default lr."""
    problem = least_squares(11)
    result = fx.solve(problem, fx.FOCUS(), fx.Trace(np.array(trace)), rounds=4000)
    assert relative(result.x, fx.reference(problem)) < 1e-12


def relative(x: np.ndarray, reference: np.ndarray) -> float:
    return float(np.linalg.norm(x - reference) / np.linalg.norm(reference))


@pytest.mark.parametrize("local_steps", range(1, 11))
@pytest.mark.parametrize(
    "participation",
    [BERNOULLI, fx.Markov(0.3, 0.3), fx.Cyclic(4), fx.Categorical([4.0, 3.0, 2.0, 1.0], 2)],
    ids=lambda p: p.name,
)
def test_focus_to_rounding(participation: fx.Participation, local_steps: int) -> None:
    problem = least_squares(11)
    T = 1500
    masks = participation.mask(4, 0, T, seed=local_steps)
    path = rounds(problem, fx.FOCUS(local_steps=local_steps), masks, participation=participation)
    assert relative(path.x[-1], fx.reference(problem)) < 1e-12
    assert float(np.max(np.abs(path.invariant))) < 1e-12
