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
from fedexact.config.models import DataTable, DeployTable
from fedexact.data import BUNDLED, Features, Target, tables
from fedexact.data.columns import place_of
from fedexact.errors import InputError
from fedexact.files import atomic_path

TARGET = "target"  # the column of the target, where the rows are numbers


def at_sites(experiment: Experiment, folder: Path) -> tuple[dict[str, Path], Experiment]:
    """Writes the files of the clients into `folder`; client -> file, and the experiment for them.

    Of a client column: the raw rows, all columns but that one. Of a folder: the files as they are.
    Of a partition or LIBSVM files: the numbers of the complete rows. Raises InputError for sparse
    rows and what reading the data raises.
    """
    data, target = experiment.data, experiment.data.target
    read_as = _given({"missing_values": data.missing_values, "delimiter": data.delimiter})
    if data.folder is not None and not read_as:
        files = tables.client_files(data.folder, tables.TABLE_SUFFIXES)
        return files, _for_sites(experiment, target, data.features, list(files))
    features = data.features
    if data.folder is not None:
        parts = tables.read_folder_tables(data.folder, **read_as)
    elif data.client is not None:
        parts = _by_client(_table(data, read_as), data.client)
        if features is not None:
            left = tuple(name for name in features.exclude if name != data.client)
            features = dataclasses.replace(features, exclude=left)
    else:
        parts, target = _numbers(data)
        features = None
    files = {name: _write(part, folder, name) for name, part in parts.items()}
    return files, _for_sites(experiment, target, features, list(files))


def _for_sites(
    experiment: Experiment, target: Target | None, features: Features | None, names: list[str]
) -> Experiment:
    """The experiment without rows; its clients by name, and so their weights."""
    data, problem = experiment.data, experiment.problem
    columns = {"target": target, "features": features, "missing": data.missing}
    settings = {"sites": "rows", "standardize": data.standardize, **_given(columns)}
    if isinstance(problem.weights, list) and len(problem.weights) == len(names):
        by_name = dict(zip(names, problem.weights, strict=True))
        problem = problem.model_copy(update={"weights": by_name})
    deploy = (experiment.deploy or DeployTable()).model_copy(update={"clients": names})
    changed = {"data": DataTable.model_validate(settings), "problem": problem, "deploy": deploy}
    return experiment.model_copy(update=changed)


def _table(data: DataTable, read_as: Mapping[str, Any]) -> pa.Table:
    if data.parquet is not None:
        return tables.read_parquet_table(data.parquet)
    if data.csv is not None:
        return tables.read_csv_table(data.csv, **read_as)
    return tables.read_csv_table(BUNDLED[str(data.bundled)].path)


def _by_client(table: pa.Table, client: str) -> dict[str, pa.Table]:
    tables.need_column(table, client, "client", "the data")
    place = place_of(table.column(client), client)
    rest = table.drop_columns([client])
    return {
        name: rest.take(pa.array(np.flatnonzero(place.owner == k)))
        for k, name in enumerate(place.names)
    }


def _numbers(data: DataTable) -> tuple[dict[str, pa.Table], Target]:
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
    return parts, Target(target)


def _write(table: pa.Table, folder: Path, name: str) -> Path:
    path = folder / f"{name.replace('/', '-')}.parquet"
    with atomic_path(path) as part:
        pq.write_table(table, part)
    return path


def _given(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if value is not None}
