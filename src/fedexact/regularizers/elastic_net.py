"""Elastic net."""

from __future__ import annotations

import numbers
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from fedexact.core import record
from fedexact.errors import InputError, check_nonnegative
from fedexact.regularizers.base import Regularizer, Scalar, number
from fedexact.regularizers.l1 import soft_threshold


@record
class ElasticNet(Regularizer):
    """g(x) = strength (l1_ratio |x|_1 + (1 - l1_ratio)/2 |x|^2), as in scikit-learn."""

    strength: Scalar
    l1_ratio: Scalar = 0.5

    name: ClassVar[str] = "elastic_net"
    summary: ClassVar[str] = "elastic net, strength (l1_ratio |x|_1 + (1 - l1_ratio)/2 |x|²)"

    def __post_init__(self) -> None:
        check_nonnegative("ElasticNet: strength", self.strength)
        if isinstance(self.l1_ratio, numbers.Real) and not 0 <= self.l1_ratio <= 1:
            raise InputError(f"ElasticNet: l1_ratio must lie in [0, 1], got {self.l1_ratio!r}")

    @property
    def strong_convexity(self) -> Scalar:
        return self.strength * (1.0 - self.l1_ratio)

    def describe(self) -> str:
        return (
            f"elastic net penalty, strength {number(self.strength)}, "
            f"L1 ratio {number(self.l1_ratio)}"
        )

    def value(self, x: Array) -> Array:
        l1 = self.strength * self.l1_ratio * jnp.sum(jnp.abs(x))
        return l1 + 0.5 * self.strong_convexity * (x @ x)

    def prox(self, v: Array, step: Any) -> Array:
        shrunk = soft_threshold(v, step * self.strength * self.l1_ratio)
        return shrunk / (1.0 + step * self.strong_convexity)
