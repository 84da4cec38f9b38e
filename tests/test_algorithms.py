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
from jax.flatten_util import ravel_pytree
from sklearn.linear_model import ElasticNet

import fedexact as fx
from fedexact.core import client_key, float64, record, root_key
from fedexact.engines.state import initial
from fedexact.solve import setting_of
from problems import least_squares, logistic
from protocol import everybody, one_round, oracle_of, rounds
from quadratics import geometric, quadratics, relative, solution, two_clients

BERNOULLI = fx.Bernoulli([0.9, 0.6, 0.4, 0.2])


# --- the two-client example -----------------------------------------------------------------------


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


# --- closed forms of the biased ones --------------------------------------------------------------


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
    gradients = np.einsum("kij,kj->ki", H, np.tile(star, (4, 1))) - b
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
    server, clients = initial(algorithm, problem, jnp.asarray(x))
    oracle, visit = oracle_of(problem, algorithm), jax.jit(one_round)
    expected = np.zeros_like(x)
    for cohort in product([False, True], repeat=4):
        mask = np.array(cohort)
        after, _ = visit(algorithm, oracle, server, clients, jnp.asarray(mask))
        expected += np.prod(np.where(mask, p, 1 - p)) * np.asarray(after.x)
    np.testing.assert_allclose(expected, x, atol=1e-12)
    assert np.linalg.norm(x - solution(H, b)) > 1e-2


def test_fedavg_and_scaffold_draw_a_new_batch_in_every_local_step() -> None:
    problem, _, _ = quadratics(3)
    oracle = problem.oracles
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


# --- equivalences ---------------------------------------------------------------------------------


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


# --- exact under any participation, with the invariant all along ----------------------------------

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


@pytest.mark.slow
@given(st.lists(st.tuples(*[st.booleans()] * 4), min_size=1, max_size=7).filter(
    lambda trace: np.any(trace, axis=0).all()
))  # fmt: skip
def test_focus_lands_under_any_recurrent_masks(trace: list[tuple[bool, ...]]) -> None:
    """Whatever the trace, as long as every client is in it, with the default lr."""
    problem = least_squares(11)
    result = fx.solve(problem, fx.FOCUS(), fx.Trace(np.array(trace)), rounds=4000)
    assert relative(result.x, fx.reference(problem)) < 1e-12


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


# --- FedSplit's bound, inexact proxes -------------------------------------------------------------


def split_bound(problem: fx.Problem, x0: np.ndarray, T: int) -> tuple[fx.FedSplit, np.ndarray]:
    """Peaceman-Rachford with s = 1/sqrt(l L), and the paper's bound on its error after 1..T rounds:
    (1 - 2/(sqrt(kappa) + 1))^t |z_0 - z*| / sqrt(N) with the stacked z."""
    c, star = problem.constants(), fx.reference(problem)
    step = 1 / np.sqrt(c.l * c.L)
    oracle = problem.oracles
    gradients = np.array([oracle.client(k).grad(jnp.asarray(star)) for k in range(len(c.L_k))])
    z = star[None] - step * gradients
    factor = (1 - 2 / (np.sqrt(c.kappa) + 1)) ** np.arange(1, T + 1)
    bound = factor * np.linalg.norm(x0[None] - z) / np.sqrt(problem.n_clients)
    return fx.FedSplit(step=step, relax=1.0), bound


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("build", [least_squares, logistic])
def test_fedsplit_stays_below_its_bound_in_every_round(build: Any, seed: int) -> None:
    problem = build(20 + seed)
    T, x0 = 60, np.full(3, 2.0)
    algorithm, bound = split_bound(problem, x0, T)
    path = rounds(problem, algorithm, everybody(problem, T), x0)
    errors = np.linalg.norm(path.x - fx.reference(problem)[None], axis=1)
    assert np.all(errors <= bound + 1e-12)
    assert bound[-1] < 1e-2 * bound[0]


@record
class Noisy:
    """An oracle whose prox is off by `error` in a direction that depends on its argument."""

    oracle: Any
    error: Any

    def client(self, k: Any) -> Noisy:
        return Noisy(self.oracle.client(k), self.error)

    def prox(self, v: jax.Array, step: Any, start: jax.Array) -> jax.Array:
        direction = jnp.cos(1e3 * v + jnp.arange(v.size))
        off = self.error * direction / jnp.linalg.norm(direction)
        return self.oracle.prox(v, step, start) + off


def test_fedsplit_bound_with_an_inexact_prox() -> None:
    """A prox error of at most b adds (sqrt(kappa) + 1) b."""
    problem, b = least_squares(24), 1e-3
    algorithm, bound = split_bound(problem, np.full(3, 2.0), 300)
    noisy = Noisy(oracle_of(problem, algorithm), b)
    path = rounds(problem, algorithm, everybody(problem, 300), np.full(3, 2.0), oracle=noisy)
    errors = np.linalg.norm(path.x - fx.reference(problem)[None], axis=1)
    assert np.all(errors <= bound + (np.sqrt(problem.constants().kappa) + 1) * b)
    assert np.all(errors[-100:] > 1e-5)


@record
class OneGradientStep:
    """An oracle whose prox is one gradient step, from `start` or, cold, from the prox's centre."""

    oracle: Any
    cold: Any

    def client(self, k: Any) -> OneGradientStep:
        return OneGradientStep(self.oracle.client(k), self.cold)

    def prox(self, v: jax.Array, step: Any, start: jax.Array) -> jax.Array:
        u = jnp.where(self.cold, v, start)
        slope = self.oracle.grad(u) + (u - v) / step
        return u - slope / (self.oracle.smoothness + 1 / step)


@pytest.mark.parametrize("algorithm", [fx.FedSplit(relax=0.5), fx.FedDR(relax=1.0)])
def test_one_warm_gradient_step_for_a_prox_is_exact(algorithm: fx.Algorithm) -> None:
    """The client's last prox is where the next one starts; started anew it stalls."""
    problem = least_squares(26)
    masks, errors = BERNOULLI.mask(4, 0, 3000, seed=3), []
    for cold in (False, True):
        oracle = OneGradientStep(oracle_of(problem, algorithm), jnp.array(cold))
        path = rounds(problem, algorithm, masks, np.full(3, 2.0), oracle=oracle)
        errors.append(relative(path.x[-1], fx.reference(problem)))
    assert errors[0] < 1e-12
    assert errors[1] > 1e-3


def test_per_client_steps_see_only_the_worst_client() -> None:
    """Clients whose curvatures differ a thousandfold, each well conditioned."""
    rng = np.random.default_rng(25)
    clients = [(s * rng.normal(size=(8, 3)), rng.normal(size=8)) for s in (0.1, 1.0, 3.0, 10.0)]
    problem = fx.Problem(clients)
    star = fx.reference(problem)
    needed = []
    for algorithm in (
        split_bound(problem, np.ones(3), 1)[0],
        fx.FedSplit(relax=1.0, per_client=True),
    ):
        path = rounds(problem, algorithm, everybody(problem, 4000), np.ones(3))
        assert relative(path.x[-1], star) < 1e-12
        errors = np.linalg.norm(path.x - star[None], axis=1)
        needed.append(int(np.flatnonzero(errors > 1e-9)[-1]))
    assert needed[1] < needed[0] / 4


# --- FedDR with a regulariser ---------------------------------------------------------------------


def sparse_clients(seed: int, N: int = 10, n: int = 40, d: int = 20) -> list[tuple[Any, Any]]:
    """Clients with kappa_k = 400 whose coefficients differ around a sparse centre."""
    rng = np.random.default_rng(seed)
    centre = np.where(rng.random(d) < 0.4, 2 * rng.normal(size=d), 0.0)
    clients = []
    for _ in range(N):
        left, _ = np.linalg.qr(rng.normal(size=(n, d)))
        right, _ = np.linalg.qr(rng.normal(size=(d, d)))
        X = np.sqrt(n) * (left * np.geomspace(1, 1 / 20, d)[None]) @ right
        beta = centre + 0.3 * rng.normal(size=d)
        clients.append((X, X @ beta + 0.1 * rng.normal(size=n)))
    return clients


@pytest.mark.parametrize("participation", [fx.Full(), fx.Bernoulli(0.5)], ids=lambda p: p.name)
@pytest.mark.parametrize("server_block", [False, True])
@pytest.mark.parametrize(("strength", "l1_ratio"), [(0.05, 1.0), (0.03, 0.5)])
def test_feddr_is_scikit_learns_elastic_net(
    strength: float, l1_ratio: float, server_block: bool, participation: fx.Participation
) -> None:
    clients = sparse_clients(30)
    g = fx.L1(strength) if l1_ratio == 1.0 else fx.ElasticNet(strength, l1_ratio)
    problem = fx.Problem(clients, regularizer=g)
    assert problem.constants().kappa == pytest.approx(400, rel=1e-6)
    result = fx.solve(problem, fx.FedDR(server_block=server_block), participation, rounds=600)
    X, y = (np.concatenate(part) for part in zip(*clients, strict=True))
    model = ElasticNet(
        alpha=strength, l1_ratio=l1_ratio, fit_intercept=False, tol=1e-13, max_iter=10**6
    ).fit(X, y)
    np.testing.assert_allclose(result.x, model.coef_, atol=1e-9)
    assert 2 < np.sum(np.abs(model.coef_) > 0) < 20
    assert result.invariant < 1e-13


@pytest.mark.parametrize("server_block", [False, True])
def test_feddr_diverges_beyond_alpha_2(server_block: bool) -> None:
    """Clients with fewer rows than columns, l = 0: the reflections do not contract."""
    problem = least_squares(31, (2, 2, 2, 2))
    close = fx.solve(problem, fx.FedDR(relax=1.95, server_block=server_block), rounds=3000)
    assert close.exactness.exact
    assert relative(close.x, fx.reference(problem)) < 1e-12
    with pytest.warns(fx.DivergenceWarning, match="lower relax"):
        beyond = fx.solve(problem, fx.FedDR(relax=2.05, server_block=server_block), rounds=3000)
    assert beyond.status == "diverged"
    assert not beyond.exactness.exact


# --- rates ----------------------------------------------------------------------------------------

SLOW = {  # algorithm, and the dimension of what its rounds conserve
    "FedAvg": (fx.FedAvg(lr=0.002, local_steps=3), 0),
    "FedProx": (fx.FedProx(step=0.002), 0),
    "FedSplit": (fx.FedSplit(step=0.002), 3 + 1),
    "Peaceman-Rachford": (fx.FedSplit(step=0.02, relax=1.0), 3 + 1),
    "FedSplit per client": (fx.FedSplit(relax=1.0, per_client=True), 3 + 1),
    "FedDR": (fx.FedDR(step=0.002), 3 + 3 + 1),
    "FedDR block": (fx.FedDR(step=0.002, server_block=True), 3 + 1),
    "SCAFFOLD 1": (fx.SCAFFOLD(lr=0.002, local_steps=3, option=1), 3 + 1),
    "SCAFFOLD 2": (fx.SCAFFOLD(lr=0.002, local_steps=3, option=2), 3 + 1),
    "FOCUS": (fx.FOCUS(lr=0.005), 3 + 1),
    "FOCUS 3": (fx.FOCUS(lr=0.005, local_steps=3), 3 + 1),
}


@pytest.mark.parametrize("name", SLOW)
def test_observed_rate_is_the_spectral_radius_of_the_round(name: str) -> None:
    """With everybody present a round is an affine map of all states; its eigenvalues 1 belong to
    what it conserves (the invariant, N, FedDR's unused block), the next modulus is the rate."""
    problem, _, _ = quadratics(40)
    algorithm, conserved = SLOW[name]
    algorithm = algorithm.resolve(setting_of(problem, fx.Full()))
    oracle, present = oracle_of(problem, algorithm), jnp.ones(4, bool)
    start, unravel = ravel_pytree(initial(algorithm, problem, jnp.full(3, 5.0)))

    def round_map(flat: jax.Array) -> jax.Array:
        server, clients = unravel(flat)
        return ravel_pytree(one_round(algorithm, oracle, server, clients, present))[0]

    @jax.jit
    def run(flat: jax.Array) -> tuple[jax.Array, jax.Array]:
        end, path = jax.lax.scan(lambda z, _: (round_map(z), z), flat, length=5000)
        return path, jax.jacfwd(round_map)(end)

    path, jacobian = run(start)
    eigenvalues = np.linalg.eigvals(jacobian)
    unit = np.abs(eigenvalues - 1) < 1e-6
    assert np.sum(unit) == conserved
    radius = np.max(np.abs(eigenvalues[~unit]))

    errors = np.linalg.norm(path - path[-1:], axis=1)
    early, late = (int(np.argmax(errors < level * errors[0])) for level in (1e-7, 1e-12))
    observed = (errors[late] / errors[early]) ** (1 / (late - early))
    assert observed == pytest.approx(radius, abs=5e-4)


# --- what they say of themselves, and what they choose --------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "participation", "l2", "exact", "why"),
    [
        (fx.FedAvg(), fx.Full(), 0.1, False, "drift"),
        (fx.FedAvg(local_steps=1), fx.Full(), 0.1, True, "gradient descent"),
        (fx.FedAvg(local_steps=1), fx.Uniform(2), 0.1, False, "on average"),
        (fx.FedAvg(local_steps=1), BERNOULLI, 0.1, False, "q_k"),
        (fx.FedAvg(local_steps=1, batch_size=3), fx.Full(), 0.1, False, "noise ball"),
        (fx.FedProx(), fx.Full(), 0.1, False, "Moreau"),
        (fx.FedSplit(relax=1.0), BERNOULLI, 0.1, True, "splitting"),
        (fx.FedSplit(relax=1.0), BERNOULLI, 0.0, False, "every l_k > 0"),
        (fx.FedSplit(relax=0.5), BERNOULLI, 0.0, True, "splitting"),
        (fx.FedSplit(), BERNOULLI, 0.0, True, "splitting"),
        (fx.FedDR(), BERNOULLI, 0.0, True, "splitting"),
        (fx.FedDR(relax=2.0), BERNOULLI, 0.0, False, "every l_k > 0"),
        (fx.SCAFFOLD(), fx.Markov(0.1, 0.9), 0.0, True, "control variates"),
        (fx.SCAFFOLD(batch_size=5), fx.Full(), 0.1, False, "noise ball"),
        (fx.FOCUS(), fx.Cyclic(4), 0.0, True, "tracks"),
        (fx.FOCUS(), fx.Bernoulli([1.0, 0.5, 0.0, 0.5]), 0.1, False, "never present: 2;"),
        (fx.FedSplit(), fx.Trace(np.eye(4)[:2]), 0.1, False, "never present: 2, 3;"),
    ],
)
def test_exactness(
    algorithm: fx.Algorithm, participation: fx.Participation, l2: float, exact: bool, why: str
) -> None:
    setting = setting_of(logistic(50, l2=l2), participation)
    verdict = algorithm.resolve(setting).exactness(setting)
    assert verdict.exact is exact
    assert why in verdict.why


def test_mini_batches_make_scaffold_a_noise_ball() -> None:
    problem = least_squares(51)
    star = fx.reference(problem)
    full = fx.solve(problem, fx.SCAFFOLD(lr=0.01), BERNOULLI, rounds=3000)
    noisy = fx.solve(problem, fx.SCAFFOLD(lr=0.01, batch_size=2), BERNOULLI, rounds=3000)
    assert relative(full.x, star) < 1e-12
    assert 1e-4 < relative(noisy.x, star) < 0.5


def test_bad_choices_are_refused() -> None:
    with pytest.raises(fx.InputError, match="option must be 1 or 2, got 3"):
        fx.SCAFFOLD(option=3)
    with pytest.raises(fx.InputError, match="local_steps must be an integer >= 1, got 0"):
        fx.FOCUS(local_steps=0)
    with pytest.raises(fx.InputError, match=r"batch_size must be an integer >= 1, got 2\.5"):
        fx.FedAvg(batch_size=2.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(fx.InputError, match="per_client=True chooses the steps"):
        fx.FedSplit(per_client=True, step=0.1)
    with pytest.raises(fx.InputError, match="needs l_k > 0, not 0 as at client '1'"):
        fx.solve(least_squares(52, (8, 2, 8, 8)), fx.FedSplit(per_client=True))


HARD = {
    "one at a time": fx.Uniform(1),
    "bernoulli": BERNOULLI,
    "cyclic": fx.Cyclic(4),
    "markov": fx.Markov(0.1, 0.2),
    "rare": fx.Bernoulli([1.0, 1.0, 1.0, 0.05]),
}


@pytest.fixture(scope="module")
def hospitals() -> tuple[fx.Problem, np.ndarray]:
    """Logistic regression without ridge, unequal clients with a shift between them, the smallest
    separable by itself: no l, and only the pooled fit exists."""
    rng = np.random.default_rng(53)
    beta, clients = rng.normal(size=6), []
    for n, shift in ((120, 0.0), (80, 0.5), (30, -1.0), (5, 1.0)):
        X = rng.normal(size=(n, 5)) + 0.5 * shift
        logit = beta[0] + X @ beta[1:] + shift
        clients.append((X, (rng.random(n) < 1 / (1 + np.exp(-logit))).astype(float)))
    with float64():
        problem = fx.Problem(clients, loss="logistic", fit_intercept=True)
        return problem, fx.reference(problem)


@pytest.mark.slow
@pytest.mark.parametrize("participation", HARD)
@pytest.mark.parametrize(
    "algorithm",
    [fx.FedSplit(), fx.FedDR(), fx.SCAFFOLD(), fx.SCAFFOLD(local_steps=1, option=1), fx.FOCUS()],
    ids=repr,
)
def test_defaults_land_without_strong_convexity(
    hospitals: tuple[fx.Problem, np.ndarray], algorithm: fx.Algorithm, participation: str
) -> None:
    problem, star = hospitals
    assert problem.constants().l == 0.0
    result = fx.solve(problem, algorithm, HARD[participation], rounds=3000, record_every=3000)
    assert relative(result.x, star) < 1e-8
