"""Patterns that are a table of rounds x clients, repeated for ever."""

from __future__ import annotations

import abc
import csv
import functools
import hashlib
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedexact.errors import InputError, check_count
from fedexact.participation.base import Cohorts, Participation, check_cohort, of_mask
from fedexact.participation.draws import as_mask
from fedexact.participation.expectations import largest_gap


@dataclass(frozen=True)
class Periodic(Participation):
    """Round r is row r mod P of a (P, N) table, kept as the participants of its rows."""

    @abc.abstractmethod
    def period(self, n_clients: int) -> Cohorts:
        """The participants of the P rounds; InputError if they do not fit N clients."""

    def table(self, n_clients: int) -> np.ndarray:
        """(P, N) bool."""
        return as_mask(self.period(n_clients), n_clients)

    def check(self, n_clients: int, names: Sequence[str] | None = None) -> None:
        self.period(n_clients)

    def mask(self, n_clients: int, start: int, stop: int, seed: int) -> np.ndarray:
        return as_mask(self.cohorts(n_clients, start, stop, seed), n_clients)

    def cohorts(self, n_clients: int, start: int, stop: int, seed: int) -> Cohorts:
        ids, offsets = self.period(n_clients)
        row = np.arange(start, stop) % (len(offsets) - 1)
        counts = np.diff(offsets)[row]
        ends = np.append(0, np.cumsum(counts))
        at = np.arange(ends[-1]) + np.repeat(offsets[row] - ends[:-1], counts)
        return Cohorts(ids[at], ends)

    def inclusion(self, n_clients: int) -> np.ndarray:
        ids, offsets = self.period(n_clients)
        return np.bincount(ids, minlength=n_clients) / (len(offsets) - 1)

    def aggregation(self, n_clients: int) -> np.ndarray:
        ids, offsets = self.period(n_clients)
        present = np.diff(offsets)
        shares = np.repeat(1.0 / np.maximum(present, 1), present)
        return np.bincount(ids, shares, n_clients) / (len(offsets) - 1)

    def gap(self, n_clients: int) -> float:
        """The most rounds from one visit of a client to its next, never-present clients apart."""
        ids, offsets = self.period(n_clients)
        rounds = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        order = np.argsort(ids, kind="stable")
        return largest_gap(ids[order], rounds[order], len(offsets) - 1)


@dataclass(frozen=True)
class Cyclic(Periodic):
    """One block of clients after the other: a number of blocks of neighbouring clients, as equal
    as can be, or the blocks as lists of clients counted from 0."""

    blocks: int | Sequence[Sequence[int]]

    name: ClassVar[str] = "cyclic"
    summary: ClassVar[str] = "blocks of clients in a fixed cycle"

    def __post_init__(self) -> None:
        if isinstance(self.blocks, int):
            return check_count("blocks", self.blocks)
        try:
            blocks = tuple(tuple(block) for block in self.blocks)
        except TypeError:
            raise InputError(
                f"blocks must be a number of blocks or a list of lists of clients, "
                f"got {self.blocks!r}"
            ) from None
        for b, block in enumerate(blocks):
            for client in block:
                check_count(f"blocks[{b}]: a client, counted from 0,", client, at_least=0)
        if not any(blocks):
            raise InputError("blocks must name at least one client")
        object.__setattr__(self, "blocks", blocks)
        return None

    def period(self, n_clients: int) -> Cohorts:
        if isinstance(self.blocks, int):
            check_cohort("blocks", self.blocks, n_clients, "clients")
            return _neighbours(self.blocks, n_clients)
        listed = self._listed
        if np.max(listed.ids) >= n_clients:
            visit = int(np.argmax(listed.ids >= n_clients))
            b = int(np.searchsorted(listed.offsets, visit, side="right")) - 1
            raise InputError(
                f"blocks[{b}] names client {np.max(self.blocks[b])} but there are only "
                f"{n_clients} clients, counted from 0"
            )
        return listed

    @functools.cached_property
    def _listed(self) -> Cohorts:
        """The blocks given as lists, each client once in a block."""
        assert not isinstance(self.blocks, int)
        blocks = [np.unique(np.asarray(block, np.int32)) for block in self.blocks]
        offsets = np.append(0, np.cumsum([len(block) for block in blocks]))
        return Cohorts(np.concatenate(blocks), offsets)


@functools.lru_cache(maxsize=4)
def _neighbours(blocks: int, n_clients: int) -> Cohorts:
    """All clients in blocks of neighbours, the first ones one client larger if need be."""
    size, larger = divmod(n_clients, blocks)
    b = np.arange(blocks + 1)
    return Cohorts(np.arange(n_clients, dtype=np.int32), size * b + np.minimum(b, larger))


@dataclass(frozen=True, eq=False, repr=False)
class Trace(Periodic):
    """A record of who was there, repeated when it ends.

    `source` is an array of rounds x clients of 0 and 1, a `.npy` file with one, or a CSV file
    without index column, with or without a first line of client names. The first line is names if
    a cell of it is neither 0 nor 1.

    Raises InputError for a table that is not of 0 and 1. A first line that may be names or a round
    is settled by `check`, which knows the names.
    """

    source: str | os.PathLike[str] | np.ndarray | Sequence[Sequence[int]]
    _table: np.ndarray = field(init=False)
    _first: list[str] | None = field(init=False)

    name: ClassVar[str] = "trace"
    summary: ClassVar[str] = (
        "a recorded trace: file (CSV, npy) or array of rounds x clients, 0 or 1"
    )

    def __post_init__(self) -> None:
        first = None
        if isinstance(self.source, str | os.PathLike):
            where = f"trace file {os.fspath(self.source)!r}"
            values, first = _read(Path(self.source), where)
        else:
            where = "the trace"
            values = _as_numbers(self.source, where)
        object.__setattr__(self, "_table", _zero_one(values, where))
        object.__setattr__(self, "_first", first)

    def __repr__(self) -> str:
        """What the trace says, wherever it is kept: equal for equal tables only."""
        rounds, clients = self._table.shape
        digest = hashlib.sha256(np.packbits(self._table).tobytes()).hexdigest()[:16]
        return f"Trace({rounds} rounds x {clients} clients, sha256 {digest})"

    def check(self, n_clients: int, names: Sequence[str] | None = None) -> None:
        self.table(n_clients)
        first, names = self._first or [], list(names or ())
        odd = _odd(first)
        if not odd:
            if first and first == names:
                raise InputError(
                    f"the first line of the trace, {','.join(first)}, may be a round or the names "
                    f"of the clients; leave the line of names out, and if it is a round give the "
                    f"trace as an .npy file or rename the clients"
                )
            return
        if len(odd) == 1 < len(first) and first != names:
            raise _broken("the trace", first, odd[0])
        for column, (mine, theirs) in enumerate(zip(first, names, strict=False)):
            if mine != theirs:
                raise InputError(
                    f"column {column} of the trace is called {mine!r} but client {column} is "
                    f"{theirs!r}; put the columns in the order of the clients"
                )

    def period(self, n_clients: int) -> Cohorts:
        if self._table.shape[1] != n_clients:
            raise InputError(
                f"the trace has {self._table.shape[1]} columns but there are {n_clients} clients; "
                f"give one column per client"
            )
        return self._period

    @functools.cached_property
    def _period(self) -> Cohorts:
        return of_mask(self._table)


def _read(path: Path, where: str) -> tuple[np.ndarray, list[str] | None]:
    """The table in a file and, of a CSV file, the cells of its first line, names or not."""
    try:
        if path.suffix == ".npy":
            return _as_numbers(np.load(path, allow_pickle=False), where), None
        text = io.StringIO(path.read_text(encoding="utf-8-sig"))
        lines = list(csv.reader(text, skipinitialspace=True, strict=True))
    except OSError as error:
        raise InputError(f"{where} cannot be read: {error.strerror or error}") from error
    except (ValueError, csv.Error) as error:
        raise InputError(f"{where} is neither CSV text nor an .npy array: {error}") from error
    rows = [[cell.strip() for cell in line] for line in lines]
    rows = [row for row in rows if row not in ([], [""])]
    widths = {len(row) for row in rows}
    if len(widths) > 1:
        raise InputError(f"{where} has lines of {min(widths)} and of {max(widths)} cells")
    first = rows[0] if rows else []
    if _odd(first):
        _check_names(first, where)
        rows = rows[1:]
    return _as_numbers(rows, where), first


def _check_names(first: list[str], where: str) -> None:
    """Refuse a round with a bad cell: a line of names has none empty and none twice."""
    if "" in first:
        raise _broken(where, first, first.index(""))
    flags = [cell for cell in first if _is_flag(cell)]
    if len(set(flags)) < len(flags):
        raise _broken(where, first, _odd(first)[0])


def _broken(where: str, first: list[str], column: int) -> InputError:
    return InputError(
        f"{where}: cell {column} (counted from 0) of the first line is {first[column]!r}; every "
        f"cell of a round must be 0 or 1, and a line of names must name each client once, in the "
        f"order of the clients and without index column"
    )


def _odd(cells: Sequence[str]) -> list[int]:
    """Where the cells are neither 0 nor 1."""
    return [column for column, cell in enumerate(cells) if not _is_flag(cell)]


def _is_flag(text: str) -> bool:
    try:
        return float(text) in (0.0, 1.0)
    except ValueError:
        return False


def _as_numbers(values: object, where: str) -> np.ndarray:
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"{where} must be a table of 0 and 1: {error}") from error


def _zero_one(values: np.ndarray, where: str) -> np.ndarray:
    if values.ndim != 2 or values.size == 0:
        raise InputError(f"{where} must be a table of rounds x clients, got shape {values.shape}")
    bad = (values != 0) & (values != 1)
    if np.any(bad):
        row, column = (int(i) for i in np.argwhere(bad)[0])
        raise InputError(
            f"round {row}, client {column} (counted from 0) of {where} is {values[row, column]:g}; "
            f"every cell must be 0 or 1"
        )
    table = values == 1
    if not np.any(table):
        raise InputError(f"{where} is 0 everywhere: nobody ever takes part")
    table.flags.writeable = False
    return table
