"""How the clients' rows lie in memory: padded to a few sizes, spread over the devices.

Clients of similar size share a bucket, a stack of arrays with a leading client axis, so that the
cost of a round grows with its participants' rows and not with N times the largest client. With
several JAX devices each holds a slice of every bucket.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedexact.errors import InputError
from fedexact.losses import Rows
from fedexact.oracles import RowOracle, bucket_sizes

AXIS = "clients"
LARGEST = 1e100  # in modulus, of a cell
# Entries of X; below, the devices wait for each other longer than they work.
WORTH_SHARDING = 1_000_000


class Clients(NamedTuple):
    """Validated rows of all clients."""

    X: list[np.ndarray]
    y: list[np.ndarray]
    names: list[str]
    feature_names: list[str]

    def fingerprint(self, w: np.ndarray) -> str:
        """Tells these rows, in this order and with these client weights, from any others."""
        digest = hashlib.sha256(np.ascontiguousarray(w).data)
        for X, y in zip(self.X, self.y, strict=True):
            digest.update(repr(X.shape).encode())
            for array in (X, y):
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()[:32]


class Bucket(NamedTuple):
    """Clients padded to one size, in slots (shard, position); an empty slot has client -1."""

    size: int
    slots: np.ndarray  # (shards * width,) client of each slot, -1 where empty


class Layout:
    """Which client lies in which slot of which bucket."""

    def __init__(self, n_rows: np.ndarray, n_features: int, shards: int | None = None) -> None:
        self.n_clients, self.n_rows = len(n_rows), n_rows
        self.shards = _choose_shards(n_rows, n_features, shards)
        self.mesh = (
            Mesh(np.array(jax.devices()[: self.shards]), (AXIS,)) if self.shards > 1 else None
        )
        self.buckets = [
            Bucket(size, _slots(members, self.shards)) for size, members in bucket_sizes(n_rows)
        ]
        self.bucket_of = np.empty(self.n_clients, np.int32)
        self.slot_of = np.empty(self.n_clients, np.int32)
        for b, bucket in enumerate(self.buckets):
            taken = np.flatnonzero(bucket.slots >= 0)
            self.bucket_of[bucket.slots[taken]] = b
            self.slot_of[bucket.slots[taken]] = taken

    def width(self, b: int) -> int:
        """Slots per shard of bucket b."""
        return len(self.buckets[b].slots) // self.shards

    @property
    def taken(self) -> list[np.ndarray]:
        """Per bucket, (shards,) number of clients; they come first in each shard."""
        return [(b.slots.reshape(self.shards, -1) >= 0).sum(axis=1) for b in self.buckets]

    def stacks(
        self, X: Sequence[np.ndarray], y: Sequence[np.ndarray], scale: np.ndarray
    ) -> Iterator[tuple[Rows, np.ndarray, np.ndarray]]:
        """Per bucket: rows (slots, size, ...), row weights (slots, size), n_rows (slots,)."""
        stacked = [np.concatenate(a) for a in (X, y)]
        for size, slots in self.buckets:
            padding = _padding(self.n_rows, slots, size)
            rows = Rows(*(jnp.asarray(a[padding]) for a in stacked))
            n_rows = self.n_rows[np.maximum(slots, 0)]
            weight = np.where(slots >= 0, scale[slots], 0.0)[:, None] * (
                np.arange(size)[None, :] < n_rows[:, None]
            )
            yield rows, weight, n_rows

    def place(self, oracles: Iterable[RowOracle]) -> tuple[RowOracle, ...]:
        """The stacked oracles on their devices."""
        return tuple(
            jax.tree.map(lambda a, spec: put(a, self.mesh, spec), oracle, oracle_specs(oracle))
            for oracle in oracles
        )

    def in_client_order(self, stacked: Sequence[np.ndarray]) -> np.ndarray:
        """(N, ...) from the per-bucket arrays (slots, ...)."""
        out = np.empty((self.n_clients, *stacked[0].shape[1:]), stacked[0].dtype)
        for bucket, a in zip(self.buckets, stacked, strict=True):
            taken = bucket.slots >= 0
            out[bucket.slots[taken]] = a[taken]
        return out

    def in_slots(self, array: np.ndarray) -> list[np.ndarray]:
        """Per-bucket arrays (slots, ...) from one in client order; empty slots repeat client 0."""
        return [array[np.maximum(b.slots, 0)] for b in self.buckets]

    def rows_in_client_order(
        self, oracles: Sequence[RowOracle]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """X (n, p), y (n,), weight (n,) of all rows, client after client, without padding."""
        parts = []
        for k in range(self.n_clients):
            oracle, slot = oracles[self.bucket_of[k]], self.slot_of[k]
            n = int(oracle.n_rows[slot])
            parts.append([np.asarray(a[slot, :n]) for a in (*oracle.rows, oracle.weight)])
        X, y, weight = (np.concatenate(column) for column in zip(*parts, strict=True))
        return X, y, weight


def oracle_specs(oracle: RowOracle) -> RowOracle:
    """Partition specs of a stacked oracle: per-client fields split, shared ones replicated."""
    specs = {
        field.name: jax.tree.map(
            lambda _, s=(() if field.name in oracle.SHARED else (AXIS,)): PartitionSpec(*s),
            getattr(oracle, field.name),
        )
        for field in dataclasses.fields(oracle)
        if not field.metadata.get("static")
    }
    return dataclasses.replace(oracle, **specs)


def put(a: Any, mesh: Mesh | None, spec: PartitionSpec) -> jax.Array:
    """`a` on the device, or on those of the mesh."""
    a = jnp.asarray(a)
    return a if mesh is None else jax.device_put(a, NamedSharding(mesh, spec))


def over_shards(
    fn: Callable[..., Any], mesh: Mesh | None, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`fn` run by every device on its slice; `fn` itself on one device."""
    if mesh is None:
        return fn
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def all_shards_sum(tree: Any, mesh: Mesh | None) -> Any:
    """Inside `over_shards`: the sum over the devices."""
    return tree if mesh is None else jax.lax.psum(tree, AXIS)


def sum_over_clients(
    fn: Callable[..., Any], layout: Layout, oracles: tuple[RowOracle, ...], *args: Any
) -> Any:
    """sum_k fn(oracle_k, *args), mapping over the clients of each shard."""
    return _sum_over_clients(fn, layout.mesh, oracles, tuple(layout.taken), args)


@partial(jax.jit, static_argnums=(0, 1))
def _sum_over_clients(
    fn: Callable[..., Any],
    mesh: Mesh | None,
    oracles: tuple[RowOracle, ...],
    taken: tuple[jax.Array, ...],
    args: tuple[Any, ...],
) -> Any:
    def shard(
        oracles: tuple[RowOracle, ...], taken: tuple[jax.Array, ...], args: tuple[Any, ...]
    ) -> Any:
        shape = jax.eval_shape(lambda: fn(oracles[0].client(0), *args))
        total = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shape)
        for oracle, count in zip(oracles, taken, strict=True):

            def add(j: jax.Array, total: Any, oracle: RowOracle = oracle) -> Any:
                return jax.tree.map(jnp.add, total, fn(oracle.client(j), *args))

            total = jax.lax.fori_loop(0, count[0], add, total)
        return all_shards_sum(total, mesh)

    split = PartitionSpec(AXIS)
    specs = (tuple(oracle_specs(o) for o in oracles), split, PartitionSpec())
    return over_shards(shard, mesh, specs, PartitionSpec())(oracles, taken, args)


# --- reading the clients --------------------------------------------------------------------------


def read_clients(
    clients: Sequence[tuple[Any, Any]],
    names: Sequence[str] | None,
    feature_names: Sequence[str] | None,
    fit_intercept: bool,
) -> Clients:
    """Checks every client's rows; puts the column of ones first where there is an intercept."""
    try:
        clients = list(clients)
    except TypeError:
        raise InputError(f"clients must be a sequence of (X, y), got {clients!r}") from None
    if not clients:
        raise InputError("clients is empty: at least one (X, y) is needed")
    names = _check_names(names, len(clients))
    pairs = [_read_client(c, n, feature_names) for c, n in zip(clients, names, strict=True)]
    p = pairs[0][0].shape[1]
    for name, (X, _) in zip(names, pairs, strict=True):
        if X.shape[1] != p:
            raise InputError(
                f"client {name!r} has {X.shape[1]} columns, client {names[0]!r} has {p}: "
                "all clients need the same columns in the same order"
            )
    features = list(feature_names) if feature_names else [f"x{j}" for j in range(p)]
    if len(features) != p:
        raise InputError(f"feature_names has {len(features)} names for {p} columns")
    X, y = [X for X, _ in pairs], [y for _, y in pairs]
    if fit_intercept:
        X = [np.column_stack([np.ones(len(a)), a]) for a in X]
        features = ["intercept", *features]
    return Clients(X, y, names, features)


def _check_names(names: Sequence[str] | None, n_clients: int) -> list[str]:
    if names is None:
        return [str(k) for k in range(n_clients)]
    if isinstance(names, str):
        raise InputError(f"names must be a sequence of names, got the string {names!r}")
    names = [str(name) for name in names]
    if len(names) != n_clients:
        raise InputError(f"names has {len(names)} entries for {n_clients} clients")
    for k, name in enumerate(names):
        if name in names[:k]:
            raise InputError(f"two clients are called {name!r}: give each its own name")
    return names


def _read_client(
    client: Any, name: str, feature_names: Sequence[str] | None
) -> tuple[np.ndarray, np.ndarray]:
    try:
        X, y = client
    except (TypeError, ValueError):
        raise InputError(f"client {name!r} must be a pair (X, y), got {type(client)}") from None
    try:
        X, y = np.asarray(X), np.asarray(y)
        if np.iscomplexobj(X) or np.iscomplexobj(y):
            raise TypeError("complex numbers")
        X, y = X.astype(float), y.astype(float)
    except (TypeError, ValueError) as error:
        raise InputError(f"client {name!r}: X and y must be real numbers ({error})") from None
    if X.ndim != 2 or y.ndim != 1 or len(X) != len(y):
        raise InputError(
            f"client {name!r}: X must be (rows, columns) and y (rows,), got {X.shape} and {y.shape}"
        )
    if len(y) == 0:
        raise InputError(f"client {name!r} has zero rows: leave it out or give it data")
    if X.shape[1] == 0:
        raise InputError(f"client {name!r} has zero columns")
    columns = [*(feature_names or ()), *range(len(feature_names or ()), X.shape[1])]
    check_cells(X, [f"column {c!r}" for c in columns], f"client {name!r}")
    check_cells(y[:, None], ["target"], f"client {name!r}")
    return X, y


def check_cells(values: np.ndarray, columns: Sequence[str], where: str) -> None:
    """InputError for a cell of (rows, columns) that is not finite, or whose square overflows."""
    for bad, remedy in (
        (~np.isfinite(values), "drop or impute them"),
        (np.abs(values) > LARGEST, f"larger than {LARGEST:g}, its square overflows; rescale"),
    ):
        if bad.any():
            i, j = np.argwhere(bad)[0]
            count = int(bad.any(axis=1).sum())
            raise InputError(
                f"{where}, {columns[j]}, row {i}: value {values[i, j]} "
                f"({count} of {len(values)} rows have such values): {remedy}"
            )


# --- slots ----------------------------------------------------------------------------------------


def _choose_shards(n_rows: np.ndarray, n_features: int, shards: int | None) -> int:
    available = len(jax.devices())
    if shards is None:
        worth = int(n_rows.sum()) * n_features >= WORTH_SHARDING and len(n_rows) >= 2 * available
        return available if worth else 1
    if not 1 <= shards <= available:
        raise InputError(f"shards must be between 1 and {available}, the number of JAX devices")
    return shards


def _slots(members: np.ndarray, shards: int) -> np.ndarray:
    """Deals the clients over the shards, the same number of slots on each, empty ones last."""
    width = -(-len(members) // shards)
    slots = np.full((shards, width), -1)
    for s in range(shards):
        dealt = members[s::shards]
        slots[s, : len(dealt)] = dealt
    return slots.ravel()


def _padding(n_rows: np.ndarray, slots: np.ndarray, size: int) -> np.ndarray:
    """(slots, size) indices into the stacked rows of all clients: a client's own rows, then its
    first row again."""
    start = np.cumsum(n_rows) - n_rows
    k = np.maximum(slots, 0)[:, None]
    i = np.arange(size)[None, :]
    return start[k] + np.where(i < n_rows[k], i, 0)
