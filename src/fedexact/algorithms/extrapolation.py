"""Anderson's extrapolation from sums: what a client keeps of its last iterations, the coefficients
from the Gram matrix of the residuals, and when to trust them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

_RIDGE = 1e-12  # of the least squares, whose residuals are scaled to length 1
_POWER = 1.1  # > 1: the bounds on the residuals of extrapolated points can be summed


class Pulled(NamedTuple):
    x: Array  # (d,)
    alpha: Array  # (m + 1,) how the images make the iterate
    version: Array  # () of alpha
    slot: Array  # () where the next image goes


class Past(NamedTuple):
    """What a client keeps."""

    z: Array  # (d,) its last image
    u: Array  # (d,) its last prox, where the next one starts
    images: Array  # (m + 1, d) of the last iterations, by slot
    residuals: Array  # (m + 1, d)
    version: Array  # () of the alpha that it has applied


class Upload(NamedTuple):
    change: Array  # (d,) of z
    image: Array  # (d,) z itself: sums of changes would let extrapolated rounding errors pile up
    products: Array  # (m + 1,) of the new residual with those in the slots, its own included


class Window(NamedTuple):
    """The last iterations w_j -> T(w_j), in slots that are filled in turn; r_j = T(w_j) - w_j."""

    gram: Array  # (m + 1, m + 1) of the r_j
    slot: Array  # () where the next iteration goes
    filled: Array  # () how many slots are
    first: Array  # () |r|^2 of the first iteration
    last: Array  # () |r|^2 where the current iterate was extrapolated
    trusted: Array  # () number of extrapolations so far
    trial: Array  # () 1 if the current iterate is an extrapolation not yet seen to do good


def empty(memory: int, like: Array) -> Window:
    """Before the first iteration."""
    gram = jnp.zeros((memory + 1, memory + 1), like.dtype)
    return Window(gram, *[jnp.zeros((), like.dtype)] * 6)


def no_past(memory: int, x0: Array) -> Past:
    """A client before its first visit."""
    none, zero = jnp.zeros((memory + 1, x0.size), x0.dtype), jnp.zeros((), x0.dtype)
    return Past(x0, x0, none, none, zero)


def iterate(past: Past, alpha: Array, version: Array) -> Array:
    """(d,) z_k: the last image, or the combination of images that the client has yet to apply."""
    return jnp.where(past.version == version, past.z, alpha @ past.images)


def remember(past: Past, pulled: Pulled, image: Array, residual: Array, u: Array) -> Past:
    """With a new iteration in the current slot."""
    slot = pulled.slot.astype(int)
    images, residuals = past.images.at[slot].set(image), past.residuals.at[slot].set(residual)
    return Past(image, u, images, residuals, pulled.version)


def coefficients(gram: Array, filled: Array) -> Array:
    """(m + 1,) alpha, sum 1, that minimises |sum_j alpha_j r_j|^2 + 1e-12 sum_j alpha_j^2
    |r_j|^2, zero in slots that are not filled."""
    slots = jnp.arange(gram.shape[0])
    used = (slots < filled) & (jnp.diag(gram) > 0.0)
    unit = jnp.where(used, jnp.sqrt(jnp.where(used, jnp.diag(gram), 1.0)), jnp.inf)
    cosines = gram / unit[:, None] / unit[None, :]
    diagonal = jnp.where(used, 1.0 + _RIDGE, 1.0)
    cosines = jnp.where(jnp.eye(len(slots), dtype=bool), jnp.diag(diagonal), cosines)
    alpha = jnp.linalg.solve(cosines, 1.0 / unit) / unit
    return alpha / jnp.sum(alpha)


def decide(window: Window, row: Array, safeguard: Any) -> tuple[Window, Array]:
    """The window after an iteration whose residual has the inner products `row`, (m + 1,), with
    those in the slots (its own included), and the (m + 1,) coefficients of the next iterate.

    An extrapolated iterate whose residual outgrows that where it started is taken back: the next
    one is the plain image of that start. Otherwise it is extrapolated while the residual is at
    most safeguard |r_0| (1 + number of extrapolations)^-1.1, and plain where it is not (Zhang,
    O'Donoghue & Boyd 2020): bad extrapolations cost every second round, and idle ones come to an
    end, since the bound has a finite sum.
    """
    slots, slot = jnp.arange(len(row)), window.slot.astype(int)
    gram = window.gram.at[slot, :].set(row).at[:, slot].set(row)
    filled = jnp.minimum(window.filled + 1, len(row))
    now = row[slot]
    first = jnp.where(window.filled == 0, now, window.first)
    back = (window.trial == 1.0) & ~(now <= window.last)
    bound = safeguard**2 * first * (1.0 + window.trusted) ** (-2.0 * _POWER)
    alpha = coefficients(gram, filled)
    trust = ~back & (filled > 1) & (now <= bound) & jnp.all(jnp.isfinite(alpha))
    plain = jnp.where(back, (slot - 1) % len(row), slot)
    chosen = jnp.where(trust, alpha, (slots == plain).astype(row.dtype))
    trial = trust.astype(row.dtype)
    last = jnp.where(back, window.last, now)
    window = Window(
        gram,
        ((slot + 1) % len(row)).astype(row.dtype),
        filled,
        first,
        last,
        window.trusted + trial,
        trial,
    )
    return window, chosen


def interrupted(window: Window) -> Window:
    """The window after a round that was no iteration of the whole map."""
    return window._replace(trial=jnp.zeros_like(window.trial))
