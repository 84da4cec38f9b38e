"""No regulariser."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from fedexact.core import record
from fedexact.regularizers.base import Regularizer


@record
class Zero(Regularizer):
    """g = 0."""

    name: ClassVar[str] = "none"
    summary: ClassVar[str] = "no regulariser"

    def describe(self) -> str:
        return "no regulariser"

    def value(self, x: Array) -> Array:
        return jnp.zeros(())

    def prox(self, v: Array, step: Any) -> Array:
        return v
