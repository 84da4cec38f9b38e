"""The pooled objective as sums over the clients, wherever their rows are.

F(x) + g(x),   F(x) = sum_k w_k f_k(x) + (l2 / 2) |x|^2   (the intercept is not penalised)

A client's objective is scaled once, f_k <- N w_k f_k, so that F = (1/N) sum_k f_k and every
algorithm is written in the unweighted form.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedexact.core import Constants, Pooled, in_float64
from fedexact.errors import InputError, check_choice, check_nonnegative
from fedexact.losses import Loss, Multinomial
from fedexact.losses.spectrum import spectral_norm
from fedexact.oracles import RowOracle
from fedexact.regularizers import OnCoordinates, Regularizer, Zero, make_regularizer

NEWTON_LIMIT = 500  # the largest d for which (d, d) factorisations per client are worth their cost


Weights = str | Sequence[float]

SUMMABLE: dict[str, Callable[..., Any]] = {}  # by name: what a client may be asked for


def summable(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Lets clients elsewhere be asked for `fn` of their oracle, by its name."""
    SUMMABLE[fn.__qualname__] = fn
    return fn


for _method in (
    RowOracle.value, RowOracle.grad, RowOracle.value_and_grad, RowOracle.hessian,
    RowOracle.row_smoothness,
):  # fmt: skip
    summable(_method)


class Objective(abc.ABC):
    """F + g, known through sums over the clients and streams of their constants.

    Attributes:
        names: of the N clients; n_rows: (N,) their rows.
        n_features, dim: columns of X, intercept included, and number of coefficients d.
        feature_names: names of the d coefficients.
        loss, regularizer, l2: what is minimised; ridge: (d,) l2, 0 for the intercept.
        fit_intercept, reduction, weights: as given; w: (N,) the w_k.
        row_weight: (N,) weight of each row of a client in f_k, N w_k included.
    """

    names: Sequence[str]
    n_clients: int
    n_rows: np.ndarray
    n_features: int
    dim: int
    feature_names: list[str]
    loss: Loss
    regularizer: Regularizer
    l2: float
    ridge: np.ndarray
    fit_intercept: bool
    reduction: str
    weights: str
    w: np.ndarray
    row_weight: np.ndarray

    def _define(
        self,
        loss: Loss,
        names: Sequence[str],
        columns: Sequence[str],
        n_rows: np.ndarray,
        *,
        regularizer: Regularizer | str | None,
        l2: float,
        weights: Weights,
        reduction: str,
        fit_intercept: bool,
    ) -> None:
        """Sets the attributes; `columns` are the names of those of X, the intercept included.
        Raises InputError."""
        check_settings(l2, reduction)
        self.names, self.n_clients, self.n_rows = names, len(names), n_rows
        self.loss, self.n_features, self.dim = loss, len(columns), loss.dim(len(columns))
        self.fit_intercept, self.reduction, self.l2 = fit_intercept, reduction, float(l2)
        self.feature_names = _coefficients(loss, list(columns), self.dim, fit_intercept)
        penalised = _penalised(self.dim, self.n_features, fit_intercept)
        self.ridge = np.where(penalised, self.l2, 0.0)
        self.regularizer = _restrict(make_regularizer(regularizer), penalised)
        self.weights, self.w = _client_weights(weights, reduction, n_rows, names)
        self.row_weight = self.n_clients * self.w / (n_rows if reduction == "mean" else 1.0)

    # --- sums over the clients ------------------------------------------------------------------

    @abc.abstractmethod
    def sum_over_clients(self, fn: Callable[..., Any], *args: Any) -> Any:
        """sum_k fn(oracle_k, *args) as NumPy, one client's rows at a time; `fn` a module-level
        function of an oracle and arrays (it is compiled once)."""

    @abc.abstractmethod
    def sum_over_rows(self, fn: Callable[..., Any], *args: Any) -> Any:
        """The same sum for an fn that is a weighted sum over rows, the ridges left out."""

    @abc.abstractmethod
    def map_clients(
        self, fn: Callable[..., Any], *args: Any, shared: tuple[Any, ...] = (), prox: bool = False
    ) -> Any:
        """(N, ...) fn(oracle_k, arg_k, ..., *shared) in client order as NumPy, `args` (N, ...);
        the oracles are ready for proxes where `prox`."""

    @abc.abstractmethod
    def smoothness(self) -> tuple[np.ndarray, np.ndarray]:
        """(N,) L_k and l_k of the clients' objectives, ridge included."""

    # --- the pooled objective -------------------------------------------------------------------

    def value(self, x: Any) -> float:
        """F(x), the smooth part."""
        x = self.check_model(x)
        return float(self.sum_over_rows(RowOracle.value, x)) / self.n_clients + self._ridge_value(x)

    def grad(self, x: Any) -> np.ndarray:
        """(d,) gradient of F."""
        x = self.check_model(x)
        return self.sum_over_rows(RowOracle.grad, x) / self.n_clients + self.ridge * x

    def value_and_grad(self, x: Any) -> tuple[float, np.ndarray]:
        """F(x) and its (d,) gradient in one pass."""
        x = self.check_model(x)
        return self.with_ridge(x, *self.sum_over_rows(RowOracle.value_and_grad, x))

    def with_ridge(self, x: np.ndarray, value: Any, grad: Any) -> tuple[float, np.ndarray]:
        """F(x) and its (d,) gradient from their sums over the rows."""
        N = self.n_clients
        return float(value) / N + self._ridge_value(x), np.asarray(grad) / N + self.ridge * x

    def hessian(self, x: Any) -> np.ndarray:
        """(d, d) Hessian of F."""
        x = self.check_model(x)
        return self.sum_over_rows(RowOracle.hessian, x) / self.n_clients + np.diag(self.ridge)

    def _ridge_value(self, x: np.ndarray) -> float:
        with np.errstate(over="ignore"):  # where it does it is infinite
            return 0.5 * float(self.ridge @ (x * x))

    def objective(self, x: Any) -> float:
        """F(x) + g(x)."""
        return self.value(x) + self.penalty(x)

    @in_float64
    def penalty(self, x: Any) -> float:
        """g(x)."""
        if isinstance(self.regularizer, Zero):
            return 0.0
        return float(self.regularizer.value(jnp.asarray(x, float)))

    @in_float64
    def prox(self, v: np.ndarray, step: float) -> np.ndarray:
        """(d,) argmin_u g(u) + |u - v|^2 / (2 step)."""
        if isinstance(self.regularizer, Zero):
            return v
        return np.asarray(self.regularizer.prox(jnp.asarray(v), step))

    def loss_sum(self, x: Any) -> float:
        """Sum over all rows of the loss, each row once, without ridge."""
        return float(self.sum_over_rows(_row_loss, self.check_model(x)))

    def information(self, x: Any) -> np.ndarray:
        """(d, d) sum over all rows of the Hessian of the loss, each row once, without ridge."""
        x = self.check_model(x)
        if np.ptp(self.row_weight) == 0.0:  # the Hessian of F in other units: no other program
            return self.sum_over_rows(RowOracle.hessian, x) / self.row_weight[0]
        return self.sum_over_rows(_row_hessian, x)

    def check_model(self, x: Any) -> np.ndarray:
        """x as a (d,) float64 array; InputError for another length or a non-finite value."""
        try:
            x = np.asarray(x, float)
        except (TypeError, ValueError):
            raise InputError(f"a model must be {self.dim} numbers, got {x!r}") from None
        if x.shape != (self.dim,):
            raise InputError(f"a model of this problem has shape ({self.dim},), got {x.shape}")
        if not np.all(np.isfinite(x)):
            raise InputError(
                f"the model has a non-finite value at index {np.argmin(np.isfinite(x))}"
            )
        return x

    # --- what is known before round 0 -----------------------------------------------------------

    def constants(self) -> Constants:
        """L_k, l_k of the scaled client objectives, L, l, kappa, and those of F."""
        return self._constants

    @cached_property
    def _constants(self) -> Constants:
        return Constants(
            *self.smoothness(), self.loss.global_smooth, self.loss.newton,
            lambda: self.map_clients(RowOracle.row_smoothness), self._pooled_constants,
        )  # fmt: skip

    def _pooled_constants(self) -> Pooled:
        L, l = (float(np.mean(constants)) for constants in self.smoothness())  # noqa: E741
        conditioning = 100.0
        if self.dim <= NEWTON_LIMIT:
            spectrum = np.linalg.eigvalsh(self.hessian(np.zeros(self.dim)))
            L = min(L, float(spectrum[-1]) if self.loss.steepest_at_zero else self._bound())
            if self.loss.quadratic:
                l = max(l, float(spectrum[0]) - 1e-14 * float(spectrum[-1]))  # noqa: E741
            if spectrum[-1] > 0:
                conditioning = float(spectrum[-1] / max(spectrum[0], 1e-12 * spectrum[-1]))
        return Pooled(L or 1.0, l, conditioning)

    def _bound(self) -> float:
        """On the Hessian of F, in the sense in which the loss bounds its own."""
        total = self.sum_over_rows(_curvature_matrix)
        return spectral_norm(total / self.n_clients + np.diag(self.ridge))

    def target(self) -> str:
        """In words: what is minimised, over which rows, clients and weights."""
        n, N = int(self.n_rows.sum()), self.n_clients
        alike = {"rows": "every row alike", "clients": "every client alike"}
        counted = alike.get(self.weights, "clients weighted as given")
        penalty = self.regularizer.describe()
        ridge = f", ridge l2 = {self.l2:g}" if self.l2 else ""
        intercept = ", unpenalised intercept" if self.fit_intercept else ""
        return (
            f"{self.loss.name} loss, {self.reduction} over {n} rows of {N} "
            f"client{'s' if N > 1 else ''}, {counted}, regulariser: {penalty}{ridge}{intercept}"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.target()})"


# --- functions of one oracle, summed over the clients ---------------------------------------------


@summable
def _curvature_matrix(oracle: RowOracle) -> jax.Array:
    return oracle.loss.curvature_matrix(oracle.rows, oracle.weight)


def _unit(oracle: RowOracle) -> jax.Array:
    return (oracle.weight > 0).astype(float)


@summable
def _row_loss(oracle: RowOracle, x: jax.Array) -> jax.Array:
    return oracle.loss.value(x, oracle.rows, _unit(oracle))


@summable
def _row_hessian(oracle: RowOracle, x: jax.Array) -> jax.Array:
    return oracle.loss.hessian(x, oracle.rows, _unit(oracle))


# --- construction ---------------------------------------------------------------------------------


def check_settings(l2: float, reduction: str) -> None:
    """Raises InputError."""
    check_nonnegative("l2", l2)
    check_choice("reduction", reduction, ("mean", "sum"))


def _coefficients(loss: Loss, features: list[str], dim: int, fit_intercept: bool) -> list[str]:
    """Names of the d entries of x."""
    if dim == len(features):
        return features
    if isinstance(loss, Multinomial):
        return [f"{name}[{c}]" for name in features for c in range(1, loss.n_classes)]
    if fit_intercept:
        raise InputError(
            f"fit_intercept: a {loss.name} loss of {dim} parameters for {len(features) - 1} "
            "columns has no intercept of its own; put it into the loss"
        )
    return [f"x[{j}]" for j in range(dim)]


def _penalised(dim: int, n_features: int, fit_intercept: bool) -> np.ndarray:
    """(d,) bool; x is (n_features, outputs) in row-major order and the intercept its first row."""
    penalised = np.ones(dim, bool)
    if fit_intercept:
        penalised[: dim // n_features] = False
    return penalised


def _restrict(g: Regularizer, penalised: np.ndarray) -> Regularizer:
    index = np.flatnonzero(penalised)
    g.check(len(index))
    if penalised.all() or isinstance(g, Zero):
        return g
    return OnCoordinates(g, tuple(index.tolist()))


def _client_weights(
    weights: Weights, reduction: str, n_rows: np.ndarray, names: Sequence[str]
) -> tuple[str, np.ndarray]:
    N = len(n_rows)
    if isinstance(weights, str):
        check_choice("weights", weights, ("rows", "clients"))
        if weights == "clients":
            return weights, np.full(N, 1.0 / N)
        return weights, n_rows / n_rows.sum() if reduction == "mean" else np.ones(N)
    w = np.asarray(weights, float)
    if w.shape != (N,):
        raise InputError(f"weights must be 'rows', 'clients' or {N} numbers, got shape {w.shape}")
    for name, value in zip(names, w, strict=True):
        if not (np.isfinite(value) and value > 0):
            raise InputError(f"client {name!r}: its weight must be positive, got {value}")
    return "given", w
