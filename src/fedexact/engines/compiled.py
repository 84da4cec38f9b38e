"""Many rounds, and what is recorded among them, as one XLA program.

The participants of a round are visited one after the other, so that a client's rows stay in cache
during its local steps, and only they are visited: no padding of the cohort, no masked work. With
several JAX devices, each visits those of its own clients and the sums are added once per round.
The schedule is an argument: other participants, seeds, float hyperparameters or numbers of rounds
compile nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from fedexact.core import Algorithm, narrowed, round_key
from fedexact.devices import AXIS, SPLIT, WHOLE, all_shards_sum, over_shards, put
from fedexact.engines.slab import Slab
from fedexact.engines.state import (
    Advance,
    Recording,
    State,
    by_stretches,
    part_for,
    push_unless_empty,
    visit,
)
from fedexact.layout import Layout, at_least
from fedexact.oracles import RowOracle, Stack
from fedexact.participation import Cohorts
from fedexact.parts import Part
from fedexact.problem import Problem
from fedexact.streams import over_own_rows, stack_specs

# What one call of the program takes at most: rounds, visits (but for a single round with more),
# recordings, and numbers in these.
ROUNDS, VISITS, RECORDINGS, NUMBERS = 512, 1 << 15, 32, 1 << 20
# Every call copies the states: where these have more numbers, it takes OFTEN times as many visits.
MANY, OFTEN = 1 << 20, 16
# Up to WIDE slots there is room for the new states of all clients, beyond for those of a round.
WIDE = 8192


class Visits(NamedTuple):
    """Who is visited, round after round and there bucket after bucket."""

    ids: Any  # (shards, visits) clients
    slots: Any  # (shards, visits) their positions within the shard
    rows: Any  # (shards, visits) and those of their states
    first: Any  # (rounds, shards, buckets + 1) where the visits of each bucket begin


class Schedule(NamedTuple):
    """What happens in some rounds."""

    visits: Visits
    counts: Any  # (rounds,) participants
    edges: Any  # (stretches + 1,) rounds: between them it may be recorded
    recorded: Any  # (stretches,) 1 where it is recorded at a stretch's end, else 0
    stretches: Any  # how many of them are meant


class Span(NamedTuple):
    """Some rounds: everything that their program takes."""

    algorithm: Any
    oracles: Stack
    first: Any  # (shards, buckets + 1) as in Layout
    server: Any
    clients: Any
    schedule: Schedule
    root: Any  # key


_Carry = tuple[Any, Any, Any, Array]  # server, clients, those just visited, row gradients


class Compiled:
    """The default engine; `clients` is a Slab. Rounds are computed in float32 if it is `single`."""

    def __init__(self, single: bool = False) -> None:
        self.single = single

    def load(self, problem: Problem, server: Any, clients: Any) -> State:
        if self.single:
            server, clients = narrowed((server, clients))
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
        stops: Sequence[int] = (),
    ) -> Advance:
        def run(state: State, cohorts: Cohorts, start: int, stops: Sequence[int] = ()) -> Advance:
            part = part_for(algorithm, problem, cohorts.ids, self.single)
            gradients, recordings = 0, []
            most = most_visits(state.clients)
            for begin, end, among in pieces(cohorts, start, stops, problem.dim, most):
                mine = cohorts.between(begin - start, end - start)
                state, more, new = self._once(
                    algorithm, problem, part, state, mine, begin, root, among
                )
                recordings += [r._replace(gradients=gradients + r.gradients) for r in new]
                gradients += more
            return Advance(state, gradients, recordings)

        if problem.in_memory:
            return run(state, cohorts, start, stops)
        return by_stretches(run, algorithm, problem, state, cohorts, start, stops)

    def _once(
        self,
        algorithm: Algorithm,
        problem: Problem,
        part: Part,
        state: State,
        cohorts: Cohorts,
        start: int,
        root: Array,
        stops: Sequence[int],
    ) -> Advance:
        """What one call of the program does."""
        slab, layout = state.clients.with_places(problem.layout, cohorts.ids), part.layout
        most = most_visits(state.clients)
        visited, width = visits(layout, part.of(slab.place), cohorts, part.ids, most)
        schedule = Schedule(
            visited, participants(cohorts), *stretches(cohorts, start, stops, problem.dim)
        )
        span = Span(
            algorithm, part.oracles, layout.first, state.server, slab.states, schedule, root
        )
        with jax.enable_x64(not self.single):
            server, clients, rows, found = jax.block_until_ready(_advance(layout.mesh, width, span))
        gradients = np.append(0, np.cumsum(np.asarray(rows, np.int64)))
        models, values, grads = (np.asarray(a, float) for a in found)
        recordings = [
            Recording(int(gradients[stop - start]), x, *problem.with_ridge(x, value, grad))
            for stop, x, value, grad in zip(stops, models, values, grads, strict=False)
        ]
        return Advance(State(server, slab._replace(states=clients)), int(gradients[-1]), recordings)


# --- schedules ------------------------------------------------------------------------------------


def pieces(
    cohorts: Cohorts, start: int, stops: Sequence[int], dim: int, most: int
) -> Iterator[tuple[int, int, Sequence[int]]]:
    """The rounds begin, ..., end - 1 of each call of the program, and the stops in them."""
    end, last = start, start + cohorts.rounds
    while end < last or stops:
        begin, visits_before = end, cohorts.offsets[end - start]
        fit = np.searchsorted(cohorts.offsets, visits_before + most, "right") - 1 + start
        end = min(last, begin + ROUNDS, max(begin + 1, int(fit)))
        among = [stop for stop in stops if stop <= end][: most_recordings(dim)]
        if len(among) == most_recordings(dim):
            end = among[-1]
        yield begin, end, among
        stops = stops[len(among) :]


def most_recordings(dim: int) -> int:
    """In one call of the program."""
    return max(1, min(RECORDINGS, NUMBERS // dim))


def most_visits(slab: Slab) -> int:
    """In one call of the program."""
    numbers = sum(leaf.size for leaf in jax.tree.leaves(slab.states))
    return VISITS * OFTEN if numbers > MANY else VISITS


def visits(
    layout: Layout, place: np.ndarray, cohorts: Cohorts, clients: np.ndarray | None, most: int
) -> tuple[Visits, int]:
    """Sorts the participants of every round by shard and bucket; their states stand at `place`.
    The layout is that of `clients`, or of all. Also how many places a round's new states take on a
    device, or more."""
    T, shards, buckets = cohorts.rounds, layout.shards, len(layout.sizes)
    position = cohorts.ids if clients is None else np.searchsorted(clients, cohorts.ids)
    shard = layout.shard_of[position]
    line = shard * T + np.repeat(np.arange(T), cohorts.counts)
    cell = line * buckets + layout.bucket_of[position]
    count = np.bincount(cell, minlength=shards * T * buckets).reshape(shards, -1)
    ends = np.cumsum(count, axis=1)
    first = np.zeros((ROUNDS, shards, buckets + 1), np.int32)
    first[:T, :, 1:] = ends.reshape(shards, T, buckets).swapaxes(0, 1)
    first[1:T, :, 0] = first[: T - 1, :, -1] if T else 0
    length = at_least(int(count.sum(axis=1).max()), most)
    order = np.argsort(cell, kind="stable")
    position, total = position[order], ends[:, -1:] if T else np.zeros((shards, 1), int)
    at = shard[order], np.arange(len(order)) - (np.cumsum(total) - total[:, 0])[shard[order]]

    def table(of: np.ndarray) -> np.ndarray:
        filled = np.zeros((shards, length), np.int32)
        filled[at] = of
        return filled

    width = layout.width
    if width > WIDE:
        width = min(width, at_least(int(np.max(first[..., -1] - first[..., 0])), WIDE // 8))
    slots, rows = layout.slot_of[position] % layout.width, place[position]
    return Visits(table(cohorts.ids[order]), table(slots), table(rows), first), width


def participants(cohorts: Cohorts) -> np.ndarray:
    """(rounds,) number of participants, as many rounds as the program takes."""
    counts = np.zeros(ROUNDS, np.int64)
    counts[: cohorts.rounds] = cohorts.counts
    return counts


def stretches(
    cohorts: Cohorts, start: int, stops: Sequence[int], dim: int
) -> tuple[np.ndarray, np.ndarray, np.int64]:
    """The last three of a Schedule."""
    ends = [*stops, start + cohorts.rounds]
    edges = np.full(most_recordings(dim) + 2, ends[-1], np.int64)
    edges[0], edges[1 : len(ends) + 1] = start, ends
    recorded = (np.arange(len(edges) - 1) < len(stops)).astype(np.int64)
    return edges, recorded, np.int64(len(ends))


# --- the program ----------------------------------------------------------------------------------


@partial(jax.jit, static_argnums=(0, 1))
def _advance(mesh: Mesh | None, width: int, span: Span) -> tuple[Any, Any, Array, Any]:
    visits = Visits(SPLIT, SPLIT, SPLIT, PartitionSpec(None, AXIS))
    specs = Span(
        algorithm=WHOLE,
        oracles=stack_specs(span.oracles),
        first=SPLIT,
        server=WHOLE,
        clients=SPLIT,
        schedule=Schedule(visits, *(WHOLE,) * 4),
        root=WHOLE,
    )
    out = WHOLE, SPLIT, WHOLE, WHOLE
    return over_shards(partial(_rounds, mesh, width), mesh, (specs,), out)(span)


def _rounds(mesh: Mesh | None, width: int, span: Span) -> tuple[Any, Any, Array, Any]:
    """The rounds of the span on this device's slice of the clients: the states, the row gradients
    of each, and what was recorded: models, and sums of values and gradients."""
    algorithm, oracles, _, server, clients, schedule, root = span
    (ids, slots, rows, starts), counts, edges, recorded, count = schedule
    ids, slots, rows, begin = ids[0], slots[0], rows[0], edges[0]

    def one_round(r: Array, carry: _Carry) -> _Carry:
        server, clients, after, gradients = carry
        pulled, of_round = algorithm.pull(server, r), round_key(root, r)
        first = starts[r - begin, 0]
        sums = _no_upload(algorithm, oracles, clients, pulled, root), jnp.zeros((), int)
        for b in range(len(oracles.sizes)):

            def see(j: Array, carry: Any, b: int = b) -> Any:
                after, sums = carry
                oracle = oracles.client(slots[j], b)
                key = jax.random.fold_in(of_round, ids[j])
                client, *adds = visit(algorithm, _at(clients, rows[j]), pulled, oracle, key)
                sums = jax.tree.map(jnp.add, sums, tuple(adds))
                return _put(after, j - first[0], client), sums

            after, sums = lax.fori_loop(first[b], first[b + 1], see, (after, sums))
        total, gradients = all_shards_sum(sums[0], mesh), gradients.at[r - begin].set(sums[1])
        server = push_unless_empty(algorithm, server, total, counts[r - begin])
        model = algorithm.model(server)

        def keep(j: Array, clients: Any) -> Any:
            client = _at(after, j - first[0])
            client = algorithm.receive(client, model) if algorithm.receives else client
            return _put(clients, rows[j], client)

        # Behind the visits: XLA copies all states where one loop both reads and writes them.
        clients = lax.fori_loop(first[0], first[-1], keep, clients)
        return server, clients, after, gradients

    def stretch(i: Array, carry: tuple[_Carry, Any]) -> tuple[_Carry, Any]:
        done, records = carry
        done = lax.fori_loop(edges[i], edges[i + 1], one_round, done)
        x = algorithm.model(done[0])
        sums = over_own_rows(RowOracle.value_and_grad, oracles, span.first, (x,), recorded[i])
        return done, _put(records, i, (x, *all_shards_sum(sums, mesh)))

    after = jax.tree.map(lambda a: jnp.zeros((width, *a.shape[1:]), a.dtype), clients)
    x = algorithm.model(server)
    records = tuple(jnp.zeros((len(recorded), *shape), x.dtype) for shape in (x.shape, (), x.shape))
    begin_with = (server, clients, after, jnp.zeros(len(counts), int)), records
    (server, clients, _, gradients), records = lax.fori_loop(0, count, stretch, begin_with)
    return server, clients, all_shards_sum(gradients, mesh), records


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
