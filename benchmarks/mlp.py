"""The multilayer perceptron of W3 as one vector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

SHAPES = ((64, 64), (64,), (64, 10), (10,))  # weights (in, out) and biases of both layers
CUTS = (4096, 4160, 4800)


def layers(x: Any, split: Callable[[Any, Any], Any] = np.split) -> list[Any]:
    """The weights and biases in the vector x; `split` is NumPy's, or JAX's like it, whose gradient
    is one concatenation where that of slices is a sum of four long vectors."""
    parts = split(x, CUTS)
    return [part.reshape(shape) for part, shape in zip(parts, SHAPES, strict=True)]
