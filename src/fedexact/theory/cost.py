"""What a round costs on average: bytes and row gradients, without running it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedexact.core import Algorithm, in_float64, root_key
from fedexact.engines.state import initial, oracles_for, visit
from fedexact.oracles import RowOracle
from fedexact.participation import Full, Participation
from fedexact.problem import Problem
from fedexact.solve import bytes_per_visit, setting_of


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

    The bytes are those of the engines. Row gradients inside a prox are those of a first visit at
    the (d,) model x0, zeros if left out; iterative proxes get cheaper as a run converges.
    """
    participation = Full() if participation is None else participation
    setting = setting_of(problem, participation)
    algorithm = algorithm.resolve(setting)
    x0 = np.zeros(problem.dim) if x0 is None else problem.check_model(x0)
    server, clients = initial(algorithm, problem, jnp.asarray(x0))
    down, up = bytes_per_visit(algorithm, problem, server, clients)
    visits = float(setting.p.sum())
    pulled = algorithm.pull(server, jnp.asarray(0))
    client = jax.tree.map(lambda a: a[0], clients)
    rows = problem.layout.in_client_order(
        [
            np.asarray(_row_gradients(algorithm, client, pulled, oracle))
            for oracle in oracles_for(algorithm, problem)
        ]
    )
    return Cost(visits, visits * up, visits * down, float(setting.p @ rows))


@jax.jit
def _row_gradients(algorithm: Algorithm, client: Any, pulled: Any, oracle: RowOracle) -> Array:
    """(slots,) row gradients of the visit of each client of a stack."""

    def rows(j: Array) -> Array:
        return visit(algorithm, client, pulled, oracle.client(j), root_key(0))[2]

    return lax.map(rows, jnp.arange(oracle.weight.shape[0]))
