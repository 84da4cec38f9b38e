"""What the sites agree on before the first round: columns, levels, classes, and no rows.

Each site describes its table (`describe`), the server merges the descriptions (`agree`), and each
site codes its rows by what was agreed (`encode`). The outcome is that of `from_table` or
`from_folder` on the stacked tables, bit for bit. A description holds the names and kinds of the
columns that are used, the distinct values of those that are categories, and counts of rows; a site
with too many distinct values refuses to send them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from fedexact.data.columns import (
    Complete,
    Features,
    Place,
    Target,
    categories,
    coded_names,
    complete_rows,
    design,
    feature_columns,
    is_number,
    numbers,
    ordered_levels,
    refuse_identifier,
    target_texts,
    target_values,
)
from fedexact.data.moments import Standardize, Sums, check_standardize, sums_of_clients
from fedexact.data.tables import checked_table, kind, need_column
from fedexact.errors import InputError, check_choice

T = TypeVar("T")

LISTED = 8  # clients at most that a message names


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is to be explained by what, and what becomes of missing cells and scales.

    The same for all sites; the fields are those of `from_table`.
    """

    target: Target
    features: Features = dataclasses.field(default_factory=Features)
    missing: str = "drop"
    standardize: Standardize = False

    def __post_init__(self) -> None:
        check_choice("missing", self.missing, ("drop", "error"))
        if not isinstance(self.standardize, bool | str):
            object.__setattr__(self, "standardize", tuple(self.standardize))

    def to_meta(self) -> dict[str, Any]:
        """Fit for JSON; `from_meta` gives the same specification back."""
        return {
            "target": dataclasses.asdict(self.target),
            "features": dataclasses.asdict(self.features),
            "missing": self.missing,
            "standardize": self.standardize,
        }

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Spec:
        """The specification in a message. Raises InputError for anything else."""
        return _read("specification", lambda: cls._from(meta))

    @classmethod
    def _from(cls, meta: Mapping[str, Any]) -> Spec:
        features, standardize = meta["features"], meta["standardize"]
        return cls(
            Target(**meta["target"]),
            Features(
                columns=None if features["columns"] is None else _texts(features["columns"]),
                exclude=_texts(features["exclude"]),
                categorical=_texts(features["categorical"]),
                reference=dict(features["reference"]),
            ),
            meta["missing"],
            standardize if isinstance(standardize, bool | str) else _texts(standardize),
        )


@dataclasses.dataclass(frozen=True)
class Description:
    """What one site tells about its table."""

    columns: Mapping[str, str]  # feature column -> number, true/false or text, in order
    levels: Mapping[str, tuple[str, ...]]  # categorical column -> values in complete rows, sorted
    target: str  # kind of the target
    classes: tuple[str, ...]  # of a text target, sorted
    occurs: bool  # whether a row has the text that `target.equals` names; True without one
    rows: int
    complete: int
    missing: Mapping[str, int]  # column -> missing cells, where there are any

    @property
    def dropped(self) -> int:
        """Rows left out because a cell was missing."""
        return self.rows - self.complete

    def to_meta(self) -> dict[str, Any]:
        """Fit for JSON; `from_meta` gives the same description back."""
        return {
            "columns": [list(item) for item in self.columns.items()],
            "levels": {name: list(levels) for name, levels in self.levels.items()},
            "target": self.target,
            "classes": list(self.classes),
            "occurs": self.occurs,
            "rows": self.rows,
            "complete": self.complete,
            "missing": dict(self.missing),
        }

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any], name: str) -> Description:
        """What the client `name` sent. Raises InputError naming it if that is no description."""
        found = _read(f"description of client {name!r}", lambda: cls._from(meta))
        if not 1 <= found.complete <= found.rows:
            raise InputError(
                f"description of client {name!r}: {found.complete} complete of {found.rows} rows"
            )
        return found

    @classmethod
    def _from(cls, meta: Mapping[str, Any]) -> Description:
        return cls(
            columns=_pairs(meta["columns"]),
            levels=_lists(meta["levels"]),
            target=_of(str, meta["target"]),
            classes=_texts(meta["classes"]),
            occurs=_of(bool, meta["occurs"]),
            rows=_count(meta["rows"]),
            complete=_count(meta["complete"]),
            missing={_of(str, name): _count(cells) for name, cells in meta["missing"].items()},
        )


@dataclasses.dataclass(frozen=True)
class Schema:
    """What was agreed: enough for any site to code its rows."""

    spec: Spec
    columns: Mapping[str, str]  # feature column -> kind, in the order of X
    levels: Mapping[str, tuple[str, ...]]  # categorical column -> levels, the reference first
    target: str  # kind of the target
    classes: tuple[str, ...]  # of a text target, coded 0, 1, ...

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Of the columns of X."""
        return coded_names(list(self.columns), self.levels)

    def to_meta(self) -> dict[str, Any]:
        """Fit for JSON; `from_meta` gives the same schema back."""
        return {
            "spec": self.spec.to_meta(),
            "columns": [list(item) for item in self.columns.items()],
            "levels": {name: list(levels) for name, levels in self.levels.items()},
            "target": self.target,
            "classes": list(self.classes),
        }

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Schema:
        """The schema in a message. Raises InputError for anything else."""
        return _read("schema", lambda: cls._from(meta))

    @classmethod
    def _from(cls, meta: Mapping[str, Any]) -> Schema:
        found = cls(
            spec=Spec.from_meta(meta["spec"]),
            columns=_pairs(meta["columns"]),
            levels=_lists(meta["levels"]),
            target=_of(str, meta["target"]),
            classes=_texts(meta["classes"]),
        )
        features, columns = found.spec.features, found.columns
        coded = {name for name, what in columns.items() if _is_categorical(features, name, what)}
        if not columns or coded != {name for name, texts in found.levels.items() if len(texts) > 1}:
            raise ValueError("the levels do not fit the columns")
        return found


class Encoded(NamedTuple):
    """The complete rows of one site as numbers, not standardised."""

    X: np.ndarray  # (m, p)
    y: np.ndarray  # (m,)
    feature_names: tuple[str, ...]  # of the columns of X

    def sums(self) -> Sums:
        """What `pooled_moments` needs of this site, bit for bit as from the stacked rows."""
        return sums_of_clients(self.X, np.array([len(self.X)]))


# --- at a site ------------------------------------------------------------------------------------


def describe(table: pa.Table, spec: Spec, name: str) -> Description:
    """What the client `name` tells about its table.

    Raises InputError naming client, row, column and value for what one site can see to be wrong: a
    column that is not there, no complete row, a cell that is not finite, numbers mixed with text,
    and a column with so many distinct values that they may tell who is who.
    """
    checked_table(table, _table_of(name))
    need_column(table, spec.target.column, "target", _table_of(name))
    columns = feature_columns(table, spec.features, (spec.target.column,), _table_of(name))
    rows = _complete(table, columns, spec, name)
    kinds, levels = {}, {}
    for column in columns:
        cells = rows.table.column(column)
        kinds[column] = kind(cells.type)
        texts = categories(cells, column, spec.features, rows.place)
        if texts is None:
            numbers(cells, column, rows.place)
        else:
            _refuse_identifier(texts.values, len(texts.code), column, name)
            levels[column] = tuple(texts.values)
    target, (classes, occurs) = rows.table.column(spec.target.column), _classes(rows, spec, name)
    return Description(
        columns=kinds,
        levels=levels,
        target=kind(target.type),
        classes=classes,
        occurs=occurs,
        rows=table.num_rows,
        complete=rows.table.num_rows,
        missing=rows.missing[name],
    )


def encode(table: pa.Table, schema: Schema, name: str) -> Encoded:
    """The complete rows of the client `name` as numbers, by the agreed schema.

    Raises InputError naming client, row, column and value as `describe` does, and where the table
    is no longer as it was described.
    """
    checked_table(table, _table_of(name))
    spec, kinds = schema.spec, {**schema.columns, schema.spec.target.column: schema.target}
    for column, agreed in kinds.items():
        need_column(table, column, "agreed columns", _table_of(name))
        found = kind(table.schema.field(column).type)
        if found != agreed:
            raise InputError(
                f"client {name!r}, column {column!r}: it holds {found}, agreed was {agreed}; the "
                "table has changed since, start anew"
            )
    columns = list(schema.columns)
    rows = _complete(table, columns, spec, name)
    found = design(rows.table, columns, spec.features, rows.place, schema.levels)
    target = rows.table.column(spec.target.column)
    y, _ = target_values(target, spec.target, rows.place, schema.classes)
    return Encoded(np.ascontiguousarray(found.X), y, found.names)


def _complete(table: pa.Table, columns: list[str], spec: Spec, name: str) -> Complete:
    n, used = table.num_rows, [*columns, spec.target.column]
    place = Place([name], np.zeros(n, dtype=int), np.arange(1, n + 1))
    return complete_rows(table.select(used), used, place, spec.missing)


def _classes(rows: Complete, spec: Spec, name: str) -> tuple[tuple[str, ...], bool]:
    """The classes of a text target, and whether the level of an event occurs."""
    column = rows.table.column(spec.target.column)
    texts = target_texts(column, spec.target, rows.place)
    if texts is None:
        numbers(column, spec.target.column, rows.place)
        return (), True
    if spec.target.equals is not None:
        return (), str(spec.target.equals) in texts.values
    remedy = "make it an event (target.equals)"
    _refuse_identifier(texts.values, len(texts.code), spec.target.column, name, remedy)
    return tuple(texts.values), True


def _refuse_identifier(values: list[str], n: int, column: str, name: str, *remedy: str) -> None:
    try:
        refuse_identifier(values, n, column, *remedy)
    except InputError as error:
        raise InputError(f"client {name!r}: {error}") from None


def _table_of(name: str) -> str:
    return f"the table of client {name!r}"


# --- at the server --------------------------------------------------------------------------------


def agree(spec: Spec, descriptions: Mapping[str, Description]) -> Schema:
    """One schema for all clients, from the description of each by its name.

    Columns are in the order of the first client. Raises InputError naming clients and column where
    they disagree, and for what only all of them together show: a reference level or an event that
    occurs nowhere, a categorical column with a single level, a column to standardise that is none.
    """
    if not descriptions:
        raise InputError("no client has described its table")
    columns = _agreed_columns(descriptions)
    kinds = {column: {n: d.columns[column] for n, d in descriptions.items()} for column in columns}
    agreed = {column: _agreed_kind(column, kinds[column]) for column in columns}
    target = _agreed_kind(spec.target.column, {n: d.target for n, d in descriptions.items()})
    levels = {
        column: _agreed_levels(spec.features, column, what, descriptions)
        for column, what in agreed.items()
        if _is_categorical(spec.features, column, what)
    }
    if not any(d.occurs for d in descriptions.values()):
        raise InputError(
            f"target.equals: no complete row has {spec.target.column} = {spec.target.equals!r}, at "
            f"any of {_listed(descriptions)}"
        )
    classes = _merged(d.classes for d in descriptions.values())
    schema = Schema(spec, agreed, levels, target, tuple(classes))
    check_standardize(spec.standardize, schema.feature_names)
    return schema


def _agreed_columns(descriptions: Mapping[str, Description]) -> list[str]:
    columns = list(next(iter(descriptions.values())).columns)
    for column in dict.fromkeys(c for d in descriptions.values() for c in d.columns):
        have = [name for name, d in descriptions.items() if column in d.columns]
        lack = [name for name in descriptions if name not in have]
        if lack:
            raise InputError(
                f"column {column!r} is at {_listed(have)} and not at {_listed(lack)}; add it there "
                "or name the columns to use (features.columns)"
            )
    return columns


def _agreed_kind(column: str, kinds: Mapping[str, str]) -> str:
    """The kind that all clients give, by client."""
    who: dict[str, list[str]] = {}
    for name, what in kinds.items():
        who.setdefault(what, []).append(name)
    if len(who) > 1:
        listed = "; ".join(f"{what} at {_listed(names)}" for what, names in who.items())
        raise InputError(f"column {column!r} is of different types: {listed}")
    return next(iter(who))


def _agreed_levels(
    features: Features, column: str, what: str, descriptions: Mapping[str, Description]
) -> tuple[str, ...]:
    for name, described in descriptions.items():
        values = described.levels.get(column, ())
        if not values or (what == "number" and not all(map(is_number, values))):
            raise InputError(f"client {name!r}, column {column!r}: no levels of a {what} column")
    values = _merged(d.levels[column] for d in descriptions.values())
    rows = sum(d.complete for d in descriptions.values())
    try:
        return ordered_levels(values, rows, column, what, features.reference.get(column))
    except InputError as error:
        raise InputError(f"{_listed(descriptions)}: {error}") from None


def _is_categorical(features: Features, column: str, what: str) -> bool:
    return what == "text" or column in (*features.categorical, *features.reference)


def _merged(values: Iterable[Iterable[str]]) -> list[str]:
    return sorted({value for each in values for value in each})


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    who = "client" if len(names) == 1 else "clients"
    return f"{who} {', '.join(map(repr, names[:LISTED]))}{more}"


# --- what a message holds -------------------------------------------------------------------------


def _read(what: str, make: Callable[[], T]) -> T:
    try:
        return make()
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{what}: not understood ({type(error).__name__}: {error})") from None


def _of(type_: type[T], value: Any) -> T:
    if not isinstance(value, type_):
        raise TypeError(f"{str(value)[:40]!r} where {type_.__name__} was expected")
    return value


def _count(value: Any) -> int:
    if isinstance(value, bool) or _of(int, value) < 0:
        raise ValueError(f"{value} is no count")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        raise TypeError(f"{value[:40]!r} where a list was expected")
    return tuple(_of(str, text) for text in value)


def _pairs(value: Any) -> dict[str, str]:
    return {_of(str, name): _of(str, what) for name, what in value}


def _lists(value: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    return {_of(str, name): _texts(texts) for name, texts in value.items()}
