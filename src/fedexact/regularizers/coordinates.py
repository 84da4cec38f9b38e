"""A regulariser on some coordinates only, as for an unpenalised intercept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from jax import Array

from fedexact.core import record, static
from fedexact.errors import InputError
from fedexact.regularizers.base import Regularizer, coordinate


@record
class OnCoordinates(Regularizer):
    """g(x[index]); the other coordinates are free. `g` is a function on R^len(index)."""

    g: Regularizer
    index: Sequence[int] = static()

    name: ClassVar[str] = "on_coordinates"
    summary: ClassVar[str] = "a regulariser on some coordinates, the others free"

    def __post_init__(self) -> None:
        object.__setattr__(self, "index", tuple(coordinate(j) for j in self.index))

    def check(self, dim: int) -> None:
        if len(set(self.index)) != len(self.index):
            raise InputError(f"OnCoordinates: index names a coordinate twice: {self.index}")
        for j in self.index:
            if not 0 <= j < dim:
                raise InputError(f"OnCoordinates: coordinate {j} in index, d is {dim}")
        self.g.check(len(self.index))

    def describe(self) -> str:
        return f"{self.g.describe()}, on {len(self.index)} coordinates"

    def value(self, x: Array) -> Array:
        return self.g.value(x[np.asarray(self.index, int)])

    def prox(self, v: Array, step: Any) -> Array:
        index = np.asarray(self.index, int)
        return v.at[index].set(self.g.prox(v[index], step))
