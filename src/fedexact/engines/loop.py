"""One client after the other, one round after the other: what a node of a real federation runs.

`pull`, `local`, `push` and `receive` are compiled once per algorithm, never per call. Uploads are
added in client order.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedexact.core import Algorithm, client_key
from fedexact.engines.state import State, part_for, push_unless_empty, visit
from fedexact.oracles import Stack
from fedexact.participation import Cohorts
from fedexact.parts import Part
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
    ) -> tuple[State, int]:
        part, gradients = part_for(algorithm, problem, cohorts.ids), 0
        for t in range(len(cohorts.offsets) - 1):
            participants = cohorts.ids[cohorts.offsets[t] : cohorts.offsets[t + 1]]
            state, rows = self.one_round(algorithm, part, state, participants, start + t, root)
            gradients += rows
        return state, gradients

    def one_round(
        self,
        algorithm: Algorithm,
        part: Part,
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
                algorithm, clients[k], pulled, *oracle_of(part, k), root, round, k
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


def oracle_of(part: Part, k: int) -> tuple[Stack, Any, int]:
    """Where client k's oracle stands: stack, slot and bucket."""
    i = int(part.positions(np.asarray(k)))
    return part.oracles, part.layout.slot_of[i], int(part.layout.bucket_of[i])


@jax.jit
def pull(algorithm: Algorithm, server: Any, round: Array) -> Any:
    return algorithm.pull(server, round)


@partial(jax.jit, static_argnames="bucket")
def local(
    algorithm: Algorithm,
    client: Any,
    pulled: Any,
    oracles: Stack,
    slot: Array,
    bucket: int,
    root: Array,
    round: Array,
    k: Array,
) -> tuple[Any, Any, Array]:
    key = client_key(root, round, k)
    return visit(algorithm, client, pulled, oracles.client(slot, bucket), key)


@jax.jit
def push(algorithm: Algorithm, server: Any, total: Any, count: Array) -> Any:
    return push_unless_empty(algorithm, server, total, count)


@jax.jit
def receive(algorithm: Algorithm, client: Any, model: Array) -> Any:
    return algorithm.receive(client, model)
