"""With a regulariser: proximal gradient steps, then Newton steps on the fixed-point equation."""

from __future__ import annotations

from typing import Any, cast

import jax
import numpy as np
import scipy.sparse.linalg
from jax import Array

from fedexact.errors import FedexactError
from fedexact.losses.base import GramLoss
from fedexact.losses.spectrum import spectral_norm
from fedexact.objective import NEWTON_LIMIT
from fedexact.reference.newton import conjugate_direction, newton_direction, not_found
from fedexact.reference.pooled import EPS, Pooled
from fedexact.regularizers import Regularizer

GRADIENT_STEPS = 200_000  # of the proximal gradient method, in all
FIRST_CHUNK = 200  # of these before the first Newton step
NEWTON_STEPS = 100  # on the fixed-point equation, between two chunks
STEP_FACTORS = (1.0, 1e2, 1e4, 1e6)  # of these
REACHED = 1e-14  # gradient mapping times step, relative to the size of x: done
FLOOR = 1e-11  # where rounding stops the progress, this is accepted


def composite(pooled: Pooled) -> np.ndarray:
    """(d,) x after chunks of proximal gradient steps, each followed by Newton steps, down to
    rounding."""
    g = pooled.problem.regularizer
    x = _prox(g, np.zeros(pooled.problem.dim), 1.0)
    L = _smoothness(pooled, x)
    start = float(np.linalg.norm(pooled.grad(x)))
    steps, done, error, before = FIRST_CHUNK, 0, np.inf, np.inf
    while done < GRADIENT_STEPS:
        x, L = _proximal_gradient(pooled, g, x, L, steps)
        done, steps = done + steps, 2 * steps
        x, r = _best_polish(pooled, g, x, 1.0 / L)
        size = max(float(np.linalg.norm(x)), start / L, 1e-300)
        error = float(np.linalg.norm(r)) / size
        if error <= REACHED or (error <= FLOOR and error >= 0.25 * before):
            _check_finite(pooled, x - r)
            return x - r
        before = error
    raise FedexactError(
        f"the reference solution reached a gradient mapping (times step, relative to x) of "
        f"{error:.2g} only, in {done} steps; scale the features, add l2, or check that a finite "
        "minimiser exists (separation)"
    )


def _smoothness(pooled: Pooled, x: np.ndarray) -> float:
    """Of F: for all x, or a guess at x, which the steps then correct."""
    d = pooled.problem.dim
    if pooled.dense:
        known = pooled.problem.loss.global_smooth
        bound = pooled.curvature_matrix if known else pooled.expansion(x).hessian
        return spectral_norm(bound) or 1.0

    def product(v: np.ndarray) -> np.ndarray:
        v = v.ravel()
        return pooled.curvature_product(v) if _step_known(pooled) else pooled.product(x, v)

    linalg = cast(Any, scipy.sparse.linalg)
    operator = linalg.LinearOperator((d, d), matvec=product, dtype=float)
    top = linalg.eigsh(operator, 1, v0=_probe(d), tol=1e-3, return_eigenvectors=False)
    return 1.01 * float(np.abs(top[0])) or 1.0


def _step_known(pooled: Pooled) -> bool:
    """Whether `_smoothness` holds for all x."""
    loss = pooled.problem.loss
    return loss.global_smooth and (pooled.dense or isinstance(loss, GramLoss))


def _check_finite(pooled: Pooled, x: np.ndarray) -> None:
    """InputError if a Newton step in the coordinates on which g has no curvature would not be
    short: then the gradient vanishes because the loss is flat, far out, and not at a minimiser."""
    problem, unit = pooled.problem, pooled.units
    if problem.loss.quadratic or not problem.loss.likelihood:
        return
    grad = pooled.grad(x)
    H = pooled.expansion(x).hessian if pooled.dense else None
    L = spectral_norm(H) if H is not None else _smoothness(pooled, x)
    if L == 0.0:
        raise not_found(pooled, unit * x, grad)
    step = 1.0 / L
    probe = _probe(problem.dim)
    bend = _prox_product(problem.regularizer, x - step * grad, step, probe)
    free = np.flatnonzero(np.abs(bend - probe) <= 1e-9 * np.abs(probe))
    mapping, direction = np.zeros_like(x), np.zeros_like(x)
    mapping[free] = _residual(problem.regularizer, x, grad, step)[free] / step
    if H is None:
        start = float(np.linalg.norm(mapping / unit))
        direction = conjugate_direction(pooled, x, mapping, start, free)
    else:
        direction[free] = newton_direction(mapping[free], H[np.ix_(free, free)], unit[free])
    if np.linalg.norm(unit * direction) > 1e-3:
        raise not_found(pooled, unit * direction, grad)


# --- proximal gradient steps ----------------------------------------------------------------------


def _proximal_gradient(
    pooled: Pooled, g: Regularizer, x: np.ndarray, L: float, steps: int
) -> tuple[np.ndarray, float]:
    """FISTA with restarts where the momentum points uphill (O'Donoghue and Candès 2015).

    Without momentum for losses that need not be convex; the step is searched for where there is no
    global smoothness constant.
    """
    y, t, momentum = x, 1.0, pooled.problem.loss.newton
    for _ in range(steps):
        x_next, L = _forward_backward(pooled, g, y, L)
        if float((y - x_next) @ (x_next - x)) > 0.0 or not momentum:
            y, t = x_next, 1.0
        else:
            t, before = 0.5 * (1.0 + float(np.sqrt(1.0 + 4.0 * t * t))), t
            y = x_next + (before - 1.0) / t * (x_next - x)
        x = x_next
    return x, L


def _forward_backward(
    pooled: Pooled, g: Regularizer, y: np.ndarray, L: float
) -> tuple[np.ndarray, float]:
    """prox(y - grad F(y) / L) and L, doubled until F lies below its quadratic bound there."""
    grad = pooled.grad(y)
    if _step_known(pooled):
        return _prox(g, y - grad / L, 1.0 / L), L
    L = 0.95 * L
    while True:
        x = _prox(g, y - grad / L, 1.0 / L)
        change, move = pooled.grad(x) - grad, x - y
        rounding = 8.0 * EPS * float(np.linalg.norm(grad) * np.linalg.norm(move))
        if change @ move <= 0.5 * L * float(move @ move) + rounding or L >= 1e300:
            return x, L
        L = 2.0 * L


def _prox(g: Regularizer, u: np.ndarray, step: float) -> np.ndarray:
    return np.asarray(_jitted_prox(g, u, step))


@jax.jit
def _jitted_prox(g: Regularizer, u: Array, step: Array | float) -> Array:
    return g.prox(u, step)


def _prox_product(g: Regularizer, u: np.ndarray, step: float, v: np.ndarray) -> np.ndarray:
    """(d,) the Jacobian of the prox times v, one of the generalised ones at a kink."""
    return np.asarray(_jitted_prox_product(g, u, step, v))


@jax.jit
def _jitted_prox_product(g: Regularizer, u: Array, step: Array | float, v: Array) -> Array:
    return jax.jvp(lambda u: g.prox(u, step), (u,), (v,))[1]


@jax.jit
def _prox_jacobian(g: Regularizer, u: Array, step: Array | float) -> Array:
    return jax.jacfwd(lambda u: g.prox(u, step))(u)


# --- Newton steps on the fixed-point equation -----------------------------------------------------


def _best_polish(
    pooled: Pooled, g: Regularizer, x: np.ndarray, step: float
) -> tuple[np.ndarray, np.ndarray]:
    """The best of `_polish` with several steps, as its residual with `step` tells.

    Every step has the same fixed points, but not the same guess of the smooth piece of g: a longer
    one is right from farther away where the curvatures of the coefficients differ widely.
    """
    best, least = x, _residual(g, x, pooled.grad(x), step)
    for factor in STEP_FACTORS:
        y = _polish(pooled, g, x, factor * step)
        r = _residual(g, y, pooled.grad(y), step)
        if np.linalg.norm(r) < np.linalg.norm(least):
            best, least = y, r
        if np.linalg.norm(least) <= REACHED * np.linalg.norm(best):
            break
    return best, least


def _residual(g: Regularizer, x: np.ndarray, grad: np.ndarray, step: float) -> np.ndarray:
    """(d,) x - prox(x - step grad F(x)): the gradient mapping times the step."""
    return x - _prox(g, x - step * grad, step)


def _polish(pooled: Pooled, g: Regularizer, x: np.ndarray, step: float) -> np.ndarray:
    """Semismooth Newton steps on r(x) = x - prox(x - step grad F(x)) while they halve it.

    Where the gradient steps have found the smooth piece of g on which the minimiser lies (the
    support, the active bounds), these are Newton's method on that piece.
    """
    grad = pooled.grad(x)
    r = _residual(g, x, grad, step)
    for _ in range(NEWTON_STEPS):
        change = _newton_change(pooled, g, x, x - step * grad, r, step)
        if change is None or not np.all(np.isfinite(change)):
            break
        grad = pooled.grad(x - change)
        r_next = _residual(g, x - change, grad, step)
        if not np.linalg.norm(r_next) <= 0.5 * np.linalg.norm(r):
            break
        x, r = x - change, r_next
    return x


def _newton_change(
    pooled: Pooled, g: Regularizer, x: np.ndarray, u: np.ndarray, r: np.ndarray, step: float
) -> np.ndarray | None:
    """(d,) c with (I - D (I - step H)) c = r, D the Jacobian of the prox at u, H the Hessian at x;
    None if D reaches more coordinates than NEWTON_LIMIT.

    D is symmetric and 0 outside the coordinates A that it reaches, where therefore c = r; what
    remains is a system in A.
    """
    probe = _probe(len(x))
    reached = _prox_product(g, u, step, probe)
    if not np.all(np.isfinite(reached)):
        return None
    A = np.flatnonzero(reached)
    if len(A) > NEWTON_LIMIT:
        return None
    outside = r.copy()
    outside[A] = 0.0
    if pooled.dense:
        H = pooled.expansion(x).hessian
        block, product = H[np.ix_(A, A)], H @ outside
        D = np.asarray(_prox_jacobian(g, u, step))[np.ix_(A, A)]
    else:
        block, product = pooled.hessian_block(x, A), pooled.product(x, outside)
        D = np.stack([_prox_product(g, u, step, e)[A] for e in _units_at(A, len(x))], axis=1)
    system = np.eye(len(A)) - D @ (np.eye(len(A)) - step * block)
    if not np.all(np.isfinite(system)):
        return None
    change = outside
    change[A] = np.linalg.lstsq(system, r[A] - step * D @ product[A], rcond=None)[0]
    return change


def _units_at(index: np.ndarray, dim: int) -> np.ndarray:
    """(k, d) unit vectors."""
    units = np.zeros((len(index), dim))
    units[np.arange(len(index)), index] = 1.0
    return units


def _probe(dim: int) -> np.ndarray:
    """(d,) numbers that no row of a Jacobian maps to 0, or to the row's own number, by chance."""
    return np.random.default_rng(0).normal(size=dim)
