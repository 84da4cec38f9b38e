"""The oracle of a client that holds rows: a weighted sum of a loss over them, plus a ridge."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedexact.core import record, static
from fedexact.losses.base import Loss, Rows
from fedexact.oracles.proximal import (
    Eigen,
    Magnitude,
    eigen,
    factored_prox,
    gradient_prox,
    newton_prox,
)


@record
class RowOracle:
    """f(x) = sum_i weight_i loss_i(x) + 1/2 sum_j ridge_j x_j^2 of one client, or of a stack.

    A stack has a leading axis on every field but `loss` and `ridge`, which its clients share; the
    methods are those of one client, so take `client(j)` first. Rows that pad a client to the size
    of its stack have weight 0 and stand behind the `n_rows` real ones.
    """

    SHARED: ClassVar[frozenset[str]] = frozenset({"loss", "ridge", "prox_method"})

    loss: Loss
    ridge: Array  # (d,)
    rows: Rows  # X (m, n_features), y (m,)
    weight: Array  # (m,) N w_k / n_k for means, N w_k for sums
    n_rows: Array  # () integer
    smoothness: Array  # () L_k of f, ridge included
    strong_convexity: Array  # () l_k of f, ridge included
    factor: Eigen | None = None  # where prox_method == "factored"
    prox_method: str = static(default="newton")  # "factored", "newton" or "gradient"

    def value(self, x: Array) -> Array:
        """() f(x)."""
        return self.loss.value(x, self.rows, self.weight) + 0.5 * jnp.sum(self.ridge * x * x)

    def grad(self, x: Array) -> Array:
        """(d,) the gradient of f at x."""
        return self.loss.grad(x, self.rows, self.weight) + self.ridge * x

    def hessian(self, x: Array) -> Array:
        """(d, d) the Hessian of f at x."""
        return self.loss.hessian(x, self.rows, self.weight) + jnp.diag(self.ridge)

    def stochastic_grad(self, x: Array, key: Array, batch_size: int) -> Array:
        """(d,) an unbiased gradient from `batch_size` rows drawn uniformly with replacement."""
        i = jax.random.randint(key, (batch_size,), 0, self.n_rows, dtype=jnp.int32)
        rows = jax.tree.map(lambda column: column[i], self.rows)
        scale = self.n_rows.astype(x.dtype) / batch_size
        return self.loss.grad(x, rows, scale * self.weight[i]) + self.ridge * x

    def row_smoothness(self) -> Array:
        """() smoothness of f as seen in its steepest row alone, n_k times that row's; >= L_k."""
        steepest = self.n_rows * self.loss.row_curvature(self.rows, self.weight)
        return jnp.maximum(self.smoothness, steepest + jnp.max(self.ridge))

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
            return newton_prox(self._magnitude, self.grad, self.hessian, v, step, start)
        return gradient_prox(
            self._magnitude, self.grad, self.smoothness, self.loss.global_smooth, v, step, start
        )

    def client(self, j: Array | int) -> RowOracle:
        """Client j of a stack; j may be traced."""
        mine = {
            field.name: jax.tree.map(lambda leaf: leaf[j], getattr(self, field.name))
            for field in dataclasses.fields(self)
            if field.name not in self.SHARED
        }
        return dataclasses.replace(self, **mine)

    def _magnitude(self, x: Array) -> Magnitude:
        terms = self.weight * self.loss.values(x, self.rows)
        ridge = 0.5 * jnp.sum(self.ridge * x * x)
        return Magnitude(jnp.sum(terms) + ridge, jnp.sum(jnp.abs(terms)) + ridge)


@jax.jit
def factorise(oracle: RowOracle) -> RowOracle:
    """The oracle of a quadratic loss, one client or a stack, with its factor for the exact prox."""

    def factor(one: RowOracle) -> Eigen:
        zero = jnp.zeros_like(one.ridge)
        return eigen(one.hessian(zero), -one.grad(zero))

    stacked = oracle.weight.ndim == 2
    clients = jnp.arange(oracle.weight.shape[0])
    factors = lax.map(lambda j: factor(oracle.client(j)), clients) if stacked else factor(oracle)
    return dataclasses.replace(oracle, factor=factors, prox_method="factored")
