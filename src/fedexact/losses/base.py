"""What a loss is: the loss of each row as a function of the model x, and its derivatives."""

from __future__ import annotations

import abc
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedexact.errors import InputError
from fedexact.losses.spectrum import gram_largest


class Rows(NamedTuple):
    """The rows of one client (with a column of ones first if there is an intercept)."""

    X: Any  # (m, n_features), of JAX or NumPy
    y: Any  # (m,)


class Loss(abc.ABC):
    """loss_i(x), i = 1..m, of the rows of one client at the flat model x in R^d.

    Sums are weighted, sum_i weight_i loss_i, so that a mean, a sum and a row of padding (weight 0)
    are the same program. Subclasses are records: float parameters are leaves, counts are static.
    """

    name: ClassVar[str]
    summary: ClassVar[str]  # one line for `fedexact list`
    quadratic: ClassVar[bool] = False  # every loss_i is quadratic in x
    newton: ClassVar[bool] = True  # convex with a cheap (generalised) Hessian
    likelihood: ClassVar[bool] = False  # a negative log-likelihood: standard errors make sense
    global_smooth: ClassVar[bool] = True  # `curvature` bounds the Hessian at every x

    def dim(self, n_features: int) -> int:
        """Length d of x."""
        return n_features

    def check_targets(self, y: np.ndarray, where: str) -> np.ndarray:
        """(m,) float64 targets as `values` takes them.

        Raises InputError naming `where` (as in "client 'Cleveland'"), the value and the row.
        """
        return finite_targets(y, where)

    @abc.abstractmethod
    def values(self, x: Array, rows: Rows) -> Array:
        """(m,) loss of each row."""

    def value(self, x: Array, rows: Rows, weight: Array) -> Array:
        """Scalar sum_i weight_i loss_i(x)."""
        return weight @ self.values(x, rows)

    def grad(self, x: Array, rows: Rows, weight: Array) -> Array:
        """(d,) gradient of `value`."""
        return jax.grad(self.value)(x, rows, weight)

    def hessian(self, x: Array, rows: Rows, weight: Array) -> Array:
        """(d, d) Hessian of `value`; a generalised one where the second derivative jumps."""
        return jax.hessian(self.value)(x, rows, weight)

    @abc.abstractmethod
    def curvature(self, rows: Rows, weight: Array) -> Array:
        """Scalar smoothness constant of `value`: for all x, or near a reference point where
        `global_smooth` is False. For one client; map it over a stack."""

    def row_curvature(self, rows: Rows, weight: Array) -> Array:
        """Scalar smoothness constant of the steepest weight_i loss_i, or more, in the sense of
        `curvature`."""
        return self.curvature(rows, weight)

    def curvature_matrix(self, rows: Rows, weight: Array) -> Array:
        """(d, d) bound on the Hessian of `value`, in the sense in which `curvature` bounds it."""
        return self.hessian(jnp.zeros(self.dim(rows.X.shape[1])), rows, weight)

    def strong_curvature(self, rows: Rows, weight: Array) -> Array:
        """Scalar strong convexity constant of `value`, never more than it is: 0 if not known."""
        return jnp.zeros(())

    def self_concordance(self, rows: Rows) -> Array | float | None:
        """R with |third derivative along v| <= R |v| second derivative along v, for all x and v;
        None if there is none (generalised self-concordance, Bach 2010)."""
        return None


class LinearLoss(Loss):
    """A loss of the linear predictor, loss_i(x) = phi(eta_i, y_i) with eta = X x."""

    @abc.abstractmethod
    def phi(self, eta: Array, y: Array) -> Array:
        """(m,) phi."""

    @abc.abstractmethod
    def d1(self, eta: Array, y: Array) -> Array:
        """(m,) derivative of phi in eta."""

    @abc.abstractmethod
    def d2(self, eta: Array, y: Array) -> Array:
        """(m,) second derivative of phi in eta."""

    @abc.abstractmethod
    def d2_bound(self, y: Array) -> Array:
        """(m,) bound on `d2` over eta: for all eta, or a guide where `global_smooth` is False."""

    def values(self, x: Array, rows: Rows) -> Array:
        return self.phi(rows.X @ x, rows.y)

    def grad(self, x: Array, rows: Rows, weight: Array) -> Array:
        return rows.X.T @ (weight * self.d1(rows.X @ x, rows.y))

    def hessian(self, x: Array, rows: Rows, weight: Array) -> Array:
        scale = weight * self.d2(rows.X @ x, rows.y)
        return rows.X.T @ (scale[:, None] * rows.X)

    def curvature(self, rows: Rows, weight: Array) -> Array:
        return gram_largest(rows.X, weight * self.d2_bound(rows.y))

    def row_curvature(self, rows: Rows, weight: Array) -> Array:
        return jnp.max(weight * self.d2_bound(rows.y) * jnp.sum(rows.X**2, axis=1))

    def curvature_matrix(self, rows: Rows, weight: Array) -> Array:
        scale = weight * self.d2_bound(rows.y)
        return rows.X.T @ (scale[:, None] * rows.X)


def largest_row(rows: Rows) -> Array:
    """Scalar max_i |X_i|_2."""
    return jnp.sqrt(jnp.max(jnp.sum(rows.X**2, axis=1)))


def finite_targets(y: np.ndarray, where: str) -> np.ndarray:
    """(m,) float64 copy of y; InputError unless it is one column of finite numbers."""
    y = np.asarray(y)
    if y.ndim != 1:
        raise InputError(f"{where}: the target must be one column, got an array of shape {y.shape}")
    try:
        numbers = y.astype(np.float64)
    except (TypeError, ValueError):
        raise InputError(
            f"{where}: the target must be numbers, got {first_text(y)!r}; code it as numbers first"
        ) from None
    reject(where, y, ~np.isfinite(numbers), "is not a finite number; drop or impute the row")
    return numbers


def first_text(y: np.ndarray) -> object:
    """The first entry of y that is no number, for a message."""
    for entry in y.tolist():
        try:
            float(entry)
        except (TypeError, ValueError):
            return entry
    return y.dtype


def reject(where: str, y: np.ndarray, bad: np.ndarray, why: str) -> None:
    """Raises InputError for the first target marked in the mask `bad` (m,)."""
    if np.any(bad):
        row = int(np.argmax(bad))
        raise InputError(f"{where}: target {y[row]} in row {row} (of this client, from 0) {why}")
