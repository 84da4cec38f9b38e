"""A client's quadratic model, tangent to f_k at its last visit, with the damping that keeps it an
upper bound, nearly, where it is used."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedexact.algorithms.quadratic_model import diagonal, pack, unpack
from fedexact.core import Oracle

_SCALE = 0.01  # entry of D, relative to L_k, where the Hessian says nothing
_BLIND = 1e-20  # of L_k: a curvature below says nothing
_FLAT = 0.1  # a first Hessian whose trace is below this part of L_k says little: start with L_k
_EXCESS = 0.5  # of f_k over the model, relative to the model's quadratic term, that is accepted
_UP, _DOWN = 10.0, 4.0  # factors of the damping
_NEGLIGIBLE = 1e-12  # a damping below is zero
_NOISE = 1e3  # roundings of the values whose differences say nothing


class TangentModel(NamedTuple):
    """m(y) = f(x) + grad^T (y - x) + 1/2 (y - x)^T (hessian + damping diag(D)) (y - x)."""

    x: Array  # (d,)
    value: Array  # () f at x
    grad: Array  # (d,) at x
    hessian: Array  # (d (d + 1) / 2,) at x, packed
    D: Array  # (d,)
    damping: Array  # ()
    seen: Array  # () 1 after the first visit


class Sums(NamedTuple):
    """What is uploaded, as a change: the model is 1/2 y^T A y - v^T y + const."""

    A: Array  # (d (d + 1) / 2,) packed
    v: Array  # (d,)
    seen: Array  # ()


def unseen(x0: Array) -> TangentModel:
    """Before the first visit: no model, only the place of the first one."""
    zero, none = jnp.zeros((), x0.dtype), jnp.zeros_like(x0)
    return TangentModel(x0, zero, none, pack(jnp.outer(none, none)), none, zero, zero)


def sums(model: TangentModel) -> Sums:
    """The model's quadratic and linear terms."""
    d = model.x.size
    A = model.hessian.at[diagonal(d)].add(model.damping * model.D)
    return Sums(A, unpack(A, d) @ model.x - model.grad, model.seen)


def visited(model: TangentModel, pulled: Array, oracle: Oracle) -> TangentModel:
    """The model after a visit: tangent at `pulled`, or the old one with more damping where f has
    outgrown it or is not finite. The first one is tangent at x0, where f is known to be finite."""
    first = model.seen == 0.0
    x = jnp.where(first, model.x, pulled)
    value, grad, H = oracle.value(x), oracle.grad(x), oracle.hessian(x)
    finite = jnp.isfinite(value) & jnp.all(jnp.isfinite(grad)) & jnp.all(jnp.isfinite(H))
    fits = finite & (first | _bounded(model, x, value))
    flat = first & (jnp.trace(H) < _FLAT * oracle.smoothness)
    lower = jnp.where(model.damping > _NEGLIGIBLE, model.damping / _DOWN, 0.0)
    moved = TangentModel(
        x,
        value,
        grad,
        pack(H),
        jnp.maximum(model.D, _metric(jnp.diag(H), flat, oracle.smoothness)),
        jnp.where(first, flat.astype(x.dtype), lower),
        jnp.ones_like(model.seen),
    )
    kept = model._replace(damping=jnp.maximum(_UP * model.damping, 1.0))
    return jax.tree.map(lambda new, old: jnp.where(fits, new, old), moved, kept)


def _metric(curvature: Array, flat: Array, smoothness: Array) -> Array:
    """(d,) the entries for D: the curvature of each coordinate, so that units do not matter, on
    average L_k where the client starts flat; a part of L_k where there is none."""
    mean = jnp.maximum(jnp.mean(curvature), jnp.finfo(curvature.dtype).tiny)
    scaled = jnp.where(flat, curvature * (smoothness / mean), curvature)
    blind = curvature <= _BLIND * smoothness
    return jnp.where(blind, jnp.where(flat, 1.0, _SCALE) * smoothness, scaled)


def _bounded(model: TangentModel, x: Array, value: Array) -> Array:
    """Whether the model at x is at least f(x), up to half its quadratic term and rounding."""
    move = x - model.x
    slope = model.grad @ move
    bend = 0.5 * move @ (unpack(model.hessian, x.size) @ move)
    bend += 0.5 * model.damping * move @ (model.D * move)
    terms = jnp.abs(value) + jnp.abs(model.value) + jnp.abs(slope)
    rounding = _NOISE * jnp.finfo(x.dtype).eps * terms
    return value - model.value - slope - bend <= _EXCESS * bend + rounding
