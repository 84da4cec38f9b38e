"""What a loss is: the loss of each row as a function of the model x, and its derivatives."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedexact.errors import InputError
from fedexact.losses.design import combine, gram, n_features, predictor, row_squares
from fedexact.losses.spectrum import DENSE, extremes_of_each, gram_largest, small_gram


class Rows(NamedTuple):
    """The rows of one client (with a column of ones first if there is an intercept)."""

    X: Any  # (m, n_features), of JAX or NumPy, or design.Sparse
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
    steepest_at_zero: ClassVar[bool] = False  # and that bound is the Hessian at x = 0

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

    def row_curvature(self, rows: Rows, weight: Array) -> Array | None:
        """Scalar smoothness constant of the steepest weight_i loss_i, or more, in the sense of
        `curvature`; None where nothing better than `curvature` itself is known."""
        return None

    def curvature_matrix(self, rows: Rows, weight: Array) -> Array:
        """(d, d) bound on the Hessian of `value`, in the sense in which `curvature` bounds it."""
        return self.hessian(jnp.zeros(self.dim(n_features(rows.X))), rows, weight)

    def strong_curvature(self, rows: Rows, weight: Array) -> Array:
        """Scalar strong convexity constant of `value`, never more than it is: 0 if not known."""
        return jnp.zeros(())

    def self_concordance(self, rows: Rows) -> Array | float | None:
        """R with |third derivative along v| <= R |v| second derivative along v, for all x and v;
        None if there is none (generalised self-concordance, Bach 2010)."""
        return None


class GramLoss(Loss):
    """A loss whose Hessian is at most X' diag(scale) X, or that once per output."""

    @abc.abstractmethod
    def curvature_scale(self, rows: Rows, weight: Array) -> Array:
        """(m,) scale >= 0 of that bound; `curvature`, `row_curvature` and `curvatures` follow."""

    def curvature(self, rows: Rows, weight: Array) -> Array:
        return gram_largest(rows.X, self.curvature_scale(rows, weight))

    def row_curvature(self, rows: Rows, weight: Array) -> Array:
        return jnp.max(self.curvature_scale(rows, weight) * row_squares(rows.X))

    def curvature_matrix(self, rows: Rows, weight: Array) -> Array:
        return gram(rows.X, self.curvature_scale(rows, weight))


class LinearLoss(GramLoss):
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
        return self.phi(predictor(rows.X, x), rows.y)

    def grad(self, x: Array, rows: Rows, weight: Array) -> Array:
        return combine(weight * self.d1(predictor(rows.X, x), rows.y), rows.X)

    def hessian(self, x: Array, rows: Rows, weight: Array) -> Array:
        return gram(rows.X, weight * self.d2(predictor(rows.X, x), rows.y))

    def curvature_scale(self, rows: Rows, weight: Array) -> Array:
        return weight * self.d2_bound(rows.y)


def curvatures(
    loss: Loss, clients: Any, client: Callable[[Any], tuple[Rows, Array]], ridge: Array
) -> tuple[Array, Array]:
    """(N,) smoothness and strong convexity of each client's `value`, ridge (d,) included.

    `clients` is a pytree with leading axis N >= 1, `client` maps one slice of it to that client's
    rows and weight. Smoothness in the sense of `Loss.curvature`; convexity never more than it is.
    """
    rows, weight = jax.eval_shape(client, jax.tree.map(lambda leaf: leaf[0], clients))
    least = jnp.min(ridge)
    if loss.quadratic and ridge.size <= DENSE:

        def whole(item: Any) -> Array:
            # with the ridge, which leaves the intercept out: a singular Gram can become definite
            return loss.curvature_matrix(*client(item)) + jnp.diag(ridge)

        smallest, largest = extremes_of_each(whole, clients)
        rounding = max(weight.shape[0], ridge.size) * jnp.finfo(ridge.dtype).eps * largest
        sure = jnp.where(smallest > 2.0 * rounding, smallest - rounding, 0.0)
        return largest, jnp.maximum(least, sure)

    convexity = jax.lax.map(lambda item: loss.strong_curvature(*client(item)), clients)
    if isinstance(loss, GramLoss) and min(rows.X.shape) <= DENSE:

        def smaller(item: Any) -> Array:
            rows, weight = client(item)
            return small_gram(rows.X, loss.curvature_scale(rows, weight))

        _, largest = extremes_of_each(smaller, clients)
    else:
        largest = jax.lax.map(lambda item: loss.curvature(*client(item)), clients)
    return largest + jnp.max(ridge), convexity + least


def largest_row(rows: Rows) -> Array:
    """Scalar max_i |X_i|_2."""
    return jnp.sqrt(jnp.max(row_squares(rows.X)))


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
