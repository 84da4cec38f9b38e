"""Bounds on every coordinate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedexact.core import record
from fedexact.errors import InputError
from fedexact.regularizers.base import ROUNDING, Regularizer, indicator

Bound = Array | np.ndarray | float | Sequence[float]  # a sequence is kept as an array


@record
class Box(Regularizer):
    """g(x) = 0 if lower <= x <= upper, inf otherwise; bounds are scalars or (d,), +-inf is none."""

    lower: Bound
    upper: Bound

    name: ClassVar[str] = "box"
    summary: ClassVar[str] = "lower <= x <= upper, scalars or one bound per coordinate"

    def __post_init__(self) -> None:
        for side in ("lower", "upper"):
            bound = getattr(self, side)
            if isinstance(bound, list | tuple):
                object.__setattr__(self, side, np.asarray(bound, float))
        if all(isinstance(bound, np.ndarray | float | int) for bound in (self.lower, self.upper)):
            check_bounds(np.asarray(self.lower), np.asarray(self.upper))

    def check(self, dim: int) -> None:
        for side in ("lower", "upper"):
            shape = np.shape(getattr(self, side))
            if shape not in ((), (dim,)):
                raise InputError(
                    f"Box: {side} must be a number or have one entry for each of the {dim} "
                    f"coordinates, got shape {shape}"
                )

    def describe(self) -> str:
        return f"box, {bounds(self.lower)} <= x <= {bounds(self.upper)}"

    def value(self, x: Array) -> Array:
        slack = ROUNDING * jnp.maximum(1.0, jnp.abs(x))
        above = x >= spread(self.lower, x) - slack
        return indicator(jnp.all(above & (x <= spread(self.upper, x) + slack)))

    def prox(self, v: Array, step: Any) -> Array:
        return jnp.clip(v, spread(self.lower, v), spread(self.upper, v))


@record
class NonNegative(Regularizer):
    """g(x) = 0 if x >= 0, inf otherwise."""

    name: ClassVar[str] = "nonnegative"
    summary: ClassVar[str] = "x >= 0"

    def describe(self) -> str:
        return "x >= 0"

    def value(self, x: Array) -> Array:
        return indicator(jnp.all(x >= -ROUNDING))

    def prox(self, v: Array, step: Any) -> Array:
        return jnp.maximum(v, 0.0)


def check_bounds(lower: np.ndarray, upper: np.ndarray) -> None:
    """Raises InputError unless the box is not empty."""
    if (
        lower.ndim > 1
        or upper.ndim > 1
        or (lower.ndim == upper.ndim and lower.shape != upper.shape)
    ):
        raise InputError(
            "Box: lower and upper must be numbers or vectors of the same length, got shapes "
            f"{lower.shape} and {upper.shape}"
        )
    low, high = np.broadcast_arrays(np.atleast_1d(lower), np.atleast_1d(upper))
    bad = ~(low <= high)  # also NaN
    if np.any(bad):
        j = int(np.argmax(bad))
        raise InputError(f"Box: lower <= upper fails in coordinate {j}: {low[j]} and {high[j]}")


def spread(bound: Bound, x: Array) -> Array:
    """(d,) bound of every coordinate."""
    return jnp.broadcast_to(jnp.asarray(bound, x.dtype), x.shape)


def bounds(bound: Bound) -> str:
    """A bound for `describe`: its value, or how many there are."""
    values = np.unique(jax.device_get(bound))
    return f"{values[0]:g}" if values.size == 1 else f"{np.size(bound)} bounds"
