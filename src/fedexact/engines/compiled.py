"""All rounds between two recordings as one XLA program.

The participants of a round are visited one after the other, so that a client's rows stay in cache
during its local steps, and only they are visited: no padding of the cohort, no masked work. With
several JAX devices, each visits those of its own clients and the sums are added once per round.
The schedule is an argument: other participants, seeds or float hyperparameters compile nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from fedexact.core import Algorithm, client_key
from fedexact.engines.state import State, oracles_for, push_unless_empty, visit
from fedexact.layout import AXIS, Layout, all_shards_sum, oracle_specs, over_shards, put
from fedexact.oracles import RowOracle
from fedexact.participation import Cohorts
from fedexact.problem import Problem

# Up to WIDE slots a visit list has a place for every client, so that its shape never changes.
WIDE = 8192
# Rounds per program are rounded up to ROUNDS times a power of two.
ROUNDS = 16


class Visits(NamedTuple):
    """Who is visited in one bucket."""

    slots: Array  # (rounds, shards, width) positions within the shard, the first `counts` are valid
    counts: Array  # (rounds, shards)


class Span(NamedTuple):
    """A stretch of rounds: everything that its program takes."""

    algorithm: Any
    oracles: tuple[RowOracle, ...]  # per bucket, as the next three
    ids: Any  # (slots,) client of each slot
    server: Any
    clients: Any
    visits: Any
    start: Any  # first round
    stop: Any  # the one after the last
    root: Any  # key


_Carry = tuple[Any, tuple[Any, ...], Array]  # server, clients per bucket, row gradients


class Compiled:
    """The default engine."""

    def load(self, problem: Problem, server: Any, clients: Any) -> State:
        layout = problem.layout
        leaves, tree = jax.tree.flatten(clients)
        per_leaf = [layout.in_slots(np.asarray(leaf)) for leaf in leaves]
        buckets = [jax.tree.unflatten(tree, leaves) for leaves in zip(*per_leaf, strict=True)]
        if not leaves:
            buckets = [clients for _ in layout.buckets]
        server = jax.tree.map(lambda a: put(a, layout.mesh, PartitionSpec()), server)
        return State(
            server,
            tuple(
                jax.tree.map(lambda a: put(a, layout.mesh, PartitionSpec(AXIS)), bucket)
                for bucket in buckets
            ),
        )

    def clients(self, problem: Problem, state: State) -> Any:
        return jax.tree.map(
            lambda *stacked: problem.layout.in_client_order([np.asarray(a) for a in stacked]),
            *state.clients,
        )

    def advance(
        self,
        algorithm: Algorithm,
        problem: Problem,
        state: State,
        cohorts: Cohorts,
        start: int,
        root: Array,
    ) -> tuple[State, int]:
        layout = problem.layout
        span = Span(
            algorithm,
            oracles_for(algorithm, problem),
            tuple(jnp.asarray(bucket.slots) for bucket in layout.buckets),
            *state,
            visits(layout, cohorts),
            jnp.asarray(start),
            jnp.asarray(start + len(cohorts.offsets) - 1),
            root,
        )
        server, clients, rows = jax.block_until_ready(_advance(layout.mesh, span))
        return State(server, clients), int(rows)


def visits(layout: Layout, cohorts: Cohorts) -> tuple[Visits, ...]:
    """Sorts the participants of every round by bucket and shard."""
    T = len(cohorts.offsets) - 1
    rounds = _at_least(T, ROUNDS)
    round_of = np.repeat(np.arange(T), np.diff(cohorts.offsets))
    bucket_of, slot_of = layout.bucket_of[cohorts.ids], layout.slot_of[cohorts.ids]
    out = []
    for b in range(len(layout.buckets)):
        here = bucket_of == b
        shard, slot = np.divmod(slot_of[here], layout.width(b))
        cell = round_of[here] * layout.shards + shard
        order = np.argsort(cell, kind="stable")
        count = np.bincount(cell, minlength=rounds * layout.shards)
        width = layout.width(b)
        if width > WIDE:
            width = min(width, _at_least(int(count.max(initial=1)), WIDE // 2))
        slots = np.zeros((len(count), width), np.int32)
        first = np.cumsum(count) - count
        slots[cell[order], np.arange(len(order)) - first[cell[order]]] = slot[order]
        shape = (rounds, layout.shards)
        out.append(
            Visits(jnp.asarray(slots.reshape(*shape, -1)), jnp.asarray(count.reshape(shape)))
        )
    return tuple(out)


def _at_least(n: int, least: int) -> int:
    """The least power of two times `least` that is >= n."""
    return least * 2 ** max(0, int(np.ceil(np.log2(max(n, 1) / least))))


@partial(jax.jit, static_argnums=0)
def _advance(mesh: Mesh | None, span: Span) -> tuple[Any, tuple[Any, ...], Array]:
    split, whole = PartitionSpec(AXIS), PartitionSpec()
    specs = Span(
        algorithm=whole,
        oracles=tuple(oracle_specs(oracle) for oracle in span.oracles),
        ids=split,
        server=whole,
        clients=split,
        visits=PartitionSpec(None, AXIS),
        start=whole,
        stop=whole,
        root=whole,
    )
    return over_shards(partial(_rounds, mesh), mesh, (specs,), (whole, split, whole))(span)


def _rounds(mesh: Mesh | None, span: Span) -> tuple[Any, tuple[Any, ...], Array]:
    """The rounds of the span on this device's slice of the clients, and their row gradients."""
    algorithm, oracles, ids, server, clients, visits, start, stop, root = span

    def one_round(r: Array, carry: _Carry) -> _Carry:
        server, clients, gradients = carry
        pulled = algorithm.pull(server, r)
        total, count, after = _no_upload(algorithm, oracles[0], clients[0], pulled, root), 0, []
        rows = jnp.zeros_like(gradients)
        for oracle, k, states, seen in zip(oracles, ids, clients, visits, strict=True):
            slots, n = seen.slots[r - start, 0], seen.counts[r - start, 0]

            def see(
                slot: Array, states: Any, sums: Any, oracle: RowOracle = oracle, k: Array = k
            ) -> tuple[Any, Any]:
                key = client_key(root, r, k[slot])
                client, *adds = visit(
                    algorithm, _at(states, slot), pulled, oracle.client(slot), key
                )
                return _put(states, slot, client), jax.tree.map(jnp.add, sums, tuple(adds))

            states, (total, rows) = _over(slots, n, see, states, (total, rows))
            after.append(states)
            count = count + n
        total, count, rows = all_shards_sum((total, count, rows), mesh)
        server = push_unless_empty(algorithm, server, total, count)
        if algorithm.receives:
            after = _all_receive(algorithm, server, after, visits, r - start)
        return server, tuple(after), gradients + rows

    return lax.fori_loop(start, stop, one_round, (server, clients, jnp.zeros(())))


def _all_receive(
    algorithm: Algorithm, server: Any, clients: Any, visits: tuple[Visits, ...], r: Array
) -> list[Any]:
    """The clients after the participants of the round got the new model."""
    model = algorithm.model(server)

    def get(slot: Array, states: Any, _: tuple[()]) -> tuple[Any, tuple[()]]:
        return _put(states, slot, algorithm.receive(_at(states, slot), model)), ()

    return [
        _over(seen.slots[r, 0], seen.counts[r, 0], get, states, ())[0]
        for states, seen in zip(clients, visits, strict=True)
    ]


def _over(
    slots: Array,
    n: Array,
    see: Callable[[Array, Any, Any], tuple[Any, Any]],
    states: Any,
    sums: Any,
) -> tuple[Any, Any]:
    """`see` for the first n slots, one after the other: the states and sums it leaves."""
    return lax.fori_loop(0, n, lambda j, carry: see(slots[j], *carry), (states, sums))


def _at(states: Any, slot: Array) -> Any:
    return jax.tree.map(lambda a: a[slot], states)


def _put(states: Any, slot: Array, client: Any) -> Any:
    return jax.tree.map(lambda a, new: a.at[slot].set(new), states, client)


def _no_upload(
    algorithm: Algorithm, oracle: RowOracle, states: Any, pulled: Any, root: Array
) -> Any:
    """The sum of no uploads: zeros of an upload's shape."""
    client = jax.tree.map(lambda a: a[0], states)
    _, upload = jax.eval_shape(algorithm.local, client, pulled, oracle.client(0), root)
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), upload)
