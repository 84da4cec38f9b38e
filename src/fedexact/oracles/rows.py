"""The oracle of a client that holds rows: a weighted sum of a loss over them, plus a ridge."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedexact.core import record, static
from fedexact.losses.base import LinearLoss, Loss, Rows
from fedexact.losses.design import Sparse, predictor
from fedexact.oracles.gradient import gradient_prox
from fedexact.oracles.newton import System, cast, dual, newton_prox, primal
from fedexact.oracles.proximal import Eigen, Magnitude, dual_pays, eigen, factored_prox


@record
class RowOracle:
    """f(x) = sum_i weight_i loss_i(x) + 1/2 sum_j ridge_j x_j^2 of one client.

    The client's `n_rows` real rows stand one after the other from `offset` on; rows before and
    after them have weight 0. A mini-batch is drawn from `source`, where there is one: all clients'
    rows, this one's from `start` on.
    """

    loss: Loss
    ridge: Array  # (d,)
    rows: Rows  # X (m, n_features), y (m,)
    weight: Array  # (m,) N w_k / n_k for means, N w_k for sums
    n_rows: Array  # () integer
    smoothness: Array  # () L_k of f, ridge included
    strong_convexity: Array  # () l_k of f, ridge included
    factor: Eigen | None = None  # where prox_method == "factored"
    prox_method: str = static(default="newton")  # "factored", "newton" or "gradient"
    source: Rows | None = None
    start: Array | int = 0
    offset: Array | int = 0

    def value(self, x: Array) -> Array:
        """() f(x)."""
        return self.loss.value(x, self.rows, self.weight) + 0.5 * jnp.sum(self.ridge * x * x)

    def grad(self, x: Array) -> Array:
        """(d,) the gradient of f at x."""
        return self.loss.grad(x, self.rows, self.weight) + self.ridge * x

    def value_and_grad(self, x: Array) -> tuple[Array, Array]:
        """Both."""
        return self.value(x), self.grad(x)

    def hessian(self, x: Array) -> Array:
        """(d, d) the Hessian of f at x."""
        return self.loss.hessian(x, self.rows, self.weight) + jnp.diag(self.ridge)

    def stochastic_grad(self, x: Array, key: Array, batch_size: int) -> Array:
        """(d,) an unbiased gradient from `batch_size` rows drawn uniformly with replacement."""
        i = jax.random.randint(key, (batch_size,), 0, self.n_rows, dtype=jnp.int32)
        scale = self.n_rows.astype(x.dtype) / batch_size
        if isinstance(self.rows.X, Sparse):
            times = jnp.zeros_like(self.weight).at[self.offset + i].add(1.0)
            return self.loss.grad(x, self.rows, scale * times * self.weight) + self.ridge * x
        source, start = (
            (self.rows, self.offset) if self.source is None else (self.source, self.start)
        )
        rows = jax.tree.map(lambda column: column[start + i], source)
        return self.loss.grad(x, rows, scale * self.weight[self.offset + i]) + self.ridge * x

    def row_smoothness(self) -> Array:
        """() smoothness of f as seen in its steepest row alone, n_k times that row's; >= L_k."""
        ridge = jnp.max(self.ridge)
        own = self.loss.row_curvature(self.rows, self.weight)
        steepest = self.n_rows * (self.smoothness - ridge if own is None else own)
        return jnp.maximum(self.smoothness, steepest + ridge)

    def prox(self, v: Array, step: Any, start: Array) -> Array:
        """(d,) argmin_u f(u) + |u - v|^2 / (2 step), iterative methods warm-started at `start`.

        Exact to rounding for "factored" and "newton"; "gradient" stops at the relative rule of
        `gradient_prox`.
        """
        return self.counted_prox(v, step, start)[0]

    def counted_prox(self, v: Array, step: Any, start: Array) -> tuple[Array, Array | int]:
        """The prox, and how many gradients of f it took; one where f was factored beforehand."""
        if self.prox_method == "factored":
            assert self.factor is not None
            return factored_prox(self.factor, v, step), 1
        if self.prox_method == "newton":
            system = self._newton_system(step)
            return newton_prox(self._magnitude, self.grad, system, v, step, start)
        return gradient_prox(
            self._magnitude, self.grad, self.smoothness, self.loss.global_smooth, v, step, start
        )

    def _newton_system(self, step: Any) -> System:
        """How to solve with the Hessian of f plus 1 / step."""
        loss, rows, weight, diagonal = self.loss, self.rows, self.weight, self.ridge + 1.0 / step
        if isinstance(loss, LinearLoss) and dual_pays(loss, diagonal.shape[0], rows.X.shape[0]):
            return dual(rows.X, lambda u: weight * loss.d2(predictor(rows.X, u), rows.y), diagonal)

        def hessian(u: Array, dtype: Any) -> Array:
            return loss.hessian(*cast((u, rows, weight), dtype)).astype(dtype)

        return primal(hessian, diagonal)

    def _magnitude(self, x: Array) -> Magnitude:
        terms = self.weight * self.loss.values(x, self.rows)
        ridge = 0.5 * jnp.sum(self.ridge * x * x)
        return Magnitude(jnp.sum(terms) + ridge, jnp.sum(jnp.abs(terms)) + ridge)


@jax.jit
def factorise(oracle: RowOracle) -> RowOracle:
    """The oracle of a quadratic loss with its factor for the exact prox."""
    return dataclasses.replace(oracle, factor=factor_of(oracle), prox_method="factored")


def factor_of(oracle: RowOracle) -> Eigen:
    """What the exact prox of a quadratic loss needs."""
    zero = jnp.zeros_like(oracle.ridge)
    return eigen(oracle.hessian(zero), -oracle.grad(zero))
