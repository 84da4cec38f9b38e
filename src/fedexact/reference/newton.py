"""Damped Newton steps down to the rounding floor, dense or by conjugate gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy.linalg

from fedexact.errors import FedexactError, InputError
from fedexact.losses import Huber
from fedexact.reference.pooled import Pooled

NEWTON_STEPS = 100
REWEIGHTED_STEPS = 1000  # for the Huber loss, whose Hessian may be singular on the way
HALVINGS = 50
SHORT = 1e-6  # a Newton step, relative to x: quadratic convergence has set in
FLOOR = 1e-13  # a step, relative to x, that is taken for rounding
SINGULAR = 1e-12  # an eigenvalue of a scaled Hessian, relative
DEFINITE = 1e-6  # the smallest pivot of a scaled Hessian that is not singular
CG_STEPS = 1000
FORCING = (1e-8, 0.1)  # least and largest residual of a direction by conjugate gradients, relative

Solve = Callable[[np.ndarray, np.ndarray], np.ndarray]  # x and a gradient there to a direction


class _Here(NamedTuple):
    value: float
    grad: np.ndarray  # (d,)
    hessian: np.ndarray | None  # (d, d); None where there are many coefficients


def newton(pooled: Pooled) -> np.ndarray:
    """(d,) x after damped steps until a short one is not followed by a much shorter one: rounding.

    Where no finite minimiser exists the steps do not become short against x.
    """
    unit, x = pooled.units, np.zeros(pooled.problem.dim)
    here = _look(pooled, x)
    start, previous = float(np.linalg.norm(here.grad / unit)), np.inf
    huber = isinstance(pooled.problem.loss, Huber)
    for _ in range(REWEIGHTED_STEPS if huber else NEWTON_STEPS):
        solve, newtons = _solver(pooled, x, here.hessian, start)
        direction = solve(x, here.grad)
        length = float(np.linalg.norm(unit * direction))
        if length > SHORT * float(np.linalg.norm(unit * x)) + 1e-12 or not newtons:
            found = _line_search(pooled, x, here, direction)
            if found is None:
                break
            (x, here), previous = found, np.inf
            continue
        if length >= 0.25 * previous:
            return x
        x, settled = _short_steps(pooled, x, direction, solve)
        if settled:
            return x
        here, previous = _look(pooled, x), length
    raise not_found(pooled, unit * x, here.grad)


def _look(pooled: Pooled, x: np.ndarray) -> _Here:
    return _Here(*(pooled.expansion(x) if pooled.dense else (*pooled.value_and_grad(x), None)))


def _short_steps(
    pooled: Pooled, x: np.ndarray, direction: np.ndarray, solve: Solve
) -> tuple[np.ndarray, bool]:
    """Undamped steps with one Hessian while they become much shorter; whether they are rounding."""
    unit, previous = pooled.units, np.inf
    length = float(np.linalg.norm(unit * direction))
    while length < 0.25 * previous:
        x, previous = x + direction, length
        direction = solve(x, pooled.grad(x))
        length = float(np.linalg.norm(unit * direction))
    return x, length <= FLOOR * float(np.linalg.norm(unit * x))


def _line_search(
    pooled: Pooled, x: np.ndarray, here: _Here, direction: np.ndarray
) -> tuple[np.ndarray, _Here] | None:
    """The first of the steps 1, 1/2, 1/4, ... with enough decrease of the objective (Armijo), and F
    there; None if none has."""
    slope, slack = float(here.grad @ direction), pooled.rounding * abs(here.value)
    there = _look(pooled, x + direction)
    if there.value <= here.value + 1e-4 * slope + slack:
        return x + direction, there
    for size in 0.5 ** np.arange(1, HALVINGS):
        nearer = x + size * direction
        if pooled.value(nearer) <= here.value + 1e-4 * size * slope + slack:
            return nearer, _look(pooled, nearer)
    return None


def _solver(
    pooled: Pooled, x: np.ndarray, H: np.ndarray | None, start: float
) -> tuple[Solve, bool]:
    """A descent direction for a gradient, and whether it is Newton's.

    For the Huber loss it is that of iteratively reweighted least squares where the Hessian is
    singular: all rows may lie in the linear part.
    """
    if H is None:
        return lambda x, grad: conjugate_direction(pooled, x, grad, start), True
    newtons = not isinstance(pooled.problem.loss, Huber) or _definite(H, pooled.units)
    inverse = _inverse(H if newtons else pooled.majoriser(x), pooled.units)
    return lambda _, grad: -inverse(grad), newtons


def _definite(H: np.ndarray, unit: np.ndarray) -> bool:
    try:
        factor = scipy.linalg.cholesky(H / (unit[:, None] * unit[None, :]))
    except np.linalg.LinAlgError:
        return False
    return bool(np.min(np.diag(factor)) > DEFINITE)


def newton_direction(grad: np.ndarray, H: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """-|H|^-1 grad, |H| with the absolute eigenvalues, kept away from 0: a descent direction."""
    return -_inverse(H, unit)(grad)


def _inverse(H: np.ndarray, unit: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Product with |H|^-1."""
    scale = 1.0 / np.sqrt(np.maximum(np.abs(np.diag(H)), SINGULAR**2 * unit**2))
    scaled = H * scale[:, None] * scale[None, :]
    try:
        factor = scipy.linalg.cho_factor(scaled)
        return lambda v: scale * scipy.linalg.cho_solve(factor, scale * v)
    except np.linalg.LinAlgError:
        eigenvalues, V = np.linalg.eigh(scaled)
        inverse = 1.0 / np.maximum(np.abs(eigenvalues), SINGULAR)
        return lambda v: scale * (V @ (inverse * (V.T @ (scale * v))))


def conjugate_direction(
    pooled: Pooled, x: np.ndarray, grad: np.ndarray, start: float, free: np.ndarray | None = None
) -> np.ndarray:
    """(d,) approximately -H^-1 grad by conjugate gradients on Hessian-vector products, scaled by
    the units; on the coordinates `free` only, if given, where `grad` is not 0.

    The residual falls with the gradient relative to its size `start` at x = 0, so that Newton's
    convergence is superlinear (Dembo, Eisenstat and Steihaug 1982). Ends before a direction of
    negative curvature; -grad, scaled, if the first is one.
    """
    unit, inside = pooled.units, 1.0 if free is None else np.isin(np.arange(len(x)), free)
    r = -grad / unit
    squares = float(r @ r)
    target = squares * np.clip(np.sqrt(squares) / max(start, 1e-300), *FORCING) ** 2
    z, p = np.zeros_like(r), r
    for _ in range(CG_STEPS):
        if squares <= target:
            break
        bent = inside * pooled.product(x, p / unit) / unit
        curvature = float(p @ bent)
        if curvature <= SINGULAR * float(p @ p):
            return (z if np.any(z) else p) / unit
        z = z + squares / curvature * p
        r = r - squares / curvature * bent
        squares, before = float(r @ r), squares
        p = r + squares / before * p
    return z / unit


def not_found(pooled: Pooled, effects: np.ndarray, grad: np.ndarray) -> FedexactError:
    """Why no minimiser was found; `effects` (d,) are those of the coefficients that run off."""
    problem = pooled.problem
    if not problem.loss.likelihood:
        return FedexactError(
            f"no minimiser of the {problem.loss.name} loss found: the gradient has norm "
            f"{np.linalg.norm(grad):.3g} at the last Newton step; check that the loss is bounded "
            "below and its minimiser unique, or add l2"
        )
    largest = np.argsort(-np.abs(effects))[:3]
    names = ", ".join(repr(problem.feature_names[j]) for j in largest if effects[j] != 0)
    return InputError(
        f"no finite minimiser: the {problem.loss.name} loss keeps falling as coefficients grow, "
        f"those of {names} most (separation: a combination of columns predicts some targets "
        "perfectly); add l2 or drop columns"
    )
