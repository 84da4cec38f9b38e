"""Which client lies where: rows, slots and devices.

Every device holds a window of the rows in client order, and every client is a slice of its device's
window: rows are neither padded nor moved. What there is one of per client (its size, constants,
state) lies in slots. A slice has one of a few sizes, the sizes of the buckets, so that few programs
are compiled and a round costs what its participants' rows cost, not N times the largest client.
"""

from __future__ import annotations

import copy

import numpy as np
from jax import Array
from jax.sharding import Mesh

from fedexact.clients import Clients
from fedexact.devices import SPLIT, WHOLE, choose_shards, mesh_of, put, put_windows
from fedexact.losses import Loss
from fedexact.losses.design import Sparse
from fedexact.oracles import Size, Stack, bucket_sizes

# Windows start at multiples of so many rows: float64 rows of any width are then 64-byte aligned.
GRAIN = 8
# Rows of all slices at most, in rows of the clients: every size is one more program to compile,
# which small problems do not repay.
SLACK, LOOSE, LARGE = 1.25, 2.0, 200_000  # LARGE in entries of X
ROOM = 1024  # slots at least, in a layout of some of the clients


class Layout:
    """The slots of clients with `n_rows` (N,) rows, and `n_entries` (N,) stored numbers of X.

    Attributes:
        shards: the number of devices.
        sizes: of the buckets, ascending.
        bucket_of, shard_of, slot_of: (N,) bucket, shard and slot of each client.
        slots: (shards * width,) client of each slot, shard after shard, -1 where there is none. A
            shard's clients come first, bucket after bucket.
        first: (shards, buckets + 1) where in its shard the slots of each bucket begin.
    """

    def __init__(self, n_rows: np.ndarray, n_entries: np.ndarray, shards: int = 1) -> None:
        self.n_clients = len(n_rows)
        self.shards = shards
        buckets = bucket_sizes(n_rows, slack=SLACK if n_entries.sum() >= LARGE else LOOSE)
        self.bucket_of = np.empty(self.n_clients, np.int32)
        for b, (_, members) in enumerate(buckets):
            self.bucket_of[members] = b
        self.sizes = tuple(
            Size(size, int(n_entries[members].max()), bool(np.all(n_rows[members] == size)))
            for size, members in buckets
        )
        self.shard_of = _even_shares(n_entries + n_rows, self.shards)
        self._deal(1)

    def only(self, ids: np.ndarray) -> Layout:
        """Of these clients alone, ascending, on one device; with room, so that the layouts of
        similar numbers of clients look alike to a program."""
        part = copy.copy(self)
        part.n_clients, part.shards = len(ids), 1
        part.bucket_of, part.shard_of = self.bucket_of[ids], np.zeros(len(ids), np.int32)
        part._deal(ROOM)
        return part

    @property
    def mesh(self) -> Mesh | None:
        """The devices; None for one alone."""
        return mesh_of(self.shards)

    def _deal(self, room: int) -> None:
        """The slots, for the buckets and shards that the clients have; a power of two times `room`
        of them where that is more than 1."""
        order = np.lexsort((self.bucket_of, self.shard_of))
        per_shard = np.bincount(self.shard_of, minlength=self.shards)
        place = np.arange(self.n_clients) - np.repeat(np.cumsum(per_shard) - per_shard, per_shard)
        self.width = at_least(int(per_shard.max()), room) if room > 1 else int(per_shard.max())
        self.slot_of = np.empty(self.n_clients, np.int32)
        self.slot_of[order] = self.shard_of[order] * self.width + place
        self.slots = np.full(self.shards * self.width, -1)
        self.slots[self.slot_of] = np.arange(self.n_clients)
        cell = self.shard_of * len(self.sizes) + self.bucket_of
        counts = np.bincount(cell, minlength=self.shards * len(self.sizes))
        self.first = np.zeros((self.shards, len(self.sizes) + 1), np.int32)
        self.first[:, 1:] = np.cumsum(counts.reshape(self.shards, -1), axis=1)

    def in_slots(self, array: np.ndarray) -> np.ndarray:
        """(slots, ...) from (N, ...) in client order; empty slots repeat client 0."""
        return array[np.maximum(self.slots, 0)]

    def in_client_order(self, stacked: np.ndarray) -> np.ndarray:
        """(N, ...) from (slots, ...)."""
        return stacked[self.slot_of]

    def windows(self, lengths: np.ndarray, total: int) -> tuple[np.ndarray, int]:
        """Where each shard's window begins (shards,), and how long all are.

        `lengths` (N,) numbers of consecutive things each client owns, in client order, the first of
        `total`; a window holds those of its shard's clients, and at least as many as the largest
        client's.
        """
        if self.shards == 1:
            return np.zeros(1, int), total
        begins = np.cumsum(lengths) - lengths
        edges = np.searchsorted(self.shard_of, np.arange(self.shards + 1))
        bounds = np.append(begins, total)[edges]
        starts = bounds[:-1] - bounds[:-1] % GRAIN
        long = max(int(np.max(bounds[1:] - starts)), int(lengths.max()))
        starts = np.minimum(starts, total - long)
        starts = np.maximum(starts - starts % GRAIN, 0)
        return starts, min(int(np.max(np.maximum(bounds[1:] - starts, long))), total)


def at_least(n: int, least: int) -> int:
    """The least power of two times `least` that is >= n."""
    return least * 2 ** max(0, int(np.ceil(np.log2(max(n, 1) / least))))


def clients_layout(clients: Clients, dim: int, shards: int | None = None) -> Layout:
    """The layout of these clients' rows for models of `dim` numbers."""
    work = clients.entries * dim // clients.n_features
    return Layout(
        clients.n_rows, entries_of(clients), choose_shards(len(clients.n_rows), work, shards)
    )


def entries_of(clients: Clients) -> np.ndarray:
    """(N,) numbers in each client's X, the stored ones of a sparse one."""
    if clients.sparse:
        return np.diff(clients.X.indptr[np.append(clients.start, clients.X.shape[0])])
    return clients.n_rows * clients.n_features


def place(
    clients: Clients, layout: Layout, loss: Loss, ridge: np.ndarray, row_weight: np.ndarray
) -> Stack:
    """The clients' rows and sizes on the devices; their constants are left open.

    `row_weight` (N,) is the weight of each row of a client. Rows behind those of the last client
    belong to nobody.
    """
    starts, window = layout.windows(clients.n_rows, len(clients.y))
    shard_of_slot = np.arange(len(layout.slots)) // layout.width
    taken, mesh = layout.slots >= 0, layout.mesh
    weights = []
    for s, begin in enumerate(starts.tolist()):
        weight = np.zeros(len(clients.y))
        mine = np.where(layout.shard_of == s, row_weight, 0.0)
        weight[: clients.n_rows.sum()] = np.repeat(mine, clients.n_rows)
        weights.append(weight[begin : begin + window])
    X, entry, entries = clients.X, np.zeros(len(taken), np.int64), 1
    if clients.sparse:
        X, entry, entries = _place_entries(clients, layout)
    else:
        X = put_windows(_cut(X, starts, window), mesh)

    def slots(per_client: np.ndarray, shift: np.ndarray | int = 0) -> Array:
        found = layout.in_slots(per_client) - shift
        found[~taken] = 0
        return put(found, mesh, SPLIT)

    return Stack(
        loss=loss,
        ridge=put(ridge, mesh, WHOLE),
        X=X,
        y=put_windows(_cut(clients.y, starts, window), mesh),
        weight=put_windows(weights, mesh),
        own=slots(
            np.column_stack([clients.start, clients.n_rows]),
            np.column_stack([starts[shard_of_slot], np.zeros(len(taken), int)]),
        ),
        row_weight=slots(row_weight),
        entry=put(entry, mesh, SPLIT),
        n_entries=slots(entries_of(clients)),
        smoothness=slots(np.zeros(len(clients.n_rows))),
        strong_convexity=slots(np.zeros(len(clients.n_rows))),
        sizes=layout.sizes,
        width=layout.width,
        window=window,
        entries=entries,
    )


def _place_entries(clients: Clients, layout: Layout) -> tuple[Sparse, np.ndarray, int]:
    """The stored numbers of a sparse X on the devices, the first one of each slot in its device's
    window, and the length of the windows."""
    X, counts = clients.X, entries_of(clients)
    starts, window = layout.windows(counts, X.nnz)
    row = np.arange(X.shape[0]) - np.repeat(clients.start, clients.n_rows)
    row = np.repeat(row, np.diff(X.indptr)).astype(np.int32)
    # column after column: in the order of the rows each addition would wait for the one before
    order = np.lexsort((X.indices, np.repeat(np.arange(len(counts)), counts)))
    values, columns, row = (
        put_windows(_cut(part, starts, window), layout.mesh)
        for part in (X.data[order], X.indices[order].astype(np.int32), row[order])
    )
    begin = layout.in_slots(np.cumsum(counts) - counts)
    entry = begin - starts[np.arange(len(layout.slots)) // layout.width]
    return Sparse(values, columns, row, X.shape), np.where(layout.slots >= 0, entry, 0), window


def _cut(array: np.ndarray, starts: np.ndarray, length: int) -> list[np.ndarray]:
    """The windows [start, start + length) of an array, as views."""
    return [array[start : start + length] for start in starts.tolist()]


def _even_shares(load: np.ndarray, shards: int) -> np.ndarray:
    """(N,) shard of each client: consecutive clients, about the same load on every shard."""
    middle = np.cumsum(load) - load / 2
    return np.minimum((middle * shards / load.sum()).astype(np.int32), shards - 1)
