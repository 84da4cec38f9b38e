"""Exact moments of all rows from sums that each client computes alone.

A client hands over its row count, column sums and sums of squares about its own mean; merged
exactly (Chan, Golub and LeVeque 1983) they give the pooled mean and standard deviation, which the
average of the clients' standard deviations does not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from fedexact.errors import InputError

SMALLEST = 1e-140  # standard deviation: below, squares lose digits to underflow


@dataclasses.dataclass(frozen=True)
class Sums:
    """What one client hands over."""

    count: int
    total: np.ndarray  # (p,) sum of each column
    centred: np.ndarray  # (p,) sum of squares about the client's own mean


@dataclasses.dataclass(frozen=True)
class Moments:
    """Pooled mean and standard deviation of the columns, and which were standardised with them."""

    columns: tuple[str, ...]
    count: int
    mean: np.ndarray  # (p,)
    sd: np.ndarray  # (p,) divisor `count`, as np.std
    standardized: np.ndarray  # (p,) bool

    def apply(self, X: np.ndarray) -> np.ndarray:
        """(m, p) rows with the chosen columns moved and scaled to mean 0 and deviation 1."""
        shift, scale = self._affine()
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
        shift = np.where(self.standardized, self.mean, 0.0)
        return shift, np.where(self.standardized, self.sd, 1.0)


def client_sums(X: np.ndarray) -> Sums:
    """The sums of one client's rows (m, p), m >= 1."""
    total = X.sum(axis=0)
    return Sums(len(X), total, ((X - (total / len(X))[None, :]) ** 2).sum(axis=0))


def pooled_moments(
    sums: Sequence[Sums], columns: Sequence[str], standardize: bool | Sequence[str] = True
) -> Moments:
    """Merges the clients' sums exactly; `standardize` names the columns to standardise, or all.

    Raises InputError for a column to standardise that is constant over all rows, or so nearly so
    that rounding or underflow of the squares takes its standard deviation.
    """
    count = sum(s.count for s in sums)
    mean = np.sum([s.total for s in sums], axis=0) / count
    between = [s.count * (s.total / s.count - mean) ** 2 for s in sums]
    sd = np.sqrt((np.sum([s.centred for s in sums], axis=0) + np.sum(between, axis=0)) / count)
    if isinstance(standardize, bool):
        chosen = np.full(len(columns), standardize)
    else:
        chosen = np.array([c in standardize for c in columns], dtype=bool)
    for j in np.flatnonzero(chosen & (sd <= np.maximum(1e-14 * np.abs(mean), SMALLEST))).tolist():
        raise InputError(
            f"column {columns[j]!r} cannot be standardised: its mean is {mean[j]:g} and its "
            f"computed standard deviation {sd[j]:g} in {count} rows; leave it out of the features "
            "if it is constant, else rescale it or subtract a constant"
        )
    return Moments(tuple(columns), count, mean, sd, chosen)
