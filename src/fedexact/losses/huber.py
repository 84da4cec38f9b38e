"""Huber loss: regression that bounds the pull of outliers."""

from __future__ import annotations

from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from fedexact.core import record
from fedexact.errors import check_positive
from fedexact.losses.base import LinearLoss


@record
class Huber(LinearLoss):
    """1/2 r^2 for |r| <= delta and delta (|r| - delta/2) beyond, r = eta - y (Huber 1964).

    `delta` is in the units of y; the default is 95 % efficient for normal residuals of variance 1.
    The Hessian is the generalised one, 1 for |r| <= delta and 0 beyond.
    """

    delta: Array | float = 1.345

    name: ClassVar[str] = "huber"
    summary: ClassVar[str] = "Huber's robust regression, quadratic up to delta and linear beyond"

    def __post_init__(self) -> None:
        check_positive("Huber: delta", self.delta)

    def phi(self, eta: Array, y: Array) -> Array:
        clipped = self.d1(eta, y)
        return clipped * (eta - y - 0.5 * clipped)

    def d1(self, eta: Array, y: Array) -> Array:
        return jnp.clip(eta - y, -self.delta, self.delta)

    def d2(self, eta: Array, y: Array) -> Array:
        return jnp.where(jnp.abs(eta - y) <= self.delta, 1.0, 0.0)

    def d2_bound(self, y: Array) -> Array:
        return jnp.ones_like(y)
