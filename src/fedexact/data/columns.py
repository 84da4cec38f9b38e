"""Typed columns to numbers: the design matrix and the target of complete rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from fedexact.clients import LARGEST
from fedexact.data.tables import kind, nearest, need_column
from fedexact.errors import InputError

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
    """Where each row came from: for messages, and for the clients of a federation."""

    names: Sequence[str]  # of the clients, none if rows have no client yet
    owner: np.ndarray  # (n,) client of each row, 0 if there are none
    rows: np.ndarray  # (n,) number of the row in its file, from 1

    def __call__(self, i: int) -> str:
        who = f"client {self.names[self.owner[i]]!r}, " if self.names else ""
        return f"{who}row {self.rows[i]}"

    def take(self, index: np.ndarray) -> Place:
        """The places of some of the rows."""
        return Place(self.names, self.owner[index], self.rows[index])

    def counts(self) -> np.ndarray:
        """(N,) rows of each client; (1,) if there are none."""
        return np.bincount(self.owner, minlength=len(self.names))


def place_of(owners: pa.ChunkedArray, name: str) -> Place:
    """Clients by the values of a column, in the order in which they first appear."""
    if owners.null_count:
        blank = int(np.argmax(owners.is_null().to_numpy()))
        raise InputError(f"client column {name!r}: row {blank + 1} is blank")
    owner, values = encoded(owners)
    names = [str(value) for value in values]
    return Place(names, owner, np.arange(1, len(owner) + 1))


def no_place(n: int) -> Place:
    """n rows without clients."""
    return Place((), np.zeros(n, dtype=int), np.arange(1, n + 1))


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
            cells = Texts(column)
            found = _levels(cells, name, kind(column.type), spec.reference.get(name))
        elif kind(column.type) == "text":
            cells = Texts(column)
            _check_text(cells, name, place)
            found = _levels(cells, name, "text", None)
        else:
            blocks.append(numbers(column, name, place)[:, None])
            names.append(name)
            continue
        blocks.append(np.stack([cells.equal(level) for level in found[1:]], axis=1))
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
        cells = Texts(column)
        if str(spec.equals) not in cells.values:
            raise InputError(
                f"target.equals: no row has {name} = {spec.equals!r}"
                f"{nearest(str(spec.equals), cells.values)} "
                f"(values: {', '.join(cells.values[:20])})"
            )
        return cells.equal(str(spec.equals)), ()
    if text and spec.above is not None:
        raise InputError(f"target.above: column {name!r} holds text; use target.equals")
    if text:
        cells = Texts(column)
        _check_text(cells, name, place)
        return cells.code.astype(float), tuple(cells.values)
    values = numbers(column, name, place)
    if spec.above is not None:
        return (values > spec.above).astype(float), ()
    return values if spec.equals is None else (values == float(spec.equals)).astype(float), ()


def event(y: np.ndarray, spec: Target) -> np.ndarray:
    """The event of a target that is a vector of numbers already."""
    return target_values(pa.chunked_array([y]), spec, no_place(len(y)))[0]


def encoded(column: pa.ChunkedArray) -> tuple[np.ndarray, list[Any]]:
    """(n,) code of each cell, and the distinct values in the order of their first row."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    encoded = column.combine_chunks().dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_pylist()


class Texts:
    """The cells of a column as text: `values`, sorted, and the (n,) `code` of each cell."""

    def __init__(self, column: pa.ChunkedArray) -> None:
        if kind(column.type) == "number":
            column = column.cast(pa.float64(), safe=False)
        code, values = encoded(column)
        texts = [as_text(value) for value in values]
        self.values = sorted(set(texts))
        index = {text: i for i, text in enumerate(self.values)}
        self.code = np.array([index[text] for text in texts], dtype=np.int64)[code]

    def equal(self, text: str) -> np.ndarray:
        """(n,) 1.0 where the cell is `text`, else 0.0."""
        return (self.code == self.values.index(text)).astype(float)


def as_text(value: str | bool | float) -> str:
    """A cell or level as text; whole numbers without decimal point, true/false in lower case."""
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else f"{value:.15g}"


def _levels(cells: Texts, name: str, what: str, reference: str | None) -> tuple[str, ...]:
    levels = sorted(cells.values, key=float) if what == "number" else cells.values
    if len(levels) < 2:
        raise InputError(
            f"column {name!r} has the single level {levels[0]!r} in all complete rows; leave it out"
        )
    if len(levels) > max(20, len(cells.code) // 2):
        raise InputError(
            f"column {name!r} has {len(levels)} levels in {len(cells.code)} rows: it looks like an "
            "identifier or free text; leave it out (features.exclude)"
        )
    if reference is None:
        return tuple(levels)
    if reference not in levels:
        raise InputError(
            f"features.reference: column {name!r} has no level {reference!r}"
            f"{nearest(reference, levels)} (levels: {', '.join(levels)})"
        )
    return (reference, *(level for level in levels if level != reference))


def _check_text(cells: Texts, name: str, place: Place) -> None:
    """Refuses numbers mixed with text: a typing error in one cell turns a number column to text."""
    number = np.array([_is_number(value) for value in cells.values])[cells.code]
    if not number.any():
        return
    i = int(np.argmax(number))
    where = f"{place(i)} has the number {cells.values[cells.code[i]]!r}"
    if not number.all():
        i = int(np.argmin(number))
        where = f"{place(i)} has {cells.values[cells.code[i]]!r}, other rows have numbers"
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
