"""The pooled solution to machine precision, by methods that share nothing with the federated ones.

Everything streams: sums over the clients, and a QR factorisation of one block of rows after the
other. Smooth problems: damped Newton steps down to the rounding floor, with conjugate gradients in
place of a matrix where there are many coefficients. Least squares with badly conditioned columns:
that QR and refinement. With a regulariser: accelerated proximal gradient steps, then Newton steps
on the fixed-point equation x = prox(x - step grad F(x)), whose residual, the gradient mapping, also
tells when to stop.
"""

from __future__ import annotations

import numpy as np

from fedexact.core import in_float64
from fedexact.problem import Problem

__all__ = ["reference"]


@in_float64
def reference(problem: Problem) -> np.ndarray:
    """(d,) the minimiser of the pooled objective F + g.

    Memory: a block of rows and, for d <= 500, a few (d, d) matrices; for the rank of up to 2000
    columns a few matrices of that side; beyond, vectors only.

    Without a regulariser the minimiser is unique where the columns of the pooled rows are linearly
    independent, which is checked for up to 2000 columns. Beyond, only that there are as many rows
    as columns, or a ridge, is. With a regulariser, or a loss that is not one of a linear predictor,
    uniqueness is not checked: where there are several minimisers (lasso with two identical columns)
    x is one of them. `certify` tells whether x is known to be the only one.

    Raises:
        InputError: without a regulariser, the minimiser is not unique (linearly dependent
            columns); or it is not finite (separation). Says which coefficients are concerned.
        FedexactError: the precision was not reached; says which one was.
    """
    from fedexact.reference.methods import minimiser  # here: SciPy's linear algebra loads slowly

    return minimiser(problem)
