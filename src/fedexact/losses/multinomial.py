"""Multinomial logistic loss: classification with K classes."""

from __future__ import annotations

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedexact.core import record, static
from fedexact.errors import check_count
from fedexact.losses.base import GramLoss, Rows, finite_targets, largest_row, reject
from fedexact.losses.design import combine, gram, n_features, predictor


@record
class Multinomial(GramLoss):
    """-log P(y) with P(class j) proportional to exp(eta_j), eta_0 = 0, labels 0..K-1.

    Class 0 is the reference, so that the coefficients are identified: x is the matrix
    (n_features, K - 1) of the other classes, flattened row by row.
    """

    n_classes: int = static()

    name: ClassVar[str] = "multinomial"
    summary: ClassVar[str] = "multinomial logistic regression, labels 0..K-1, class 0 the reference"
    likelihood: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("Multinomial: n_classes", self.n_classes, at_least=2)

    def dim(self, n_features: int) -> int:
        return n_features * (self.n_classes - 1)

    def check_targets(self, y: np.ndarray, where: str) -> np.ndarray:
        labels = finite_targets(y, where)
        known = np.isin(labels, np.arange(self.n_classes))
        reject(where, y, ~known, f"is no label of 0..{self.n_classes - 1}; code the classes so")
        return labels

    def values(self, x: Array, rows: Rows) -> Array:
        logits = self._logits(x, rows)
        own = self._own(rows)
        ahead = logits - jnp.sum(own * logits, axis=1, keepdims=True)
        return jnp.logaddexp(0.0, jax.nn.logsumexp(ahead, axis=1, where=own == 0.0))

    def grad(self, x: Array, rows: Rows, weight: Array) -> Array:
        own = self._own(rows)
        others = jax.nn.softmax(self._logits(x, rows), axis=1) * (1.0 - own)
        d1 = others - own * jnp.sum(others, axis=1, keepdims=True)  # P - own, without cancellation
        return combine(weight[:, None] * d1[:, 1:], rows.X).ravel()

    def hessian(self, x: Array, rows: Rows, weight: Array) -> Array:
        P = jax.nn.softmax(self._logits(x, rows), axis=1)
        off = -P[:, :, None] * P[:, None, :] * (1.0 - jnp.eye(self.n_classes))[None]
        d2 = off - jnp.eye(self.n_classes)[None] * jnp.sum(off, axis=2, keepdims=True)
        free = self.n_classes - 1
        pairs = (weight[:, None, None] * d2[:, 1:, 1:]).reshape(weight.shape[0], free**2)
        blocks = jax.lax.map(lambda scale: gram(rows.X, scale), pairs.T)
        p = n_features(rows.X)
        return blocks.reshape(free, free, p, p).transpose(2, 0, 3, 1).reshape(p * free, p * free)

    def curvature_scale(self, rows: Rows, weight: Array) -> Array:
        # diag(p) - p p' without the reference class is at most 1/2, or 1/4 (Böhning 1992)
        return (0.25 if self.n_classes == 2 else 0.5) * weight

    def curvature_matrix(self, rows: Rows, weight: Array) -> Array:
        return jnp.kron(super().curvature_matrix(rows, weight), jnp.eye(self.n_classes - 1))

    def self_concordance(self, rows: Rows) -> Array:
        # Central moments of U_j = X_i v_j over the classes: |third| <= range(U) * second, and
        # |X_i (v_j - v_l)| <= sqrt(2) |X_i| |v|, or |X_i| |v| against the reference class.
        return (1.0 if self.n_classes == 2 else math.sqrt(2.0)) * largest_row(rows)

    def _logits(self, x: Array, rows: Rows) -> Array:
        """(m, K) linear predictors, zero for the reference class."""
        eta = predictor(rows.X, x.reshape(n_features(rows.X), self.n_classes - 1))
        return jnp.concatenate([jnp.zeros_like(eta[:, :1]), eta], axis=1)

    def _own(self, rows: Rows) -> Array:
        """(m, K) one-hot labels."""
        return jax.nn.one_hot(rows.y.astype(int), self.n_classes, dtype=rows.X.dtype)
