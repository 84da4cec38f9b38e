"""Files to Arrow tables: CSV, Parquet, and a folder with one file per client.

A cell that is blank, NA, N/A or null is missing. NaN and infinities are values (of a calculation
that went wrong somewhere) and are refused later, with client, column and row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

import pyarrow as pa

from fedexact.errors import InputError

MISSING = ("", "NA", "N/A", "#N/A", "n/a", "NULL", "Null", "null", "None")
TABLE_SUFFIXES = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".pq": "parquet"}


def read_csv_table(
    path: str | Path, missing_values: Sequence[str] = MISSING, delimiter: str | None = None
) -> pa.Table:
    """The table in a CSV file with one header line; types are inferred per column.

    `missing_values` are the spellings of a missing cell. The delimiter is a comma, or a tab in a
    `.tsv` file, unless given. Raises InputError naming the file.
    """
    from pyarrow import csv

    path = existing(path)
    if delimiter is None:
        delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    convert = csv.ConvertOptions(null_values=list(missing_values), strings_can_be_null=True)
    parse = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    try:
        table = csv.read_csv(path, parse_options=parse, convert_options=convert)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a readable CSV file: {error}") from error
    return checked_table(table, str(path))


def read_parquet_table(path: str | Path) -> pa.Table:
    """The table in a Parquet file; nulls are missing cells. Raises InputError naming the file."""
    from pyarrow import parquet

    path = existing(path)
    try:
        table = parquet.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a readable Parquet file: {error}") from error
    return checked_table(table, str(path))


def read_arrow_table(path: str | Path) -> pa.Table:
    """The table in an Arrow (IPC, Feather) file. Raises InputError naming the file."""
    path = existing(path)
    try:
        with pa.OSFile(str(path)) as opened, pa.ipc.open_file(opened) as file:
            table = file.read_all()
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path}: not a readable Arrow file: {error}") from error
    return checked_table(table, str(path))


def read_folder_tables(
    path: str | Path, missing_values: Sequence[str] = MISSING, delimiter: str | None = None
) -> dict[str, pa.Table]:
    """The tables of a folder with one CSV or Parquet file per client, by file name without suffix.

    All files must have the same columns (in any order), each of one kind (number, true/false, text)
    throughout. Raises InputError naming the file and the columns that differ.
    """
    files = client_files(path, TABLE_SUFFIXES)
    tables = {}
    for name, file in files.items():
        if TABLE_SUFFIXES[file.suffix.lower()] == "csv":
            tables[name] = read_csv_table(file, missing_values, delimiter)
        else:
            tables[name] = read_parquet_table(file)
    _check_same_columns(tables, files)
    return _same_types(tables, files)


def client_files(path: str | Path, suffixes: Mapping[str, str]) -> dict[str, Path]:
    """The files of a folder with one of the suffixes, by stem, in the order of their names."""
    folder = Path(path)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    files: dict[str, Path] = {}
    for file in sorted(folder.iterdir()):
        if file.suffix.lower() not in suffixes or file.name.startswith("."):
            continue
        if file.stem in files:
            raise InputError(
                f"{folder}: {files[file.stem].name} and {file.name} are both for client "
                f"{file.stem!r}; keep one file per client"
            )
        files[file.stem] = file
    if not files:
        raise InputError(f"{folder}: no files of clients in it ({', '.join(suffixes)})")
    return files


def existing(path: str | Path) -> Path:
    """`path` as a Path; raises InputError when there is no such file."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: no such file{nearest(path.name, _siblings(path))}")
    return path


def nearest(name: str, known: Iterable[str]) -> str:
    """'; did you mean ...?' when one of the known names is close, else nothing."""
    near = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def need_column(table: pa.Table, name: str, role: str, source: str) -> None:
    """Raises InputError when the table has no column of that name, with a near match and a list."""
    columns = table.column_names
    if name not in columns:
        listed = ", ".join(columns[:40]) + (", ..." if len(columns) > 40 else "")
        raise InputError(
            f"{role}: there is no column {name!r} in {source}{nearest(name, columns)} "
            f"(columns: {listed})"
        )


def _siblings(path: Path) -> list[str]:
    return [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []


def kind(type_: pa.DataType) -> str:
    """number, true/false, text, empty (only missing cells), or the name of another Arrow type."""
    if pa.types.is_dictionary(type_):
        return kind(type_.value_type)
    tests = {
        "true/false": (pa.types.is_boolean,),
        "number": (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal),
        "text": (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view),
        "empty": (pa.types.is_null,),
        "bytes that are not UTF-8 text": (pa.types.is_binary, pa.types.is_large_binary),
    }
    for name, predicates in tests.items():
        if any(predicate(type_) for predicate in predicates):
            return name
    return str(type_)


def checked_table(table: pa.Table, source: str) -> pa.Table:
    """The table; raises InputError if it has no rows or two columns of one name."""
    seen: set[str] = set()
    for name in table.column_names:
        if name in seen:
            raise InputError(f"{source}: two columns are called {name!r}; rename one")
        seen.add(name)
    if table.num_rows == 0:
        raise InputError(f"{source}: the table has no rows")
    return table


def _check_same_columns(tables: Mapping[str, pa.Table], files: Mapping[str, Path]) -> None:
    first = next(iter(tables))
    expected = tables[first].column_names
    wrong = []
    for name, table in tables.items():
        lacking = [c for c in expected if c not in table.column_names]
        extra = [c for c in table.column_names if c not in expected]
        parts = [f"lacks {', '.join(map(repr, lacking))}"] if lacking else []
        parts += [f"has {', '.join(map(repr, extra))} in addition"] if extra else []
        if parts:
            wrong.append(f"  {files[name].name} {' and '.join(parts)}")
    if wrong:
        raise InputError(
            f"the files of the clients have different columns; compared with {files[first].name}:\n"
            + "\n".join(wrong)
        )


def _same_types(tables: Mapping[str, pa.Table], files: Mapping[str, Path]) -> dict[str, pa.Table]:
    """The same tables with one Arrow type per column: numbers become float64 where they differ."""
    fields = []
    for column in next(iter(tables.values())).column_names:
        kinds: dict[str, str] = {}
        for name, table in tables.items():
            kinds.setdefault(kind(table.schema.field(column).type), files[name].name)
        kinds.pop("empty", None)
        if len(kinds) > 1:
            what = ", ".join(f"{k} in {file}" for k, file in kinds.items())
            raise InputError(f"column {column!r} is of different types: {what}")
        types = {t.schema.field(column).type for t in tables.values()}
        types.discard(pa.null())
        fields.append(pa.field(column, _common(types, next(iter(kinds), "empty"))))
    schema = pa.schema(fields)
    return {n: t.select(schema.names).cast(schema, safe=False) for n, t in tables.items()}


def _common(types: set[pa.DataType], kind_: str) -> pa.DataType:
    if len(types) == 1:
        return next(iter(types))
    wide = {"number": pa.float64(), "true/false": pa.bool_(), "empty": pa.null()}
    return wide.get(kind_, pa.string())
