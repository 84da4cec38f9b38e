"""One client's objective over a loss and its rows, and those of all clients."""

from __future__ import annotations

from fedexact.oracles.buckets import bucket_sizes
from fedexact.oracles.proximal import Eigen, prox_method
from fedexact.oracles.rows import RowOracle, factor_of, factorise
from fedexact.oracles.stack import Size, Stack, largest

__all__ = [
    "Eigen",
    "RowOracle",
    "Size",
    "Stack",
    "bucket_sizes",
    "factor_of",
    "factorise",
    "largest",
    "prox_method",
]
