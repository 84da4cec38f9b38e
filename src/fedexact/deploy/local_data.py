"""An experiment's rows as one file per client, as they would lie at the sites."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import scipy.sparse

from fedexact.config import Experiment
from fedexact.config.models import DataTable
from fedexact.data import BUNDLED, tables
from fedexact.data.columns import place_of
from fedexact.errors import InputError
from fedexact.files import atomic_path

TARGET = "target"  # the column of the target, where the rows are numbers


def at_sites(experiment: Experiment, folder: Path) -> tuple[dict[str, Path], Experiment]:
    """Writes the files of the clients into `folder`; client -> file, and the experiment on them.

    Of a client column: the raw rows, all columns but that one. Of a folder: the files as they are.
    Of a partition or LIBSVM files: the numbers of the complete rows. Raises InputError for sparse
    rows and what reading the data raises.
    """
    data = experiment.data
    if data.folder is not None and data.missing_values is None and data.delimiter is None:
        return tables.client_files(data.folder, tables.TABLE_SUFFIXES), experiment
    if data.folder is not None:
        settings = {"missing_values": data.missing_values, "delimiter": data.delimiter}
        parts = tables.read_folder_tables(data.folder, **_given(settings))
        there = _data(data, folder)
    elif data.client is not None:
        parts = _by_client(_table(data), data.client)
        there = _data(data, folder)
    else:
        parts, target = _numbers(data)
        there = DataTable(folder=str(folder), target=target, standardize=data.standardize)  # pyright: ignore
    files = {name: _write(part, folder, name) for name, part in parts.items()}
    return files, _on(experiment, there, list(parts))


def _on(experiment: Experiment, data: DataTable, names: list[str]) -> Experiment:
    """The experiment on other data; weights listed in the order of the clients, now by name."""
    problem = experiment.problem
    if isinstance(problem.weights, list) and len(problem.weights) == len(names):
        by_name = dict(zip(names, problem.weights, strict=True))
        problem = problem.model_copy(update={"weights": by_name})
    return experiment.model_copy(update={"data": data, "problem": problem})


def _data(data: DataTable, folder: Path) -> DataTable:
    """The same columns, from a folder with a file per client."""
    features = data.features
    if features is not None and data.client in features.exclude:
        left = tuple(name for name in features.exclude if name != data.client)
        features = dataclasses.replace(features, exclude=left)
    kept = {"target": data.target, "features": features, "missing": data.missing}
    return DataTable(folder=str(folder), standardize=data.standardize, **_given(kept))  # pyright: ignore


def _table(data: DataTable) -> pa.Table:
    settings = _given({"missing_values": data.missing_values, "delimiter": data.delimiter})
    if data.parquet is not None:
        return tables.read_parquet_table(data.parquet)
    if data.csv is not None:
        return tables.read_csv_table(data.csv, **settings)
    return tables.read_csv_table(BUNDLED[str(data.bundled)].path)


def _by_client(table: pa.Table, client: str) -> dict[str, pa.Table]:
    tables.need_column(table, client, "client", "the data")
    place = place_of(table.column(client), client)
    rest = table.drop_columns([client])
    return {
        name: rest.take(pa.array(np.flatnonzero(place.owner == k)))
        for k, name in enumerate(place.names)
    }


def _numbers(data: DataTable) -> tuple[dict[str, pa.Table], str]:
    """The rows of each client as numbers, not standardised, and the name of the target's column."""
    federation = data.model_copy(update={"standardize": False}).federation()
    target = TARGET
    while target in federation.feature_names:
        target += "_"
    parts = {}
    for name, (X, y) in zip(federation.names, federation.clients, strict=True):
        if scipy.sparse.issparse(X):
            raise InputError(
                f"{federation.source}: the rows are sparse; a site reads dense tables only: give "
                "fewer columns, or run the experiment with fedexact run"
            )
        columns: list[np.ndarray] = [*np.ascontiguousarray(X.T), y]
        parts[name] = pa.table(columns, names=[*federation.feature_names, target])
    return parts, target


def _write(table: pa.Table, folder: Path, name: str) -> Path:
    path = folder / f"{name.replace('/', '-')}.parquet"
    with atomic_path(path) as part:
        pq.write_table(table, part)
    return path


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if value is not None}
