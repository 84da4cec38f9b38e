"""Every message as a product with the round's matrix: pull by R(S), push by C(S) = R(S)^T.

The rows 0, ..., N of the server and the clients are one stack. Row 0 of the broadcast goes to the
participants as R(S) X, the uploads are summed and taken away from their senders as C(S) U, and the
new model, for algorithms that `receive`, comes as R(S) X again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from fedexact.core import Algorithm
from fedexact.engines import loop
from fedexact.engines.matrices import check_size, pull_matrix, push_matrix
from fedexact.engines.state import State
from fedexact.problem import Problem


class Matrix(loop.Loop):
    """The engine of the theory; `clients` is a list, one state per client."""

    def load(self, problem: Problem, server: Any, clients: Any) -> State:
        check_size(problem.n_clients)
        return super().load(problem, server, clients)

    def one_round(
        self,
        algorithm: Algorithm,
        problem: Problem,
        state: State,
        participants: np.ndarray,
        round: int,
        root: Array,
    ) -> tuple[State, int]:
        """R(S), local and C(S) of one round, and R(S) once more where participants receive."""
        if len(participants) == 0:
            return state, 0
        server, clients, gradients = state.server, list(state.clients), 0
        mask = np.zeros(len(clients), bool)
        mask[participants] = True
        R, C = pull_matrix(mask), push_matrix(mask)

        pulled, uploads = carried(R, {0: loop.pull(algorithm, server, round)}), {}
        for k in participants:
            alone = loop.oracle_of(algorithm, problem, k)
            clients[k], uploads[k + 1], rows = loop.local(
                algorithm, clients[k], pulled(k + 1), alone, root, round, k
            )
            gradients += int(rows)
        total = carried(C, uploads)(0)
        server = loop.push(algorithm, server, total, len(participants))
        if algorithm.receives:
            model = carried(R, {0: algorithm.model(server)})
            for k in participants:
                clients[k] = loop.receive(algorithm, clients[k], model(k + 1))
        return State(server, clients), gradients


def carried(M: np.ndarray, messages: Mapping[int, Any]) -> Callable[[int], Any]:
    """M X, X the stack with the messages in their rows and 0 in all others; row i as a message."""
    flat = {row: ravel_pytree(message) for row, message in messages.items()}
    first, as_message = next(iter(flat.values()))
    X = np.zeros((len(M), first.size))
    for row, (vector, _) in flat.items():
        X[row] = vector
    with np.errstate(invalid="ignore"):  # 0 * inf in rows that nobody reads
        X = M @ X
    return lambda row: as_message(jnp.asarray(X[row], first.dtype))
