"""L1: the lasso."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from fedexact.core import record
from fedexact.errors import check_nonnegative
from fedexact.regularizers.base import Regularizer, Scalar, number


def soft_threshold(v: Array, threshold: Any) -> Array:
    """sign(v) max(|v| - threshold, 0), coordinate by coordinate."""
    return jnp.sign(v) * jnp.maximum(jnp.abs(v) - threshold, 0.0)


@record
class L1(Regularizer):
    """g(x) = strength |x|_1."""

    strength: Scalar

    name: ClassVar[str] = "l1"
    summary: ClassVar[str] = "lasso, strength |x|_1"

    def __post_init__(self) -> None:
        check_nonnegative("L1: strength", self.strength)

    def describe(self) -> str:
        return f"L1 penalty, strength {number(self.strength)}"

    def value(self, x: Array) -> Array:
        return self.strength * jnp.sum(jnp.abs(x))

    def prox(self, v: Array, step: Any) -> Array:
        return soft_threshold(v, step * self.strength)
