"""The target: which clients, which rows, which weights, which regulariser.

    F(x) + g(x),   F(x) = sum_k w_k f_k(x) + (l2 / 2) |x|^2   (the intercept is not penalised)

A client's objective is scaled once, f_k <- N w_k f_k, so that F = (1/N) sum_k f_k and every
algorithm is written in the unweighted form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from fedexact.core import Constants, in_float64
from fedexact.errors import InputError, check_choice, check_nonnegative
from fedexact.layout import Layout, read_clients, sum_over_clients
from fedexact.losses import CustomLoss, Loss, Multinomial, Rows, make_loss
from fedexact.oracles import RowOracle, factorise
from fedexact.regularizers import OnCoordinates, Regularizer, Zero, make_regularizer

NEWTON_LIMIT = 500  # the largest d for which (d, d) factorisations per client are worth their cost

Weights = str | Sequence[float]


class Problem:
    """Clients, loss, weights and regulariser: what "the pooled answer" means.

    Args:
        clients: sequence of (X, y), one per client; X (n_k, p), y (n_k,), array-like. Sizes may
            differ, n_k >= 1.
        loss: "squared", "logistic", "multinomial", "poisson", "huber", a Loss, or a JAX function
            of (x, rows) that returns the loss of each row.
        regularizer: g, for example `fx.L1(0.1)`; acts on all coefficients but the intercept.
        l2: ridge added to F, (l2 / 2) |x|^2, intercept excluded.
        weights: what counts alike. "rows" (default): the pooled problem, w_k = n_k / n.
            "clients": w_k = 1 / N. Or a sequence of N positive numbers w_k.
        reduction: whether f_k is the "mean" or the "sum" over the client's rows.

            =========  =========  ================================
            weights    reduction  F(x), without l2
            =========  =========  ================================
            rows       mean       (1/n) sum_i loss_i
            rows       sum        sum_i loss_i
            clients    mean       (1/N) sum_k (1/n_k) sum_i loss_i
            clients    sum        (1/N) sum_k sum_i loss_i
            =========  =========  ================================
        fit_intercept: puts a column of ones first; its coefficient is never penalised.
        names: client names, used in every message.
        feature_names: names of the columns of X; the attribute names the d coefficients.
        shards: over how many JAX devices the clients are spread; chosen by size if left out.

    Raises:
        InputError: naming the client, the column and the value.
    """

    @in_float64
    def __init__(
        self,
        clients: Sequence[tuple[Any, Any]],
        loss: str | Loss | Callable[..., Any] = "squared",
        regularizer: Regularizer | str | None = None,
        l2: float = 0.0,
        weights: Weights = "rows",
        reduction: str = "mean",
        fit_intercept: bool = False,
        names: Sequence[str] | None = None,
        feature_names: Sequence[str] | None = None,
        shards: int | None = None,
    ) -> None:
        check_nonnegative("l2", l2)
        check_choice("reduction", reduction, ("mean", "sum"))
        data = read_clients(clients, names, feature_names, fit_intercept)
        self.names = data.names
        self.n_clients, self.n_features = len(data.names), data.X[0].shape[1]
        self.n_rows = np.array([len(y) for y in data.y])
        self.fit_intercept, self.reduction, self.l2 = fit_intercept, reduction, float(l2)
        self.loss = make_loss(loss, n_classes=_count_classes(data.y))
        where = [f"client {name!r}" for name in self.names]
        y = [self.loss.check_targets(*pair) for pair in zip(data.y, where, strict=True)]
        self.dim = self.loss.dim(self.n_features)
        if isinstance(self.loss, CustomLoss):
            self.loss.check(Rows(cast(Any, data.X[0]), cast(Any, y[0])), where[0])

        self.feature_names = _coefficients(self.loss, data.feature_names, self.dim, fit_intercept)
        penalised = _penalised(self.dim, self.n_features, fit_intercept)
        self.ridge = np.where(penalised, self.l2, 0.0)
        self.regularizer = _restrict(make_regularizer(regularizer), penalised)
        self.weights, self.w = _client_weights(weights, reduction, self.n_rows, self.names)
        self.fingerprint = data.fingerprint(self.w)
        scale = self.n_clients * self.w / (self.n_rows if reduction == "mean" else 1.0)

        self.layout = Layout(self.n_rows, self.n_features, shards)
        self.oracles = self.layout.place(
            _stack(self.loss, self.ridge, rows, weight, n_rows, self._prox_method)
            for rows, weight, n_rows in self.layout.stacks(data.X, y, scale)
        )

    @property
    def _prox_method(self) -> str:
        if self.dim > NEWTON_LIMIT:
            return "gradient"
        return "factored" if self.loss.quadratic else "newton" if self.loss.newton else "gradient"

    @cached_property
    @in_float64
    def prox_oracles(self) -> tuple[RowOracle, ...]:
        """The oracles with what their prox needs: quadratics factored once per client."""
        if self._prox_method != "factored":
            return self.oracles
        return self.layout.place(factorise(oracle) for oracle in self.oracles)

    # --- sums over the clients, streaming -------------------------------------------------------

    @in_float64
    def sum_over_clients(self, fn: Callable[..., Any], *args: Any) -> Any:
        """sum_k fn(oracle_k, *args) as NumPy, one client's rows at a time; `fn` a module-level
        function of an oracle and arrays (it is compiled once)."""
        total = sum_over_clients(fn, self.layout, self.oracles, *args)
        return jax.tree.map(np.asarray, total)

    def value(self, x: Any) -> float:
        """F(x), the smooth part."""
        return float(self._mean(_value, x))

    def grad(self, x: Any) -> np.ndarray:
        """(d,) gradient of F."""
        return self._mean(_grad, x)

    def value_and_grad(self, x: Any) -> tuple[float, np.ndarray]:
        """F(x) and its (d,) gradient in one pass."""
        value, grad = self._mean(_value_and_grad, x)
        return float(value), grad

    def hessian(self, x: Any) -> np.ndarray:
        """(d, d) Hessian of F."""
        return self._mean(_hessian, x)

    def objective(self, x: Any) -> float:
        """F(x) + g(x)."""
        return self.value(x) + self.penalty(x)

    @in_float64
    def penalty(self, x: Any) -> float:
        """g(x)."""
        return float(self.regularizer.value(jnp.asarray(x, float)))

    @in_float64
    def prox(self, v: np.ndarray, step: float) -> np.ndarray:
        """(d,) argmin_u g(u) + |u - v|^2 / (2 step)."""
        return np.asarray(self.regularizer.prox(jnp.asarray(v), step))

    def loss_sum(self, x: Any) -> float:
        """Sum over all rows of the loss, each row once, without ridge."""
        return float(self.sum_over_clients(_row_loss, self.check_model(x)))

    def information(self, x: Any) -> np.ndarray:
        """(d, d) sum over all rows of the Hessian of the loss, each row once, without ridge."""
        return self.sum_over_clients(_row_hessian, self.check_model(x))

    def _mean(self, fn: Callable[..., Any], x: Any) -> Any:
        total = self.sum_over_clients(fn, self.check_model(x))
        return jax.tree.map(lambda a: a / self.n_clients, total)

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
    @in_float64
    def _constants(self) -> Constants:
        L_k, l_k = (
            self.layout.in_client_order([np.asarray(getattr(o, field)) for o in self.oracles])
            for field in ("smoothness", "strong_convexity")
        )
        row_L_k = self.layout.in_client_order(
            [np.asarray(_row_smoothness(oracle)) for oracle in self.oracles]
        )
        L_F, l_F, conditioning = float(np.mean(L_k)), float(np.mean(l_k)), 100.0
        if self.dim <= NEWTON_LIMIT:
            bound = self._mean(_curvature_matrix, np.zeros(self.dim))
            L_F = min(L_F, float(np.linalg.norm(bound, 2)))
            spectrum = np.linalg.eigvalsh(self.hessian(np.zeros(self.dim)))
            if self.loss.quadratic:
                l_F = max(l_F, float(spectrum[0]) - 1e-14 * float(spectrum[-1]))
            if spectrum[-1] > 0:
                conditioning = float(spectrum[-1] / max(spectrum[0], 1e-12 * spectrum[-1]))
        L, l = float(np.max(L_k)), float(np.min(l_k))  # noqa: E741
        return Constants(
            L_k, row_L_k, l_k, L or 1.0, l, L / l if l > 0 else np.inf, L_F or 1.0, l_F,
            self.loss.global_smooth, self.loss.newton, conditioning,
        )  # fmt: skip

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

    def pooled(self) -> tuple[Rows, np.ndarray]:
        """All rows stacked in client order, and weights (n,) such that
        F(x) = sum_i weight_i loss_i(x) + 1/2 sum_j ridge_j x_j^2."""
        X, y, weight = self.layout.rows_in_client_order(self.oracles)
        return Rows(cast(Any, X), cast(Any, y)), weight / self.n_clients

    def __repr__(self) -> str:
        return f"Problem({self.target()})"


# --- functions of one oracle, summed over the clients ---------------------------------------------


def _value(oracle: RowOracle, x: jax.Array) -> jax.Array:
    return oracle.value(x)


def _grad(oracle: RowOracle, x: jax.Array) -> jax.Array:
    return oracle.grad(x)


def _value_and_grad(oracle: RowOracle, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return oracle.value(x), oracle.grad(x)


def _hessian(oracle: RowOracle, x: jax.Array) -> jax.Array:
    return oracle.hessian(x)


def _curvature_matrix(oracle: RowOracle, x: jax.Array) -> jax.Array:
    bound = oracle.loss.curvature_matrix(oracle.rows, oracle.weight)
    return bound + jnp.diag(oracle.ridge)


def _unit(oracle: RowOracle) -> jax.Array:
    return (oracle.weight > 0).astype(float)


def _row_loss(oracle: RowOracle, x: jax.Array) -> jax.Array:
    return oracle.loss.value(x, oracle.rows, _unit(oracle))


def _row_hessian(oracle: RowOracle, x: jax.Array) -> jax.Array:
    return oracle.loss.hessian(x, oracle.rows, _unit(oracle))


# --- construction ---------------------------------------------------------------------------------


def _stack(
    loss: Loss, ridge: np.ndarray, rows: Rows, weight: np.ndarray, n_rows: np.ndarray, prox: str
) -> RowOracle:
    smoothness, convexity = _curvatures(loss, rows, weight, ridge)
    return RowOracle(
        loss=loss,
        ridge=jnp.asarray(ridge),
        rows=rows,
        weight=jnp.asarray(weight),
        n_rows=jnp.asarray(n_rows),
        smoothness=smoothness,
        strong_convexity=convexity,
        factor=None,
        prox_method=prox,
    )


@jax.jit
def _curvatures(
    loss: Loss, rows: Rows, weight: jax.Array, ridge: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(slots,) smoothness and strong convexity of each client's f, ridge included."""

    def one(client: tuple[Rows, jax.Array]) -> tuple[jax.Array, jax.Array]:
        L = loss.curvature(*client) + jnp.max(ridge)
        l = loss.strong_curvature(*client) + jnp.min(ridge)  # noqa: E741 - the papers' symbol
        if not loss.quadratic or ridge.size > NEWTON_LIMIT:
            return L, l
        # the ridge leaves the intercept out: the Hessian as a whole can still be definite
        spectrum = jnp.linalg.eigvalsh(loss.curvature_matrix(*client) + jnp.diag(ridge))
        rounding = weight.shape[-1] * jnp.finfo(ridge.dtype).eps * spectrum[-1]
        whole = jnp.where(spectrum[0] > 2.0 * rounding, spectrum[0] - rounding, 0.0)
        return jnp.minimum(L, spectrum[-1] + rounding), jnp.maximum(l, whole)

    return jax.lax.map(one, (rows, weight))


@jax.jit
def _row_smoothness(oracle: RowOracle) -> jax.Array:
    """(slots,) of each client of a stack."""
    slots = jnp.arange(oracle.weight.shape[0])
    return jax.lax.map(lambda j: oracle.client(j).row_smoothness(), slots)


def _count_classes(y: Sequence[np.ndarray]) -> int:
    return int(max(np.max(v) for v in y)) + 1


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
