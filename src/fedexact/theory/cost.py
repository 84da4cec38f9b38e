"""What a round costs on average: bytes and row gradients, without running it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedexact.core import Algorithm, Setting, client_key, in_float64, root_key
from fedexact.engines.state import initial, visit
from fedexact.participation import Full, Participation
from fedexact.problem import Problem
from fedexact.solve import bytes_per_visit, check_fit, setting_of
from fedexact.theory.rounds import Everyone, everyone

DRAWS = 64  # rounds over which what the server draws is averaged


class Cost(NamedTuple):
    """Of one round, on average over the participation."""

    visits: float  # participants
    bytes_up: float
    bytes_down: float
    gradients: float  # of rows


@in_float64
def cost(
    algorithm: Algorithm,
    problem: Problem,
    participation: Participation | None = None,
    x0: Any = None,
) -> Cost:
    """The average cost of a round.

    The bytes are those of the engines. Row gradients are those of a first visit at the (d,) model
    x0, zeros if left out: iterative proxes get cheaper as a run converges. Those outside a prox are
    the mean over the messages of `DRAWS` rounds.
    """
    check_fit(problem, algorithm)
    participation = Full() if participation is None else participation
    setting = setting_of(problem, participation)
    algorithm = algorithm.resolve(setting)
    oracle = everyone(problem, algorithm)
    return cost_of(problem, algorithm, setting, oracle, x0)


def cost_of(
    problem: Problem, algorithm: Algorithm, setting: Setting, oracle: Everyone, x0: Any = None
) -> Cost:
    """`cost` of a resolved algorithm on the clients' oracles, in one stack in client order."""
    x0 = np.zeros(problem.dim) if x0 is None else problem.check_model(x0)
    server, clients = initial(algorithm, problem, jnp.asarray(x0))
    down, up = bytes_per_visit(algorithm, problem, server, clients)
    visits = float(setting.p.sum())
    count = _with_proxes if "prox" in algorithm.requires else _drawn
    rows = np.asarray(count(algorithm, server, clients, oracle))
    return Cost(visits, visits * up, visits * down, float(setting.p @ rows))


@jax.jit
def _with_proxes(algorithm: Algorithm, server: Any, clients: Any, oracle: Everyone) -> Array:
    """(N,) row gradients of each client's first visit."""
    pulled = algorithm.pull(server, jnp.asarray(0))

    def rows(k: Array) -> Array:
        client = jax.tree.map(lambda a: a[0], clients)
        return visit(algorithm, client, pulled, oracle.client(k), root_key(0))[2]

    return lax.map(rows, jnp.arange(len(oracle.slots)))


@jax.jit
def _drawn(algorithm: Algorithm, server: Any, clients: Any, oracle: Everyone) -> Array:
    """(N,) mean row gradients of each client's first visit over the messages of several rounds."""

    def rows(round: Array, k: Array) -> Array:
        client, pulled = jax.tree.map(lambda a: a[0], clients), algorithm.pull(server, round)
        key = client_key(root_key(0), round, k)
        return jnp.asarray(algorithm.row_gradients(client, pulled, oracle.client(k), key), float)

    every_client = jax.vmap(rows, (None, 0))
    counts = jax.vmap(every_client, (0, None))(jnp.arange(DRAWS), jnp.arange(len(oracle.slots)))
    return counts.mean(axis=0)
