"""What a regulariser is: a closed convex function g with a cheap prox."""

from __future__ import annotations

import abc
import operator
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from fedexact.errors import InputError

Scalar = Array | float


class Regularizer(abc.ABC):
    """g: R^d -> (-inf, inf], closed, convex. Subclasses are records whose parameters are leaves."""

    name: ClassVar[str]
    summary: ClassVar[str]  # one line for `fedexact list`

    @property
    def strong_convexity(self) -> Scalar:
        """mu such that g - mu/2 |x|^2 is convex."""
        return 0.0

    def check(self, dim: int) -> None:
        """Raises InputError if g is not a function on R^dim."""
        return

    @abc.abstractmethod
    def describe(self) -> str:
        """g in words, with its parameters."""

    @abc.abstractmethod
    def value(self, x: Array) -> Array:
        """Scalar g(x), inf outside the domain; a rounding error outside counts as inside."""

    @abc.abstractmethod
    def prox(self, v: Array, step: Any) -> Array:
        """(d,) argmin_u g(u) + |u - v|^2 / (2 step)."""


ROUNDING = 1e-12  # relative, granted to points of a constraint set


def indicator(inside: Array) -> Array:
    """0 where `inside`, inf elsewhere."""
    return jnp.where(inside, 0.0, jnp.inf)


def safe_norm(squared: Array) -> Array:
    """Square root whose derivative at 0 is 0 instead of NaN."""
    positive = squared > 0.0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, squared, 1.0)), 0.0)


def number(value: Any) -> str:
    """A parameter for `describe`."""
    return f"{float(value):g}"


def coordinate(j: Any) -> int:
    """The number of a coordinate; InputError if it is none."""
    try:
        return operator.index(j)
    except TypeError:
        raise InputError(f"a coordinate must be an integer, got {j!r}") from None
