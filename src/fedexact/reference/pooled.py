"""The pooled objective F as streaming sums: values, derivatives, Hessian-vector products."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedexact.losses import Huber
from fedexact.losses.base import GramLoss
from fedexact.losses.design import combine, gram, n_features, predictor
from fedexact.objective import NEWTON_LIMIT
from fedexact.oracles import RowOracle
from fedexact.problem import Problem

EPS = float(np.finfo(float).eps)
COLUMNS = 16  # of a block of the Hessian, in one pass


class Expansion(NamedTuple):
    """F at a point to second order."""

    value: float
    grad: np.ndarray  # (d,)
    hessian: np.ndarray  # (d, d)


class Pooled:
    """F of a problem; every method is one pass over the rows, unless it says otherwise."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.ridge = problem, problem.ridge
        self.dense = problem.dim <= NEWTON_LIMIT  # whether (d, d) matrices are formed
        # rounding error of a sum over all rows, relative to that of the absolute terms
        self.rounding = (16.0 + 2.0 * float(np.sqrt(problem.n_rows.sum()))) * EPS

    def value(self, x: np.ndarray) -> float:
        """F(x)."""
        return float(self._sum(RowOracle.value, x)) + self._ridge_value(x)

    def grad(self, x: np.ndarray) -> np.ndarray:
        """(d,) gradient of F."""
        return self._sum(RowOracle.grad, x) + self.ridge * x

    def value_and_grad(self, x: np.ndarray) -> tuple[float, np.ndarray]:
        """F(x) and its (d,) gradient."""
        value, grad = self._sum(RowOracle.value_and_grad, x)
        return float(value) + self._ridge_value(x), grad + self.ridge * x

    def expansion(self, x: np.ndarray) -> Expansion:
        """F, its gradient and its Hessian."""
        value, grad, hessian = self._sum(_expansion, x)
        value = float(value) + self._ridge_value(x)
        return Expansion(value, grad + self.ridge * x, hessian + np.diag(self.ridge))

    def product(self, x: np.ndarray, v: np.ndarray) -> np.ndarray:
        """(d,) Hessian of F at x times v."""
        return self._sum(_product, x, v) + self.ridge * v

    def hessian_block(self, x: np.ndarray, index: np.ndarray) -> np.ndarray:
        """(k, k) rows and columns `index` of the Hessian of F at x, in k / 16 passes."""
        block = np.empty((len(index), len(index)))
        for first in range(0, len(index), COLUMNS):
            mine = index[first : first + COLUMNS]
            units = np.zeros((COLUMNS, self.problem.dim))
            units[np.arange(len(mine)), mine] = 1.0
            products = self._sum(_products, x, units)[: len(mine)]
            block[:, first : first + len(mine)] = products[:, index].T
        return 0.5 * (block + block.T) + np.diag(self.ridge[index])

    def majoriser(self, x: np.ndarray) -> np.ndarray:
        """(d, d) Hessian of a quadratic that touches F at x and lies above it, for the Huber loss:
        rows weigh min(1, delta / |residual|), as in iteratively reweighted least squares."""
        return self._sum(_reweighted, x) + np.diag(self.ridge)

    def curvature_product(self, v: np.ndarray) -> np.ndarray:
        """(d,) bound on the Hessian of a `GramLoss` and ridge, times v."""
        return self._sum(_curvature_product, v) + self.ridge * v

    @cached_property
    def curvature_matrix(self) -> np.ndarray:
        """(d, d) bound on the Hessian of F, in the sense in which the loss bounds its curvature."""
        return self._sum(_curvature_matrix) + np.diag(self.ridge)

    @cached_property
    def units(self) -> np.ndarray:
        """(d,) the effect of a unit of each coefficient on F, for comparing them; 1 for many
        coefficients of a loss that is no function of a linear predictor."""
        if self.dense:
            curvature = np.abs(np.diag(self.curvature_matrix))
        elif isinstance(self.problem.loss, GramLoss):
            squares = self._sum(_curvature_diagonal)
            curvature = np.repeat(squares, self.problem.dim // len(squares)) + self.ridge
        else:
            curvature = np.ones(self.problem.dim)
        unit = np.sqrt(curvature)
        return np.where(unit > 0, unit, np.max(unit, initial=0.0) or 1.0)

    def _ridge_value(self, x: np.ndarray) -> float:
        return 0.5 * float(self.ridge @ (x * x))

    def _sum(self, fn: Callable[..., Any], *args: np.ndarray) -> Any:
        total = self.problem.sum_over_rows(fn, *args)
        return jax.tree.map(lambda a: a / self.problem.n_clients, total)


# --- functions of an oracle without its ridge, weighted sums over its rows ------------------------


def _expansion(oracle: RowOracle, x: Array) -> tuple[Array, Array, Array]:
    return *oracle.value_and_grad(x), oracle.hessian(x)


def _product(oracle: RowOracle, x: Array, v: Array) -> Array:
    return jax.jvp(oracle.grad, (x,), (v,))[1]


def _products(oracle: RowOracle, x: Array, V: Array) -> Array:
    return jax.vmap(lambda v: _product(oracle, x, v))(V)


def _reweighted(oracle: RowOracle, x: Array) -> Array:
    loss, rows = oracle.loss, oracle.rows
    assert isinstance(loss, Huber)
    residual = jnp.abs(predictor(rows.X, x) - rows.y)
    return gram(rows.X, oracle.weight * loss.delta / jnp.maximum(loss.delta, residual))


def _curvature_matrix(oracle: RowOracle) -> Array:
    return oracle.loss.curvature_matrix(oracle.rows, oracle.weight)


def _curvature_product(oracle: RowOracle, v: Array) -> Array:
    X, V = oracle.rows.X, v.reshape(n_features(oracle.rows.X), -1)
    return combine(_curvature_scale(oracle)[:, None] * predictor(X, V), X).ravel()


def _curvature_diagonal(oracle: RowOracle) -> Array:
    """(p,); the squares of a sparse X are those of its values, its only floating leaf."""
    squares = jax.tree.map(
        lambda a: a * a if jnp.issubdtype(a.dtype, jnp.floating) else a, oracle.rows.X
    )
    return combine(_curvature_scale(oracle), squares)


def _curvature_scale(oracle: RowOracle) -> Array:
    assert isinstance(oracle.loss, GramLoss)
    return oracle.loss.curvature_scale(oracle.rows, oracle.weight)
