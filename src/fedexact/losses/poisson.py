"""Poisson loss: counts."""

from __future__ import annotations

from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array

from fedexact.core import record
from fedexact.losses.base import LinearLoss, Rows, finite_targets, largest_row, reject


@record
class Poisson(LinearLoss):
    """exp(eta) - y eta with y >= 0: the negative log-likelihood of E[y] = exp(eta), without log y!.

    No smoothness constant holds for all eta: `curvature` takes max(1, y) for exp(eta).
    """

    name: ClassVar[str] = "poisson"
    summary: ClassVar[str] = "Poisson regression with log link, counts y >= 0"
    likelihood: ClassVar[bool] = True
    global_smooth: ClassVar[bool] = False

    def check_targets(self, y: np.ndarray, where: str) -> np.ndarray:
        counts = finite_targets(y, where)
        reject(where, y, counts < 0, "is negative; counts must be >= 0")
        return counts

    def phi(self, eta: Array, y: Array) -> Array:
        return jnp.exp(eta) - y * eta

    def d1(self, eta: Array, y: Array) -> Array:
        return jnp.exp(eta) - y

    def d2(self, eta: Array, y: Array) -> Array:
        return jnp.exp(eta)

    def d2_bound(self, y: Array) -> Array:
        return jnp.maximum(1.0, y)

    def self_concordance(self, rows: Rows) -> Array:
        return largest_row(rows)  # phi''' = phi''
