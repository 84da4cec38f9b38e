"""Tables to a federation: one (X, y) per client, ready for a problem, with a record of what was
done to the rows on the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from fedexact.data import libsvm, tables
from fedexact.data.columns import (
    Features,
    Place,
    Target,
    design,
    event,
    feature_columns,
    missing_cells,
    target_values,
)
from fedexact.data.moments import Moments, client_sums, pooled_moments
from fedexact.data.partition import Partition, PartitionRecord
from fedexact.errors import InputError, check_choice
from fedexact.problem import Problem

MANY_FACTS = 6  # more remarks than this about constant columns become one


@dataclasses.dataclass(frozen=True)
class Federation:
    """The clients' rows as numbers, and everything that was decided about them."""

    source: str  # file, folder or bundled name
    target: str  # in words
    clients: tuple[tuple[np.ndarray, np.ndarray], ...]  # (X (n_k, p), y (n_k,)) of each
    names: tuple[str, ...]
    feature_names: tuple[str, ...]
    dropped: tuple[int, ...]  # rows left out per client because a cell was missing
    missing: Mapping[str, Mapping[str, int]]  # client -> column -> missing cells
    levels: Mapping[str, tuple[str, ...]]  # categorical column -> levels, the reference first
    classes: tuple[str, ...]  # of a text target, coded 0, 1, ...
    moments: Moments
    partition: PartitionRecord | None
    notes: tuple[str, ...]

    @property
    def n_rows(self) -> np.ndarray:
        """(N,) rows used per client."""
        return np.array([len(y) for _, y in self.clients])

    def problem(self, **settings: Any) -> Problem:
        """`fx.Problem` on these rows with these names; `settings` are its other arguments."""
        return Problem(self.clients, names=self.names, feature_names=self.feature_names, **settings)


class _Rows(NamedTuple):
    """Complete rows as numbers, and where they came from."""

    X: np.ndarray  # (n, p)
    y: np.ndarray  # (n,)
    columns: Sequence[str]
    clients: list[str] | None  # client of each complete row
    everyone: list[str]  # client of each row, complete or not
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
    standardize: bool | Sequence[str] = False,
    source: str = "table",
    notes: Sequence[str] = (),
) -> Federation:
    """The clients of one Arrow table: by a column, or dealt out by a partition.

    Rows with a missing target or feature are left out and counted, or refused with
    missing="error". `standardize` moves and scales all columns of X, or those named, to pooled mean
    0 and standard deviation 1. Raises InputError naming client, row, column and value.
    """
    _check_split(client, partition, source)
    owners, taken = None, ()
    if client is not None:
        tables.need_column(table, client, "client", source)
        owners, taken = _owners(table.column(client), client), (client,)
    place = Place(owners, np.arange(1, table.num_rows + 1))
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
    standardize: bool | Sequence[str] = False,
) -> Federation:
    """A folder with one CSV or Parquet file per client, named by the file; columns must agree."""
    parts = tables.read_folder_tables(path, missing_values, delimiter)
    owners = [name for name, part in parts.items() for _ in range(part.num_rows)]
    numbers = np.concatenate([np.arange(1, part.num_rows + 1) for part in parts.values()])
    table, place = pa.concat_tables(parts.values()), Place(owners, numbers)
    rows = _rows(table, place, _target(target), _features(features), missing, str(path))
    return _federation(rows, None, standardize, str(path), _target(target), ())


def from_libsvm(
    path: str | Path,
    *,
    target: Target | None = None,
    partition: Partition | None = None,
    n_features: int | None = None,
    standardize: bool | Sequence[str] = False,
) -> Federation:
    """A LIBSVM file, dealt out by a partition, or a folder with one such file per client.

    The columns are x1, x2, ...; `n_features` may be given when the last ones do not occur. Needs
    the extra `fedexact[libsvm]`. Raises InputError naming the file.
    """
    target = target or Target("y")
    if Path(path).is_dir() == (partition is not None):
        raise InputError(
            f"{path}: a LIBSVM file needs a partition into clients, and a folder of them none"
        )
    parts = libsvm.read(path, n_features)
    X, y = (np.concatenate([part[i] for part in parts.values()]) for i in (0, 1))
    clients = [name for name, part in parts.items() for _ in part[1]]
    columns = [f"x{j + 1}" for j in range(X.shape[1])]
    owners = None if partition is not None else clients
    rows = _Rows(X, event(y, target), columns, owners, clients, {}, {}, ())
    return _federation(rows, partition, standardize, str(path), target, ())


def _rows(
    table: pa.Table,
    place: Place,
    target: Target,
    features: Features,
    missing: str,
    source: str,
    taken: Sequence[str] = (),
) -> _Rows:
    check_choice("missing", missing, ("drop", "error"))
    tables.need_column(table, target.column, "target", source)
    columns = feature_columns(table, features, (target.column, *taken), source)
    everyone = list(place.clients or [""] * table.num_rows)
    blank = missing_cells(table, [*columns, target.column])
    counts = _count_missing(blank, [*columns, target.column], everyone)
    if missing == "error":
        _refuse_missing(blank, [*columns, target.column], place, counts)
    complete = np.flatnonzero(~blank.any(axis=1))
    _need_complete_rows(everyone, complete, counts)
    kept, place = table.take(pa.array(complete)), place.take(complete)
    found = design(kept, columns, features, place)
    y, classes = target_values(kept.column(target.column), target, place)
    clients = None if place.clients is None else list(place.clients)
    return _Rows(found.X, y, found.names, clients, everyone, counts, found.levels, classes)


def _federation(
    rows: _Rows,
    partition: Partition | None,
    standardize: bool | Sequence[str],
    source: str,
    target: Target,
    notes: Sequence[str],
) -> Federation:
    lost = len(rows.everyone) - len(rows.y)
    if partition is not None:
        parts = partition.split(rows.y)
        names = [f"client {k:0{len(str(len(parts) - 1))}d}" for k in range(len(parts))]
        dropped = [0] * len(parts)
        made = partition.record(rows.y, parts)
        notes = [*notes, *_lost_before(lost)]
    else:
        assert rows.clients is not None
        names = list(dict.fromkeys(rows.everyone))
        parts = _groups(rows.clients, names)
        total = [len(part) for part in _groups(rows.everyone, names)]
        dropped = [t - len(part) for t, part in zip(total, parts, strict=True)]
        made = None
        notes = [*notes, *_constant_columns(rows, names, parts)]
    if rows.classes:
        coded = ", ".join(f"{level} = {i}" for i, level in enumerate(rows.classes))
        notes = [*notes, f"classes of the target: {coded}"]
    moments = _moments([rows.X[part] for part in parts], rows.columns, standardize)
    return Federation(
        source=source,
        target=target.describe(),
        clients=tuple((moments.apply(rows.X[part]), rows.y[part]) for part in parts),
        names=tuple(names),
        feature_names=tuple(rows.columns),
        dropped=tuple(dropped),
        missing=rows.missing,
        levels=rows.levels,
        classes=rows.classes,
        moments=moments,
        partition=made,
        notes=tuple(notes),
    )


def _moments(
    Xs: Sequence[np.ndarray], columns: Sequence[str], standardize: bool | Sequence[str]
) -> Moments:
    if not isinstance(standardize, bool):
        for name in standardize:
            check_choice("standardize", name, columns)
    return pooled_moments([client_sums(X) for X in Xs], columns, standardize)


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


def _owners(column: pa.ChunkedArray, name: str) -> list[str]:
    values = column.to_pylist()
    if None in values:
        raise InputError(f"client column {name!r}: row {values.index(None) + 1} is blank")
    return [str(value) for value in values]


def _groups(owners: Sequence[str], names: Sequence[str]) -> list[np.ndarray]:
    """For each name the indices of its rows, ascending."""
    index = {name: k for k, name in enumerate(names)}
    owner = np.array([index[o] for o in owners], dtype=int)
    order = np.argsort(owner, kind="stable")
    return np.split(order, np.cumsum(np.bincount(owner, minlength=len(names)))[:-1])


def _count_missing(
    blank: np.ndarray, columns: Sequence[str], everyone: Sequence[str]
) -> dict[str, dict[str, int]]:
    names = list(dict.fromkeys(everyone))
    counts = {}
    for name, part in zip(names, _groups(everyone, names), strict=True):
        per_column = blank[part].sum(axis=0)
        counts[name] = {c: int(m) for c, m in zip(columns, per_column, strict=True) if m}
    return counts


def _refuse_missing(
    blank: np.ndarray,
    columns: Sequence[str],
    place: Place,
    counts: Mapping[str, Mapping[str, int]],
) -> None:
    for i, j in np.argwhere(blank)[:1].tolist():
        total = sum(sum(per_column.values()) for per_column in counts.values())
        raise InputError(
            f"{place(i)}: column {columns[j]!r} is missing ({total} missing cells in all); fill it "
            'in, leave the column out, or set missing = "drop" to leave out incomplete rows'
        )


def _need_complete_rows(
    everyone: Sequence[str], complete: np.ndarray, counts: Mapping[str, Mapping[str, int]]
) -> None:
    has_rows = {everyone[i] for i in complete.tolist()}
    for name, per_column in counts.items():
        if name not in has_rows:
            who = f"client {name!r}" if name else "the table"
            cells = ", ".join(f"{c} in {m}" for c, m in per_column.items())
            raise InputError(
                f"{who} has no complete row (of {everyone.count(name)} rows, missing: {cells}); "
                "leave out the columns it does not have, or the client"
            )


def _lost_before(lost: int) -> list[str]:
    if not lost:
        return []
    return [f"{lost} rows with a missing cell were left out before the partition"]


def _constant_columns(rows: _Rows, names: Sequence[str], parts: Sequence[np.ndarray]) -> list[str]:
    """Columns that vary, but not at one client of ten rows or more: a sentinel, perhaps."""
    varies = np.ptp(rows.X, axis=0) > 0
    facts = []
    for name, part in zip(names, parts, strict=True):
        if len(part) >= 10 and len(names) > 1:
            X: np.ndarray = rows.X[part]
            for j in np.flatnonzero(varies & (np.ptp(X, axis=0) == 0)).tolist():
                facts.append(f"{rows.columns[j]} is {X[0, j]:g} in all {len(part)} rows of {name}")
    if len(facts) > MANY_FACTS:
        return [f"{facts[0]}; {len(facts) - 1} more columns are constant at some client"]
    return facts
