"""One client after the other, one round after the other: what a node of a real federation runs.

`pull`, `local`, `push` and `receive` are compiled once per algorithm, never per call. Uploads are
added in client order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedexact.core import Algorithm, client_key
from fedexact.engines.state import Advance, State, by_stretches, push_unless_empty, visit
from fedexact.oracles import Stack
from fedexact.participation import Cohorts
from fedexact.problem import Problem


class Loop:
    """The engine to debug with and to compare with; `clients` is a list, one state per client."""

    def load(self, problem: Problem, server: Any, clients: Any) -> State:
        leaves = range(problem.n_clients)
        return State(
            jax.tree.map(jnp.asarray, server),
            [jax.tree.map(lambda a, k=k: jnp.asarray(a[k]), clients) for k in leaves],
        )

    def clients(self, problem: Problem, state: State) -> Any:
        return jax.tree.map(lambda *a: np.stack([np.asarray(v) for v in a]), *state.clients)

    def advance(
        self,
        algorithm: Algorithm,
        problem: Problem,
        state: State,
        cohorts: Cohorts,
        start: int,
        root: Array,
        stops: Sequence[int] = (),
    ) -> Advance:
        def run(state: State, cohorts: Cohorts, start: int) -> Advance:
            gradients = 0
            for t in range(cohorts.rounds):
                ids = cohorts.between(t, t + 1).ids
                state, rows = self.one_round(algorithm, problem, state, ids, start + t, root)
                gradients += rows
            return Advance(state, gradients, [])

        return by_stretches(run, algorithm, problem, state, cohorts, start, stops)

    def one_round(
        self,
        algorithm: Algorithm,
        problem: Problem,
        state: State,
        participants: np.ndarray,
        round: int,
        root: Array,
    ) -> tuple[State, int]:
        """Pull, local and push of one round."""
        server, clients = state.server, list(state.clients)
        if len(participants) == 0:
            return state, 0
        pulled, uploads, gradients = pull(algorithm, server, round), [], 0
        for k in participants:
            clients[k], upload, rows = local(
                algorithm, clients[k], pulled, oracle_of(algorithm, problem, k), root, round, k
            )
            uploads.append(upload)
            gradients += int(rows)
        total = jax.tree.map(lambda *a: sum(a[1:], start=a[0]), *uploads)
        server = push(algorithm, server, total, len(uploads))
        if algorithm.receives:
            model = algorithm.model(server)
            for k in participants:
                clients[k] = receive(algorithm, clients[k], model)
        return State(server, clients), gradients


def oracle_of(algorithm: Algorithm, problem: Problem, k: int) -> Stack:
    """Client k alone, with what the algorithm requires of it."""
    return problem.alone(int(k), prox="prox" in algorithm.requires).oracles


@jax.jit
def pull(algorithm: Algorithm, server: Any, round: Array) -> Any:
    return algorithm.pull(server, round)


@jax.jit
def local(
    algorithm: Algorithm,
    client: Any,
    pulled: Any,
    alone: Stack,
    root: Array,
    round: Array,
    k: Array,
) -> tuple[Any, Any, Array]:
    """The visit of client k, `alone` on its stack: state, upload, row gradients."""
    key = client_key(root, round, k)
    return visit(algorithm, client, pulled, alone.client(0, 0), key)


@jax.jit
def push(algorithm: Algorithm, server: Any, total: Any, count: Array) -> Any:
    return push_unless_empty(algorithm, server, total, count)


@jax.jit
def receive(algorithm: Algorithm, client: Any, model: Array) -> Any:
    return algorithm.receive(client, model)
