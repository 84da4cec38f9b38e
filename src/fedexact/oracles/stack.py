"""The oracles of all clients over the rows of all, each client a slice."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedexact.core import record, static
from fedexact.losses.base import Loss, Rows
from fedexact.losses.design import Sparse
from fedexact.oracles.proximal import Eigen
from fedexact.oracles.rows import RowOracle


class Size(NamedTuple):
    """How long the slices of a bucket's clients are."""

    rows: int
    entries: int  # stored numbers of X, where it is sparse
    even: bool  # whether every client of the bucket has just so many rows


@record
class Stack:
    """f_k of all clients; one device's, or those of all devices one after the other.

    Every device holds `window` rows and `width` clients in its slots. A client of the bucket b is
    a slice of sizes[b].rows rows that contains its own; the others in it get weight 0 and repeat
    one of its own. So a client costs what its bucket's size costs, in `client(slot, b)`; without b
    every client is as long as the largest.
    """

    ROWS: ClassVar[frozenset[str]] = frozenset({"X", "y", "weight"})
    SHARED: ClassVar[frozenset[str]] = frozenset({"loss", "ridge"})

    loss: Loss
    ridge: Array  # (d,)
    X: Array | Sparse  # (rows, p); of a sparse one the values, columns and rows (entries,)
    y: Array  # (rows,)
    weight: Array  # (rows,) N w_k / n_k for means, N w_k for sums; 0 for rows of other devices
    own: Array  # (slots, 2) first row in the device's window, and number of rows
    row_weight: Array  # (slots,) the weight of each of them
    entry: Array  # (slots,) first entry of a sparse X in the device's window
    n_entries: Array  # (slots,)
    smoothness: Array  # (slots,) L_k of f_k, ridge included
    strong_convexity: Array  # (slots,) l_k of f_k, ridge included
    factor: Eigen | None = None  # (slots, ...) where prox_method == "factored"
    prox_method: str = static(default="newton")
    sizes: tuple[Size, ...] = static(default=())
    width: int = static(default=1)
    window: int = static(default=1)
    entries: int = static(default=1)  # length of a device's window of entries

    def client(self, slot: Array | int, bucket: int | None = None) -> RowOracle:
        """The oracle in a slot, of a client of that bucket; the slot may be traced."""
        size = largest(self.sizes) if bucket is None else self.sizes[bucket]
        shard = slot // self.width
        first, n = self.own[slot]
        start = first + shard * self.window
        begin = jnp.minimum(start, self.y.shape[0] - size.rows)
        rows = self._rows(slot, size, begin)
        weight = jnp.broadcast_to(self.row_weight[slot], (size.rows,))
        if not size.even:
            i = jnp.arange(size.rows) - (start - begin)
            own = (i >= 0) & (i < n)
            rows, weight = _repeat(rows, own, start - begin), jnp.where(own, weight, 0.0)
        factor = jax.tree.map(lambda leaf: leaf[slot], self.factor)
        return RowOracle(
            loss=self.loss,
            ridge=self.ridge,
            rows=rows,
            weight=weight,
            n_rows=n,
            smoothness=self.smoothness[slot],
            strong_convexity=self.strong_convexity[slot],
            factor=factor,
            prox_method=self.prox_method,
            source=None if isinstance(self.X, Sparse) else Rows(self.X, self.y),
            start=start,
            offset=start - begin,
        )

    def block(self, begin: Array | int, rows: int, done: Array | int) -> RowOracle:
        """A device's rows begin, begin + 1, ... as if they were one client's; those before `done`
        have weight 0. Only for values, gradients and Hessians, without ridge."""
        assert not isinstance(self.X, Sparse)
        weight = _slice(self.weight, begin, rows)
        return RowOracle(
            loss=self.loss,
            ridge=jnp.zeros_like(self.ridge),
            rows=Rows(_slice(self.X, begin, rows), _slice(self.y, begin, rows)),
            weight=jnp.where(begin + jnp.arange(rows) >= done, weight, 0.0),
            n_rows=jnp.asarray(rows),
            smoothness=jnp.zeros(()),
            strong_convexity=jnp.zeros(()),
        )

    def _rows(self, slot: Array | int, size: Size, begin: Array) -> Rows:
        y = _slice(self.y, begin, size.rows)
        if not isinstance(self.X, Sparse):
            return Rows(_slice(self.X, begin, size.rows), y)
        start = self.entry[slot] + slot // self.width * self.entries
        first = jnp.minimum(start, self.X.values.shape[0] - size.entries)
        values, columns, row = (
            _slice(part, first, size.entries)
            for part in (self.X.values, self.X.columns, self.X.row)
        )
        i = jnp.arange(size.entries) - (start - first)
        own = (i >= 0) & (i < self.n_entries[slot])
        before = (self.own[slot, 0] + slot // self.width * self.window - begin).astype(row.dtype)
        shape = (size.rows, self.X.shape[1])
        return Rows(Sparse(jnp.where(own, values, 0.0), columns, row + before, shape), y)


def largest(sizes: tuple[Size, ...]) -> Size:
    """A size that every client fits into."""
    even = len(sizes) == 1 and sizes[0].even
    return Size(max(s.rows for s in sizes), max(s.entries for s in sizes), even)


def _slice(array: Array, begin: Array | int, length: int) -> Array:
    return lax.dynamic_slice_in_dim(array, begin, length)


def _repeat(rows: Rows, own: Array, at: Array) -> Rows:
    """The rows that are not the client's own replaced by row `at`; sparse ones stay empty."""
    y = jnp.where(own, rows.y, rows.y[at])
    if isinstance(rows.X, Sparse):
        return Rows(rows.X, y)
    return Rows(jnp.where(own[:, None], rows.X, rows.X[at][None, :]), y)
