"""A bound on the length of x."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from fedexact.core import record
from fedexact.errors import check_positive
from fedexact.regularizers.base import (
    ROUNDING,
    Regularizer,
    Scalar,
    indicator,
    number,
    safe_norm,
)


@record
class L2Ball(Regularizer):
    """g(x) = 0 if |x|_2 <= radius, inf otherwise."""

    radius: Scalar

    name: ClassVar[str] = "l2_ball"
    summary: ClassVar[str] = "|x|_2 <= radius"

    def __post_init__(self) -> None:
        check_positive("L2Ball: radius", self.radius)

    def describe(self) -> str:
        return f"|x|_2 <= {number(self.radius)}"

    def value(self, x: Array) -> Array:
        return indicator(safe_norm(x @ x) <= self.radius * (1.0 + ROUNDING))

    def prox(self, v: Array, step: Any) -> Array:
        return v * (self.radius / jnp.maximum(safe_norm(v @ v), self.radius))
