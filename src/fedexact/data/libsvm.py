"""LIBSVM files, through scikit-learn's reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse

from fedexact.clients import LARGEST
from fedexact.data.columns import TOO_LARGE
from fedexact.data.tables import client_files, existing
from fedexact.errors import InputError, check_count

SUFFIXES = {".libsvm": "libsvm", ".svm": "libsvm", ".svmlight": "libsvm", ".txt": "libsvm"}
MAX_CELLS = 500_000_000  # of a dense matrix: 4 GB
DENSE = 0.1  # share of cells that are stored from which on a matrix is made dense


class LibsvmRows(NamedTuple):
    """The rows of one file or of all files of a folder."""

    X: Any  # (n, p) array, or csr_array if it is large or has few nonzeros
    y: np.ndarray  # (n,)
    names: list[str]  # of the files, without suffix
    n_rows: np.ndarray  # (number of files,)

    @property
    def note(self) -> list[str]:
        """What is to be known of a sparse matrix."""
        if not scipy.sparse.issparse(self.X):
            return []
        n, p = self.X.shape
        return [f"the rows are kept sparse: {100 * self.X.nnz / (n * p):.2g} % nonzeros"]


def read(path: str | Path, n_features: int | None = None) -> LibsvmRows:
    """The rows of the file, or of the files of the folder in the order of their names.

    All have the same number of columns, `n_features` or the largest index that occurs. They are a
    dense array if at least 10 % of the cells are stored and it is of less than 4 GB, else sparse.
    Raises InputError naming the file and, where it is known, the line.
    """
    if n_features is not None:
        check_count("n_features", n_features)
    folder = Path(path).is_dir()
    files = client_files(path, SUFFIXES) if folder else {Path(path).stem: existing(path)}
    parts = [_read_one(file, n_features) for file in files.values()]
    p = max(X.shape[1] for X, _ in parts)
    for rows, y in parts:
        rows.resize(len(y), p)
    X: Any = scipy.sparse.csr_array(scipy.sparse.vstack([rows for rows, _ in parts], format="csr"))
    cells = X.shape[0] * p
    if cells <= MAX_CELLS and X.nnz >= DENSE * cells:
        X = X.toarray()
    n_rows = np.array([len(y) for _, y in parts])
    return LibsvmRows(X, np.concatenate([y for _, y in parts]), list(files), n_rows)


def _read_one(file: Path, n_features: int | None) -> tuple[Any, np.ndarray]:
    try:
        from sklearn.datasets import load_svmlight_file
    except ImportError as error:
        raise InputError(
            "LIBSVM files are read with scikit-learn, which is not installed: "
            "pip install 'fedexact[libsvm]'"
        ) from error
    try:
        X, y = load_svmlight_file(str(file), n_features=n_features)
    except (ValueError, OverflowError) as error:
        raise InputError(f"{file}: not a readable LIBSVM file: {error}") from error
    if len(y) == 0:
        raise InputError(f"{file}: the file has no rows")
    for bad, why in (
        (~np.isfinite(X.data), "is not finite"),
        (np.abs(X.data) > LARGEST, TOO_LARGE),
    ):
        for i in np.flatnonzero(bad).tolist()[:1]:
            row = int(np.searchsorted(X.indptr, i, side="right"))
            raise InputError(f"{file}, row {row}, column x{X.indices[i] + 1}: {X.data[i]} {why}")
    return X, y
