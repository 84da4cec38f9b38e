"""Rounds by the protocol alone: no engine, every client computed in every round and masked."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import fedexact as fx
from fedexact.engines.state import initial, part_for
from fedexact.oracles import Stack
from fedexact.solve import setting_of
from fedexact.theory import rounds as theory_rounds


class Path(NamedTuple):
    """What happened in T rounds."""

    x: np.ndarray  # (T, d) models after each round
    invariant: np.ndarray  # (T, d)
    server: Any  # at the end
    clients: Any


def one_round(
    algorithm: fx.Algorithm, oracle: Any, server: Any, clients: Any, mask: Array
) -> tuple[Any, Any]:
    """The states after a round with the participants `mask`, (N,) bool."""
    keys = jax.vmap(jax.random.key)(jnp.arange(len(mask)))
    return theory_rounds.one_round(algorithm, oracle, server, clients, mask, 0, keys)


@jax.jit
def _scan(algorithm: fx.Algorithm, oracle: Any, state: Any, masks: Array) -> Any:
    def step(state: Any, mask: Array) -> tuple[Any, tuple[Array, Array]]:
        server, clients = one_round(algorithm, oracle, state[0], state[1], mask)
        return (server, clients), (algorithm.model(server), algorithm.invariant(server, clients))

    return jax.lax.scan(step, state, masks)


def oracle_of(problem: fx.Problem, algorithm: fx.Algorithm) -> Stack:
    """All clients in one stack; they must have equally many rows."""
    oracles = part_for(algorithm, problem).oracles
    assert len(oracles.sizes) == 1
    return oracles


def rounds(
    problem: fx.Problem,
    algorithm: fx.Algorithm,
    masks: Any,
    x0: Any = None,
    participation: fx.Participation | None = None,
    state: Any = None,
    oracle: Any = None,
) -> Path:
    """Resolves the algorithm and runs it from x0, or from `state`, over (T, N) masks; `oracle`
    stands for the problem's own if given."""
    algorithm = algorithm.resolve(setting_of(problem, participation or fx.Full()))
    if state is None:
        start = jnp.zeros(problem.dim) if x0 is None else jnp.asarray(x0)
        state = initial(algorithm, problem, start)
    oracle = oracle_of(problem, algorithm) if oracle is None else oracle
    (server, clients), (x, invariant) = _scan(algorithm, oracle, state, jnp.asarray(masks))
    return Path(np.asarray(x), np.asarray(invariant), server, clients)


def everybody(problem: fx.Problem, T: int) -> np.ndarray:
    return np.ones((T, problem.n_clients), bool)


def assert_same_run(a: fx.Result, b: fx.Result, close: float) -> None:
    """Two runs agree in states (relative to x), in who was never present, and in all counts."""
    scale = max(1.0, float(np.max(np.abs(a.x))))
    for side in ("server", "clients"):
        mine, theirs = getattr(a, side), getattr(b, side)
        assert mine.keys() == theirs.keys()
        for field in mine:
            np.testing.assert_allclose(
                mine[field], theirs[field], rtol=0, atol=close * scale, err_msg=field
            )
    assert a.never_present == b.never_present
    counts = [
        "round", "participants", "uploads", "bytes_up", "bytes_down", "gradient_evaluations"
    ]  # fmt: skip
    assert a.history.select(counts).equals(b.history.select(counts))
