"""The pooled solution to machine precision, by methods that share nothing with the federated ones.

All rows are stacked. Least squares: a pivoted QR factorisation. Smooth problems: damped Newton
steps down to the rounding floor. With a regulariser: accelerated proximal gradient steps, then
Newton steps on the fixed-point equation x = prox(x - step grad F(x)), whose residual, the gradient
mapping, also tells when to stop.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax import Array, lax

from fedexact.core import in_float64
from fedexact.errors import FedexactError, InputError
from fedexact.losses import LinearLoss, Loss, Multinomial, Rows, Squared
from fedexact.problem import Problem
from fedexact.regularizers import Regularizer, Zero

EPS = float(np.finfo(float).eps)
NEWTON_STEPS = 100
HALVINGS = 50
SHORT = 1e-6  # a Newton step, relative to x: quadratic convergence has set in
SINGULAR = 1e-12  # an eigenvalue of a scaled Hessian, relative
GRADIENT_STEPS = 1_000_000  # of the proximal gradient method, in all
STEP_FACTORS = (1.0, 1e2, 1e4, 1e6)  # of the Newton steps on the fixed-point equation
FIRST_CHUNK = 200  # of these before the first Newton step
REACHED = 1e-14  # gradient mapping times step, relative to the size of x: done
FLOOR = 1e-11  # where rounding stops the progress, this is accepted


@in_float64
def reference(problem: Problem) -> np.ndarray:
    """(d,) the minimiser of the pooled objective F + g.

    With a regulariser, or a loss that is not one of a linear predictor, uniqueness is not checked:
    where there are several minimisers (lasso with two identical columns) x is one of them.
    `certify` tells whether x is known to be the only one.

    Raises:
        InputError: without a regulariser, the minimiser is not unique (linearly dependent
            columns); or it is not finite (separation). Says which coefficients are concerned.
        FedexactError: the precision was not reached; says which one was.
    """
    rows, weight = problem.pooled()
    pooled = _Pooled(
        problem.loss,
        Rows(jnp.asarray(rows.X), jnp.asarray(rows.y)),
        jnp.asarray(weight),
        jnp.asarray(problem.ridge),
    )
    if not isinstance(problem.regularizer, Zero):
        x = _composite(pooled, problem.regularizer)
        _check_finite(problem, pooled, x)
        return x
    if isinstance(problem.loss, LinearLoss | Multinomial):
        _check_rank(problem, rows, weight)
    if isinstance(problem.loss, Squared):
        return _least_squares(problem, rows, weight)
    return _newton(problem, pooled)


class _Pooled(NamedTuple):
    """F(x) = sum_i weight_i loss_i(x) + 1/2 sum_j ridge_j x_j^2 on the stacked rows."""

    loss: Loss
    rows: Rows
    weight: Array
    ridge: Array

    def value(self, x: Array) -> Array:
        return self.loss.value(x, self.rows, self.weight) + 0.5 * jnp.sum(self.ridge * x * x)

    def grad(self, x: Array) -> Array:
        return self.loss.grad(x, self.rows, self.weight) + self.ridge * x

    def hessian(self, x: Array) -> Array:
        return self.loss.hessian(x, self.rows, self.weight) + jnp.diag(self.ridge)


@jax.jit
def _value(pooled: _Pooled, x: Array) -> Array:
    return pooled.value(x)


@jax.jit
def _grad(pooled: _Pooled, x: Array) -> Array:
    return pooled.grad(x)


@jax.jit
def _grad_hessian(pooled: _Pooled, x: Array) -> tuple[Array, Array]:
    return pooled.grad(x), pooled.hessian(x)


# --- least squares --------------------------------------------------------------------------------


def _augmented(problem: Problem, rows: Rows, weight: np.ndarray) -> np.ndarray:
    """[sqrt(weight) X; sqrt(ridge)]; for several outputs, with the ridge that all of them have."""
    ridge = problem.ridge.reshape(problem.n_features, -1).min(axis=1)
    return np.concatenate([np.sqrt(weight)[:, None] * rows.X, np.diag(np.sqrt(ridge))])


def _unit_columns(A: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A with its columns scaled to length 1, and the lengths that they had."""
    scale = np.linalg.norm(A, axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    return A / scale[None, :], scale


def _pivoted_qr(A: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Q, R, pivots."""
    return cast(Any, scipy.linalg.qr(A, mode="economic", pivoting=True))


def _check_rank(problem: Problem, rows: Rows, weight: np.ndarray) -> None:
    """InputError if a column is a linear combination of the others as far as rounding can tell."""
    A, _ = _unit_columns(_augmented(problem, rows, weight))
    first = int(problem.fit_intercept)  # the intercept is not the one to drop: the others go
    A[:, first:] -= A[:, :first] @ (A[:, :first].T @ A[:, first:])
    _, R, pivots = _pivoted_qr(A[:, first:])
    dependent = first + pivots[np.abs(np.diag(R)) <= max(A.shape) * EPS]
    if len(dependent):
        outputs = problem.dim // problem.n_features
        features = [problem.feature_names[j * outputs] for j in sorted(dependent)]
        names = ", ".join(repr(n.removesuffix("[1]") if outputs > 1 else n) for n in features)
        intercept = " and the intercept" if problem.fit_intercept else ""
        raise InputError(
            f"the minimiser is not unique (rank deficiency): {names} can be written as a linear "
            f"combination of the other columns{intercept} in the pooled rows; drop columns or "
            "add l2"
        )


def _least_squares(problem: Problem, rows: Rows, weight: np.ndarray) -> np.ndarray:
    """QR, and one step of refinement."""
    A = _augmented(problem, rows, weight)
    b = np.concatenate([np.sqrt(weight) * rows.y, np.zeros(problem.dim)])
    scaled, scale = _unit_columns(A)
    Q, R, pivots = _pivoted_qr(scaled)
    x = np.zeros(problem.dim)
    for _ in range(2):
        step = scipy.linalg.solve_triangular(R, Q.T @ (b - A @ x))
        x[pivots] += step / scale[pivots]
    return x


# --- Newton ---------------------------------------------------------------------------------------


def _newton(problem: Problem, pooled: _Pooled) -> np.ndarray:
    """Damped Newton steps until a short one is not followed by a much shorter one: rounding.

    Where no finite minimiser exists the steps do not become short against x.
    """
    unit = _units(pooled)
    x, grad, previous = np.zeros(problem.dim), np.zeros(problem.dim), np.inf
    for _ in range(NEWTON_STEPS):
        grad, H = (np.asarray(a) for a in _grad_hessian(pooled, x))
        direction = _newton_direction(grad, H, unit)
        length = float(np.linalg.norm(unit * direction))
        short = length <= SHORT * float(np.linalg.norm(unit * x)) + 1e-12
        if short and length >= 0.25 * previous:
            return x
        size = 1.0 if short else _armijo(pooled, x, direction, float(grad @ direction))
        if size == 0.0:
            break
        x, previous = x + size * direction, length if short else np.inf
    raise _not_found(problem, unit * x, grad)


def _units(pooled: _Pooled) -> np.ndarray:
    """(d,) the effect of a unit of each coefficient on F, for comparing them."""
    bound = np.asarray(pooled.loss.curvature_matrix(pooled.rows, pooled.weight))
    unit = np.sqrt(np.abs(np.diag(bound)) + np.asarray(pooled.ridge))
    return np.where(unit > 0, unit, np.max(unit, initial=0.0) or 1.0)


def _newton_direction(grad: np.ndarray, H: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """-|H|^-1 grad, |H| with the absolute eigenvalues, kept away from 0: a descent direction."""
    scale = 1.0 / np.sqrt(np.maximum(np.abs(np.diag(H)), SINGULAR**2 * unit**2))
    scaled = H * scale[:, None] * scale[None, :]
    try:
        factor = scipy.linalg.cho_factor(scaled)
        return -scale * scipy.linalg.cho_solve(factor, scale * grad)
    except np.linalg.LinAlgError:
        eigenvalues, V = np.linalg.eigh(scaled)
        inverse = 1.0 / np.maximum(np.abs(eigenvalues), SINGULAR)
        return -scale * (V @ (inverse * (V.T @ (scale * grad))))


def _armijo(pooled: _Pooled, x: np.ndarray, direction: np.ndarray, slope: float) -> float:
    """The first of 1, 1/2, 1/4, ... with enough decrease of the objective; 0 if none has."""
    value = float(_value(pooled, x))
    size = 1.0
    for _ in range(HALVINGS):
        there = float(_value(pooled, x + size * direction))
        if there <= value + 1e-4 * size * slope + 16.0 * EPS * abs(value):
            return size
        size *= 0.5
    return 0.0


def _not_found(problem: Problem, effects: np.ndarray, grad: np.ndarray) -> FedexactError:
    """Why no minimiser was found; `effects` (d,) are those of the coefficients that run off."""
    if not problem.loss.likelihood:
        return FedexactError(
            f"no minimiser of the {problem.loss.name} loss found in {NEWTON_STEPS} Newton steps: "
            f"the gradient has norm {np.linalg.norm(grad):.3g} at the last one; check that the "
            "loss is bounded below, or add l2"
        )
    largest = np.argsort(-np.abs(effects))[:3]
    names = ", ".join(repr(problem.feature_names[j]) for j in largest if effects[j] != 0)
    return InputError(
        f"no finite minimiser: the {problem.loss.name} loss keeps falling as coefficients grow, "
        f"those of {names} most (separation: a combination of columns predicts some targets "
        "perfectly); add l2 or drop columns"
    )


# --- with a regulariser ---------------------------------------------------------------------------


def _composite(pooled: _Pooled, g: Regularizer) -> np.ndarray:
    """Chunks of proximal gradient steps, each followed by Newton steps, down to rounding."""
    zero = np.zeros(pooled.ridge.shape[0])
    x = np.asarray(_prox(g, zero, 1.0))
    L = _smoothness(pooled, x)
    start = float(np.linalg.norm(_grad(pooled, x)))
    steps, done, error, before = FIRST_CHUNK, 0, np.inf, np.inf
    while done < GRADIENT_STEPS:
        x, L = _proximal_gradient(pooled, g, x, L, steps)
        done, steps = done + steps, 2 * steps
        step = 1.0 / float(L)
        x, r = _best_polish(pooled, g, np.asarray(x), step)
        error = float(np.linalg.norm(r)) / max(float(np.linalg.norm(x)), step * start, 1e-300)
        if error <= REACHED or (error <= FLOOR and error >= 0.25 * before):
            return x - r
        before = error
    raise FedexactError(
        f"the reference solution reached a gradient mapping (times step, relative to x) of "
        f"{error:.2g} only, in {done} steps; scale the features, add l2, or check that a finite "
        "minimiser exists (separation)"
    )


def _check_finite(problem: Problem, pooled: _Pooled, x: np.ndarray) -> None:
    """InputError if a Newton step in the coordinates on which g has no curvature would not be
    short: then the gradient vanishes because the loss is flat, far out, and not at a minimiser."""
    if problem.loss.quadratic or not problem.loss.likelihood:
        return
    grad, H = (np.asarray(a) for a in _grad_hessian(pooled, x))
    unit, L = _units(pooled), float(np.linalg.norm(H, 2))
    if L == 0.0:
        raise _not_found(problem, unit * x, grad)
    step = 1.0 / L
    bend = np.diag(np.asarray(_prox_jacobian(problem.regularizer, x - step * grad, step)))
    free = np.flatnonzero(bend > 1.0 - 1e-9)
    direction = np.zeros(problem.dim)
    mapping = _residual(problem.regularizer, x, grad, step) / step
    direction[free] = _newton_direction(mapping[free], H[np.ix_(free, free)], unit[free])
    if np.linalg.norm(unit * direction) > 1e-3:
        raise _not_found(problem, unit * direction, grad)


def _smoothness(pooled: _Pooled, x: np.ndarray) -> float:
    """Of F: for all x, or a guess at x, which the steps then correct."""
    if pooled.loss.global_smooth:
        return float(pooled.loss.curvature(pooled.rows, pooled.weight) + jnp.max(pooled.ridge))
    return float(np.linalg.norm(np.asarray(_grad_hessian(pooled, x)[1]), 2))


class _Steps(NamedTuple):
    x: Array  # (d,)
    y: Array  # (d,) extrapolated
    t: Array  # momentum
    L: Array
    done: Array


@jax.jit
def _proximal_gradient(
    pooled: _Pooled, g: Regularizer, x: Array, L: Array | float, steps: Array | int
) -> tuple[Array, Array]:
    """FISTA with restarts where the momentum points uphill (O'Donoghue and Candès 2015).

    Without momentum for losses that need not be convex; the step is searched for where there is no
    global smoothness constant.
    """

    def step_from(y: Array, L: Array) -> tuple[Array, Array]:
        grad = pooled.grad(y)

        def forward(L: Array) -> Array:
            return g.prox(y - grad / L, 1.0 / L)

        def too_long(state: tuple[Array, Array]) -> Array:
            x, L = state
            change, move = pooled.grad(x) - grad, x - y
            rounding = 8.0 * EPS * jnp.linalg.norm(grad) * jnp.linalg.norm(move)
            return ~(change @ move <= 0.5 * L * (move @ move) + rounding) & (L < 1e300)

        def shorten(state: tuple[Array, Array]) -> tuple[Array, Array]:
            return forward(2.0 * state[1]), 2.0 * state[1]

        if pooled.loss.global_smooth:
            return forward(L), L
        return lax.while_loop(too_long, shorten, (forward(0.95 * L), 0.95 * L))

    def advance(s: _Steps) -> _Steps:
        x, L = step_from(s.y, s.L)
        uphill = (s.y - x) @ (x - s.x) > 0.0
        t = jnp.where(uphill, 1.0, 0.5 * (1.0 + jnp.sqrt(1.0 + 4.0 * s.t**2)))
        momentum = jnp.where(uphill, 0.0, (s.t - 1.0) / t) if pooled.loss.newton else 0.0
        return _Steps(x, x + momentum * (x - s.x), t, L, s.done + 1)

    x, L = jnp.asarray(x), jnp.asarray(L, float)
    first = _Steps(x, x, jnp.ones(()), L, jnp.zeros((), int))
    last = lax.while_loop(lambda s: s.done < steps, advance, first)
    return last.x, last.L


@jax.jit
def _prox(g: Regularizer, u: Array, step: Array | float) -> Array:
    return g.prox(u, step)


@jax.jit
def _prox_jacobian(g: Regularizer, u: Array, step: Array | float) -> Array:
    """(d, d); an element of the generalised Jacobian where the prox has kinks."""
    return jax.jacfwd(lambda u: g.prox(u, step))(u)


def _best_polish(
    pooled: _Pooled, g: Regularizer, x: np.ndarray, step: float
) -> tuple[np.ndarray, np.ndarray]:
    """The best of `_polish` with several steps, as its residual with `step` tells.

    Every step has the same fixed points, but not the same guess of the smooth piece of g: a longer
    one is right from farther away where the curvatures of the coefficients differ widely.
    """
    tried = [_polish(pooled, g, x, factor * step) for factor in STEP_FACTORS]
    residuals = [_residual(g, y, np.asarray(_grad(pooled, y)), step) for y, _ in tried]
    best = int(np.argmin([np.linalg.norm(r) for r in residuals]))
    return tried[best][0], residuals[best]


def _residual(g: Regularizer, x: np.ndarray, grad: np.ndarray, step: float) -> np.ndarray:
    """(d,) x - prox(x - step grad F(x)): the gradient mapping times the step."""
    return x - np.asarray(_prox(g, x - step * grad, step))


def _polish(
    pooled: _Pooled, g: Regularizer, x: np.ndarray, step: float
) -> tuple[np.ndarray, np.ndarray]:
    """Semismooth Newton steps on r(x) = x - prox(x - step grad F(x)) while they halve it; the last
    x and r(x).

    Where the gradient steps have found the smooth piece of g on which the minimiser lies (the
    support, the active bounds), these are Newton's method on that piece.
    """
    identity = np.eye(len(x))
    grad, H = (np.asarray(a) for a in _grad_hessian(pooled, x))
    r = _residual(g, x, grad, step)
    for _ in range(NEWTON_STEPS):
        J = identity - np.asarray(_prox_jacobian(g, x - step * grad, step)) @ (identity - step * H)
        if not np.all(np.isfinite(J)):
            break
        x_next = x - np.linalg.lstsq(J, r, rcond=None)[0]
        grad, H = (np.asarray(a) for a in _grad_hessian(pooled, x_next))
        r_next = _residual(g, x_next, grad, step)
        if not np.linalg.norm(r_next) <= 0.5 * np.linalg.norm(r):
            break
        x, r = x_next, r_next
    return x, r
