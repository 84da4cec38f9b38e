"""One client's objective over a loss and its rows, alone or stacked with others."""

from __future__ import annotations

from fedexact.oracles.buckets import bucket_sizes
from fedexact.oracles.proximal import Eigen
from fedexact.oracles.rows import RowOracle, factorise

__all__ = ["Eigen", "RowOracle", "bucket_sizes", "factorise"]
