"""What an engine holds and offers."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from fedexact.core import Algorithm
from fedexact.oracles import RowOracle
from fedexact.participation import Cohorts
from fedexact.problem import Problem


class State(NamedTuple):
    """State of a run; the form of `clients` is the engine's own."""

    server: Any
    clients: Any


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
    ) -> State:
        """The state after the rounds start, start + 1, ... with these participants."""
        ...


def initial(algorithm: Algorithm, problem: Problem, x0: Array) -> tuple[Any, Any]:
    """Server state and client states stacked in client order, before round 0."""
    N = problem.n_clients
    client = algorithm.init_client(x0)
    stacked = jax.tree.map(lambda a: jnp.broadcast_to(a[None], (N, *jnp.shape(a))), client)
    return algorithm.init_server(x0, N), stacked


def oracles_for(algorithm: Algorithm, problem: Problem) -> tuple[RowOracle, ...]:
    """The problem's oracles with what the algorithm requires of them."""
    return problem.prox_oracles if "prox" in algorithm.requires else problem.oracles


def push_unless_empty(algorithm: Algorithm, server: Any, total: Any, count: Array) -> Any:
    """The server's new state; a round with nobody changes nothing."""
    new = algorithm.push(server, total, count)
    return jax.tree.map(lambda a, b: jnp.where(count > 0, a, b), new, server)
