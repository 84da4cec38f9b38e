"""The clients' states in memory: for few clients all of them, for many those that were visited."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from fedexact.devices import SPLIT, WHOLE, fetch, over_shards, put
from fedexact.layout import Layout

FEW = 10_000  # clients; up to so many, each has its place from the start
GROWTH = 4  # of the places when they run out: few programs are compiled on the way


class Slab(NamedTuple):
    """States of the clients that have a place; all others are still in their initial state."""

    states: Any  # (shards * capacity, ...)
    place: np.ndarray  # (N,) position within the client's shard, -1 for none
    taken: np.ndarray  # (shards,) number of places taken
    initial: Any  # one client's state before its first visit

    @staticmethod
    def load(layout: Layout, clients: Any) -> Slab:
        """From states stacked in client order (N, ...); equal ones, broadcast from one, need no
        memory until they are visited."""
        initial = jax.tree.map(lambda a: np.array(a[0]), clients)
        if layout.n_clients > FEW and all(_repeated(a) for a in jax.tree.leaves(clients)):
            places = np.full(layout.n_clients, -1, np.int32), np.zeros(layout.shards, np.int64)
            return Slab(_empty(layout, initial, FEW // layout.shards), *places, initial)
        states = jax.tree.map(
            lambda a: put(layout.in_slots(np.asarray(a)), layout.mesh, SPLIT), clients
        )
        place = (layout.slot_of % layout.width).astype(np.int32)
        return Slab(states, place, np.full(layout.shards, layout.width), initial)

    def with_places(self, layout: Layout, ids: np.ndarray) -> Slab:
        """The same with a place for each of these clients."""
        new = np.unique(ids[self.place[ids] < 0])
        if len(new) == 0:
            return self
        place, shard = self.place.copy(), layout.shard_of[new]
        count = np.bincount(shard, minlength=layout.shards)
        place[new] = self.taken[shard] + np.arange(len(new)) - (np.cumsum(count) - count)[shard]
        slab = self._replace(place=place, taken=self.taken + count)
        return slab._grown(layout)

    def _grown(self, layout: Layout) -> Slab:
        leaves = jax.tree.leaves(self.states)
        have = leaves[0].shape[0] // layout.shards if leaves else layout.n_clients
        need = int(self.taken.max())
        if need <= have:
            return self
        capacity = have
        while capacity < need:
            capacity *= GROWTH
        extra = min(capacity, layout.width) - have
        return self._replace(states=_longer(layout.mesh, extra, self.states, self.initial))

    def in_client_order(self, layout: Layout) -> Any:
        """(N, ...) as NumPy."""
        placed = np.flatnonzero(self.place >= 0)

        def leaf(states: jax.Array, initial: np.ndarray) -> np.ndarray:
            shape = (layout.n_clients, *initial.shape)
            out = np.zeros(shape, initial.dtype)  # untouched pages of zeros take no memory
            if initial.any():
                out[:] = initial
            capacity = states.shape[0] // layout.shards
            out[placed] = fetch(states)[layout.shard_of[placed] * capacity + self.place[placed]]
            return out

        return jax.tree.map(leaf, self.states, self.initial)


def _repeated(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) and leaf.strides[0] == 0


def _empty(layout: Layout, initial: Any, capacity: int) -> Any:
    rows = layout.shards * min(capacity, layout.width)
    return jax.tree.map(
        lambda a: put(np.broadcast_to(a, (rows, *a.shape)), layout.mesh, SPLIT), initial
    )


@partial(jax.jit, static_argnums=(0, 1))
def _longer(mesh: Mesh | None, extra: int, states: Any, initial: Any) -> Any:
    def shard(states: Any, initial: Any) -> Any:
        return jax.tree.map(
            lambda a, new: jnp.concatenate([a, jnp.broadcast_to(new, (extra, *new.shape))]),
            states,
            initial,
        )

    return over_shards(shard, mesh, (SPLIT, WHOLE), SPLIT)(states, initial)
