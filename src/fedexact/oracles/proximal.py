"""prox(v, step) = argmin_u f(u) + |u - v|^2 / (2 step) of one client: the choice among three ways,
the exact one for quadratics, and what the other two share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from fedexact.core import record
from fedexact.losses.base import LinearLoss, Loss

LARGEST = 500  # the largest matrix worth factorising for each client
NOISE = 16.0  # a difference of values below this many roundings of their terms says nothing
_HALVINGS = 60
_STORED = 2**27  # numbers in the factors of all clients, at most: 1 GiB in float64


class Magnitude(NamedTuple):
    """A sum and the sum of the absolute values of its terms, the scale of its rounding error."""

    value: Array
    terms: Array


def prox_method(loss: Loss, d: int, m: int, n_clients: int) -> str:
    """How the prox of clients with at most m rows each is computed.

    "factored": a quadratic of d <= 500 whose clients' eigendecompositions fit in 1 GiB; exact.
    "newton": a matrix of order d, or of order m where `dual_pays`, of at most 500; exact.
    "gradient": else; to a relative rule.
    """
    if not loss.newton:
        return "gradient"
    if loss.quadratic and d <= LARGEST and n_clients * d**2 <= _STORED:
        return "factored"
    order = m if dual_pays(loss, d, m) else d
    return "newton" if order <= LARGEST else "gradient"


def dual_pays(loss: Loss, d: int, m: int) -> bool:
    """Whether Newton systems are solved in the space of the m rows rather than the d coefficients:
    for losses of the linear predictor with fewer rows."""
    return isinstance(loss, LinearLoss) and m < d


@record
class Eigen:
    """f(x) = 1/2 x^T H x - b^T x + const with H = Q diag(lam) Q^T."""

    Q: Array  # (d, d) orthogonal
    lam: Array  # (d,) >= 0, ascending
    b: Array  # (d,)


def eigen(hessian: Array, b: Array) -> Eigen:
    """The eigendecomposition of a positive semidefinite (d, d) matrix, with the linear term b."""
    lam, Q = jnp.linalg.eigh(hessian)
    return Eigen(Q, jnp.maximum(lam, 0.0), b)


def factored_prox(factor: Eigen, v: Array, step: Any) -> Array:
    """The prox of a quadratic: (H + I / step)^-1 (b + v / step)."""
    Q = factor.Q
    return Q @ (((factor.b + v / step) @ Q) / (factor.lam + 1.0 / step))


def penalised(value: Callable[[Array], Magnitude], u: Array, v: Array, step: Any) -> Magnitude:
    """f(u) + |u - v|^2 / (2 step)."""
    f = value(u)
    penalty = jnp.sum((u - v) ** 2) / (2.0 * step)
    return Magnitude(f.value + penalty, f.terms + penalty)


def at_rounding(u: Array, g: Array, v: Array, step: Any) -> Array:
    """Whether g = grad f(u) + (u - v) / step is no more than the rounding of its terms."""
    eps, norm = jnp.finfo(u.dtype).eps, jnp.linalg.norm
    terms = norm(g - (u - v) / step) + (norm(u) + norm(v)) / step
    return norm(g) <= 4.0 * eps * terms


def backtrack(
    objective: Callable[[Array], Magnitude],
    u: Array,
    phi: Magnitude,
    p: Array,
    slope: Array,
    fraction: float,
) -> tuple[Array, Array, Magnitude]:
    """(t, u + t p, objective there): the first t = 1, 1/2, 1/4, ... with enough decrease."""
    eps = jnp.finfo(u.dtype).eps

    def too_long(state: tuple[Array, Magnitude, Array]) -> Array:
        t, there, count = state
        rounding = NOISE * eps * phi.terms
        enough = there.value <= phi.value + fraction * t * slope + rounding
        return ~enough & (count < _HALVINGS)

    def halve(state: tuple[Array, Magnitude, Array]) -> tuple[Array, Magnitude, Array]:
        t, _, count = state
        return 0.5 * t, objective(u + 0.5 * t * p), count + 1

    one = jnp.ones((), u.dtype)
    t, there, _ = lax.while_loop(too_long, halve, (one, objective(u + p), jnp.array(0)))
    return t, u + t * p, there
