"""Typed columns to numbers: the design matrix and the target of complete rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from fedexact.clients import LARGEST
from fedexact.data.tables import kind, nearest, need_column
from fedexact.errors import InputError, check_choice

KINDS = ("number", "true/false", "text")
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


def design(
    table: pa.Table,
    columns: Sequence[str],
    spec: Features,
    place: Place,
    agreed: Mapping[str, tuple[str, ...]] | None = None,
) -> Design:
    """The numbers of complete rows; the levels of categorical columns are those found in them, or
    those `agreed`, the reference first. Raises InputError naming client, row, column and value."""
    blocks, levels = [], {}
    for name in columns:
        column = table.column(name)
        cells = categories(column, name, spec, place)
        if cells is None:
            blocks.append(numbers(column, name, place)[:, None])
            continue
        if agreed is None:
            what, reference = kind(column.type), spec.reference.get(name)
            found = ordered_levels(cells.values, len(cells.code), name, what, reference)
        else:
            found = agreed[name]
            _check_known(cells, found, name, place)
        blocks.append(np.stack([cells.equal(level) for level in found[1:]], axis=1))
        levels[name] = found
    return Design(np.concatenate(blocks, axis=1), coded_names(columns, levels), levels)


def categories(column: pa.ChunkedArray, name: str, spec: Features, place: Place) -> Texts | None:
    """The cells of a categorical column, None for any other. InputError for text with numbers."""
    if name in spec.categorical or name in spec.reference:
        _need_kind(column, name, KINDS)
        return Texts(column)
    if kind(column.type) != "text":
        return None
    cells = Texts(column)
    _check_text(cells, name, place)
    return cells


def coded_names(columns: Sequence[str], levels: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The names of the columns of X; `levels` of the categorical ones, the reference first."""
    names = []
    for name in columns:
        names += [f"{name}[{x}]" for x in levels[name][1:]] if name in levels else [name]
    return tuple(names)


def numbers(column: pa.ChunkedArray, name: str, place: Place) -> np.ndarray:
    """(n,) float64 of a number or true/false column without missing cells, all finite and of a size
    that can be squared."""
    _need_kind(column, name, ("number", "true/false"))
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
    column: pa.ChunkedArray, spec: Target, place: Place, agreed: Sequence[str] | None = None
) -> tuple[np.ndarray, tuple[str, ...]]:
    """(n,) float64 target of complete rows, and the classes 0, 1, ... of a text target: those found
    in the rows, or those `agreed`, and then the level of an event need not occur in the rows."""
    name, cells = spec.column, target_texts(column, spec, place)
    if cells is None:
        values = numbers(column, name, place)
        if spec.above is not None:
            return (values > spec.above).astype(float), ()
        return values if spec.equals is None else (values == float(spec.equals)).astype(float), ()
    if spec.equals is not None:
        if agreed is None and str(spec.equals) not in cells.values:
            raise InputError(
                f"target.equals: no row has {name} = {spec.equals!r}"
                f"{nearest(str(spec.equals), cells.values)} "
                f"(values: {', '.join(cells.values[:20])})"
            )
        return cells.equal(str(spec.equals)), ()
    if agreed is None:
        return cells.code.astype(float), tuple(cells.values)
    _check_known(cells, agreed, name, place)
    number = {value: float(i) for i, value in enumerate(agreed)}
    return np.array([number[value] for value in cells.values])[cells.code], tuple(agreed)


def target_texts(column: pa.ChunkedArray, spec: Target, place: Place) -> Texts | None:
    """The cells of a target of classes, or of one compared with a text; None for numbers."""
    text = kind(column.type) == "text"
    if spec.equals is not None and (text or isinstance(spec.equals, str)):
        _need_kind(column, spec.column, KINDS)
        return Texts(column)
    if not text:
        return None
    if spec.above is not None:
        raise InputError(f"target.above: column {spec.column!r} holds text; use target.equals")
    cells = Texts(column)
    _check_text(cells, spec.column, place)
    return cells


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
        code = self.values.index(text) if text in self.values else -1
        return (self.code == code).astype(float)


def as_text(value: str | bool | float) -> str:
    """A cell or level as text; whole numbers without decimal point, true/false in lower case."""
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else f"{value:.15g}"


def ordered_levels(
    values: Sequence[str], n: int, name: str, what: str, reference: str | None
) -> tuple[str, ...]:
    """The levels of a column of kind `what`, the reference first, from its sorted distinct `values`
    in n complete rows. InputError for one level, for an identifier and for an unknown reference."""
    levels = sorted(values, key=float) if what == "number" else values
    if len(levels) < 2:
        raise InputError(
            f"column {name!r} has the single level {levels[0]!r} in all complete rows; leave it out"
        )
    refuse_identifier(levels, n, name)
    if reference is None:
        return tuple(levels)
    if reference not in levels:
        raise InputError(
            f"features.reference: column {name!r} has no level {reference!r}"
            f"{nearest(reference, levels)} (levels: {', '.join(levels)})"
        )
    return (reference, *(level for level in levels if level != reference))


def refuse_identifier(
    levels: Sequence[str], n: int, name: str, remedy: str = "leave it out (features.exclude)"
) -> None:
    """InputError for a column with too many levels for n rows."""
    if len(levels) > max(20, n // 2):
        raise InputError(
            f"column {name!r} has {len(levels)} levels in {n} rows: it looks like an "
            f"identifier or free text; {remedy}"
        )


def _need_kind(column: pa.ChunkedArray, name: str, kinds: Sequence[str]) -> None:
    what = kind(column.type)
    if what not in kinds:
        raise InputError(
            f"column {name!r} holds {what}: features are numbers, true/false or text; leave it out "
            "(features.exclude)"
        )


def _check_known(cells: Texts, agreed: Sequence[str], name: str, place: Place) -> None:
    known = set(agreed)
    for value in [value for value in cells.values if value not in known][:1]:
        i = int(np.argmax(cells.equal(value)))
        raise InputError(
            f"{place(i)}, column {name!r}: {value!r} is not among the levels that were agreed "
            f"({', '.join(agreed)}); the table has changed since, start anew"
        )


def _check_text(cells: Texts, name: str, place: Place) -> None:
    """Refuses numbers mixed with text: a typing error in one cell turns a number column to text."""
    number = np.array([is_number(value) for value in cells.values])[cells.code]
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


def is_number(text: str) -> bool:
    """Whether a text reads as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def missing_cells(table: pa.Table, columns: Sequence[str]) -> np.ndarray:
    """(n, len(columns)) whether the cell is missing."""
    return np.stack([table.column(c).is_null().to_numpy().astype(bool) for c in columns], axis=1)


class Complete(NamedTuple):
    """The rows without a missing cell, and what was left out."""

    table: pa.Table
    place: Place
    total: np.ndarray  # (N,) rows of each client, complete or not
    missing: dict[str, dict[str, int]]  # client -> column -> missing cells


def complete_rows(table: pa.Table, columns: Sequence[str], place: Place, missing: str) -> Complete:
    """The rows without a missing cell in these columns. InputError for a client without such a row,
    and with missing="error" for any missing cell."""
    check_choice("missing", missing, ("drop", "error"))
    blank = missing_cells(table, columns)
    counts, total = _count_missing(blank, columns, place), place.counts()
    if missing == "error":
        _refuse_missing(blank, columns, place)
    complete = np.flatnonzero(~blank.any(axis=1))
    if len(complete) < table.num_rows:
        table, place = table.take(pa.array(complete)), place.take(complete)
        _need_complete_rows(place, total, counts)
    return Complete(table, place, total, counts)


def _count_missing(
    blank: np.ndarray, columns: Sequence[str], place: Place
) -> dict[str, dict[str, int]]:
    names = place.names or [""]
    counts: list[dict[str, int]] = [{} for _ in names]
    row, column = np.nonzero(blank)
    cells, times = np.unique(place.owner[row] * len(columns) + column, return_counts=True)
    for cell, count in zip(cells.tolist(), times.tolist(), strict=True):
        k, j = divmod(cell, len(columns))
        counts[k][columns[j]] = count
    return dict(zip(names, counts, strict=True))


def _refuse_missing(blank: np.ndarray, columns: Sequence[str], place: Place) -> None:
    for i, j in np.argwhere(blank)[:1].tolist():
        raise InputError(
            f"{place(i)}: column {columns[j]!r} is missing ({np.count_nonzero(blank)} missing "
            'cells in all); fill it in, leave the column out, or set missing = "drop" to leave out '
            "incomplete rows"
        )


def _need_complete_rows(
    place: Place, total: np.ndarray, counts: Mapping[str, Mapping[str, int]]
) -> None:
    for k in np.flatnonzero(place.counts() == 0).tolist()[:1]:
        name = place.names[k] if place.names else ""
        who = f"client {name!r}" if place.names else "the table"
        cells = ", ".join(f"{c} in {m}" for c, m in counts[name].items())
        raise InputError(
            f"{who} has no complete row (of {total[k]} rows, missing: {cells}); "
            "leave out the columns it does not have, or the client"
        )
