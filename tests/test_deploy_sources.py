"""A site's rows from files and from databases."""

from __future__ import annotations

import builtins
import datetime
import sqlite3
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import csv as arrow_csv
from pyarrow import parquet

import fedexact as fx
from fedexact import data
from fedexact.data.tables import kind, read_csv_table
from fedexact.deploy.sources import Source, read

sqlalchemy = pytest.importorskip("sqlalchemy")

SCHEMA = """
create table patients (
    id int primary key, age integer, bmi numeric(5, 2), stage text, smoker boolean, seen date,
    note text, photo blob
);
insert into patients values
    (3, 50, 25.5, 'II', 1, '2020-01-01', null, x'00ff'),
    (1, null, 31, 'I', 0, '2020-01-02', null, null),
    (2, 70, 22.25, null, null, null, null, null);
create view old as select id, age from patients where age > 60;
create table mixed (x integer, y text);
insert into mixed values (1, '5'), ('seventy', 'a'), (null, null), (2.5, 'b');
create table nobody (x integer);
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "the patients #1.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(SCHEMA)
    return path


def rows(file: Path, **what: str) -> pa.Table:
    return read(Source(f"sqlite:///{file}", **what))


# --- files ----------------------------------------------------------------------------------------


def test_files_are_read_as_elsewhere(tmp_path: Path) -> None:
    table = read_csv_table(data.BUNDLED["heart_disease_uci"].path)
    arrow_csv.write_csv(table, tmp_path / "a.csv")
    parquet.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    for name in ("a.csv", "a.parquet", "a.arrow"):
        assert read(Source(str(tmp_path / name))).equals(table)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("b.csv", r"b\.csv: no such file; did you mean 'a\.csv'"),
        ("a.arrow", r"a\.arrow: not a readable Arrow file"),
        ("a.xlsx", r"a\.xlsx: neither a database URL nor, by its name, .*\.csv, .*\.arrow"),
        ("empty.csv", r"empty\.csv: the table has no rows"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, name: str, message: str) -> None:
    for made, text in (("a.csv", "x\n1\n"), ("a.arrow", "x"), ("empty.csv", "x,y\n")):
        (tmp_path / made).write_text(text)
    with pytest.raises(fx.InputError, match=message):
        read(Source(str(tmp_path / name)))


# --- databases ------------------------------------------------------------------------------------


def test_a_table_has_the_types_of_its_columns_and_the_order_of_its_key(file: Path) -> None:
    table = rows(file, table="patients")
    assert {name: kind(table.schema.field(name).type) for name in table.column_names} == {
        "id": "number", "age": "number", "bmi": "number", "stage": "text", "smoker": "true/false",
        "seen": "text", "note": "empty", "photo": "bytes that are not UTF-8 text",
    }  # fmt: skip
    found = table.select(["id", "age", "bmi", "stage", "smoker"]).to_pydict()
    assert found == {
        "id": [1, 2, 3],
        "age": [None, 70, 50],
        "bmi": [31, 22.25, 25.5],
        "stage": ["I", None, "II"],
        "smoker": [False, None, True],
    }


def test_a_view_is_a_table(file: Path) -> None:
    assert rows(file, table="old").to_pydict() == {"id": [2], "age": [70]}
    assert rows(file, table="main.old").num_rows == 1


def test_a_query_gives_the_columns_it_names(file: Path) -> None:
    query = """-- those of stage I; and II
        select age + 1 as "a;b", stage || ' :x %s' as s from patients
        where stage like 'I%' order by id desc;"""
    table = rows(file, query=query)
    assert table.to_pydict() == {"a;b": [51, None], "s": ["II :x %s", "I :x %s"]}
    query = "/* a ; */ with p as (select 1 as x) (select x from p)"
    with pytest.raises(fx.InputError, match="syntax error"):  # SQLite has no such brackets
        rows(file, query=query)
    assert rows(file, query=query.replace("(select x from p)", "select x from p")).num_rows == 1


def test_a_column_of_numbers_and_texts_is_text(file: Path) -> None:
    table = rows(file, table="mixed")
    assert table.to_pydict() == {
        "x": ["1", "seventy", None, "2.5"], "y": ["5", "a", None, "b"],
    }  # fmt: skip
    with pytest.raises(fx.InputError, match=r"'x' was read as text: client 'A', row 2 has 'sev"):
        data.describe(table, data.Spec(data.Target("y"), data.Features(("x",))), "A")


@pytest.mark.parametrize(
    ("values", "type_"),
    [
        ([Decimal("1.50"), None, Decimal("NaN")], pa.float64()),
        ([1, 2.5, Decimal("3")], pa.float64()),
        ([2**70, 1], pa.float64()),
        ([True, 2], pa.float64()),
        ([True, None], pa.bool_()),
        (["a", None], pa.string()),
        ([None], pa.null()),
        ([datetime.date(2020, 1, 1), None], pa.date32()),
        ([datetime.date(2020, 1, 1), "x"], pa.string()),
    ],
)
def test_values_of_any_driver(
    values: list[Any], type_: pa.DataType, monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    monkeypatch.setattr(
        sqlalchemy.CursorResult, "fetchall", lambda _: [(value,) for value in values]
    )
    column = rows(file, query="select age from patients").column("age")
    assert column.type == type_
    assert [cell is None for cell in column.to_pylist()] == [value is None for value in values]


def test_the_site_of_a_database_agrees_with_that_of_a_file(file: Path, tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text("smoker,age,bmi,y\ntrue,40,20.5,1\nfalse,41,21,0\n")
    query = "select age, age > 60 as y, bmi, smoker from patients where smoker is not null"
    database = rows(file, query=query)
    column = database.column("smoker").cast(pa.bool_())
    database = database.set_column(3, "smoker", column)
    spec = data.Spec(data.Target("y"))
    parts = {"A": read(Source(str(tmp_path / "b.csv"))), "B": database}
    schema = data.agree(spec, {name: data.describe(t, spec, name) for name, t in parts.items()})
    assert data.encode(parts["B"], schema, "B").X.tolist() == [[1, 50, 25.5]]


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ({"table": "patient"}, "no such table; did you mean 'patients'.*mixed, nobody, patients"),
        ({"table": "nobody"}, "table 'nobody': the table has no rows"),
        ({"query": "select age from patients where age > 99"}, "age > 99': the table has no rows"),
        ({"query": "select agee from patients"}, "no such column: agee"),
        ({"query": "select id, age as id from patients"}, "two columns are called 'id'"),
        ({"query": "delete from patients"}, "the query must be one SELECT"),
        ({"query": "/* select */ drop table patients"}, "the query must be one SELECT"),
        ({"query": "select 1; delete from patients"}, "the query must be one SELECT"),
        ({"query": " "}, "the query must be one SELECT"),
        ({"query": "with x as (select 1) delete from patients returning id"}, "readonly database"),
        ({"query": "with x as (select 1) delete from patients"}, "readonly database"),
        ({}, "a database needs table or query, got neither"),
        ({"table": "patients", "query": "select 1"}, "needs table or query, got both"),
    ],
)
def test_a_bad_request_is_refused_and_changes_nothing(
    file: Path, what: dict[str, str], message: str
) -> None:
    before = file.read_bytes()
    with pytest.raises(fx.InputError, match=message) as caught:
        rows(file, **what)
    assert str(caught.value).startswith(f"sqlite:///{file}")
    assert file.read_bytes() == before
    assert rows(file, table="patients").num_rows == 3


def test_a_file_that_is_not_there_is_not_made(file: Path) -> None:
    with pytest.raises(fx.InputError, match=r"none\.db: no such file"):
        rows(file.with_name("none.db"), table="patients")
    with pytest.raises(fx.InputError, match="unable to open database file"):
        read(Source(f"sqlite:///file:{file.parent}/none.db?mode=rwc&uri=true", "patients"))
    with pytest.raises(fx.InputError, match=r"sqlite://, .*names no file; write sqlite:///"):
        read(Source("sqlite://", "patients"))
    assert list(file.parent.iterdir()) == [file]
    other = file.with_name("other.db")
    other.write_text("no database, but long enough to be looked at " * 20)
    with pytest.raises(fx.InputError, match="file is not a database"):
        rows(other, table="patients")


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://ann:hushhush@nowhere.invalid/patients",
        "postgresql://ann:hush@hush@nowhere.invalid/patients",
        "postgresql+nothing://ann:hushhush@nowhere.invalid/patients",
        "nothing://ann:hushhush@nowhere.invalid/patients?key=hush",
        "sqlite://ann:hushhush@nowhere.invalid/patients",
        "sqlite:///file:/nowhere/at/all?password=hushhush",
        "postgresql://ann:hushhush@nowhere.invalid:port/patients",
        "://ann:hushhush@nowhere",
    ],
)
def test_passwords_stay_here(url: str) -> None:
    source = Source(url, query="select 1")
    with pytest.raises(fx.InputError) as caught:
        read(source)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    for text in (str(caught.value), str(source), repr(source)):
        assert "hush" not in text
    assert str(caught.value).startswith(str(source))


def test_what_a_driver_says_is_cleared_of_secrets(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise sqlite3.OperationalError("no connection with password=hushhush\n and token=hush2")

    monkeypatch.setattr("sqlite3.dbapi2.connect", fail)
    with pytest.raises(fx.InputError, match=r"with password=[*]+ and token=[*]+$") as caught:
        read(Source(f"sqlite:///{file}?password=hushhush&access_token=hush2", "patients"))
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({}, "data: say where the rows are"),
        ({"data": 3}, "data must be a text, got 3"),
        ({"data": "a.csv", "table": "x"}, "a.csv, table 'x': table goes with a database URL"),
        ({"data": "a.csv", "query": "select 1"}, "query goes with a database URL"),
    ],
)
def test_a_bad_mapping_is_refused(mapping: dict[str, Any], message: str) -> None:
    with pytest.raises(fx.InputError, match=message):
        Source.from_mapping(mapping)


def test_a_mapping_may_hold_other_keys() -> None:
    source = Source.from_mapping({"client-id": "A", "data": "sqlite:///x.db", "table": "t"})
    assert source == Source("sqlite:///x.db", "t")
    assert str(source) == "sqlite:///x.db, table 't'"


def test_without_sqlalchemy_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("sqlalchemy"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(fx.InputError, match=r"pip install 'fedexact\[flower\]'"):
        read(Source("postgresql://ann:hush@host/db", "patients"))
