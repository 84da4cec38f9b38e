"""Exact moments of all rows from sums that each client computes alone.

A client hands over its row count, column sums and sums of squares about its own mean; merged
exactly (Chan, Golub and LeVeque 1983) they give the pooled mean and standard deviation, which the
average of the clients' standard deviations does not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import scipy.sparse

from fedexact.errors import InputError, check_choice

Standardize: TypeAlias = bool | str | Sequence[str]

SCALE = "scale"  # standardize by the standard deviation only
SMALLEST = 1e-140  # standard deviation: below, squares lose digits to underflow


@dataclasses.dataclass(frozen=True)
class Sums:
    """What one client hands over; or what several do, with a leading axis of clients."""

    count: int | np.ndarray
    total: np.ndarray  # (p,) sum of each column
    centred: np.ndarray  # (p,) sum of squares about the client's own mean

    def to_arrays(self) -> dict[str, np.ndarray]:
        """As what a message carries: count (N,), total and centred (N, p) of N clients."""
        return {
            "count": np.atleast_1d(self.count),
            "total": np.atleast_2d(self.total),
            "centred": np.atleast_2d(self.centred),
        }

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, np.ndarray], columns: Sequence[str], n_rows: int, name: str
    ) -> Sums:
        """What the client `name` sent, who has said that it has `n_rows` complete rows.

        Raises InputError naming client, column and value for what cannot be such sums.
        """
        p = len(columns)
        sums = _floats(arrays, {"total": (1, p), "centred": (1, p)}, f"client {name!r}: sums")
        for key, value in sums.items():
            wrong = ~np.isfinite(value[0]) | ((key == "centred") & (value[0] < 0))
            for j in np.flatnonzero(wrong).tolist()[:1]:
                raise InputError(
                    f"client {name!r}, column {columns[j]!r}: {value[0, j]} cannot be a sum"
                    f"{' of squares' if key == 'centred' else ''}"
                )
        count = np.asarray(arrays.get("count"))
        if count.shape != (1,) or count.dtype.kind not in "iu" or int(count[0]) != n_rows:
            raise InputError(
                f"client {name!r}: sums of {count.tolist()} rows, it had {n_rows} complete ones "
                "when the columns were agreed; start anew if its table has changed"
            )
        return cls(count.astype(np.int64), **sums)


@dataclasses.dataclass(frozen=True)
class Moments:
    """Pooled mean and standard deviation of the columns, and which were standardised with them."""

    columns: tuple[str, ...]
    count: int
    mean: np.ndarray  # (p,)
    sd: np.ndarray  # (p,) divisor `count`, as np.std
    standardized: np.ndarray  # (p,) bool
    centred: bool = True  # False: scaled only

    def to_arrays(self) -> dict[str, np.ndarray]:
        """As what a message carries; the names of the columns travel apart."""
        return {
            "count": np.array([float(self.count)]),
            "mean": self.mean,
            "sd": self.sd,
            "standardized": self.standardized.astype(float),
            "centred": np.array([float(self.centred)]),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], columns: Sequence[str]) -> Moments:
        """What `to_arrays` gave, for the same columns. Raises InputError for other shapes."""
        shape = (len(columns),)
        shapes = {"mean": shape, "sd": shape, "standardized": shape, "count": (1,), "centred": (1,)}
        found = _floats(arrays, shapes, "moments")
        return cls(
            columns=tuple(columns),
            count=int(found["count"][0]),
            mean=found["mean"],
            sd=found["sd"],
            standardized=found["standardized"] > 0,
            centred=bool(found["centred"][0]),
        )

    def apply(self, X: Any) -> Any:
        """(m, p) rows with the chosen columns moved and scaled to mean 0 and deviation 1.

        Columns that are scaled only keep their zeros, and a sparse X stays sparse.
        """
        if not self.standardized.any():
            return X
        shift, scale = self._affine()
        if scipy.sparse.issparse(X):
            return scipy.sparse.csr_array((X.data / scale[X.indices], X.indices, X.indptr), X.shape)
        return (X - shift[None, :]) / scale[None, :]

    def to_original(self, fit_intercept: bool = True) -> np.ndarray:
        """The matrix T for which T x are coefficients for the columns as they were.

        x are coefficients for the standardised columns, the intercept first if there is one. The
        covariance follows as T V T'. Raises InputError without an intercept, where centred columns
        have no equivalent on the original scale.
        """
        shift, scale = self._affine()
        if not fit_intercept:
            if np.any(shift != 0):
                raise InputError(
                    "without an intercept, coefficients of centred columns cannot be mapped back; "
                    "set fit_intercept = true or standardize = false"
                )
            return np.diag(1 / scale)
        matrix = np.diag(np.concatenate([[1.0], 1 / scale]))
        matrix[0, 1:] = -shift / scale
        return matrix

    def _affine(self) -> tuple[np.ndarray, np.ndarray]:
        shift = np.where(self.standardized & self.centred, self.mean, 0.0)
        return shift, np.where(self.standardized, self.sd, 1.0)


def client_sums(X: np.ndarray) -> Sums:
    """The sums of one client's rows (m, p), m >= 1."""
    total = X.sum(axis=0)
    return Sums(len(X), total, ((X - (total / len(X))[None, :]) ** 2).sum(axis=0))


def sums_of_clients(X: np.ndarray, n_rows: np.ndarray) -> Sums:
    """The sums of all clients from their rows (n, p) in client order, n_rows (N,) each."""
    start = np.cumsum(n_rows) - n_rows
    total = np.add.reduceat(X, start, axis=0)
    centred = np.add.reduceat(
        (X - np.repeat(total / n_rows[:, None], n_rows, axis=0)) ** 2, start, axis=0
    )
    return Sums(n_rows, total, centred)


def sparse_sums(X: Any) -> Sums:
    """The sums of all rows of a sparse matrix (n, p), as of one client."""
    n, p = X.shape
    total = np.bincount(X.indices, X.data, p)
    mean = total / n
    stored = np.bincount(X.indices, minlength=p)
    away = np.bincount(X.indices, (X.data - mean[X.indices]) ** 2, p)
    return Sums(n, total, away + (n - stored) * mean**2)


def check_standardize(standardize: Standardize, columns: Sequence[str]) -> None:
    """InputError for what is neither true, false, "scale" nor names of columns of X."""
    if isinstance(standardize, str):
        check_choice("standardize", standardize, (SCALE,))
    elif not isinstance(standardize, bool):
        known = set(columns)
        for name in standardize:
            if name not in known:
                check_choice("standardize", name, columns)


def pooled_moments(
    sums: Sums | Sequence[Sums], columns: Sequence[str], standardize: Standardize = True
) -> Moments:
    """Merges the clients' sums exactly; `standardize` names the columns to standardise, or all, or
    is "scale": all that vary are divided by their standard deviation, and not moved.

    Raises InputError for a column to standardise that is constant over all rows, or so nearly so
    that rounding or underflow of the squares takes its standard deviation.
    """
    each = [sums] if isinstance(sums, Sums) else sums
    counts = np.concatenate([np.atleast_1d(s.count) for s in each])
    totals, squares = (
        np.concatenate([np.atleast_2d(getattr(s, field)) for s in each])
        for field in ("total", "centred")
    )
    count = int(counts.sum())
    mean = totals.sum(axis=0) / count
    between = counts[:, None] * (totals / counts[:, None] - mean[None, :]) ** 2
    sd = np.sqrt((squares.sum(axis=0) + between.sum(axis=0)) / count)
    constant = sd <= np.maximum(1e-14 * np.abs(mean), SMALLEST)
    if isinstance(standardize, str):
        return Moments(tuple(columns), count, mean, sd, ~constant, centred=False)
    if isinstance(standardize, bool):
        chosen = np.full(len(columns), standardize)
    else:
        chosen = np.isin(columns, list(standardize))
    for j in np.flatnonzero(chosen & constant).tolist():
        raise InputError(
            f"column {columns[j]!r} cannot be standardised: its mean is {mean[j]:g} and its "
            f"computed standard deviation {sd[j]:g} in {count} rows; leave it out of the features "
            "if it is constant, else rescale it or subtract a constant"
        )
    return Moments(tuple(columns), count, mean, sd, chosen)


def _floats(
    arrays: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]], what: str
) -> dict[str, np.ndarray]:
    found = {}
    for key, shape in shapes.items():
        array = np.asarray(arrays.get(key))
        if array.shape != shape or array.dtype != np.float64:
            raise InputError(
                f"{what}: {key} is of shape {array.shape} and type {array.dtype}, expected "
                f"{shape} and float64"
            )
        found[key] = array
    return found
