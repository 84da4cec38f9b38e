"""A site's rows: a file, or a table or query of a database, as an Arrow table.

A database is opened for reading only, as far as its driver allows. Rows are wanted in the same
order each time, so that a run resumes bit for bit: a table is read by its primary key, a query
should say ORDER BY.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from fedexact.data.columns import as_text
from fedexact.data.mapped import SUFFIXES as MAPPED_SUFFIXES
from fedexact.data.tables import (
    TABLE_SUFFIXES,
    checked_table,
    existing,
    nearest,
    read_arrow_table,
    read_csv_table,
    read_parquet_table,
)
from fedexact.errors import InputError

if TYPE_CHECKING:
    from sqlalchemy import URL, Connection

_READERS: dict[str, Callable[[str], pa.Table]] = {
    "csv": read_csv_table,
    "parquet": read_parquet_table,
    "arrow": read_arrow_table,
}
_SUFFIXES = {**TABLE_SUFFIXES, **MAPPED_SUFFIXES}
_READ_ONLY = ("postgresql", "mysql", "mariadb", "oracle")  # know SET TRANSACTION READ ONLY
_SECRET = re.compile("pass|pwd|secret|token|key|connect", re.IGNORECASE)  # options of a URL
_USER = re.compile(r"(://)(?:[^:/@?]*(?::.*)?@)")  # also with an @ in the password
_NOT_CODE = re.compile(
    r"""'(?:[^']|'')*' | "(?:[^"]|"")*" | `[^`]*` | --[^\n]* | /\*.*?\*/""", re.DOTALL | re.VERBOSE
)


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a site's rows are.

    `data` is the path of a CSV, Parquet or Arrow file, or the URL of a database, such as
    sqlite:///patients.db or postgresql://user:password@host/database; of a database, `table` (with
    its schema, if it needs one: schema.table) or `query`, a SELECT, says which rows.
    """

    data: str = dataclasses.field(repr=False)
    table: str | None = None
    query: str | None = None

    def __post_init__(self) -> None:
        if not self.data:
            raise InputError("data: say where the rows are, the path of a file or a database URL")
        given = [key for key in ("table", "query") if getattr(self, key)]
        if self.is_database and len(given) != 1:
            found = "both" if given else "neither"
            raise InputError(f"{self}: a database needs table or query, got {found}")
        if given and not self.is_database:
            raise InputError(f"{self}: {given[0]} goes with a database URL, and this is a file")
        if self.query:
            _check_select(self.query, str(self))

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Source:
        """From the keys data, table and query; others are left alone. Raises InputError."""
        for key in ("data", "table", "query"):
            if not isinstance(mapping.get(key, ""), str):
                raise InputError(f"{key} must be a text, got {mapping[key]!r}")
        return cls(mapping.get("data", ""), mapping.get("table"), mapping.get("query"))

    @property
    def is_database(self) -> bool:
        """Whether the rows are in a database."""
        return "://" in self.data

    def __str__(self) -> str:
        """For messages: without user, password and options of a URL."""
        where = self.data
        if self.is_database:
            where = _USER.sub(r"\1***@", where).partition("?")[0]
        if self.table:
            return f"{where}, table {self.table!r}"
        if self.query:
            return f"{where}, query {textwrap.shorten(self.query, 80, placeholder='...')!r}"
        return where


def read(source: Source) -> pa.Table:
    """The rows. Raises InputError naming the source, without its password.

    A blank cell of a CSV file, as `from_csv` has it, and NULL are missing. Integers, decimals and
    floating-point numbers of a database are numbers; a column of both numbers and texts is text.
    SQLite has no truth values: a column declared BOOLEAN is one if it is read as part of a `table`;
    from a `query` it holds the numbers 0 and 1.
    """
    if source.is_database:
        return _read_database(source)
    suffix = Path(source.data).suffix.lower()
    if suffix not in _SUFFIXES:
        raise InputError(
            f"{source}: neither a database URL nor, by its name, a file with rows "
            f"({', '.join(_SUFFIXES)})"
        )
    return _READERS[_SUFFIXES[suffix]](source.data)


# --- databases ------------------------------------------------------------------------------------


def _read_database(source: Source) -> pa.Table:
    try:
        import sqlalchemy
        from sqlalchemy.exc import ArgumentError
    except ImportError:
        raise InputError(
            f"{source}: a database needs SQLAlchemy: pip install 'fedexact[flower]'"
        ) from None
    try:
        url = sqlalchemy.make_url(source.data)
    except (ArgumentError, ValueError):
        raise InputError(
            f"{source}: not a database URL; it is written "
            "postgresql://user:password@host/database, with %40 for an @ in the password"
        ) from None
    with _failures(source, url):
        engine = sqlalchemy.create_engine(
            _opened_for_reading(url), poolclass=sqlalchemy.NullPool, hide_parameters=True
        )
        with engine.connect() as connection:
            if url.get_backend_name() in _READ_ONLY:
                connection.exec_driver_sql("SET TRANSACTION READ ONLY")
            found = _query(connection, source) if source.query else _table(connection, source)
    return checked_table(found, str(source))


@contextmanager
def _failures(source: Source, url: URL) -> Iterator[None]:
    """What fails inside as an InputError, without secrets of the URL."""
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except InputError as error:
        raise InputError(f"{source}: {error}") from None
    except ImportError as error:
        raise InputError(
            f"{source}: the driver for {url.drivername} is not installed: pip install {error.name}"
        ) from None
    except (SQLAlchemyError, OSError, ValueError) as error:
        reason = " ".join(str(getattr(error, "orig", None) or error).split())
        for secret in _secrets(url):
            reason = reason.replace(secret, "***")
        raise InputError(f"{source}: {reason}") from None


def _secrets(url: URL) -> list[str]:
    found = [url.password or ""]
    for key, value in url.query.items():
        if _SECRET.search(key):
            found += [value] if isinstance(value, str) else value
    return [secret for secret in found if secret]


def _opened_for_reading(url: URL) -> URL:
    """The URL of an SQLite file with the options that keep SQLite from making or changing it."""
    if url.get_backend_name() != "sqlite":
        return url
    database = url.database or ""
    if database in ("", ":memory:"):
        raise InputError("this names no file; write sqlite:///patients.db")
    if not database.startswith("file:"):
        url = url.set(database=existing(database).absolute().as_uri())
    return url.update_query_dict({"mode": "ro", "uri": "true"})


def _query(connection: Connection, source: Source) -> pa.Table:
    bare = connection.execution_options(no_parameters=True)  # a % or : is nothing special
    result = bare.exec_driver_sql(source.query or "")
    if not result.returns_rows:
        raise InputError("this query returns no rows; write a SELECT")
    return _arrow(list(result.keys()), result.fetchall())


def _table(connection: Connection, source: Source) -> pa.Table:
    import sqlalchemy
    from sqlalchemy.exc import SAWarning

    inspector = sqlalchemy.inspect(connection)
    schema, name = _place(inspector, source.table or "")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SAWarning)  # types that it does not know
        columns = inspector.get_columns(name, schema=schema)
    key = inspector.get_pk_constraint(name, schema=schema)["constrained_columns"]
    statement = (
        sqlalchemy.select(*(sqlalchemy.column(column["name"]) for column in columns))
        .select_from(sqlalchemy.table(name, schema=schema))
        .order_by(*map(sqlalchemy.column, key))
    )
    result = connection.execute(statement)
    truth = {c["name"] for c in columns if isinstance(c["type"], sqlalchemy.Boolean)}
    return _arrow(list(result.keys()), result.fetchall(), truth)


def _place(inspector: Any, table: str) -> tuple[str | None, str]:
    """Schema, if one is named, and name of a table or view."""
    if inspector.has_table(table):
        return None, table
    schema, _, name = table.rpartition(".")
    if schema and inspector.has_table(name, schema):
        return schema, name
    known = [*inspector.get_table_names(schema or None), *inspector.get_view_names(schema or None)]
    listed = ", ".join(known[:20]) or "none"
    raise InputError(f"there is no such table{nearest(name, known)} (tables: {listed})")


def _check_select(query: str, source: str) -> None:
    code = _NOT_CODE.sub(" ", query).strip().removesuffix(";")
    first = re.match(r"[\s(]*(\w*)", code)
    if ";" in code or first is None or first[1].lower() not in ("select", "with"):
        raise InputError(f"{source}: the query must be one SELECT")


# --- values to columns ----------------------------------------------------------------------------


def _arrow(
    names: Sequence[str], rows: Sequence[Sequence[Any]], truth: set[str] | None = None
) -> pa.Table:
    """A table of the rows; 0 and 1 in the columns `truth` are false and true."""
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(names)
    arrays = []
    for name, values in zip(names, columns, strict=True):
        if name in (truth or ()) and set(values) <= {0, 1, None}:
            values = [None if value is None else bool(value) for value in values]
        arrays.append(_column(values))
    return pa.table(arrays, names=list(names))


def _column(values: Sequence[Any]) -> pa.Array:
    kinds = {type(value) for value in values if value is not None}
    number = {kind for kind in kinds if issubclass(kind, int | float | Decimal)}
    if kinds and not kinds <= number | {str}:
        return _inferred(values)
    if kinds <= {bool}:
        return pa.array(values, pa.bool_() if kinds else pa.null())
    if kinds == number:
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    return pa.array([_text(value) for value in values], pa.string())


def _text(value: str | float | Decimal | None) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return as_text(value if isinstance(value, bool) else float(value))


def _inferred(values: Sequence[Any]) -> pa.Array:
    """Dates, bytes and the like."""
    try:
        return pa.array(values)
    except (pa.ArrowException, TypeError, ValueError):
        return pa.array([None if value is None else str(value) for value in values], pa.string())
