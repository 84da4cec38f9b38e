"""The prox of a convex function to rounding, by Newton steps that share factorisations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedexact.losses.design import Design, combine, outer_gram, predictor
from fedexact.oracles.proximal import NOISE, Magnitude, at_rounding, backtrack, penalised

T = TypeVar("T")

_FACTORS = 100  # at most
_CURVED = 100.0  # error after a Newton step, in units of the square of its relative length
_SLOPPY = 8.0  # error of a solution of the Newton system, in roundings of its condition number
_TRUSTED = 1.0 / 64.0  # the largest relative error of what a float32 factor solves
_SINGLE = 32  # the smallest matrix that is worth factorising in float32 first
_ARMIJO = 1e-4


class Factor(NamedTuple):
    """A factorised Newton matrix."""

    parts: Any
    error: Array  # () relative error of the solutions, or more


class System(NamedTuple):
    """How to solve with the Hessian of the objective of a prox, f(u) + |u - v|^2 / (2 step)."""

    factor: Callable[[Array, Any], Factor]  # at u (d,), in a dtype
    solve: Callable[[Any, Array], Array]  # parts of a factor and right-hand side (d,), to (d,)
    order: int  # of the matrix that is factorised


def primal(hessian: Callable[[Array, Any], Array], diagonal: Array) -> System:
    """For hessian(u, dtype) + diag(diagonal), by the Cholesky factor of this (d, d) matrix."""

    def factor(u: Array, dtype: Any) -> Factor:
        H = hessian(u, dtype)
        trace, eps = jnp.trace(H), jnp.finfo(dtype).eps
        # 4 eps tr(H) keeps the Cholesky factor real where H is singular and 1 / step below rounding
        matrix = H + jnp.diag((diagonal + 4.0 * eps * trace).astype(dtype))
        return Factor(_cholesky(matrix), _SLOPPY * eps * trace / jnp.min(diagonal))

    return System(factor, _cho_solve, diagonal.shape[0])


def dual(X: Design, curvature: Callable[[Array], Array], diagonal: Array) -> System:
    """For the Hessian X' diag(curvature(u)) X + diag(diagonal) with X (m, d), m < d, by the
    Cholesky factor of an (m, m) matrix (Woodbury); curvature(u) (m,) >= 0, diagonal (d,) > 0."""
    m = X.shape[0]

    def factor(u: Array, dtype: Any) -> Factor:
        root = jnp.sqrt(curvature(u))
        small, inverse = root.astype(dtype), (1.0 / diagonal).astype(dtype)
        K = small[:, None] * outer_gram(cast(X, dtype), inverse) * small[None, :]
        upper = _cholesky(K + jnp.eye(m, dtype=dtype))
        return Factor((root, upper), _SLOPPY * jnp.finfo(dtype).eps * jnp.trace(K).astype(u.dtype))

    def solve(parts: tuple[Array, Array], b: Array) -> Array:
        root, upper = parts
        inner = root * _cho_solve(upper, root * predictor(X, b / diagonal))
        return (b - combine(inner, X)) / diagonal

    return System(factor, solve, m)


def cast(tree: T, dtype: Any) -> T:
    """The tree with its floats in this dtype."""

    def convert(leaf: Any) -> Any:
        leaf = jnp.asarray(leaf)
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(convert, tree)


def _cholesky(matrix: Array) -> Array:
    return jax.scipy.linalg.cho_factor(matrix)[0]


def _cho_solve(upper: Array, b: Array) -> Array:
    size = jnp.linalg.norm(b)  # a unit vector neither overflows nor underflows in float32
    unit = (b / jnp.where(size > 0.0, size, 1.0)).astype(upper.dtype)
    return size * jax.scipy.linalg.cho_solve((upper, False), unit).astype(b.dtype)


def newton_prox(
    value: Callable[[Array], Magnitude],
    grad: Callable[[Array], Array],
    system: System,
    v: Array,
    step: Any,
    start: Array,
) -> tuple[Array, Array]:
    """The prox of a convex function by Newton steps from `start`, and the number of gradients.

    A factor serves for full steps as long as each halves the gradient of the objective and they
    promise to reach rounding sooner than with a new one (simplified Newton, Deuflhard 2004,
    section 2.1.2). Factors are made in float32, which the steps that follow correct, unless the
    condition number forbids it; in float64 from the first step on that fails. Where the first full
    step with a new float64 factor does not halve the gradient, Armijo backtracking on the values,
    while their differences are above rounding. Ends when the gradient is down to rounding, when
    the error that a step will leave is, or when progress stops.
    """
    g = grad(start) + (start - v) / step
    norm = jnp.linalg.norm(g)
    objective = _Objective(value, grad, system, v, step)
    first = _State(
        u=start,
        g=g,
        least=norm,
        length=jnp.full((), jnp.inf, v.dtype),
        new=jnp.array(True),
        spent=jnp.array(False),
        fine=jnp.array(system.order < _SINGLE),
        done=jnp.array(False),
        gradients=jnp.array(1),
    )

    def next_factor(state: _State) -> _State:
        coarse, fine = (partial(_with_one_factor, objective, choice) for choice in (False, True))
        return fine(state) if system.order < _SINGLE else lax.cond(state.fine, fine, coarse, state)

    def run() -> tuple[Array, Array]:
        last, _ = lax.while_loop(
            lambda carry: ~carry[0].done & (carry[1] < _FACTORS),
            lambda carry: (next_factor(carry[0]), carry[1] + 1),
            (first, 0),
        )
        return last.u, last.gradients

    return lax.cond(at_rounding(start, g, v, step), lambda: (start, first.gradients), run)


class _Objective(NamedTuple):
    value: Callable[[Array], Magnitude]
    grad: Callable[[Array], Array]
    system: System
    v: Array
    step: Any

    def residual(self, u: Array) -> Array:
        return self.grad(u) + (u - self.v) / self.step


class _State(NamedTuple):
    u: Array  # (d,)
    g: Array  # (d,) gradient of the objective of the prox at u
    least: Array  # the least norm of it so far
    length: Array  # of the last step
    new: Array  # whether the factor is that of u
    spent: Array  # whether to make a new one
    fine: Array  # whether float32 has failed
    done: Array
    gradients: Array


def _with_one_factor(objective: _Objective, fine: bool, state: _State) -> _State:
    """Steps with the factor of state.u; with none if it is one of float32 that is not trusted."""
    factor = objective.system.factor(state.u, state.u.dtype if fine else jnp.float32)
    bad = jnp.array(False) if fine else ~(factor.error <= _TRUSTED)
    return lax.while_loop(
        lambda s: ~s.spent & ~s.done,
        lambda s: _advance(objective, factor, fine, s),
        state._replace(new=jnp.array(True), spent=bad, fine=state.fine | bad),
    )


def _advance(objective: _Objective, factor: Factor, fine: bool, s: _State) -> _State:
    """A step, or the decision that the factor is spent."""
    eps = jnp.finfo(s.u.dtype).eps
    p = -objective.system.solve(factor.parts, s.g)
    u = s.u + p
    length, size = jnp.linalg.norm(p), jnp.linalg.norm(u)
    # by which factor the steps shrink: expected of a new factor, observed of an old one
    rate = jnp.where(s.new, _CURVED * length / size + factor.error, length / s.length)
    last = rate * length <= eps * size
    patience = max(2, objective.system.order // 20)  # steps that cost as much as a new factor
    promising = (rate <= 0.5) & (length * rate**patience <= eps * size)
    spent = s._replace(spent=jnp.array(True))
    finish = s._replace(u=u, length=length, done=jnp.array(True))
    return lax.cond(
        last,
        lambda: finish,
        lambda: lax.cond(
            s.new | promising, lambda: _attempt(objective, fine, s, p, u, length), lambda: spent
        ),
    )


def _attempt(
    objective: _Objective, fine: bool, s: _State, p: Array, u: Array, length: Array
) -> _State:
    """The full step to u = s.u + p if it halves the least gradient; else a damped step with a new
    float64 factor, or none."""
    g = objective.residual(u)
    norm = jnp.linalg.norm(g)
    tried = s._replace(gradients=s.gradients + 1)
    full = tried._replace(
        u=u,
        g=g,
        least=norm,
        length=length,
        new=jnp.array(False),
        done=at_rounding(u, g, objective.v, objective.step),
    )
    spent = tried._replace(spent=jnp.array(True), fine=s.fine | s.new)

    def refuse() -> _State:
        if not fine:
            return spent
        return lax.cond(s.new, lambda: _damped(objective, spent, p, g), lambda: spent)

    return lax.cond(norm <= 0.5 * s.least, lambda: full, refuse)


def _damped(objective: _Objective, s: _State, p: Array, g_full: Array) -> _State:
    """A step along p by Armijo backtracking; g_full is the gradient after the full one."""
    slope = s.g @ p
    phi = penalised(objective.value, s.u, objective.v, objective.step)
    t, u, _ = backtrack(
        lambda w: penalised(objective.value, w, objective.v, objective.step),
        s.u, phi, p, slope, _ARMIJO,
    )  # fmt: skip
    full = t == 1.0
    g = lax.cond(full, lambda: g_full, lambda: objective.residual(u))
    length = jnp.linalg.norm(u - s.u)
    flat = jnp.abs(slope) <= NOISE * jnp.finfo(u.dtype).eps * phi.terms
    return s._replace(
        u=u,
        g=g,
        least=jnp.minimum(s.least, jnp.linalg.norm(g)),
        length=length,
        done=flat & (length >= 0.5 * s.length),
        gradients=s.gradients + jnp.where(full, 0, 1),
    )
