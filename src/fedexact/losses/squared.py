"""Squared loss: linear regression."""

from __future__ import annotations

from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from fedexact.core import record
from fedexact.losses.base import LinearLoss, Rows
from fedexact.losses.spectrum import gram_smallest


@record
class Squared(LinearLoss):
    """1/2 (eta - y)^2: the negative log-likelihood of a normal y of variance 1."""

    name: ClassVar[str] = "squared"
    summary: ClassVar[str] = "least squares, 1/2 (x·row - y)²"
    quadratic: ClassVar[bool] = True
    likelihood: ClassVar[bool] = True
    steepest_at_zero: ClassVar[bool] = True

    def phi(self, eta: Array, y: Array) -> Array:
        return 0.5 * (eta - y) ** 2

    def d1(self, eta: Array, y: Array) -> Array:
        return eta - y

    def d2(self, eta: Array, y: Array) -> Array:
        return jnp.ones_like(eta)

    def d2_bound(self, y: Array) -> Array:
        return jnp.ones_like(y)

    def strong_curvature(self, rows: Rows, weight: Array) -> Array:
        return gram_smallest(rows.X, weight)

    def self_concordance(self, rows: Rows) -> float:
        return 0.0
