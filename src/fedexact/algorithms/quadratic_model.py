"""Quadratic models q(x) = 1/2 x^T B x - u^T x: packed for the wire, and minimised with g."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedexact.core import Prox

_PASSES = 100  # of gradient steps and Newton steps, at most
_GRADIENT_STEPS = 50  # a pass
_NEWTON_STEPS = 20  # a pass, at most
_SHIFT = 64.0  # d times so many roundings of each coordinate's curvature are added to it
_REACHED = 16.0  # roundings that the fixed-point residual may have
_FLOOR = 1e-10  # where rounding stops the progress, this relative residual is accepted


def pack(B: Array) -> Array:
    """(d (d + 1) / 2,) the upper triangle of a symmetric (d, d) matrix, row by row."""
    return B[np.triu_indices(B.shape[0])]


def unpack(packed: Array, d: int) -> Array:
    """(d, d) the symmetric matrix of a packed triangle."""
    i, j = np.triu_indices(d)
    return jnp.zeros((d, d), packed.dtype).at[i, j].set(packed).at[j, i].set(packed)


def diagonal(d: int) -> np.ndarray:
    """(d,) where the diagonal stands in a packed triangle."""
    i, j = np.triu_indices(d)
    return np.flatnonzero(i == j)


def minimise(
    B: Array, u: Array, center: Array, curvature: Any, g: Prox | None, weight: Array
) -> Array:
    """(d,) argmin_x 1/2 x^T B x - u^T x + weight g(x) + 1/2 (x - center)^T diag(s) (x - center).

    s, 64 d roundings of the size of B's diagonal and of `curvature`, (d,) or a number, coordinate
    by coordinate, keeps the minimiser finite where B is singular and moves no fixed point,
    x = center. Without g one Cholesky factorisation, and where that breaks down (B indefinite) a
    gradient step; with g see `_composite`. Without g, scaling x scales the answer.
    """
    size = jnp.maximum(jnp.abs(jnp.diag(B)), curvature)
    size = jnp.where(size > 0.0, size, 1.0)
    residual = u - B @ center
    B = B + jnp.diag(_SHIFT * u.size * jnp.finfo(u.dtype).eps * size)
    if g is not None:
        return _composite(B, residual + B @ center, center, g, weight)
    factor = jnp.linalg.cholesky(B)
    definite = jnp.all(jnp.isfinite(factor))
    factor = jnp.where(definite, factor, jnp.diag(jnp.sqrt(u.size * size)))
    return center + jax.scipy.linalg.cho_solve((factor, True), residual)


class _Accelerated(NamedTuple):
    x: Array  # (d,)
    y: Array  # (d,) extrapolated
    t: Array  # momentum


class _Pass(NamedTuple):
    x: Array  # (d,)
    residual: Array  # norm of the fixed-point residual
    done: Array
    passes: Array


def _composite(B: Array, u: Array, start: Array, g: Prox, weight: Array) -> Array:
    """argmin_x 1/2 x^T B x - u^T x + weight g(x) to rounding, B positive definite.

    Passes of accelerated proximal gradient steps, restarted where the momentum points uphill, then
    of semismooth Newton steps on r(x) = x - prox(x - s (B x - u), s weight) while they halve it:
    on the right piece of g (support, active bounds) the first one solves it.
    """
    eps, step = jnp.finfo(u.dtype).eps, 1.0 / jnp.max(jnp.sum(jnp.abs(B), axis=1))

    def prox(v: Array) -> Array:
        return g.prox(v, step * weight)

    def forward(x: Array) -> Array:
        return x - step * (B @ x - u)

    def size(x: Array) -> Array:
        return jnp.linalg.norm(x - prox(forward(x)))

    def accelerate(_: Array, s: _Accelerated) -> _Accelerated:
        x = prox(forward(s.y))
        uphill = (s.y - x) @ (x - s.x) > 0.0
        t = jnp.where(uphill, 1.0, 0.5 * (1.0 + jnp.sqrt(1.0 + 4.0 * s.t**2)))
        return _Accelerated(x, x + jnp.where(uphill, 0.0, (s.t - 1.0) / t) * (x - s.x), t)

    def one_pass(s: _Pass) -> _Pass:
        first = _Accelerated(s.x, s.x, jnp.ones((), u.dtype))
        x = lax.fori_loop(0, _GRADIENT_STEPS, accelerate, first).x
        x = _polish(x, forward, prox, step * B, size)
        residual = size(x)
        scale = jnp.linalg.norm(x) + step * jnp.linalg.norm(u)
        stalled = (residual <= _FLOOR * scale) & (residual >= 0.5 * s.residual)
        return _Pass(x, residual, stalled | (residual <= _REACHED * eps * scale), s.passes + 1)

    first = _Pass(start, jnp.full((), jnp.inf, u.dtype), jnp.array(False), jnp.array(0))
    x = lax.while_loop(lambda s: ~s.done & (s.passes < _PASSES), one_pass, first).x
    return prox(forward(x))


def _polish(
    x: Array,
    forward: Callable[[Array], Array],
    prox: Callable[[Array], Array],
    bend: Array,
    size: Callable[[Array], Array],
) -> Array:
    """Semismooth Newton steps from x while they halve the residual; I - `bend` is the Jacobian of
    `forward`."""

    def newton(x: Array) -> Array:
        v = forward(x)
        P = jax.jacfwd(prox)(v)
        J = (jnp.eye(x.size, dtype=x.dtype) - P) + P @ bend
        return x - jnp.linalg.solve(J, x - prox(v))

    def advance(state: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        x, residual, _, count = state
        x_next = newton(x)
        halved = size(x_next) <= 0.5 * residual
        x_next = jnp.where(halved, x_next, x)
        return x_next, size(x_next), halved, count + 1

    first = (x, size(x), jnp.array(True), jnp.array(0))
    return lax.while_loop(lambda s: s[2] & (s[3] < _NEWTON_STEPS), advance, first)[0]
