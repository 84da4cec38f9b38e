"""The rows of all clients as they were given, checked and stacked in client order."""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import scipy.sparse

from fedexact.errors import InputError

LARGEST = 1e100  # in modulus, of a cell
CHECKED = 1 << 24  # cells that are checked at once
ALIGNED = 64  # bytes; JAX uses arrays that are aligned so without a copy


class Clients:
    """Rows of all clients: client k owns the n_rows[k] rows after those of the clients before it.

    What `Problem` takes where a list of (X, y) pairs is too slow or too large: a million clients,
    a memory map, a sparse matrix.

    Args:
        X: (n, p) array, memory map, or scipy.sparse matrix (kept as CSR, never made dense).
        y: (n,) targets.
        n_rows: (N,) rows of each client, >= 1; they add up to n.
        names: N client names, "0", "1", ... if left out.
        feature_names: names of the p columns, "x0", "x1", ... if left out.

    Raises:
        InputError: naming the client, the column and the value.
    """

    def __init__(
        self,
        X: Any,
        y: Any,
        n_rows: Any,
        names: Sequence[str] | None = None,
        feature_names: Sequence[str] | None = None,
    ) -> None:
        self.X, self.y = _matrix(X, "clients"), _numbers(y, "clients")
        self.n_rows = np.asarray(n_rows)
        if self.n_rows.ndim != 1 or not np.issubdtype(self.n_rows.dtype, np.integer):
            raise InputError("n_rows must be integers, one for each client")
        self.names = check_names(names, len(self.n_rows))
        self.feature_names = _features(feature_names, self.X.shape[1])
        self.ones = False  # whether a column of ones comes before those of X
        self._check()

    @staticmethod
    def of(
        clients: Any,
        names: Sequence[str] | None = None,
        feature_names: Sequence[str] | None = None,
    ) -> Clients:
        """Stacks a sequence of (X, y) pairs; a `Clients` stays what it is, but for new names."""
        if isinstance(clients, Clients):
            return clients.renamed(names, feature_names)
        try:
            clients = list(clients)
        except TypeError:
            raise InputError(f"clients must be a sequence of (X, y), got {clients!r}") from None
        if not clients:
            raise InputError("clients is empty: at least one (X, y) is needed")
        names = check_names(names, len(clients))
        pairs = [_read_client(c, n) for c, n in zip(clients, names, strict=True)]
        p = pairs[0][0].shape[1]
        for name, (X, _) in zip(names, pairs, strict=True):
            if X.shape[1] != p:
                raise InputError(
                    f"client {name!r} has {X.shape[1]} columns, client {names[0]!r} has {p}: "
                    "all clients need the same columns in the same order"
                )
        n_rows = np.array([len(y) for _, y in pairs])
        X = _stacked([X for X, _ in pairs], int(n_rows.sum()), p)
        return Clients(X, np.concatenate([y for _, y in pairs]), n_rows, names, feature_names)

    def renamed(self, names: Sequence[str] | None, feature_names: Sequence[str] | None) -> Clients:
        """The same rows under other names, where these are given."""
        p, N = self.X.shape[1], len(self.n_rows)
        return self._but(
            names=self.names if names is None else check_names(names, N),
            feature_names=self.feature_names
            if feature_names is None
            else _features(feature_names, p),
        )

    def with_intercept(self) -> Clients:
        """The same with a column of ones put first; before a memory map's only as it is read."""
        n = self.X.shape[0]
        feature_names = ["intercept", *self.feature_names]
        if self.on_disk:
            return self._but(ones=True, feature_names=feature_names)
        if self.sparse:
            X = scipy.sparse.csr_array(scipy.sparse.hstack([np.ones((n, 1)), self.X], format="csr"))
        else:
            X = _after_ones(self.X, aligned((n, self.X.shape[1] + 1)))
        return self._but(X=X, feature_names=feature_names)

    def with_targets(self, y: np.ndarray) -> Clients:
        """The same with other targets (n,)."""
        if y.dtype == float and y.ctypes.data % ALIGNED:
            y, unaligned = aligned(y.shape), y
            y[:] = unaligned
        return self._but(y=y)

    def _but(self, **changes: Any) -> Clients:
        """The same rows with some attributes replaced, not checked again."""
        other = copy.copy(self)
        vars(other).update(changes)
        return other

    @cached_property
    def start(self) -> np.ndarray:
        """(N,) first row of each client."""
        return np.cumsum(self.n_rows) - self.n_rows

    @property
    def sparse(self) -> bool:
        """Whether X is a sparse matrix."""
        return scipy.sparse.issparse(self.X)

    @property
    def entries(self) -> int:
        """Numbers in X, the stored ones of a sparse one."""
        return self.X.nnz if self.sparse else self.X.shape[0] * self.n_features

    @property
    def on_disk(self) -> bool:
        """Whether X is a memory map."""
        return isinstance(self.X, np.memmap)

    @property
    def n_features(self) -> int:
        """p, the column of ones included."""
        return self.X.shape[1] + self.ones

    def block(self, begin: int, end: int | None) -> Any:
        """X of the rows begin, ..., end - 1 (or the last), the column of ones included."""
        X = self.X[begin:end]
        if self.ones:
            return _after_ones(X, aligned((X.shape[0], self.n_features)))
        return X if self.sparse else np.asarray(X, float)

    def pairs(self) -> Iterator[tuple[Any, np.ndarray]]:
        """(X_k, y_k) of each client."""
        for start, n in zip(self.start.tolist(), self.n_rows.tolist(), strict=True):
            yield self.block(start, start + n), self.y[start : start + n]

    def in_memory(self) -> Clients:
        """The same with all rows in memory."""
        if not self.on_disk:
            return self
        if self.X.dtype == float and not self.ones:
            return self._but(X=np.asarray(self.X))  # JAX uses the mapped pages
        return self.take(np.arange(len(self.n_rows)), 0)

    def take(self, ids: np.ndarray, capacity: int) -> Clients:
        """The rows of the clients `ids`, ascending, in memory; behind them, unless they are sparse,
        the first one again, owned by nobody, up to `capacity` rows."""
        n_rows = self.n_rows[ids]
        n = int(n_rows.sum())
        first = np.repeat(self.start[ids] - (np.cumsum(n_rows) - n_rows), n_rows)
        index = first + np.arange(n)
        if self.sparse:
            return self._taken(self.X[index], self.y[index], n_rows)
        X = aligned((max(n, capacity), self.n_features))
        X[:, : int(self.ones)] = 1.0
        for begin in range(0, n, size := max(1, CHECKED // self.X.shape[1])):
            rows = index[begin : begin + size]
            X[begin : begin + len(rows), int(self.ones) :] = self.X[rows]
        X[n:] = X[0]
        y = np.concatenate([self.y[index], np.full(len(X) - n, self.y[index[0]])])
        return self._taken(X, y, n_rows)

    def _taken(self, X: Any, y: np.ndarray, n_rows: np.ndarray) -> Clients:
        taken = self._but(X=X, y=y, n_rows=n_rows, ones=False)
        vars(taken).pop("start", None)
        return taken

    def fingerprint(self, w: np.ndarray) -> str:
        """Tells these rows, in this order and with these client weights, from any others."""
        n, p = self.X.shape[0], self.n_features
        digest = hashlib.blake2b(repr((n, p)).encode(), digest_size=16)
        if self.sparse:
            X = (self.X.indptr, self.X.indices, self.X.data)
        else:
            size = max(1, CHECKED // p)
            X = (self.block(begin, begin + size) for begin in range(0, n, size))
        for array in itertools.chain((w, self.n_rows, self.y), X):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def _check(self) -> None:
        """InputError for shapes that do not fit, and for the first cell that cannot be used."""
        n, p = self.X.shape
        if self.y.shape != (n,):
            raise InputError(f"y must be ({n},), one target for each row of X, got {self.y.shape}")
        if np.any(self.n_rows < 1):
            name = self.names[int(np.argmax(self.n_rows < 1))]
            raise InputError(f"client {name!r} has zero rows: leave it out or give it data")
        if self.n_rows.sum() != n:
            raise InputError(f"n_rows add up to {self.n_rows.sum()}, and X has {n} rows")
        if p == 0:
            raise InputError(f"client {self.names[0]!r} has zero columns")
        for row in self._unusable_rows():
            k = int(np.searchsorted(self.start, row, side="right")) - 1
            mine = slice(self.start[k], self.start[k] + self.n_rows[k])
            where = f"client {self.names[k]!r}"
            X = self.X[mine].toarray() if self.sparse else np.asarray(self.X[mine], float)
            check_cells(X, [f"column {c!r}" for c in self.feature_names], where)
            check_cells(np.asarray(self.y[mine, None], float), ["target"], where)

    def _unusable_rows(self) -> list[int]:
        """The first row with a cell that is not finite or too large, if there is one."""
        if self.sparse:
            entries = np.flatnonzero(~(np.abs(self.X.data) <= LARGEST))[:1]
            rows = np.searchsorted(self.X.indptr, entries, side="right") - 1
        else:
            rows = next(self._unusable_blocks(), np.empty(0, int))
        targets = np.flatnonzero(~(np.abs(np.asarray(self.y, float)) <= LARGEST))[:1]
        return sorted([*rows.tolist(), *targets.tolist()])[:1]

    def _unusable_blocks(self) -> Iterator[np.ndarray]:
        """In each block of rows that has any: the first row with a cell that cannot be used."""
        size = max(1, CHECKED // self.X.shape[1])
        for begin in range(0, len(self.X), size):
            block = self.X[begin : begin + size]
            least, most = float(np.min(block)), float(np.max(block))  # NaN if there is one
            if not (least >= -LARGEST and most <= LARGEST):
                usable = np.abs(block.astype(float)) <= LARGEST
                yield begin + np.flatnonzero(~usable.all(axis=1))[:1]


def aligned(shape: tuple[int, ...]) -> np.ndarray:
    """An empty float64 array that JAX can use without a copy."""
    size = int(np.prod(shape)) * 8
    raw = np.empty(size + ALIGNED, np.uint8)
    offset = -raw.ctypes.data % ALIGNED
    return raw[offset : offset + size].view(np.float64).reshape(shape)


def _after_ones(X: np.ndarray, out: np.ndarray) -> np.ndarray:
    """`out`, filled with a column of ones and X."""
    out[:, 0], out[:, 1:] = 1.0, X
    return out


def check_names(names: Sequence[str] | None, n_clients: int) -> list[str]:
    """N distinct client names, "0", "1", ... if none are given; InputError for others."""
    if names is None:
        return [str(k) for k in range(n_clients)]
    if isinstance(names, str):
        raise InputError(f"names must be a sequence of names, got the string {names!r}")
    names = [str(name) for name in names]
    if len(names) != n_clients:
        raise InputError(f"names has {len(names)} entries for {n_clients} clients")
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InputError(f"two clients are called {name!r}: give each its own name")
        seen.add(name)
    return names


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


def _features(names: Sequence[str] | None, p: int) -> list[str]:
    features = list(names) if names else [f"x{j}" for j in range(p)]
    if len(features) != p:
        raise InputError(f"feature_names has {len(features)} names for {p} columns")
    return features


def _numbers(values: Any, where: str) -> np.ndarray:
    """As float64, without a copy where it is; a memory map of floats stays what it is. InputError
    for what is no real number."""
    if isinstance(values, np.memmap) and values.dtype.kind == "f":
        return values
    try:
        array = np.asarray(values)
        if np.iscomplexobj(array):
            raise TypeError("complex numbers")
        return array.astype(float, copy=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: X and y must be real numbers ({error})") from None


def _matrix(X: Any, where: str) -> Any:
    """(rows, columns) float64, or CSR without explicit duplicates."""
    if scipy.sparse.issparse(X):
        X = scipy.sparse.csr_array(X)
        X.sum_duplicates()
        return X.astype(float, copy=False)
    X = _numbers(X, where)
    if X.ndim != 2:
        raise InputError(f"{where}: X must be (rows, columns), got {X.shape}")
    return X


def _read_client(client: Any, name: str) -> tuple[Any, np.ndarray]:
    where = f"client {name!r}"
    try:
        X, y = client
    except (TypeError, ValueError):
        raise InputError(f"{where} must be a pair (X, y), got {type(client)}") from None
    y = _numbers(y, where)
    X = X if scipy.sparse.issparse(X) else _numbers(X, where)
    if X.ndim != 2 or y.ndim != 1 or X.shape[0] != len(y):
        raise InputError(
            f"{where}: X must be (rows, columns) and y (rows,), got {X.shape} and {y.shape}"
        )
    return X, y


def _stacked(X: Sequence[Any], n: int, p: int) -> Any:
    """The clients' rows one below the other; sparse as soon as one client's are."""
    if any(scipy.sparse.issparse(part) for part in X):
        return scipy.sparse.csr_array(scipy.sparse.vstack([scipy.sparse.csr_array(a) for a in X]))
    if len(X) == 1:
        return X[0]
    return np.concatenate(X, out=aligned((n, p)))
