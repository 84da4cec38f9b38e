"""Tables to a federation: one (X, y) per client, ready for a problem, with a record of what was
done to the rows on the way."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import scipy.sparse

from fedexact.clients import Clients
from fedexact.data import libsvm, tables
from fedexact.data.columns import (
    Features,
    Place,
    Target,
    complete_rows,
    design,
    event,
    feature_columns,
    no_place,
    place_of,
    target_values,
)
from fedexact.data.moments import (
    SCALE,
    Moments,
    Standardize,
    check_standardize,
    pooled_moments,
    sparse_sums,
    sums_of_clients,
)
from fedexact.data.partition import Partition, PartitionRecord
from fedexact.errors import InputError
from fedexact.problem import Problem

MANY_FACTS = 6  # more remarks than this about constant columns become one


@dataclasses.dataclass(frozen=True)
class Federation:
    """The clients' rows as numbers, and everything that was decided about them."""

    source: str  # file, folder or bundled name
    target: str  # in words
    rows: Clients  # of all clients, one after the other
    dropped: tuple[int, ...]  # rows left out per client because a cell was missing
    missing: Mapping[str, Mapping[str, int]]  # client -> column -> missing cells
    levels: Mapping[str, tuple[str, ...]]  # categorical column -> levels, the reference first
    classes: tuple[str, ...]  # of a text target, coded 0, 1, ...
    moments: Moments
    partition: PartitionRecord | None
    notes: tuple[str, ...]

    @functools.cached_property
    def clients(self) -> tuple[tuple[Any, np.ndarray], ...]:
        """(X (n_k, p), y (n_k,)) of each client; X is sparse where the data are."""
        return tuple(self.rows.pairs())

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Of the clients."""
        return tuple(self.rows.names)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Of the columns of X."""
        return tuple(self.rows.feature_names)

    @property
    def n_rows(self) -> np.ndarray:
        """(N,) rows used per client."""
        return self.rows.n_rows

    def problem(self, **settings: Any) -> Problem:
        """`fx.Problem` on these rows with these names; `settings` are its other arguments."""
        return Problem(self.rows, **settings)


class _Rows(NamedTuple):
    """Complete rows as numbers, and where they came from."""

    X: Any  # (n, p) array or csr_array
    y: np.ndarray  # (n,)
    columns: Sequence[str]
    place: Place
    total: np.ndarray  # (N,) rows of each client, complete or not
    missing: dict[str, dict[str, int]]
    levels: dict[str, tuple[str, ...]]
    classes: tuple[str, ...]


def from_table(
    table: pa.Table,
    target: Target | str,
    *,
    client: str | None = None,
    partition: Partition | None = None,
    features: Features | Sequence[str] | None = None,
    missing: str = "drop",
    standardize: Standardize = False,
    source: str = "table",
    notes: Sequence[str] = (),
) -> Federation:
    """The clients of one Arrow table: by a column, or dealt out by a partition.

    Rows with a missing target or feature are left out and counted, or refused with
    missing="error". `standardize` moves and scales all columns of X, or those named, to pooled mean
    0 and standard deviation 1; "scale" scales all that vary and moves none. Raises InputError
    naming client, row, column and value.
    """
    _check_split(client, partition, source)
    place, taken = no_place(table.num_rows), ()
    if client is not None:
        tables.need_column(table, client, "client", source)
        place, taken = place_of(table.column(client), client), (client,)
    rows = _rows(table, place, _target(target), _features(features), missing, source, taken)
    return _federation(rows, partition, standardize, source, _target(target), notes)


def from_csv(
    path: str | Path,
    target: Target | str,
    *,
    missing_values: Sequence[str] = tables.MISSING,
    delimiter: str | None = None,
    **settings: Any,
) -> Federation:
    """The clients of one CSV file; `settings` as in `from_table`."""
    table = tables.read_csv_table(path, missing_values, delimiter)
    return from_table(table, target, **{"source": str(path), **settings})


def from_parquet(path: str | Path, target: Target | str, **settings: Any) -> Federation:
    """The clients of one Parquet file; `settings` as in `from_table`."""
    return from_table(tables.read_parquet_table(path), target, **{"source": str(path), **settings})


def from_folder(
    path: str | Path,
    target: Target | str,
    *,
    missing_values: Sequence[str] = tables.MISSING,
    delimiter: str | None = None,
    features: Features | Sequence[str] | None = None,
    missing: str = "drop",
    standardize: Standardize = False,
) -> Federation:
    """A folder with one CSV or Parquet file per client, named by the file; columns must agree."""
    parts = tables.read_folder_tables(path, missing_values, delimiter)
    sizes = [part.num_rows for part in parts.values()]
    numbers = np.concatenate([np.arange(1, size + 1) for size in sizes])
    place = Place(list(parts), np.repeat(np.arange(len(parts)), sizes), numbers)
    table = pa.concat_tables(parts.values())
    rows = _rows(table, place, _target(target), _features(features), missing, str(path))
    return _federation(rows, None, standardize, str(path), _target(target), ())


def from_libsvm(
    path: str | Path,
    *,
    target: Target | None = None,
    partition: Partition | None = None,
    n_features: int | None = None,
    standardize: Standardize = False,
) -> Federation:
    """A LIBSVM file, dealt out by a partition, or a folder with one such file per client.

    The columns are x1, x2, ...; `n_features` may be given when the last ones do not occur. Rows
    with less than a tenth of nonzeros, or too many for a dense array of 4 GB, stay sparse; of the
    standardisations, sparse rows allow standardize="scale" only. Needs the extra
    `fedexact[libsvm]`. Raises InputError naming the file.
    """
    target = target or Target("y")
    if Path(path).is_dir() == (partition is not None):
        raise InputError(
            f"{path}: a LIBSVM file needs a partition into clients, and a folder of them none"
        )
    found = libsvm.read(path, n_features)
    X, y = found.X, event(found.y, target)
    columns = [f"x{j + 1}" for j in range(X.shape[1])]
    place = no_place(len(y))
    if partition is None:
        owner = np.repeat(np.arange(len(found.names)), found.n_rows)
        place = Place(found.names, owner, place.rows)
    rows = _Rows(X, y, columns, place, place.counts(), {}, {}, ())
    return _federation(rows, partition, standardize, str(path), target, found.note)


def _rows(
    table: pa.Table,
    place: Place,
    target: Target,
    features: Features,
    missing: str,
    source: str,
    taken: Sequence[str] = (),
) -> _Rows:
    tables.need_column(table, target.column, "target", source)
    columns = feature_columns(table, features, (target.column, *taken), source)
    rows = complete_rows(table, [*columns, target.column], place, missing)
    found = design(rows.table, columns, features, rows.place)
    y, classes = target_values(rows.table.column(target.column), target, rows.place)
    return _Rows(
        found.X, y, found.names, rows.place, rows.total, rows.missing, found.levels, classes
    )


def _federation(
    rows: _Rows,
    partition: Partition | None,
    standardize: Standardize,
    source: str,
    target: Target,
    notes: Sequence[str],
) -> Federation:
    if partition is not None:
        parts = partition.split(rows.y)
        n_rows, order = np.array([len(part) for part in parts]), np.concatenate(parts)
        names = [f"client {k:0{len(str(len(parts) - 1))}d}" for k in range(len(parts))]
        dropped = np.zeros(len(parts), dtype=int)
        made = partition.record(rows.y, parts)
        notes = [*notes, *_lost_before(int(rows.total.sum()) - len(rows.y))]
    else:
        n_rows, order = rows.place.counts(), np.argsort(rows.place.owner, kind="stable")
        names, dropped, made = rows.place.names, rows.total - n_rows, None
    X, y = rows.X[order], rows.y[order]
    if partition is None:
        notes = [*notes, *_constant_columns(X, n_rows, rows.columns, names)]
    if rows.classes:
        coded = ", ".join(f"{level} = {i}" for i, level in enumerate(rows.classes))
        notes = [*notes, f"classes of the target: {coded}"]
    moments = _moments(X, n_rows, rows.columns, standardize)
    return Federation(
        source=source,
        target=target.describe(),
        rows=Clients(moments.apply(X), y, n_rows, names, rows.columns),
        dropped=tuple(dropped.tolist()),
        missing=rows.missing,
        levels=rows.levels,
        classes=rows.classes,
        moments=moments,
        partition=made,
        notes=tuple(notes),
    )


def _moments(
    X: Any, n_rows: np.ndarray, columns: Sequence[str], standardize: Standardize
) -> Moments:
    check_standardize(standardize, columns)
    if not scipy.sparse.issparse(X):
        return pooled_moments(sums_of_clients(X, n_rows), columns, standardize)
    if standardize and standardize != SCALE:
        raise InputError(
            "standardize moves the columns, which would fill the zeros of these sparse rows; leave "
            f"it out, or set standardize = {SCALE!r}, which divides by the standard deviation only"
        )
    return pooled_moments(sparse_sums(X), columns, standardize)


def _target(target: Target | str) -> Target:
    return Target(target) if isinstance(target, str) else target


def _features(features: Features | Sequence[str] | None) -> Features:
    if isinstance(features, Features):
        return features
    return Features(None if features is None else tuple(features))


def _check_split(client: str | None, partition: Partition | None, source: str) -> None:
    if client is None and partition is None:
        raise InputError(
            f"{source}: say which column is the client (client) or how to split the rows "
            "into clients (partition)"
        )
    if client is not None and partition is not None:
        raise InputError(
            f"{source}: the client column {client!r} and a partition exclude each other; keep one"
        )


def _lost_before(lost: int) -> list[str]:
    if not lost:
        return []
    return [f"{lost} rows with a missing cell were left out before the partition"]


def _constant_columns(
    X: Any, n_rows: np.ndarray, columns: Sequence[str], names: Sequence[str]
) -> list[str]:
    """Columns that vary, but not at one client of ten rows or more: a sentinel, perhaps. Of sparse
    rows most columns do that."""
    if len(names) == 1 or scipy.sparse.issparse(X):
        return []
    start = np.cumsum(n_rows) - n_rows
    least, most = np.minimum.reduceat(X, start), np.maximum.reduceat(X, start)
    varies = np.max(most, axis=0) > np.min(least, axis=0)
    constant = (least == most) & varies[None, :] & (n_rows >= 10)[:, None]
    places = np.argwhere(constant)
    facts = [
        f"{columns[j]} is {least[k, j]:g} in all {n_rows[k]} rows of {names[k]}"
        for k, j in places[:MANY_FACTS].tolist()
    ]
    if len(places) > MANY_FACTS:
        return [f"{facts[0]}; {len(places) - 1} more columns are constant at some client"]
    return facts
