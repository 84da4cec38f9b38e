"""The target: which clients, which rows, which weights, which regulariser.

    F(x) + g(x),   F(x) = sum_k w_k f_k(x) + (l2 / 2) |x|^2   (the intercept is not penalised)

A client's objective is scaled once, f_k <- N w_k f_k, so that F = (1/N) sum_k f_k and every
algorithm is written in the unweighted form.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from fedexact.clients import Clients
from fedexact.core import Constants, Pooled, float64, in_float64
from fedexact.devices import fetch
from fedexact.errors import InputError, check_choice, check_nonnegative
from fedexact.layout import Layout, clients_layout
from fedexact.losses import CustomLoss, Loss, Multinomial, Rows, make_loss
from fedexact.oracles import RowOracle, Stack
from fedexact.parts import Part, Parts, mapped
from fedexact.regularizers import OnCoordinates, Regularizer, Zero, make_regularizer
from fedexact.streams import sum_over_clients, sum_over_rows

NEWTON_LIMIT = 500  # the largest d for which (d, d) factorisations per client are worth their cost

Weights = str | Sequence[float]


class Problem:
    """Clients, loss, weights and regulariser: what "the pooled answer" means.

    Args:
        clients: sequence of (X, y), one per client; X (n_k, p) array-like or scipy.sparse,
            y (n_k,). Sizes may differ, n_k >= 1. Or a `Clients`, all rows in one array.
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
        in_memory: whether the rows are kept in memory. If left out they are, but for a memory map
            larger than half of the machine's memory: then only the rows of a stretch of rounds'
            participants are read, one stretch after the other, and sums go through all rows.

    Raises:
        InputError: naming the client, the column and the value.
    """

    @in_float64
    def __init__(
        self,
        clients: Sequence[tuple[Any, Any]] | Clients,
        loss: str | Loss | Callable[..., Any] = "squared",
        regularizer: Regularizer | str | None = None,
        l2: float = 0.0,
        weights: Weights = "rows",
        reduction: str = "mean",
        fit_intercept: bool = False,
        names: Sequence[str] | None = None,
        feature_names: Sequence[str] | None = None,
        shards: int | None = None,
        in_memory: bool | None = None,
    ) -> None:
        check_nonnegative("l2", l2)
        check_choice("reduction", reduction, ("mean", "sum"))
        data = Clients.of(clients, names, feature_names)
        if fit_intercept:
            data = data.with_intercept()
        self.names = data.names
        self.n_clients, self.n_features = len(data.names), data.n_features
        self.n_rows = data.n_rows
        self.fit_intercept, self.reduction, self.l2 = fit_intercept, reduction, float(l2)
        self.loss = make_loss(loss, n_classes=int(np.max(data.y)) + 1)
        self.data = data.with_targets(_check_targets(self.loss, data))
        self.dim = self.loss.dim(self.n_features)
        if isinstance(self.loss, CustomLoss):
            X, y = next(self.data.pairs())
            self.loss.check(Rows(X, cast(Any, y)), f"client {self.names[0]!r}")

        self.feature_names = _coefficients(self.loss, data.feature_names, self.dim, fit_intercept)
        penalised = _penalised(self.dim, self.n_features, fit_intercept)
        self.ridge = np.where(penalised, self.l2, 0.0)
        self.regularizer = _restrict(make_regularizer(regularizer), penalised)
        self.weights, self.w = _client_weights(weights, reduction, self.n_rows, self.names)
        self.row_weight = self.n_clients * self.w / (self.n_rows if reduction == "mean" else 1.0)

        in_memory = _fits(self.data) if in_memory is None else in_memory
        if self.data.sparse and not in_memory:
            raise InputError("in_memory=False: a sparse X cannot stay on the disk; leave it out")
        if in_memory:
            self.data = self.data.in_memory()
        layout = clients_layout(self.data, self.dim, shards if in_memory else 1)
        self._parts = Parts(self.data, layout, self.loss, self.ridge, self.row_weight, in_memory)

    @cached_property
    def fingerprint(self) -> str:
        """Tells these rows, in this order and with these client weights, from any others."""
        return self.data.fingerprint(self.w)

    # --- the clients' oracles on the devices ----------------------------------------------------

    @property
    def layout(self) -> Layout:
        """Where the clients lie."""
        return self._parts.layout

    @property
    def oracles(self) -> Stack:
        """The oracles of all clients."""
        return self.part().oracles

    def part(self, ids: np.ndarray | None = None, prox: bool = False) -> Part:
        """The oracles of the clients `ids`, or more, on the devices; of everybody if left out.
        Ready for proxes where `prox`.

        Raises InputError for everybody where the rows stay on the disk.
        """
        return self._parts.part(ids, prox)

    # --- sums over the clients, streaming -------------------------------------------------------

    @in_float64
    def sum_over_clients(self, fn: Callable[..., Any], *args: Any) -> Any:
        """sum_k fn(oracle_k, *args) as NumPy, one client's rows at a time; `fn` a module-level
        function of an oracle and arrays (it is compiled once)."""
        return self._sum(sum_over_clients, fn, args)

    @in_float64
    def map_clients(
        self, fn: Callable[..., Any], *args: Any, shared: tuple[Any, ...] = (), prox: bool = False
    ) -> Any:
        """(N, ...) fn(oracle_k, arg_k, ..., *shared) in client order as NumPy, `args` (N, ...);
        the oracles are ready for proxes where `prox`."""
        found = [
            jax.tree.map(
                lambda a, part=part: part.layout.in_client_order(fetch(a)),
                mapped(part, fn, tuple(part.of(np.asarray(a)) for a in args), shared),
            )
            for part in self._parts.each(prox)
        ]
        return jax.tree.map(lambda *parts: np.concatenate(parts), *found)

    def sum_over_rows(self, fn: Callable[..., Any], *args: Any) -> Any:
        """The same sum for an fn that is a weighted sum over rows, the ridges left out."""
        with float64():
            return self._sum(sum_over_rows, fn, args)

    def _sum(self, over: Callable[..., Any], fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        totals = (
            over(fn, part.layout.mesh, part.oracles, part.layout.first, args)
            for part in self._parts.each()
        )
        return functools.reduce(
            lambda a, b: jax.tree.map(np.add, a, b),
            (jax.tree.map(np.asarray, total) for total in totals),
        )

    def value(self, x: Any) -> float:
        """F(x), the smooth part."""
        x = self.check_model(x)
        return float(self.sum_over_rows(_value, x)) / self.n_clients + self._ridge_value(x)

    def grad(self, x: Any) -> np.ndarray:
        """(d,) gradient of F."""
        x = self.check_model(x)
        return self.sum_over_rows(_grad, x) / self.n_clients + self.ridge * x

    def value_and_grad(self, x: Any) -> tuple[float, np.ndarray]:
        """F(x) and its (d,) gradient in one pass."""
        x = self.check_model(x)
        value, grad = self.sum_over_rows(_value_and_grad, x)
        N = self.n_clients
        return float(value) / N + self._ridge_value(x), grad / N + self.ridge * x

    def hessian(self, x: Any) -> np.ndarray:
        """(d, d) Hessian of F."""
        x = self.check_model(x)
        return self.sum_over_rows(_hessian, x) / self.n_clients + np.diag(self.ridge)

    def _ridge_value(self, x: np.ndarray) -> float:
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
            return self.sum_over_rows(_hessian, x) / self.row_weight[0]
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
            self._parts.L_k, self._parts.l_k, self.loss.global_smooth, self.loss.newton,
            lambda: self.map_clients(_row_smoothness), self._pooled_constants,
        )  # fmt: skip

    def _pooled_constants(self) -> Pooled:
        L, l = float(np.mean(self._parts.L_k)), float(np.mean(self._parts.l_k))  # noqa: E741
        conditioning = 100.0
        if self.dim <= NEWTON_LIMIT:
            bound, H = (
                matrix / self.n_clients + np.diag(self.ridge)
                for matrix in self.sum_over_rows(_curvature_matrices, np.zeros(self.dim))
            )
            L = min(L, float(np.max(np.abs(np.linalg.eigvalsh(bound)))))
            spectrum = np.linalg.eigvalsh(H)
            if self.loss.quadratic:
                l = max(l, float(spectrum[0]) - 1e-14 * float(spectrum[-1]))  # noqa: E741
            if spectrum[-1] > 0:
                conditioning = float(spectrum[-1] / max(spectrum[0], 1e-12 * spectrum[-1]))
        return Pooled(L or 1.0, l, conditioning)

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
        X = self.data.X.toarray() if self.data.sparse else self.data.block(0, None)
        return Rows(X, cast(Any, self.data.y)), self._pooled_weight()

    def blocks(self, most: int = 65_536) -> Iterator[tuple[Any, np.ndarray, np.ndarray]]:
        """X, y and weights as in `pooled`, at most so many rows at a time; X dense, or CSR where
        the clients' is sparse."""
        weight = self._pooled_weight()
        for begin in range(0, len(weight), most):
            mine = slice(begin, begin + most)
            yield self.data.block(begin, begin + most), self.data.y[mine], weight[mine]

    def _pooled_weight(self) -> np.ndarray:
        return np.repeat(self.row_weight / self.n_clients, self.n_rows)

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


def _curvature_matrices(oracle: RowOracle, zero: jax.Array) -> tuple[jax.Array, jax.Array]:
    return oracle.loss.curvature_matrix(oracle.rows, oracle.weight), oracle.hessian(zero)


def _unit(oracle: RowOracle) -> jax.Array:
    return (oracle.weight > 0).astype(float)


def _row_loss(oracle: RowOracle, x: jax.Array) -> jax.Array:
    return oracle.loss.value(x, oracle.rows, _unit(oracle))


def _row_hessian(oracle: RowOracle, x: jax.Array) -> jax.Array:
    return oracle.loss.hessian(x, oracle.rows, _unit(oracle))


# --- construction ---------------------------------------------------------------------------------


def _row_smoothness(oracle: RowOracle) -> jax.Array:
    return oracle.row_smoothness()


def _fits(data: Clients) -> bool:
    """Whether rows are to be kept in memory."""
    if not data.on_disk:
        return True
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return data.X.shape[0] * data.n_features * 8 <= memory / 2


def _check_targets(loss: Loss, data: Clients) -> np.ndarray:
    """(n,) targets as the loss takes them; InputError naming the client of one it does not."""
    try:
        return loss.check_targets(data.y, "all clients")
    except InputError:
        for name, (_, y) in zip(data.names, data.pairs(), strict=True):
            loss.check_targets(y, f"client {name!r}")
        raise


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
