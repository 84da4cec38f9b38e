"""Patterns that are a table of rounds x clients, repeated for ever."""

from __future__ import annotations

import abc
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedexact.errors import InputError, check_count
from fedexact.participation.base import Participation, check_cohort
from fedexact.participation.expectations import largest_gap


@dataclass(frozen=True)
class Periodic(Participation):
    """Round r is row r mod P of a (P, N) table."""

    @abc.abstractmethod
    def table(self, n_clients: int) -> np.ndarray:
        """(P, N) bool."""

    def check(self, n_clients: int, names: Sequence[str] | None = None) -> None:
        self.table(n_clients)

    def mask(self, n_clients: int, start: int, stop: int, seed: int) -> np.ndarray:
        table = self.table(n_clients)
        return table[np.arange(start, stop) % len(table)]

    def inclusion(self, n_clients: int) -> np.ndarray:
        return np.mean(self.table(n_clients), axis=0)

    def aggregation(self, n_clients: int) -> np.ndarray:
        table = self.table(n_clients)
        present = np.maximum(np.count_nonzero(table, axis=1), 1)
        return (1.0 / present) @ table / len(table)

    def gap(self, n_clients: int) -> float:
        """The most rounds from one visit of a client to its next, never-present clients apart."""
        return largest_gap(self.table(n_clients))


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

    def table(self, n_clients: int) -> np.ndarray:
        if isinstance(self.blocks, int):
            check_cohort("blocks", self.blocks, n_clients, "clients")
            parts = np.array_split(np.arange(n_clients), self.blocks)
            blocks: Sequence[Sequence[int]] = [part.tolist() for part in parts]
        else:
            blocks = self.blocks
        table = np.zeros((len(blocks), n_clients), bool)
        for b, block in enumerate(blocks):
            if len(block) and max(block) >= n_clients:
                raise InputError(
                    f"blocks[{b}] names client {max(block)} but there are only {n_clients} "
                    f"clients, counted from 0"
                )
            table[b, list(block)] = True
        return table


@dataclass(frozen=True, eq=False, repr=False)
class Trace(Periodic):
    """A record of who was there, repeated when it ends.

    `source` is an array of rounds x clients of 0 and 1, a `.npy` file with one, or a CSV file
    without index column, with or without a first line of client names.
    """

    source: str | os.PathLike[str] | np.ndarray | Sequence[Sequence[int]]
    _table: np.ndarray = field(init=False)
    _header: list[str] | None = field(init=False)

    name: ClassVar[str] = "trace"
    summary: ClassVar[str] = (
        "a recorded trace: file (CSV, npy) or array of rounds x clients, 0 or 1"
    )

    def __post_init__(self) -> None:
        header = None
        if isinstance(self.source, str | os.PathLike):
            where = f"trace file {os.fspath(self.source)!r}"
            values, header = _read(Path(self.source), where)
        else:
            where, values = "trace", _as_numbers(self.source, "trace")
        object.__setattr__(self, "_table", _zero_one(values, where))
        object.__setattr__(self, "_header", header)

    def __repr__(self) -> str:
        """What the trace says, wherever it is kept: equal for equal tables only."""
        rounds, clients = self._table.shape
        digest = hashlib.sha256(np.packbits(self._table).tobytes()).hexdigest()[:16]
        return f"Trace({rounds} rounds x {clients} clients, sha256 {digest})"

    def check(self, n_clients: int, names: Sequence[str] | None = None) -> None:
        self.table(n_clients)
        for column, (mine, theirs) in enumerate(zip(self._header or (), names or (), strict=False)):
            if mine != theirs:
                raise InputError(
                    f"column {column} of the trace is called {mine!r} but client {column} is "
                    f"{theirs!r}; put the columns in the order of the clients"
                )

    def table(self, n_clients: int) -> np.ndarray:
        if self._table.shape[1] != n_clients:
            raise InputError(
                f"the trace has {self._table.shape[1]} columns but there are {n_clients} clients; "
                f"give one column per client"
            )
        return self._table


def _read(path: Path, where: str) -> tuple[np.ndarray, list[str] | None]:
    """The table in a file and its line of names if it has one."""
    try:
        if path.suffix == ".npy":
            return _as_numbers(np.load(path, allow_pickle=False), where), None
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise InputError(f"{where} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise InputError(f"{where} is neither CSV text nor an .npy array: {error}") from error
    rows = [[cell.strip() for cell in line.split(",")] for line in lines if line.strip()]
    header = None
    if rows and not all(_is_number(cell) for cell in rows[0]):
        header = [name.strip('"') for name in rows.pop(0)]
    widths = {len(row) for row in rows} | ({len(header)} if header else set())
    if len(widths) > 1:
        raise InputError(f"{where} has lines of {min(widths)} and of {max(widths)} cells")
    return _as_numbers(rows, where), header


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


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
            f"{where}: round {row}, client {column} (counted from 0) is {values[row, column]:g}; "
            f"every cell must be 0 or 1"
        )
    table = values == 1
    if not np.any(table):
        raise InputError(f"{where} is 0 everywhere: nobody ever takes part")
    table.flags.writeable = False
    return table
