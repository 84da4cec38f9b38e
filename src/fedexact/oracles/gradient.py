"""An inexact prox by gradient steps, for functions without a cheap Hessian."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from fedexact.oracles.proximal import Magnitude, backtrack, penalised

_STEPS = 100  # at most
_RELATIVE = 0.5  # of the rule that stops the steps
_DECREASE = 0.5  # of the slope, in the step-length rule


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
        phi = penalised(value, u, v, step)
        t, u_next, _ = backtrack(
            lambda w: penalised(value, w, v, step), u, phi, -lr * g, -lr * g @ g, _DECREASE
        )
        return u_next, t * lr

    def iterate(state: _State) -> _State:
        u, lr = advance(state.u, state.g, state.lr)
        g = residual(u)
        pull = (u - v) / step
        allowed = _RELATIVE * jnp.linalg.norm(u - start) / step
        rounding = 4.0 * eps * (jnp.linalg.norm(g - pull) + jnp.linalg.norm(pull))
        done = jnp.linalg.norm(g) <= jnp.maximum(allowed, rounding)
        return _State(u, g, lr, done, state.steps + 1)

    lr = jnp.asarray(1.0 / (smoothness + 1.0 / step), v.dtype)
    first = _State(start, residual(start), lr, jnp.array(False), jnp.array(0))
    last = lax.while_loop(lambda s: ~s.done & (s.steps < _STEPS), iterate, first)
    return last.u, last.steps + 1


class _State(NamedTuple):
    u: Array  # (d,)
    g: Array  # (d,) gradient of the objective of the prox at u
    lr: Array
    done: Array
    steps: Array
