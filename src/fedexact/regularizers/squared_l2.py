"""Squared L2: ridge."""

from __future__ import annotations

from typing import Any, ClassVar

from jax import Array

from fedexact.core import record
from fedexact.errors import check_nonnegative
from fedexact.regularizers.base import Regularizer, Scalar, number


@record
class SquaredL2(Regularizer):
    """g(x) = strength/2 |x|^2."""

    strength: Scalar

    name: ClassVar[str] = "squared_l2"
    summary: ClassVar[str] = "ridge, strength/2 |x|²"

    def __post_init__(self) -> None:
        check_nonnegative("SquaredL2: strength", self.strength)

    @property
    def strong_convexity(self) -> Scalar:
        return self.strength

    def describe(self) -> str:
        return f"squared L2 penalty, strength {number(self.strength)}"

    def value(self, x: Array) -> Array:
        return 0.5 * self.strength * (x @ x)

    def prox(self, v: Array, step: Any) -> Array:
        return v / (1.0 + step * self.strength)
