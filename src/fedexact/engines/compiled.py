"""All rounds between two recordings as one XLA program.

The participants of a round are visited one after the other, so that a client's rows stay in cache
during its local steps, and only they are visited: no padding of the cohort, no masked work. With
several JAX devices, each visits those of its own clients and the sums are added once per round.
The schedule is an argument: other participants, seeds or float hyperparameters compile nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from fedexact.core import Algorithm, round_key
from fedexact.devices import AXIS, SPLIT, WHOLE, all_shards_sum, over_shards, put
from fedexact.engines.slab import Slab
from fedexact.engines.state import State, part_for, push_unless_empty, visit
from fedexact.layout import Layout, at_least
from fedexact.oracles import Stack
from fedexact.participation import Cohorts
from fedexact.problem import Problem
from fedexact.streams import stack_specs

# Up to WIDE slots a visit list has a place for every client, so that its shape never changes.
WIDE = 8192
# Rounds per program are rounded up to ROUNDS times a power of two.
ROUNDS = 16


class Visits(NamedTuple):
    """Who is visited in one bucket."""

    slots: Any  # (rounds, shards, width) positions within the shard, the first `counts` are valid
    rows: Any  # (rounds, shards, width) and those of the states
    counts: Any  # (rounds, shards)


class Span(NamedTuple):
    """A stretch of rounds: everything that its program takes."""

    algorithm: Any
    oracles: Stack
    ids: Any  # (slots,) client of each slot
    server: Any
    clients: Any
    visits: Any  # per bucket
    counts: Any  # (rounds,) participants
    start: Any  # first round
    stop: Any  # the one after the last
    root: Any  # key


_Carry = tuple[Any, Any, Array]  # server, clients, row gradients


class Compiled:
    """The default engine; `clients` is a Slab."""

    def load(self, problem: Problem, server: Any, clients: Any) -> State:
        server = jax.tree.map(lambda a: put(a, problem.layout.mesh, WHOLE), server)
        return State(server, Slab.load(problem.layout, clients))

    def clients(self, problem: Problem, state: State) -> Any:
        return state.clients.in_client_order(problem.layout)

    def advance(
        self,
        algorithm: Algorithm,
        problem: Problem,
        state: State,
        cohorts: Cohorts,
        start: int,
        root: Array,
    ) -> tuple[State, int]:
        if len(cohorts.ids) == 0:
            return state, 0
        slab = state.clients.with_places(problem.layout, cohorts.ids)
        part = part_for(algorithm, problem, cohorts.ids)
        layout, mine = part.layout, cohorts._replace(ids=part.positions(cohorts.ids))
        span = Span(
            algorithm,
            part.oracles,
            part.owner,
            state.server,
            slab.states,
            visits(layout, part.of(slab.place), mine),
            participants(cohorts),
            np.int64(start),
            np.int64(start + len(cohorts.offsets) - 1),
            root,
        )
        server, clients, rows = jax.block_until_ready(_advance(layout.mesh, span))
        return State(server, slab._replace(states=clients)), int(rows)


def visits(layout: Layout, place: np.ndarray, cohorts: Cohorts) -> tuple[Visits, ...]:
    """Sorts the participants of every round by bucket and shard; their states stand at `place`."""
    T = len(cohorts.offsets) - 1
    rounds = at_least(T, ROUNDS)
    round_of = np.repeat(np.arange(T), np.diff(cohorts.offsets))
    bucket_of = layout.bucket_of[cohorts.ids]
    return tuple(
        _visits(layout, place, cohorts.ids[bucket_of == b], round_of[bucket_of == b], rounds)
        for b in range(len(layout.sizes))
    )


def participants(cohorts: Cohorts) -> np.ndarray:
    """(rounds,) number of participants, as many rounds as the program takes."""
    counts = np.zeros(at_least(len(cohorts.offsets) - 1, ROUNDS), np.int64)
    counts[: len(cohorts.offsets) - 1] = np.diff(cohorts.offsets)
    return counts


def _visits(
    layout: Layout, place: np.ndarray, ids: np.ndarray, round_of: np.ndarray, rounds: int
) -> Visits:
    cell = round_of * layout.shards + layout.shard_of[ids]
    count = np.bincount(cell, minlength=rounds * layout.shards)
    width = layout.width
    if width > WIDE:
        width = min(width, at_least(int(count.max(initial=1)), WIDE // 8))
    order = np.argsort(cell, kind="stable")
    cell, ids = cell[order], ids[order]
    at = cell, np.arange(len(order)) - (np.cumsum(count) - count)[cell]

    def table(of: np.ndarray) -> np.ndarray:
        filled = np.zeros((len(count), width), np.int32)
        filled[at] = of
        return filled.reshape(rounds, layout.shards, width)

    counts = count.reshape(rounds, layout.shards)
    return Visits(table(layout.slot_of[ids] % layout.width), table(place[ids]), counts)


@partial(jax.jit, static_argnums=0)
def _advance(mesh: Mesh | None, span: Span) -> tuple[Any, Any, Array]:
    specs = Span(
        algorithm=WHOLE,
        oracles=stack_specs(span.oracles),
        ids=SPLIT,
        server=WHOLE,
        clients=SPLIT,
        visits=PartitionSpec(None, AXIS),
        counts=WHOLE,
        start=WHOLE,
        stop=WHOLE,
        root=WHOLE,
    )
    return over_shards(partial(_rounds, mesh), mesh, (specs,), (WHOLE, SPLIT, WHOLE))(span)


def _rounds(mesh: Mesh | None, span: Span) -> tuple[Any, Any, Array]:
    """The rounds of the span on this device's slice of the clients, and their row gradients."""
    algorithm, oracles, ids, server, clients, visits, counts, start, stop, root = span

    def one_round(r: Array, carry: _Carry) -> _Carry:
        server, clients, gradients = carry
        pulled = algorithm.pull(server, r)
        total = _no_upload(algorithm, oracles, clients, pulled, root)
        of_round, news = round_key(root, r), []
        for b, visited in enumerate(visits):

            def see(j: Array, carry: Any, b: int = b, visited: Visits = visited) -> Any:
                after, sums = carry
                slot, row = visited.slots[r - start, 0, j], visited.rows[r - start, 0, j]
                oracle, key = oracles.client(slot, b), jax.random.fold_in(of_round, ids[slot])
                client, *adds = visit(algorithm, _at(clients, row), pulled, oracle, key)
                return _put(after, j, client), jax.tree.map(jnp.add, sums, tuple(adds))

            # written behind the visits: XLA copies states that are read and written in one loop
            width = visited.rows.shape[-1]
            after = jax.tree.map(lambda a, w=width: jnp.zeros((w, *a.shape[1:]), a.dtype), clients)
            n = visited.counts[r - start, 0]
            after, (total, gradients) = lax.fori_loop(0, n, see, (after, (total, gradients)))
            news.append(after)
        for visited, after in zip(visits, news, strict=True):
            clients = _written(clients, visited, r - start, after)
        total = all_shards_sum(total, mesh)
        server = push_unless_empty(algorithm, server, total, counts[r - start])
        if algorithm.receives:
            clients = _all_receive(algorithm, server, clients, visits, r - start)
        return server, clients, gradients

    first = server, clients, jnp.zeros(())
    server, clients, gradients = lax.fori_loop(start, stop, one_round, first)
    return server, clients, all_shards_sum(gradients, mesh)


def _all_receive(
    algorithm: Algorithm, server: Any, clients: Any, visits: tuple[Visits, ...], r: Array
) -> Any:
    """The clients after the participants of the round got the new model."""
    model = algorithm.model(server)
    for visited in visits:
        rows = visited.rows[r, 0]
        after = jax.tree.map(lambda a, rows=rows: a[rows], clients)
        after = jax.vmap(algorithm.receive, (0, None))(after, model)
        clients = _written(clients, visited, r, after)
    return clients


def _written(clients: Any, visited: Visits, r: Array, after: Any) -> Any:
    """The states with those of a round's participants replaced by `after` (width, ...)."""
    rows, n = visited.rows[r, 0], visited.counts[r, 0]
    return lax.fori_loop(0, n, lambda j, states: _put(states, rows[j], _at(after, j)), clients)


def _at(states: Any, slot: Array) -> Any:
    return jax.tree.map(lambda a: a[slot], states)


def _put(states: Any, slot: Array, client: Any) -> Any:
    return jax.tree.map(lambda a, new: a.at[slot].set(new), states, client)


def _no_upload(algorithm: Algorithm, oracles: Stack, states: Any, pulled: Any, root: Array) -> Any:
    """The sum of no uploads: zeros of an upload's shape."""

    def upload() -> Any:
        client = jax.tree.map(lambda a: a[0], states)
        return algorithm.local(client, pulled, oracles.client(0, 0), root)[1]

    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(upload))
