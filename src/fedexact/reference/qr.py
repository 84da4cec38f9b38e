"""The rank of the pooled rows, and least squares, by QR factorisations block after block.

R of [R of the blocks before; block] is that of all rows (Demmel, Grigori, Hoemmen and Langou 2012,
Communication-optimal parallel and sequential QR and LU factorizations). Householder's method is
backward stable column by column, so that the columns can be scaled afterwards, in R.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import scipy.linalg
import scipy.sparse

from fedexact.errors import InputError
from fedexact.losses import Squared
from fedexact.problem import Problem
from fedexact.reference.pooled import EPS, Pooled

QR_LIMIT = 2000  # the largest number of columns that are factorised
BLOCK = 2_000_000  # entries of a block, or more where it would have fewer rows than 4 p
INDEPENDENT = 1e-8  # the smallest eigenvalue, of a Gram matrix with diagonal 1, beyond doubt
REFINEMENTS = 10


def triangle(problem: Problem, with_target: bool = False) -> np.ndarray:
    """(p, p) R with R'R = X' diag(weight) X + diag(ridge), the ridge that all outputs have; with
    the target as one more column if asked for."""
    p = problem.n_features
    ridge = problem.ridge.reshape(p, -1).min(axis=1)
    R = np.zeros((p + with_target, p + with_target))
    R[:p, :p] = np.diag(np.sqrt(ridge))
    for X, y, weight in problem.blocks(most=max(4 * p, BLOCK // p)):
        rows = np.empty((len(R) + len(y), len(R)), order="F")
        rows[: len(R)] = R
        rows[len(R) :, :p] = X.toarray() if scipy.sparse.issparse(X) else X
        if with_target:
            rows[len(R) :, p] = y
        rows[len(R) :] *= np.sqrt(weight)[:, None]
        factors = cast(Any, scipy.linalg.lapack).dgeqrf(rows, overwrite_a=True)
        R = np.triu(factors[0][: len(R)])
    return R


def check_rank(pooled: Pooled) -> None:
    """InputError if a column is a linear combination of the others as far as rounding can tell."""
    problem = pooled.problem
    n, p = int(problem.n_rows.sum()), problem.n_features
    if p > QR_LIMIT:
        if n < p and problem.l2 == 0.0:
            raise InputError(
                f"the minimiser is not unique (rank deficiency): {n} rows for {p} columns; drop "
                "columns or add l2"
            )
        return
    if clearly_independent(pooled) or isinstance(problem.loss, Squared):
        return  # `least_squares` looks at the R that it needs anyway
    refuse_dependent(problem, triangle(problem))


def clearly_independent(pooled: Pooled) -> bool:
    """Whether the bound on the Hessian, a Gram matrix of the rows, settles the question; it does
    not where none is formed."""
    if not pooled.dense:
        return False
    outputs = pooled.problem.dim // pooled.problem.n_features
    gram = pooled.curvature_matrix[::outputs, ::outputs]
    diagonal = np.diag(gram)
    if not np.all(diagonal > 0):
        return False
    scale = 1.0 / np.sqrt(diagonal)
    return bool(np.linalg.eigvalsh(gram * scale[:, None] * scale[None, :])[0] > INDEPENDENT)


def refuse_dependent(problem: Problem, R: np.ndarray) -> None:
    """InputError that names the columns which pivoting finds dependent on the others in R."""
    n, p = int(problem.n_rows.sum()), problem.n_features
    first = int(problem.fit_intercept)  # the intercept is not the one to drop: the others go
    scaled, _ = unit_columns(R)
    remainder = scaled[first:, first:]  # orthogonal to the intercept
    rest, pivots = cast(Any, scipy.linalg.qr(remainder, mode="r", pivoting=True))
    dependent = first + pivots[np.abs(np.diag(rest)) <= (n + p) * EPS]
    if len(dependent):
        outputs = problem.dim // p
        features = [problem.feature_names[j * outputs] for j in sorted(dependent)]
        names = ", ".join(repr(n.removesuffix("[1]") if outputs > 1 else n) for n in features)
        intercept = " and the intercept" if problem.fit_intercept else ""
        raise InputError(
            f"the minimiser is not unique (rank deficiency): {names} can be written as a linear "
            f"combination of the other columns{intercept} in the pooled rows; drop columns or "
            "add l2"
        )


def unit_columns(A: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A with its columns scaled to length 1, and the lengths that they had."""
    scale = np.linalg.norm(A, axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    return A / scale[None, :], scale


def least_squares(pooled: Pooled) -> np.ndarray:
    """R x = Q'y, where Q'y is the target's column of R, and refinement by the seminormal equations
    R'R step = -grad F(x) while the steps become shorter (Björck 1987). InputError as `check_rank`.
    """
    problem = pooled.problem
    p = problem.n_features
    whole = triangle(problem, with_target=True)
    refuse_dependent(problem, whole[:p, :p])
    R, scale = unit_columns(whole[:p, :p])
    z = scipy.linalg.solve_triangular(R, whole[:p, p])
    length = float(np.linalg.norm(z))
    for _ in range(REFINEMENTS):
        right = scipy.linalg.solve_triangular(R.T, -pooled.grad(z / scale) / scale, lower=True)
        step = scipy.linalg.solve_triangular(R, right)
        if not np.linalg.norm(step) < 0.5 * length:
            break
        z, length = z + step, float(np.linalg.norm(step))
    return z / scale
