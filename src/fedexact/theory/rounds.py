"""A round as one pure function of the state, all clients in one stack, every client computed and
masked: what fixed points and rates are derived from. Differentiable, also through the proxes."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.flatten_util import ravel_pytree

from fedexact.core import Algorithm, client_key, record, root_key, static
from fedexact.engines.state import initial, part_for, push_unless_empty
from fedexact.oracles import RowOracle, Stack
from fedexact.participation import (
    Bernoulli,
    Categorical,
    Full,
    Participation,
    Uniform,
)
from fedexact.participation.base import spread
from fedexact.problem import Problem
from fedexact.solve import check_fit, setting_of

INDEPENDENT = (Full, Uniform, Bernoulli, Categorical)  # every round has the same law
COHORTS = 4096  # the most cohorts that are enumerated

State = tuple[Any, Any]  # server state, clients' states stacked in client order


# --- oracles --------------------------------------------------------------------------------------


@jax.custom_jvp
def _prox(oracle: RowOracle, v: Array, step: Array, start: Array) -> Array:
    return oracle.prox(v, step, start)


@_prox.defjvp
def _prox_jvp(primals: Any, tangents: Any) -> tuple[Array, Array]:
    """Implicit: (H + I / s) du = dv / s + (u - v) ds / s^2 with H the Hessian of f at u."""
    oracle, v, step, start = primals
    u = _prox(oracle, v, step, start)
    _, dv, dstep, _ = tangents
    curvature = oracle.hessian(u) + jnp.eye(v.size) / step
    return u, jnp.linalg.solve(curvature, dv / step + (u - v) * dstep / step**2)


@record
class Differentiable:
    """Oracles whose prox has the derivative of the exact one, and whose mini-batch
    gradients are replaced by their mean where `mean`."""

    oracle: Any  # a RowOracle, or an Everyone before `client`
    mean: bool = static(default=False)

    @property
    def n_rows(self) -> Any:
        return self.oracle.n_rows

    @property
    def smoothness(self) -> Any:
        return self.oracle.smoothness

    @property
    def strong_convexity(self) -> Any:
        return self.oracle.strong_convexity

    def value(self, x: Array) -> Array:
        return self.oracle.value(x)

    def grad(self, x: Array) -> Array:
        return self.oracle.grad(x)

    def hessian(self, x: Array) -> Array:
        return self.oracle.hessian(x)

    def stochastic_grad(self, x: Array, key: Array, batch_size: int) -> Array:
        if self.mean:
            return self.oracle.grad(x)
        return self.oracle.stochastic_grad(x, key, batch_size)

    def prox(self, v: Array, step: Any, start: Array) -> Array:
        if self.oracle.prox_method == "newton":
            return _prox(self.oracle, v, jnp.asarray(step, v.dtype), start)
        return self.oracle.prox(v, step, start)

    def client(self, j: Array | int) -> Differentiable:
        return dataclasses.replace(self, oracle=self.oracle.client(j))


@record
class Everyone:
    """The clients' oracles in client order, each padded to the largest."""

    stack: Stack
    slots: Array  # (N,)

    @property
    def prox_method(self) -> str:
        return self.stack.prox_method

    def client(self, k: Array | int) -> RowOracle:
        return self.stack.client(self.slots[k])


def everyone(problem: Problem, algorithm: Algorithm) -> Everyone:
    """The oracles that the algorithm needs."""
    part = part_for(algorithm, problem)
    return Everyone(part.oracles, jnp.asarray(part.layout.slot_of))


# --- a round --------------------------------------------------------------------------------------


def one_round(
    algorithm: Algorithm,
    oracle: Any,
    server: Any,
    clients: Any,
    mask: Array,
    round: Array | int,
    keys: Array,
) -> State:
    """The states after a round with the participants `mask`, (N,) bool; `keys` (N,) are theirs and
    `oracle` anything with `client(k)`."""
    pulled = algorithm.pull(server, jnp.asarray(round))

    def visit(client: Any, k: Array, key: Array) -> tuple[Any, Any]:
        return algorithm.local(client, pulled, oracle.client(k), key)

    def present(a: Array, otherwise: Array) -> Array:
        return jnp.where(mask.reshape(-1, *[1] * (a.ndim - 1)), a, otherwise)

    new, uploads = jax.vmap(visit)(clients, jnp.arange(len(mask)), keys)
    total = jax.tree.map(lambda u: jnp.sum(present(u, jnp.zeros_like(u)), axis=0), uploads)
    server = push_unless_empty(algorithm, server, total, jnp.sum(mask))
    if algorithm.receives:
        new = jax.vmap(algorithm.receive, (0, None))(new, algorithm.model(server))
    return server, jax.tree.map(present, new, clients)


def keyed_round(
    algorithm: Algorithm, oracle: Any, state: State, mask: Array, round: Array | int, root: Array
) -> State:
    """`one_round` with the keys that the engines use."""
    keys = jax.vmap(client_key, (None, None, 0))(root, round, jnp.arange(len(mask)))
    return one_round(algorithm, oracle, *state, mask, round, keys)


class Program(NamedTuple):
    """What a round is a function of, besides state, mask and round; a pytree."""

    algorithm: Algorithm
    oracle: Differentiable
    root: Array

    def step(self, state: State, mask: Array, round: Array | int) -> State:
        return keyed_round(self.algorithm, self.oracle, state, mask, round, self.root)

    def flat_step(self, like: State, flat: Array, mask: Array, round: Array | int) -> Array:
        """The round on flat states of the structure of `like`."""
        _, unflat = ravel_pytree(like)
        return ravel_pytree(self.step(unflat(flat), mask, round))[0]


@jax.jit
def run(program: Program, state: State, masks: Array, start: Array) -> tuple[State, Array]:
    """The state after rounds with the (T, N) masks, and the (T, d) models after each."""

    def step(carry: tuple[State, Array], mask: Array) -> tuple[tuple[State, Array], Array]:
        state, round = carry
        state = program.step(state, mask, round)
        return (state, round + 1), program.algorithm.model(state[0])

    (state, _), models = lax.scan(step, (state, start), masks)
    return state, models


class Rounds:
    """The rounds of an algorithm on a problem.

    Args:
        problem, algorithm: the algorithm is resolved for the problem and the participation.
        participation: everybody if left out.
        seed: of the clients' keys and of the masks.
        mean: whether mini-batch gradients are replaced by their mean, the full gradient.
    """

    def __init__(
        self,
        problem: Problem,
        algorithm: Algorithm,
        participation: Participation | None = None,
        seed: int = 0,
        mean: bool = False,
    ) -> None:
        self.problem = problem
        self.participation = Full() if participation is None else participation
        self.participation.check(problem.n_clients, problem.names)
        check_fit(problem, algorithm)
        self.setting = setting_of(problem, self.participation, seed)
        self.algorithm = algorithm.resolve(self.setting)
        self.seed = seed
        oracle = everyone(problem, self.algorithm)
        self.program = Program(self.algorithm, Differentiable(oracle, mean), root_key(seed))

    @property
    def N(self) -> int:  # noqa: N802 - the papers' symbol
        return self.problem.n_clients

    @property
    def oracle(self) -> Differentiable:
        """All clients in one stack, in client order."""
        return self.program.oracle

    def initial(self, x0: Any = None) -> State:
        """Server state and stacked client states before round 0, started at x0 (d,), or 0."""
        x0 = np.zeros(self.problem.dim) if x0 is None else self.problem.check_model(x0)
        return initial(self.algorithm, self.problem, jnp.asarray(x0))

    def step(self, state: State, mask: Array, round: Array | int) -> State:
        """The state after round `round` with the participants `mask`, (N,) bool."""
        return self.program.step(state, mask, round)

    def masks(self, start: int, stop: int) -> np.ndarray:
        """(stop - start, N) bool: who takes part in these rounds."""
        return self.participation.mask(self.N, start, stop, self.seed)

    def run(self, state: State, start: int, stop: int) -> tuple[State, np.ndarray]:
        """The state after the rounds start, ..., stop - 1, and the models after each of them."""
        masks = jnp.asarray(self.masks(start, stop))
        state, models = run(self.program, state, masks, jnp.asarray(start))
        return state, np.asarray(models)

    def model(self, state: State) -> np.ndarray:
        """(d,) the server's model."""
        return np.asarray(self.algorithm.model(state[0]))

    def flat(self, state: State) -> Array:
        """(n,) the state as one vector."""
        return ravel_pytree(state)[0]

    def unflat(self, like: State, flat: Array) -> State:
        """The inverse of `flat`, with the structure of `like`."""
        return ravel_pytree(like)[1](flat)


# --- the law of a round ---------------------------------------------------------------------------


class Law(NamedTuple):
    """The cohorts that a round draws, independently of the other rounds."""

    masks: np.ndarray  # (M, N) bool, all different
    probability: np.ndarray  # (M,) positive, sum 1


def law(participation: Participation, n_clients: int) -> Law | None:
    """The law of a round's cohort; None where rounds are not independent and alike, or there are
    more than `COHORTS` cohorts."""
    masks, probability = _cohorts(participation, n_clients)
    if len(masks) == 0:
        return None
    possible = probability > 0.0
    return Law(masks[possible], probability[possible])


def _cohorts(participation: Participation, N: int) -> tuple[np.ndarray, np.ndarray]:
    nothing = np.zeros((0, N), bool), np.zeros(0)
    if isinstance(participation, Full):
        return np.ones((1, N), bool), np.ones(1)
    if isinstance(participation, Bernoulli):
        p = participation.inclusion(N)
        if 2 ** np.sum((p > 0) & (p < 1)) > COHORTS:
            return nothing
        choices = [[False, True] if 0 < q < 1 else [q == 1.0] for q in p]
        masks = np.array(list(itertools.product(*choices)))
        return masks, np.prod(np.where(masks, p[None, :], 1.0 - p[None, :]), axis=1)
    if isinstance(participation, Uniform | Categorical):
        return _drawn(participation, N)
    return nothing


def _drawn(participation: Uniform | Categorical, N: int) -> tuple[np.ndarray, np.ndarray]:
    """m clients drawn one by one without replacement: P(S) is a sum over who came last."""
    uniform = isinstance(participation, Uniform)
    weights = np.ones(N) if uniform else spread("weights", participation.weights, N)
    drawable = np.flatnonzero(weights > 0.0)
    reached: dict[frozenset[int], float] = {frozenset(): 1.0}
    for _ in range(participation.m):
        after: dict[frozenset[int], float] = {}
        for cohort, probability in reached.items():
            rest = [int(k) for k in drawable if k not in cohort]
            total = float(np.sum(weights[rest]))
            for k in rest:
                larger = cohort | {k}
                after[larger] = after.get(larger, 0.0) + probability * float(weights[k]) / total
        if len(after) > COHORTS:
            return np.zeros((0, N), bool), np.zeros(0)
        reached = after
    masks = np.zeros((len(reached), N), bool)
    for row, cohort in enumerate(reached):
        masks[row, list(cohort)] = True
    return masks, np.array(list(reached.values()))
