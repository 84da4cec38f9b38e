"""Logistic loss: binary classification."""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedexact.core import record
from fedexact.errors import InputError
from fedexact.losses.base import LinearLoss, Rows, finite_targets, largest_row, reject


@record
class Logistic(LinearLoss):
    """log(1 + exp(eta)) - y eta, y in {0, 1}: the negative log-likelihood of logit P(y=1) = eta.

    Written in the margin s = (1 - 2y) eta, in which nothing cancels.
    """

    name: ClassVar[str] = "logistic"
    summary: ClassVar[str] = "logistic regression, labels 0/1 or -1/1"
    likelihood: ClassVar[bool] = True
    steepest_at_zero: ClassVar[bool] = True

    def check_targets(self, y: np.ndarray, where: str) -> np.ndarray:
        labels = finite_targets(y, where)
        reject(where, y, ~np.isin(labels, (-1, 0, 1)), "is no binary label; use 0/1 or -1/1")
        if np.any(labels == -1) and np.any(labels == 0):
            raise InputError(f"{where}: labels mix -1 and 0; use 0/1 or -1/1")
        return np.maximum(labels, 0.0)

    def phi(self, eta: Array, y: Array) -> Array:
        return jnp.logaddexp(0.0, (1.0 - 2.0 * y) * eta)

    def d1(self, eta: Array, y: Array) -> Array:
        sign = 1.0 - 2.0 * y
        return sign * jax.nn.sigmoid(sign * eta)

    def d2(self, eta: Array, y: Array) -> Array:
        return jax.nn.sigmoid(eta) * jax.nn.sigmoid(-eta)

    def d2_bound(self, y: Array) -> Array:
        return jnp.full_like(y, 0.25)

    def self_concordance(self, rows: Rows) -> Array:
        return largest_row(rows)  # |phi'''| = phi'' |1 - 2 sigmoid| <= phi''
