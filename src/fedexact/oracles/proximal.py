"""prox(v, step) = argmin_u f(u) + |u - v|^2 / (2 step) of one client, in three ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedexact.core import record

_ARMIJO = 1e-4
_NEWTON_STEPS = 100
_GRADIENT_STEPS = 100
_HALVINGS = 60
_SMALL = 1e-9  # relative length of a full Newton step that leaves an error of its square, rounding
_NOISE = 16.0  # a difference of values below this many roundings of their terms says nothing
_RELATIVE = 0.5  # of the rule that stops the gradient steps


class Magnitude(NamedTuple):
    """A sum and the sum of the absolute values of its terms, the scale of its rounding error."""

    value: Array
    terms: Array


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
    return Q @ ((Q.T @ (factor.b + v / step)) / (factor.lam + 1.0 / step))


def newton_prox(
    value: Callable[[Array], Magnitude],
    grad: Callable[[Array], Array],
    hessian: Callable[[Array], Array],
    v: Array,
    step: Any,
    start: Array,
) -> tuple[Array, Array]:
    """The prox of a convex function by damped Newton steps from `start`, and their number.

    Armijo backtracking on the values while their differences are above rounding; then full steps.
    Ends with the first full step of relative length 1e-9, or when rounding stops the progress.
    """
    eps = jnp.finfo(v.dtype).eps
    identity = jnp.eye(v.size, dtype=v.dtype)

    def newton_direction(u: Array, g: Array) -> Array:
        H = hessian(u)
        # 4 eps tr(H) keeps the Cholesky factor real where H is singular and 1 / step below rounding
        shift = 1.0 / step + 4.0 * eps * jnp.trace(H)
        return -jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(H + shift * identity), g)

    def iterate(state: _NewtonState) -> _NewtonState:
        u, phi, previous, _, steps = state
        g = grad(u) + (u - v) / step
        p = newton_direction(u, g)
        t, u_next, phi_next = _backtrack(lambda w: _penalised(value, w, v, step), u, phi, p, g @ p)
        length = jnp.linalg.norm(u_next - u)
        small = (t == 1.0) & (length <= _SMALL * (jnp.linalg.norm(u_next) + jnp.linalg.norm(v)))
        flat = jnp.abs(g @ p) <= _NOISE * eps * phi.terms
        stalled = flat & (length >= 0.5 * previous)
        return _NewtonState(u_next, phi_next, length, small | stalled, steps + 1)

    first = _NewtonState(
        start,
        _penalised(value, start, v, step),
        jnp.full((), jnp.inf, v.dtype),
        jnp.array(False),
        jnp.array(0),
    )
    last = lax.while_loop(lambda s: ~s.done & (s.steps < _NEWTON_STEPS), iterate, first)
    return last.u, last.steps


class _NewtonState(NamedTuple):
    u: Array  # (d,)
    phi: Magnitude  # the objective of the prox at u
    length: Array  # of the last step
    done: Array
    steps: Array


def gradient_prox(
    value: Callable[[Array], Magnitude],
    grad: Callable[[Array], Array],
    smoothness: Array,
    global_smooth: bool,
    v: Array,
    step: Any,
    start: Array,
) -> tuple[Array, Array]:
    """An inexact prox by gradient steps of length 1 / (smoothness + 1 / step) from `start`, and the
    number of gradients it took.

    Stops at |grad f(u) + (u - v) / step| <= 0.5 |u - start| / step, the relative rule under which
    the warm-started algorithms stay exact, after 1 to 100 steps. Where `smoothness` holds near one
    point only (`global_smooth` False) the step is halved until the objective decreases enough.
    """
    eps = jnp.finfo(v.dtype).eps

    def residual(u: Array) -> Array:
        return grad(u) + (u - v) / step

    def advance(u: Array, g: Array, lr: Array) -> tuple[Array, Array]:
        if global_smooth:
            return u - lr * g, lr
        phi = _penalised(value, u, v, step)
        t, u_next, _ = _backtrack(
            lambda w: _penalised(value, w, v, step), u, phi, -lr * g, -lr * g @ g, 0.5
        )
        return u_next, t * lr

    def iterate(state: _GradientState) -> _GradientState:
        u, lr = advance(state.u, state.g, state.lr)
        g = residual(u)
        pull = (u - v) / step
        allowed = _RELATIVE * jnp.linalg.norm(u - start) / step
        rounding = 4.0 * eps * (jnp.linalg.norm(g - pull) + jnp.linalg.norm(pull))
        done = jnp.linalg.norm(g) <= jnp.maximum(allowed, rounding)
        return _GradientState(u, g, lr, done, state.steps + 1)

    lr = jnp.asarray(1.0 / (smoothness + 1.0 / step), v.dtype)
    first = _GradientState(start, residual(start), lr, jnp.array(False), jnp.array(0))
    last = lax.while_loop(lambda s: ~s.done & (s.steps < _GRADIENT_STEPS), iterate, first)
    return last.u, last.steps + 1


class _GradientState(NamedTuple):
    u: Array  # (d,)
    g: Array  # (d,) gradient of the objective of the prox at u
    lr: Array
    done: Array
    steps: Array


def _penalised(value: Callable[[Array], Magnitude], u: Array, v: Array, step: Any) -> Magnitude:
    f = value(u)
    penalty = jnp.sum((u - v) ** 2) / (2.0 * step)
    return Magnitude(f.value + penalty, f.terms + penalty)


def _backtrack(
    objective: Callable[[Array], Magnitude],
    u: Array,
    phi: Magnitude,
    p: Array,
    slope: Array,
    fraction: float = _ARMIJO,
) -> tuple[Array, Array, Magnitude]:
    """(t, u + t p, objective there): the first t = 1, 1/2, 1/4, ... with enough decrease."""
    eps = jnp.finfo(u.dtype).eps

    def too_long(state: tuple[Array, Magnitude, Array]) -> Array:
        t, there, count = state
        rounding = _NOISE * eps * phi.terms
        enough = there.value <= phi.value + fraction * t * slope + rounding
        return ~enough & (count < _HALVINGS)

    def halve(state: tuple[Array, Magnitude, Array]) -> tuple[Array, Magnitude, Array]:
        t, _, count = state
        return 0.5 * t, objective(u + 0.5 * t * p), count + 1

    one = jnp.ones((), u.dtype)
    t, there, _ = lax.while_loop(too_long, halve, (one, objective(u + p), jnp.array(0)))
    return t, u + t * p, there
