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
    """Who is visited, bucket after bucket."""

    slots: Any  # (rounds, shards, width) positions within the shard
    rows: Any  # (rounds, shards, width) and those of the states
    first: Any  # (rounds, shards, buckets + 1) where the visits of each bucket begin


class Span(NamedTuple):
    """A stretch of rounds: everything that its program takes."""

    algorithm: Any
    oracles: Stack
    ids: Any  # (slots,) client of each slot
    server: Any
    clients: Any
    visits: Any
    counts: Any  # (rounds,) participants
    start: Any  # first round
    stop: Any  # the one after the last
    root: Any  # key


_Carry = tuple[Any, Any, Any, Array]  # server, clients, those just visited, row gradients


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


def visits(layout: Layout, place: np.ndarray, cohorts: Cohorts) -> Visits:
    """Sorts the participants of every round by shard and bucket; their states stand at `place`."""
    T, buckets = len(cohorts.offsets) - 1, len(layout.sizes)
    rounds = at_least(T, ROUNDS)
    lines = np.repeat(np.arange(T), np.diff(cohorts.offsets)) * layout.shards
    cell = (lines + layout.shard_of[cohorts.ids]) * buckets + layout.bucket_of[cohorts.ids]
    count = np.bincount(cell, minlength=rounds * layout.shards * buckets)
    first = np.zeros((rounds * layout.shards, buckets + 1), np.int32)
    first[:, 1:] = np.cumsum(count.reshape(-1, buckets), axis=1)
    width, most = layout.width, int(first[:, -1].max())
    if width > WIDE:
        width = min(width, at_least(most, WIDE // 8))
    order = np.argsort(cell, kind="stable")
    line, ids = cell[order] // buckets, cohorts.ids[order]
    begin = np.cumsum(first[:, -1]) - first[:, -1]
    at = line, np.arange(len(ids)) - begin[line]

    def table(of: np.ndarray) -> np.ndarray:
        filled = np.zeros((len(first), width), np.int32)
        filled[at] = of
        return filled.reshape(rounds, layout.shards, width)

    return Visits(
        table(layout.slot_of[ids] % layout.width),
        table(place[ids]),
        first.reshape(rounds, layout.shards, -1),
    )


def participants(cohorts: Cohorts) -> np.ndarray:
    """(rounds,) number of participants, as many rounds as the program takes."""
    counts = np.zeros(at_least(len(cohorts.offsets) - 1, ROUNDS), np.int64)
    counts[: len(cohorts.offsets) - 1] = np.diff(cohorts.offsets)
    return counts


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
        server, clients, after, gradients = carry
        slots, rows, first = (table[r - start, 0] for table in visits)
        pulled, of_round = algorithm.pull(server, r), round_key(root, r)
        sums = _no_upload(algorithm, oracles, clients, pulled, root), gradients
        for b in range(len(oracles.sizes)):

            def see(j: Array, carry: Any, b: int = b) -> Any:
                after, sums = carry
                oracle = oracles.client(slots[j], b)
                key = jax.random.fold_in(of_round, ids[slots[j]])
                client, *adds = visit(algorithm, _at(clients, rows[j]), pulled, oracle, key)
                return _put(after, j, client), jax.tree.map(jnp.add, sums, tuple(adds))

            after, sums = lax.fori_loop(first[b], first[b + 1], see, (after, sums))
        total, gradients = sums
        total = all_shards_sum(total, mesh)
        server = push_unless_empty(algorithm, server, total, counts[r - start])
        model = algorithm.model(server)

        def keep(j: Array, clients: Any) -> Any:
            client = _at(after, j)
            client = algorithm.receive(client, model) if algorithm.receives else client
            return _put(clients, rows[j], client)

        # Behind the visits: XLA copies all states where one loop both reads and writes them.
        clients = lax.fori_loop(0, first[-1], keep, clients)
        return server, clients, after, gradients

    width = visits.slots.shape[-1]
    after = jax.tree.map(lambda a: jnp.zeros((width, *a.shape[1:]), a.dtype), clients)
    begin = server, clients, after, jnp.zeros(())
    server, clients, _, gradients = lax.fori_loop(start, stop, one_round, begin)
    return server, clients, all_shards_sum(gradients, mesh)


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
