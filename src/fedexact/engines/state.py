"""What an engine holds and offers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedexact.core import Algorithm, Oracle
from fedexact.oracles import RowOracle
from fedexact.participation import Cohorts
from fedexact.parts import Part
from fedexact.problem import Problem


class State(NamedTuple):
    """State of a run; the form of `clients` is the engine's own."""

    server: Any
    clients: Any


class Recording(NamedTuple):
    """What is known of the model at some moment."""

    gradients: Any  # of rows, since the start
    model: np.ndarray  # (d,)
    value: Any  # F(model), NaN where the model or its loss is not finite
    grad: np.ndarray  # (d,) of F


class Advance(NamedTuple):
    """What some rounds brought."""

    state: State
    gradients: int  # rows whose gradient was computed on the way
    recordings: list[Recording]


class Engine(Protocol):
    """Runs rounds. Between its calls the state is complete: it can be kept, saved and resumed."""

    def load(self, problem: Problem, server: Any, clients: Any) -> State:
        """The engine's state; `clients` stacked in client order, (N, ...)."""
        ...

    def clients(self, problem: Problem, state: State) -> Any:
        """The clients' states stacked in client order, (N, ...)."""
        ...

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
        """The rounds start, start + 1, ... with these participants; a recording before each of the
        rounds `stops`, which ascend, or after the last."""
        ...


def by_stretches(
    run: Callable[[State, Cohorts, int], Advance],
    algorithm: Algorithm,
    problem: Problem,
    state: State,
    cohorts: Cohorts,
    start: int,
    stops: Sequence[int],
) -> Advance:
    """`Engine.advance` by `run`, which takes some rounds, and passes over all rows in between."""
    recordings, gradients, at = [], 0, start
    for stop in (*stops, start + cohorts.rounds):
        if stop > at:
            state, more, _ = run(state, cohorts.between(at - start, stop - start), at)
            gradients, at = gradients + more, stop
        if len(recordings) < len(stops):
            recordings.append(_recording(algorithm, problem, state, gradients))
    return Advance(state, gradients, recordings)


def _recording(algorithm: Algorithm, problem: Problem, state: State, gradients: int) -> Recording:
    x = np.asarray(algorithm.model(state.server))
    if not np.all(np.isfinite(x)):
        return Recording(gradients, x, np.nan, np.full_like(x, np.nan))
    return Recording(gradients, x, *problem.value_and_grad(x))


def initial(algorithm: Algorithm, problem: Problem, x0: Array) -> tuple[Any, Any]:
    """Server state and client states stacked in client order, before round 0."""
    N = problem.n_clients
    client = jax.tree.map(np.asarray, algorithm.init_client(x0))
    stacked = jax.tree.map(lambda a: np.broadcast_to(a, (N, *a.shape)), client)
    return algorithm.init_server(x0, N), stacked


def part_for(
    algorithm: Algorithm, problem: Problem, ids: np.ndarray | None = None, single: bool = False
) -> Part:
    """The clients `ids` or more, or everybody, with what the algorithm requires of them; in float32
    where `single`."""
    return problem.part(ids, prox="prox" in algorithm.requires, single=single)


class _Metered:
    """A client's oracle that counts the rows whose gradient its proxes compute."""

    def __init__(self, oracle: RowOracle) -> None:
        self._oracle = oracle
        self.rows: Any = 0

    def prox(self, v: Array, step: Any, start: Array) -> Array:
        u, gradients = self._oracle.counted_prox(v, step, start)
        self.rows = self.rows + gradients * self._oracle.n_rows
        return u

    def __getattr__(self, name: str) -> Any:
        return getattr(self._oracle, name)


def visit(
    algorithm: Algorithm, client: Any, pulled: Any, oracle: RowOracle, key: Array
) -> tuple[Any, Any, Array]:
    """What a participant does: its new state, its upload, and the row gradients it took."""
    metered = _Metered(oracle)
    rows = algorithm.row_gradients(client, pulled, oracle, key)
    client, upload = algorithm.local(client, pulled, cast(Oracle, metered), key)
    return client, upload, jnp.asarray(rows + metered.rows, int)


def push_unless_empty(algorithm: Algorithm, server: Any, total: Any, count: Array) -> Any:
    """The server's new state; a round with nobody changes nothing."""
    new = algorithm.push(server, total, count)
    return jax.tree.map(lambda a, b: jnp.where(count > 0, a, b), new, server)
