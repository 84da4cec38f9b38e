"""Forms that stand in print and are wrong: each fails here, and ours passes beside it.

A wrong form is ours with the printed line in the place of the right one, and nothing else changed.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

import fedexact as fx
from fedexact.algorithms import feddr, fedsplit, focus
from fedexact.core import record
from fedexact.engines.state import initial
from fedexact.solve import setting_of
from problems import least_squares
from protocol import everybody, oracle_of, rounds
from test_algorithms import BERNOULLI, relative, split_bound, two_clients

ROUNDS = 3000


def error(problem: fx.Problem, algorithm: fx.Algorithm, participation: Any = None) -> float:
    """Relative distance to the pooled solution of where a run lands; inf if it blows up."""
    masks = (participation or fx.Full()).mask(problem.n_clients, 0, ROUNDS, seed=1)
    x = rounds(problem, algorithm, masks, participation=participation).x[-1]
    return relative(x, fx.reference(problem)) if np.all(np.isfinite(x)) else np.inf


# --- 1: FedSplit that forgets ---------------------------------------------------------------------


@record
class ForgetfulFedSplit(fx.FedSplit):
    """theta_k <- theta in every round: z_k starts from what was pulled."""

    def local(
        self, client: fedsplit.Client, pulled: Array, oracle: fx.Oracle, key: Array
    ) -> tuple[fedsplit.Client, Array]:
        return super().local(client._replace(z=pulled), pulled, oracle, key)


def test_fedsplit_without_memory_is_fedprox() -> None:
    problem = two_clients()
    wrong = fx.solve(problem, ForgetfulFedSplit(step=1.0, relax=1.0), rounds=300)
    right = fx.solve(problem, fx.FedSplit(step=1.0, relax=1.0), rounds=300)
    assert wrong.x == pytest.approx([0.88], abs=1e-12)  # FedProx with mu = 1
    assert right.x == pytest.approx([4 / 9], abs=1e-12)


# --- 2: FedDR's start -----------------------------------------------------------------------------


def test_feddr_started_at_its_prox_stays_wrong_for_ever() -> None:
    """x_k = P_k(x0), xhat_k = 2 x_k - x0 at the clients, but xtilde = x0 at the server."""
    problem = two_clients()
    algorithm = fx.FedDR(step=1.0, relax=1.0).resolve(setting_of(problem, fx.Full()))
    x0 = jnp.zeros(1)
    server, clients = initial(algorithm, problem, x0)
    oracle = oracle_of(problem, algorithm)
    x = jax.vmap(lambda k: oracle.client(k).prox(x0, 1.0, x0))(jnp.arange(2))
    started = clients._replace(x=x, x_hat=2 * x - x0[None])
    wrong = rounds(problem, algorithm, everybody(problem, ROUNDS), state=(server, started))
    right = rounds(problem, algorithm, everybody(problem, ROUNDS), state=(server, clients))
    assert right.x[-1] == pytest.approx([4 / 9], abs=1e-12)
    assert abs(wrong.x[-1, 0] - 4 / 9) > 0.25
    mean = started.x_hat.mean(axis=0)
    np.testing.assert_allclose(wrong.invariant, np.tile(x0 - mean, (ROUNDS, 1)), atol=1e-12)
    collected = server._replace(x_tilde=mean, x_bar=mean)  # the other cure
    cured = rounds(problem, algorithm, everybody(problem, ROUNDS), state=(collected, started))
    assert cured.x[-1] == pytest.approx([4 / 9], abs=1e-12)


# --- 3: FedDR's prox ------------------------------------------------------------------------------


@record
class ProxAtReflection(fx.FedDR):
    """The prox taken at the third variable, the reflection, instead of the one just updated."""

    def local(
        self, client: feddr.Client, pulled: Array, oracle: fx.Oracle, key: Array
    ) -> tuple[feddr.Client, Array]:
        y = client.y + self.relax * (pulled - client.x)
        x = oracle.prox(client.x_hat, self.step, client.x)
        return feddr.Client(x, y, 2 * x - y), 2 * x - y - client.x_hat


@pytest.mark.slow
def test_feddr_takes_its_prox_at_the_variable_just_updated() -> None:
    problem = least_squares(60, regularizer=fx.L1(0.1))
    assert error(problem, fx.FedDR(), BERNOULLI) < 1e-12
    assert error(problem, ProxAtReflection(), BERNOULLI) > 0.1


@record
class Erring:
    """An oracle whose prox is off by `error` in the clients' first visit only, or in every one."""

    oracle: Any
    error: Any
    always: Any

    def client(self, k: Any) -> Erring:
        return dataclasses.replace(self, oracle=self.oracle.client(k))

    def prox(self, v: Array, step: Any, start: Array) -> Array:
        first = jnp.all(start == 5.0)  # x0, where the warm starts begin
        off = jnp.where(first | self.always, self.error, 0.0)
        return self.oracle.prox(v, step, start) + off


def test_feddr_pays_for_the_prox_error_of_every_round_not_of_the_first() -> None:
    """The bound has eps_{k,t+1}; with eps_{k,0} it would promise the exact answer here."""
    problem, x0 = least_squares(61), np.full(3, 5.0)
    star, masks = fx.reference(problem), everybody(problem, ROUNDS)
    oracle, ends = oracle_of(problem, fx.FedDR()), []
    for always in (False, True):
        erring = Erring(oracle, jnp.array(1e-3), jnp.array(always))
        ends.append(rounds(problem, fx.FedDR(), masks, x0, oracle=erring).x[-1])
    assert relative(ends[0], star) < 1e-12
    assert 1e-5 < relative(ends[1], star) < 1e-1


# --- 4: the sign of theta* ------------------------------------------------------------------------


def test_sign_of_the_least_squares_solution() -> None:
    """For f_k = |A_k x + b_k|^2 / 2 it is -(sum A'A)^-1 sum A'b, printed without the minus."""
    rng = np.random.default_rng(62)
    A, b = rng.normal(size=(4, 8, 3)), rng.normal(size=(4, 8))
    problem = fx.Problem([(A[k], -b[k]) for k in range(4)], loss="squared", reduction="sum")
    printed = np.linalg.solve(np.einsum("kij,kil->jl", A, A), np.einsum("kij,ki->j", A, b))
    assert np.linalg.norm(problem.grad(-printed)) < 1e-12
    assert np.linalg.norm(problem.grad(printed)) > 1.0
    result = fx.solve(problem, fx.FedSplit(), rounds=500)
    np.testing.assert_allclose(result.x, -printed, atol=1e-12)


# --- 5: FedSplit's bound --------------------------------------------------------------------------


def test_fedsplit_bound_needs_the_stacked_z() -> None:
    """With theta in its place the printed bound is violated after one round."""
    problem = least_squares(63)
    star, T = fx.reference(problem), 50
    x0 = star + 0.01
    algorithm, bound = split_bound(problem, x0, T)
    path = rounds(problem, algorithm, everybody(problem, T), x0)
    errors = np.linalg.norm(path.x - star[None], axis=1)
    factor = 1 - 2 / (np.sqrt(problem.constants().kappa) + 1)
    printed = factor ** np.arange(1, T + 1) * np.linalg.norm(x0 - star)
    assert errors[0] > 1.5 * printed[0]
    assert np.all(errors <= bound + 1e-12)


# --- 6: FedDR's average ---------------------------------------------------------------------------


@record
class MeanOverReceived(fx.FedDR):
    """xtilde += sum / |S|."""

    def push(self, server: feddr.Server, total: Array, count: Array) -> feddr.Server:
        return super().push(server, total * server.N / count, count)


@record
class SampleWeighted(fx.FedDR):
    """xtilde += the mean of the received messages weighted by rows."""

    def local(
        self, client: feddr.Client, pulled: Array, oracle: Any, key: Array
    ) -> tuple[feddr.Client, Any]:
        new, upload = super().local(client, pulled, oracle, key)
        rows = oracle.n_rows.astype(upload.dtype)
        return new, (rows * upload, rows)

    def push(self, server: feddr.Server, total: Any, count: Array) -> feddr.Server:
        weighted, rows = total
        return super().push(server, server.N * weighted / rows, count)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [MeanOverReceived, SampleWeighted])
def test_feddr_averages_over_all_clients(wrong: type[fx.FedDR]) -> None:
    problem = least_squares(64, (4, 5, 5, 4), weights="clients")
    assert error(problem, fx.FedDR(), BERNOULLI) < 1e-12
    assert error(problem, wrong(), BERNOULLI) > 1e-2


# --- 7: what FOCUS sends and stores ---------------------------------------------------------------


class Store(NamedTuple):
    x: Array  # (d,)
    G: Array  # (N, d) the last gradient of every client
    N: Array  # ()


@record
class StoringFOCUS(fx.FOCUS):
    """With 2d floats up (its index and its gradient) and a row per client at the server."""

    clients: int = fx.static(default=4)

    def init_server(self, x0: Array, n_clients: int) -> Any:
        return Store(x0, jnp.zeros((n_clients, x0.size)), jnp.asarray(n_clients, x0.dtype))

    def local(
        self, client: focus.Client, pulled: focus.Pulled, oracle: fx.Oracle, key: Array
    ) -> tuple[focus.Client, Any]:
        new, _ = super().local(client, pulled, oracle, key)
        k = jax.random.key_data(key)[1]  # protocol.rounds gives client k the key k
        mine = jnp.arange(self.clients) == k
        return new, (jnp.where(mine[:, None], new.g[None], 0.0), mine.astype(float))

    def push(self, server: Any, total: Any, count: Array) -> Any:
        gradients, who = total
        G = jnp.where(who[:, None] > 0, gradients, server.G)
        return Store(server.x - self.lr / server.N * G.sum(axis=0), G, server.N)

    def invariant(self, server: Any, clients: focus.Client) -> Array:
        return jnp.sum(server.G - clients.g, axis=0)


@pytest.mark.parametrize("local_steps", [1, 4])
def test_focus_needs_one_vector_up_and_one_sum_at_the_server(local_steps: int) -> None:
    problem = least_squares(65)
    masks = BERNOULLI.mask(4, 0, 300, seed=2)
    ours = rounds(problem, fx.FOCUS(0.02, local_steps), masks)
    storing = rounds(problem, StoringFOCUS(0.02, local_steps), masks)
    np.testing.assert_allclose(ours.x, storing.x, rtol=1e-10, atol=1e-13)
    few, many = (least_squares(65, (8,) * N) for N in (2, 20))
    servers = [initial(fx.FOCUS(0.02), problem, jnp.zeros(3))[0] for problem in (few, many)]
    assert [[leaf.size for leaf in server] for server in servers] == [[3, 3, 1]] * 2
    result = fx.solve(problem, fx.FOCUS(0.02, local_steps), rounds=1)
    assert result.history["bytes_up"].to_pylist()[-1] == 4 * 3 * 8


# --- 8: lost and doubled uploads ------------------------------------------------------------------


def _arrives(key: Array, upload: Array, copies: int) -> Array:
    """The upload, or in one case of a hundred `copies` of it."""
    strikes = jax.random.bernoulli(jax.random.fold_in(key, 77), 0.01)
    return jnp.where(strikes, copies * upload, upload)


@record
class UnreliableFOCUS(fx.FOCUS):
    copies: Any = 0

    def local(
        self, client: focus.Client, pulled: focus.Pulled, oracle: fx.Oracle, key: Array
    ) -> tuple[focus.Client, Array]:
        new, upload = super().local(client, pulled, oracle, key)
        return new, _arrives(key, upload, self.copies)


@record
class UnreliableFedDR(fx.FedDR):
    copies: Any = 0

    def local(
        self, client: feddr.Client, pulled: Array, oracle: fx.Oracle, key: Array
    ) -> tuple[feddr.Client, Array]:
        new, upload = super().local(client, pulled, oracle, key)
        return new, _arrives(key, upload, self.copies)


@pytest.mark.parametrize("copies", [0, 2], ids=["lost", "doubled"])
@pytest.mark.parametrize(
    ("ours", "unreliable"), [(fx.FOCUS, UnreliableFOCUS), (fx.FedDR, UnreliableFedDR)]
)
def test_one_upload_in_a_hundred_lost_or_doubled_is_never_forgotten(
    ours: Any, unreliable: Any, copies: int
) -> None:
    problem = least_squares(66)
    star = fx.reference(problem)
    acknowledged = fx.solve(problem, ours(), BERNOULLI, rounds=ROUNDS)
    struck = fx.solve(problem, unreliable(copies=copies), BERNOULLI, rounds=ROUNDS)
    assert acknowledged.invariant < 1e-12
    assert relative(acknowledged.x, star) < 1e-12
    assert struck.invariant > 1e-3
    assert relative(struck.x, star) > 1e-3
