"""Group lasso."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedexact.core import record, static
from fedexact.errors import InputError, check_nonnegative
from fedexact.regularizers.base import Regularizer, Scalar, coordinate, number, safe_norm


@record
class GroupLasso(Regularizer):
    """g(x) = strength sum_G sqrt(|G|) |x_G|_2 over disjoint groups G of all coordinates.

    `groups` is a list of lists of coordinates, or one label (a number or a string) per coordinate;
    it is kept as a tuple of tuples of coordinates (Yuan and Lin 2006).
    """

    strength: Scalar
    groups: Any = static()

    name: ClassVar[str] = "group_lasso"
    summary: ClassVar[str] = "group lasso, strength Σ sqrt(|G|) |x_G|_2"

    def __post_init__(self) -> None:
        check_nonnegative("GroupLasso: strength", self.strength)
        object.__setattr__(self, "groups", index_groups(self.groups))

    def check(self, dim: int) -> None:
        counts = np.zeros(dim, int)
        for group in self.groups:
            for j in group:
                if not 0 <= j < dim:
                    raise InputError(f"GroupLasso: coordinate {j} in group {group}, d is {dim}")
                counts[j] += 1
        wrong = np.flatnonzero(counts != 1)
        if wrong.size:
            raise InputError(
                f"GroupLasso: every coordinate must be in one group; coordinate {wrong[0]} is in "
                f"{counts[wrong[0]]}. OnCoordinates(g, index) leaves coordinates free"
            )

    def describe(self) -> str:
        return f"group lasso penalty, strength {number(self.strength)}, {len(self.groups)} groups"

    def value(self, x: Array) -> Array:
        return self.strength * jnp.sum(self._roots() * self._norms(x))

    def prox(self, v: Array, step: Any) -> Array:
        threshold = step * self.strength * self._roots()
        norms = self._norms(v)
        kept = jnp.maximum(norms - threshold, 0.0) / jnp.where(norms > 0.0, norms, 1.0)
        return v * kept[self._labels(v)]

    def _roots(self) -> np.ndarray:
        """(number of groups,) sqrt of the group sizes."""
        return np.sqrt([len(group) for group in self.groups])

    def _labels(self, x: Array) -> np.ndarray:
        """(d,) number of the group of each coordinate."""
        labels = np.zeros(x.shape[0], int)
        for number_, group in enumerate(self.groups):
            labels[list(group)] = number_
        return labels

    def _norms(self, x: Array) -> Array:
        """(number of groups,) |x_G|_2."""
        return safe_norm(jax.ops.segment_sum(x * x, self._labels(x), len(self.groups)))


def index_groups(groups: Any) -> tuple[tuple[int, ...], ...]:
    """Groups as tuples of coordinates, from lists of coordinates or one label per coordinate."""
    entries = groups.tolist() if isinstance(groups, np.ndarray) else list(groups)
    if not entries:
        raise InputError("GroupLasso: groups is empty")
    nested = [isinstance(entry, Sequence) and not isinstance(entry, str) for entry in entries]
    if all(nested):
        return tuple(tuple(coordinate(j) for j in entry) for entry in entries)
    if any(nested):
        raise InputError(f"GroupLasso: groups mixes lists of coordinates and labels: {entries!r}")
    members: dict[Hashable, list[int]] = {}
    for j, label in enumerate(entries):
        members.setdefault(label, []).append(j)
    return tuple(tuple(group) for group in members.values())
