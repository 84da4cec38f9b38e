"""Which method finds the minimiser."""

from __future__ import annotations

import numpy as np

from fedexact.losses import Squared
from fedexact.losses.base import GramLoss
from fedexact.problem import Problem
from fedexact.reference.composite import composite
from fedexact.reference.newton import newton
from fedexact.reference.pooled import Pooled
from fedexact.reference.qr import QR_LIMIT, check_rank, clearly_independent, least_squares
from fedexact.regularizers import Zero


def minimiser(problem: Problem) -> np.ndarray:
    """`fedexact.reference`."""
    pooled = Pooled(problem)
    if not isinstance(problem.regularizer, Zero):
        return composite(pooled)
    if isinstance(problem.loss, GramLoss):
        check_rank(pooled)
    squared = isinstance(problem.loss, Squared) and problem.dim <= QR_LIMIT
    if squared and not clearly_independent(pooled):
        return least_squares(pooled)
    return newton(pooled)
