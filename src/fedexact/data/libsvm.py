"""LIBSVM files, through scikit-learn's reader."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedexact.data.columns import TOO_LARGE
from fedexact.data.tables import client_files, existing
from fedexact.errors import InputError, check_count
from fedexact.layout import LARGEST

SUFFIXES = {".libsvm": "libsvm", ".svm": "libsvm", ".svmlight": "libsvm", ".txt": "libsvm"}
MAX_CELLS = 500_000_000  # of the dense matrix: 4 GB


def read(
    path: str | Path, n_features: int | None = None
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """(X (n_k, p), y (n_k,)) of the file, or of each file of the folder, by name without suffix.

    All have the same number of columns, `n_features` or the largest index that occurs. Raises
    InputError naming the file and, where it is known, the line.
    """
    if n_features is not None:
        check_count("n_features", n_features)
    folder = Path(path).is_dir()
    files = client_files(path, SUFFIXES) if folder else {Path(path).stem: existing(path)}
    sparse = {name: _read_one(file, n_features) for name, file in files.items()}
    p = max(X.shape[1] for X, _ in sparse.values())
    rows = sum(len(y) for _, y in sparse.values())
    if rows * p > MAX_CELLS:
        raise InputError(
            f"{path}: {rows} rows of {p} columns are too large as a dense matrix "
            f"({rows * p * 8 / 1e9:.0f} GB)"
        )
    return {name: (_dense(X, p), y) for name, (X, y) in sparse.items()}


def _read_one(file: Path, n_features: int | None):
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


def _dense(X, p: int) -> np.ndarray:
    dense = np.zeros((X.shape[0], p))
    dense[:, : X.shape[1]] = X.toarray()
    return dense
