"""Tables larger than memory: Parquet and Arrow files to arrays that are mapped from the disk."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from fedexact.clients import Clients
from fedexact.data.columns import (
    Features,
    Place,
    Target,
    encoded,
    feature_columns,
    numbers,
    target_values,
)
from fedexact.data.tables import client_files, existing, kind, need_column
from fedexact.errors import InputError

SUFFIXES = {
    ".parquet": "parquet", ".pq": "parquet",
    ".arrow": "arrow", ".feather": "arrow", ".ipc": "arrow",
}  # fmt: skip
_VERSION = 1  # of what is written
_CELLS = 2**22  # of a batch
_RECORD = "record.json"
_PART = ".part-"  # in the name of a folder that is being written
_FORGOTTEN = 3 * 86400.0  # seconds without a new file, after which nobody is writing any more


def memory_map(
    path: str | Path,
    target: Target | str,
    *,
    client: str | None = None,
    features: Features | Sequence[str] | None = None,
    folder: str | Path | None = None,
) -> Clients:
    """The clients of a Parquet or Arrow (IPC) file, or of a folder of them, as arrays on the disk:
    of the rows, only a batch is ever in memory.

    The rows are written to `folder` (beside the source, `<path>.clients`, if left out) as float64,
    8 bytes a cell, and mapped from there. The next call with an unchanged source (names, sizes,
    times and columns of the files) and the same target, client and columns maps what it finds. What
    is in the folder is complete or absent; what an older state of the source left is removed.

    Args:
        path: of a file, or of a folder whose files are read in the order of their names.
        target: the column to explain; text as an event (`Target(column, equals=...)`) only.
        client: the column that says whose the row is. Rows of one client need not be neighbours,
            but the pass over the rows is faster where they are. If left out, `path` must be a
            folder, and every file of it is a client.
        features: which columns explain: numbers or true/false, all but target and client if left
            out.
        folder: where to write.

    Raises:
        InputError: naming file, client, row, column and value of a cell that is missing, not
            finite, or too large to be squared; and for a disk without room.
    """
    spec = target if isinstance(target, Target) else Target(target)
    source = _source(Path(path), spec, client, features)
    store = Path(f"{path}.clients") if folder is None else Path(folder)
    place = store / source.digest
    found = _mapped(place)
    if found is None:
        _write(source, store, place)
        found = _mapped(place)
    if found is None:
        raise InputError(f"{place}: removed or changed while it was read; call again")
    return found


# --- the source -----------------------------------------------------------------------------------


class _File(NamedTuple):
    path: Path
    name: str  # without suffix
    schema: pa.Schema
    n_rows: int
    stamp: tuple[str, int, int]  # name, size in bytes, time of the last change in ns

    def batches(self, columns: Sequence[str], size: int) -> Iterator[pa.Table]:
        """Consecutive rows, at most `size` at a time."""
        for batch in _batches(self.path, columns, size):
            for begin in range(0, batch.num_rows, size):
                yield pa.Table.from_batches([batch.slice(begin, size)])


@dataclasses.dataclass(frozen=True)
class _Source:
    files: list[_File]
    target: Target
    client: str | None
    columns: list[str]
    path: Path

    @property
    def request(self) -> list[Any]:
        """What was asked of which path."""
        target = dataclasses.astuple(self.target)
        return [_VERSION, str(self.path.absolute()), repr(target), self.client, self.columns]

    @property
    def digest(self) -> str:
        """Tells this request and this state of the source from any others."""
        schemas = [str(file.schema.remove_metadata()) for file in self.files]
        told = json.dumps([self.request, [file.stamp for file in self.files], schemas])
        return hashlib.sha256(told.encode()).hexdigest()[:20]

    @property
    def batch_rows(self) -> int:
        return max(1, _CELLS // (len(self.columns) + 1))


def _source(
    path: Path, target: Target, client: str | None, features: Features | Sequence[str] | None
) -> _Source:
    folder = path.is_dir()
    if client is None and not folder:
        raise InputError(f"{path}: say which column is the client (client)")
    found = client_files(path, SUFFIXES) if folder else {path.stem: existing(path)}
    files = [_file(file, name) for name, file in found.items()]
    spec = features if isinstance(features, Features) else Features(_columns(features))
    if spec.categorical or spec.reference:
        raise InputError(
            f"{path}: categories are not coded here; write them as columns of 0 and 1, or read "
            "with from_parquet"
        )
    taken = (target.column,) if client is None else (target.column, client)
    columns = feature_columns(files[0].schema.empty_table(), spec, taken, str(files[0].path))
    for file in files:
        _check_schema(file, target, client, columns)
    if client is not None:
        kinds = {kind(file.schema.field(client).type): file.path.name for file in files}
        if len(kinds) > 1:
            what = ", ".join(f"{k} in {name}" for k, name in kinds.items())
            raise InputError(f"{path}: client column {client!r} is of different types: {what}")
    return _Source(files, target, client, columns, path)


def _columns(features: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if features is None else tuple(features)


def _check_schema(file: _File, target: Target, client: str | None, columns: list[str]) -> None:
    table, where = file.schema.empty_table(), str(file.path)
    need_column(table, target.column, "target", where)
    if client is not None:
        need_column(table, client, "client", where)
    for name in columns:
        need_column(table, name, "features", where)
        what = kind(file.schema.field(name).type)
        if what not in ("number", "true/false"):
            raise InputError(
                f"{file.path}: column {name!r} holds {what}; only numbers and true/false can be "
                "mapped: leave it out (features) or write it as columns of 0 and 1"
            )
    text = kind(file.schema.field(target.column).type) == "text"
    if text != isinstance(target.equals, str):
        raise InputError(
            f"{file.path}: the target {target.column!r} holds {'text' if text else 'numbers'}; "
            f"give Target({target.column!r}, equals=...) with a {'text' if text else 'number'}"
        )


def _file(path: Path, name: str) -> _File:
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"{path}: not a Parquet or Arrow file by its name ({', '.join(SUFFIXES)})")
    before = _stamp(path)
    try:
        schema, n_rows = _shape(path)
    except (pa.ArrowException, OSError, KeyError) as error:
        raise InputError(f"{path}: not a readable Parquet or Arrow file: {error}") from error
    if len(set(schema.names)) < len(schema.names):
        twice = next(c for c in schema.names if schema.names.count(c) > 1)
        raise InputError(f"{path}: two columns are called {twice!r}; rename one")
    return _File(path, name, schema, n_rows, before)


def _stamp(path: Path) -> tuple[str, int, int]:
    status = path.stat()
    return path.name, status.st_size, status.st_mtime_ns


def _shape(path: Path) -> tuple[pa.Schema, int]:
    if SUFFIXES[path.suffix.lower()] == "parquet":
        from pyarrow import parquet

        with parquet.ParquetFile(path) as file:
            return file.schema_arrow, file.metadata.num_rows
    with pa.memory_map(str(path)) as mapped, pa.ipc.open_file(mapped) as file:
        rows = sum(file.get_batch(i).num_rows for i in range(file.num_record_batches))
        return file.schema, rows


def _batches(path: Path, columns: Sequence[str], size: int) -> Iterator[pa.RecordBatch]:
    if SUFFIXES[path.suffix.lower()] == "parquet":
        from pyarrow import parquet

        with parquet.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=size, columns=list(columns))
        return
    with pa.memory_map(str(path)) as mapped, pa.ipc.open_file(mapped) as file:
        for i in range(file.num_record_batches):
            yield file.get_batch(i).select(list(columns))


# --- the clients ----------------------------------------------------------------------------------


class _Owners:
    """The clients in the order of their first row, and how many rows each has."""

    def __init__(self, source: _Source) -> None:
        self.client = source.client
        self._code: dict[Any, int] = {}
        counted = np.zeros(1024, dtype=np.int64)
        for codes, counts in self._count(source):
            if len(self._code) > len(counted):
                counted = np.append(counted, np.zeros(len(self._code), dtype=np.int64))
            counted[codes] += counts
        self.n_rows = counted[: len(self._code)]
        self.names = [str(value) for value in self._code]

    def of(self, batch: pa.Table, file: _File) -> np.ndarray:
        """(rows,) client of each row of a batch."""
        if self.client is None:
            return np.full(batch.num_rows, self._code[file.name])
        owner, values = encoded(batch.column(self.client))
        return np.array([self._code[value] for value in values], dtype=np.int64)[owner]

    def _count(self, source: _Source) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Clients, each once, and their rows in a batch."""
        for file in source.files:
            if self.client is None:
                yield self._codes([file.name]), np.array([file.n_rows])
                continue
            row = 0
            for batch in file.batches([self.client], source.batch_rows):
                self._check(batch.column(self.client), file, row)
                owner, values = encoded(batch.column(self.client))
                yield self._codes(values), np.bincount(owner)
                row += batch.num_rows

    def _codes(self, values: list[Any]) -> np.ndarray:
        code = self._code
        return np.array([code.setdefault(value, len(code)) for value in values])

    def _check(self, column: pa.ChunkedArray, file: _File, row: int) -> None:
        blank = column.is_null(nan_is_null=pa.types.is_floating(column.type)).to_numpy()
        if blank.any():
            where = f"{file.path}: client column {self.client!r}"
            number = row + int(np.argmax(blank)) + 1
            raise InputError(f"{where}: row {number} is blank or not a number")


def _rows(source: _Source, owners: _Owners) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """X, y and client of the rows, batch by batch."""
    read = [*source.columns, source.target.column]
    if source.client is not None:
        read.append(source.client)
    for file in source.files:
        row = 0
        for batch in file.batches(read, source.batch_rows):
            owner = owners.of(batch, file)
            place = Place(owners.names, owner, np.arange(row, row + len(owner)) + 1)
            try:
                X, y = _numbers(batch, source, place), _target(batch, source, place)
            except InputError as error:
                raise InputError(f"{file.path}: {error}") from None
            yield X, y, owner
            row += len(owner)


def _numbers(batch: pa.Table, source: _Source, place: Place) -> np.ndarray:
    X = np.empty((batch.num_rows, len(source.columns)))
    for j, name in enumerate(source.columns):
        column = batch.column(name)
        _check_present(column, name, place)
        X[:, j] = numbers(column, name, place)
    return X


def _target(batch: pa.Table, source: _Source, place: Place) -> np.ndarray:
    spec, column = source.target, batch.column(source.target.column)
    _check_present(column, spec.column, place)
    if isinstance(spec.equals, str):
        code, values = encoded(column)
        return np.array([float(value == spec.equals) for value in values])[code]
    return target_values(column, spec, place)[0]


def _check_present(column: pa.ChunkedArray, name: str, place: Place) -> None:
    if column.null_count:
        i = int(np.argmax(column.is_null().to_numpy()))
        raise InputError(
            f"{place(i)}, column {name!r}: the cell is missing; fill it in, leave the row out of "
            "the file or the column out of the features"
        )


# --- the arrays -----------------------------------------------------------------------------------


def _write(source: _Source, store: Path, place: Path) -> None:
    """The arrays of the source in the folder `place`, which appears when all are complete."""
    owners = _Owners(source)
    n_rows = owners.n_rows
    if n_rows.sum() == 0:
        raise InputError(f"{source.path}: there are no rows in it")
    store.mkdir(parents=True, exist_ok=True)
    _check_room(store, int(n_rows.sum()) * (len(source.columns) + 1) * 8)
    part = store / f".{place.name}{_PART}{secrets.token_hex(4)}"
    part.mkdir()
    try:
        _fill(source, owners, n_rows, part)
        np.save(part / "n_rows.npy", n_rows)
        record = {"request": source.request, "columns": source.columns, "names": owners.names}
        (part / _RECORD).write_text(json.dumps(record), encoding="utf-8")
        _check_unchanged(source)
        _flush(part)
        _remove_older(source, store)
        part.rename(place)
    except OSError:
        if not place.is_dir():  # else another process was first, with the same arrays
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _fill(source: _Source, owners: _Owners, n_rows: np.ndarray, part: Path) -> None:
    n, p = int(n_rows.sum()), len(source.columns)
    X, y = (
        np.lib.format.open_memmap(part / name, mode="w+", dtype=np.float64, shape=shape)
        for name, shape in (("X.npy", (n, p)), ("y.npy", (n,)))
    )
    free = np.cumsum(n_rows) - n_rows  # (N,) where the next row of each client goes
    events = 0.0
    for X_batch, y_batch, owner in _rows(source, owners):
        at = _places(owner, free)
        X[at], y[at] = X_batch, y_batch
        events += float(np.sum(y_batch))
    if isinstance(source.target.equals, str) and events == 0.0:
        raise InputError(f"target.equals: no row has {source.target.describe()}")
    X.flush()
    y.flush()


def _places(owner: np.ndarray, free: np.ndarray) -> slice | np.ndarray:
    """Where the rows of a batch go; takes the places, the first rows of a client first."""
    order = np.argsort(owner, kind="stable")
    run = owner[order]
    first = np.flatnonzero(np.append(True, run[1:] != run[:-1]))
    lengths = np.diff(np.append(first, len(run)))
    at = np.empty(len(owner), dtype=np.int64)
    at[order] = np.repeat(free[run[first]] - first, lengths) + np.arange(len(run))
    free[run[first]] += lengths
    if np.all(np.diff(at) == 1):
        return slice(int(at[0]), int(at[-1]) + 1)
    return at


def _mapped(place: Path) -> Clients | None:
    """The clients in a folder, None if there is none or it was damaged."""
    try:
        record = json.loads((place / _RECORD).read_text(encoding="utf-8"))
        X, y = (np.load(place / name, mmap_mode="r") for name in ("X.npy", "y.npy"))
        n_rows = np.load(place / "n_rows.npy")
        names, columns = record["names"], record["columns"]
    except (OSError, ValueError, KeyError, EOFError):
        shutil.rmtree(place, ignore_errors=True)
        return None
    return Clients(X, y, n_rows, names, columns)


def _check_unchanged(source: _Source) -> None:
    for file in source.files:
        if _stamp(file.path) != file.stamp:
            raise InputError(f"{file.path}: changed while it was read; call again")


def _check_room(store: Path, needed: int) -> None:
    free = shutil.disk_usage(store).free
    if needed > free:
        raise InputError(
            f"{store}: the rows need {needed / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB left; "
            "give another folder"
        )


def _remove_older(source: _Source, store: Path) -> None:
    """Removes what the same request wrote from an older state of the source, and what killed
    processes left half written some days ago."""
    for old in store.iterdir():
        with suppress(OSError, ValueError, KeyError):
            if _PART in old.name:
                forgotten = time.time() - old.stat().st_mtime > _FORGOTTEN
            else:
                record = json.loads((old / _RECORD).read_text(encoding="utf-8"))
                forgotten = record["request"] == source.request
            if forgotten:
                shutil.rmtree(old, ignore_errors=True)


def _flush(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb+") as file:
            os.fsync(file.fileno())
