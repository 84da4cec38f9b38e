"""Typed columns to numbers: the design matrix and the target of complete rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from fedexact.data.tables import kind, nearest, need_column
from fedexact.errors import InputError
from fedexact.layout import LARGEST

TOO_LARGE = f"is larger than {LARGEST:g} in modulus, its square overflows; rescale the column"


@dataclasses.dataclass(frozen=True)
class Target:
    """The column to explain, as it is or as the event `column > above` or `column == equals`."""

    column: str
    above: float | None = None
    equals: str | bool | float | None = None

    def __post_init__(self) -> None:
        if self.above is not None and self.equals is not None:
            raise InputError(f"target {self.column!r}: give above or equals, not both")

    def describe(self) -> str:
        """The target in words."""
        if self.above is not None:
            return f"{self.column} > {self.above:g}"
        return self.column if self.equals is None else f"{self.column} = {self.equals}"


@dataclasses.dataclass(frozen=True)
class Features:
    """Which columns explain, and how: all but the target's and the client's unless named.

    Text columns, and number columns named in `categorical`, are dummy coded against a reference
    level: the one named in `reference`, or else the first in sorted order.
    """

    columns: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    reference: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.columns or ():
            if list(self.columns or ()).count(name) > 1:
                raise InputError(f"features: column {name!r} is named twice")
        reference = {column: as_text(level) for column, level in self.reference.items()}
        object.__setattr__(self, "reference", reference)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where each row came from, for messages."""

    clients: Sequence[str] | None  # of each row
    rows: np.ndarray  # number of the row in its file, from 1

    def __call__(self, i: int) -> str:
        who = "" if self.clients is None else f"client {self.clients[i]!r}, "
        return f"{who}row {self.rows[i]}"

    def take(self, index: np.ndarray) -> Place:
        """The places of some of the rows."""
        clients = None if self.clients is None else [self.clients[int(i)] for i in index]
        return Place(clients, self.rows[index])


class Design(NamedTuple):
    """Numbers for a model."""

    X: np.ndarray  # (n, p)
    names: tuple[str, ...]  # of the p columns
    levels: dict[str, tuple[str, ...]]  # of the categorical columns, the reference first


def feature_columns(
    table: pa.Table, spec: Features, taken: Sequence[str], source: str
) -> list[str]:
    """The names of the columns that explain, checked against the table."""
    for role, names in (
        ("features.columns", spec.columns or ()),
        ("features.exclude", spec.exclude),
        ("features.categorical", spec.categorical),
        ("features.reference", spec.reference),
    ):
        for name in names:
            need_column(table, name, role, source)
    if spec.columns is None:
        chosen = [c for c in table.column_names if c not in taken and c not in spec.exclude]
    else:
        chosen = [c for c in spec.columns if c not in spec.exclude]
        for name in chosen:
            if name in taken:
                raise InputError(f"features.columns: {name!r} is the target or client column")
    for name in (*spec.categorical, *spec.reference):
        if name not in chosen:
            raise InputError(f"features: {name!r} is declared categorical but is not a feature")
    if not chosen:
        raise InputError(f"{source}: no feature columns are left")
    return chosen


def design(table: pa.Table, columns: Sequence[str], spec: Features, place: Place) -> Design:
    """The numbers of complete rows. Raises InputError naming client, row, column and value."""
    blocks, names, levels = [], [], {}
    for name in columns:
        column = table.column(name)
        if name in spec.categorical or name in spec.reference:
            found = _levels(column, name, spec.reference.get(name))
        elif kind(column.type) == "text":
            _check_text(column, name, place)
            found = _levels(column, name, None)
        else:
            blocks.append(numbers(column, name, place)[:, None])
            names.append(name)
            continue
        text = np.asarray(_texts(column), dtype=object)
        blocks.append(np.stack([text == level for level in found[1:]], axis=1).astype(float))
        names += [f"{name}[{level}]" for level in found[1:]]
        levels[name] = found
    return Design(np.concatenate(blocks, axis=1), tuple(names), levels)


def numbers(column: pa.ChunkedArray, name: str, place: Place) -> np.ndarray:
    """(n,) float64 of a number or true/false column without missing cells, all finite and of a size
    that can be squared."""
    what = kind(column.type)
    if what not in ("number", "true/false"):
        raise InputError(
            f"column {name!r} holds {what}: features are numbers, true/false or text; leave it out "
            "(features.exclude)"
        )
    values = column.cast(pa.float64(), safe=False).to_numpy()
    for i in np.flatnonzero(~np.isfinite(values)).tolist()[:1]:
        raise InputError(
            f"{place(i)}, column {name!r}: {values[i]} is not a finite number; correct it, or, if "
            "it stands for a missing cell, leave it blank or list its spelling in missing_values"
        )
    for i in np.flatnonzero(np.abs(values) > LARGEST).tolist()[:1]:
        raise InputError(f"{place(i)}, column {name!r}: {values[i]} {TOO_LARGE}")
    return values


def target_values(
    column: pa.ChunkedArray, spec: Target, place: Place
) -> tuple[np.ndarray, tuple[str, ...]]:
    """(n,) float64 target of complete rows, and the classes 0, 1, ... of a text target."""
    name, text = spec.column, kind(column.type) == "text"
    if spec.equals is not None and (text or isinstance(spec.equals, str)):
        found = _texts(column)
        if str(spec.equals) not in found:
            known = sorted(set(found))
            raise InputError(
                f"target.equals: no row has {name} = {spec.equals!r}"
                f"{nearest(str(spec.equals), known)} (values: {', '.join(known[:20])})"
            )
        return np.array([value == str(spec.equals) for value in found], dtype=float), ()
    if text and spec.above is not None:
        raise InputError(f"target.above: column {name!r} holds text; use target.equals")
    if text:
        _check_text(column, name, place)
        known = sorted(set(_texts(column)))
        code = {level: float(i) for i, level in enumerate(known)}
        return np.array([code[value] for value in _texts(column)]), tuple(known)
    values = numbers(column, name, place)
    if spec.above is not None:
        return (values > spec.above).astype(float), ()
    return values if spec.equals is None else (values == float(spec.equals)).astype(float), ()


def event(y: np.ndarray, spec: Target) -> np.ndarray:
    """The event of a target that is a vector of numbers already."""
    place = Place(None, np.arange(1, len(y) + 1))
    return target_values(pa.chunked_array([y]), spec, place)[0]


def _texts(column: pa.ChunkedArray) -> list[str]:
    """The cells as text."""
    if kind(column.type) == "number":
        column = column.cast(pa.float64(), safe=False)
    return [as_text(value) for value in column.to_pylist()]


def as_text(value: str | bool | float) -> str:
    """A cell or level as text; whole numbers without decimal point, true/false in lower case."""
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else f"{value:.15g}"


def _levels(column: pa.ChunkedArray, name: str, reference: str | None) -> tuple[str, ...]:
    found = set(_texts(column))
    as_numbers = kind(column.type) == "number"
    levels = sorted(found, key=float) if as_numbers else sorted(found)
    if len(levels) < 2:
        raise InputError(
            f"column {name!r} has the single level {levels[0]!r} in all complete rows; leave it out"
        )
    if len(levels) > max(20, len(column) // 2):
        raise InputError(
            f"column {name!r} has {len(levels)} levels in {len(column)} rows: it looks like an "
            "identifier or free text; leave it out (features.exclude)"
        )
    if reference is None:
        return tuple(levels)
    if reference not in found:
        raise InputError(
            f"features.reference: column {name!r} has no level {reference!r}"
            f"{nearest(reference, levels)} (levels: {', '.join(levels)})"
        )
    return (reference, *(level for level in levels if level != reference))


def _check_text(column: pa.ChunkedArray, name: str, place: Place) -> None:
    """Refuses numbers mixed with text: a typing error in one cell turns a number column to text."""
    number = [_is_number(value) for value in _texts(column)]
    if any(number):
        where = f"{place(number.index(True))} has the number {_texts(column)[number.index(True)]!r}"
        if not all(number):
            i = number.index(False)
            where = f"{place(i)} has {_texts(column)[i]!r}, other rows have numbers"
        raise InputError(
            f"column {name!r} was read as text: {where}; correct the cell, list its spelling in "
            f"missing_values, or declare features.categorical = [{name!r}]"
        )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def missing_cells(table: pa.Table, columns: Sequence[str]) -> np.ndarray:
    """(n, len(columns)) whether the cell is missing."""
    return np.stack([table.column(c).is_null().to_numpy().astype(bool) for c in columns], axis=1)
