"""What several algorithms share: checks, the gradient of a local step and its cost, guides for
defaults, and what their guarantees assume."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax import Array, lax

from fedexact.core import Algorithm, Assumption, Constants, Exactness, Oracle, Setting
from fedexact.errors import InputError, check_count, check_positive, check_seed
from fedexact.participation.periodic import Periodic

NOISE_BALL = Exactness(False, "mini-batch gradients at a constant lr: a noise ball")
_POSITIVE = ("lr", "lr_server", "step", "relax", "damping", "safeguard")


def check(algorithm: Algorithm) -> None:
    """Raises InputError for a step that is not positive, a count or an option that is not one."""
    for field in dataclasses.fields(algorithm):  # pyright: ignore[reportArgumentType]
        what, value = f"{algorithm.name} {field.name}", getattr(algorithm, field.name)
        if value is None and field.default is not None:
            raise InputError(f"{what} must be given a value, got None")
        if field.name in _POSITIVE:
            check_positive(what, value)
        elif field.name in ("local_steps", "batch_size", "cutoff") and value is not None:
            check_count(what, value)
        elif field.name in ("delay", "memory"):
            check_count(what, value, at_least=0)
        elif field.name in ("delay_seed", "coin_seed") and value is not None:
            check_seed(what, value)
        elif field.name == "probability":
            check_probability(what, value)
        elif field.name == "option" and value not in (1, 2):
            raise InputError(f"{what} must be 1 or 2, got {value!r}")


def check_probability(what: str, value: Any) -> None:
    """Raises InputError unless 1e-4 <= value <= 1: a visit takes 1/p steps on average; None and
    JAX's arrays pass."""
    check_positive(what, value)
    if not (value is None or isinstance(value, Array) or 1e-4 <= value <= 1):
        raise InputError(f"{what} must be a probability within [1e-4, 1], got {value!r}")


def local_grad(
    oracle: Oracle, x: Array, key: Array, i: Array | int, batch_size: int | None
) -> Array:
    """(d,) full gradient, or that of a mini-batch drawn with the subkey of local step i."""
    if batch_size is None:
        return oracle.grad(x)
    return oracle.stochastic_grad(x, jax.random.fold_in(key, i), batch_size)


def descend(
    oracle: Oracle, x: Array, lr: Any, local_steps: int, key: Array, batch_size: int | None
) -> Array:
    """(d,) where the local gradient steps from x end."""

    def step(i: Array, z: Array) -> Array:
        return z - lr * local_grad(oracle, z, key, i, batch_size)

    return lax.fori_loop(0, local_steps, step, x)


def rows_per_gradient(oracle: Oracle, batch_size: int | None) -> Array | int:
    """Rows whose gradient `local_grad` computes."""
    return oracle.n_rows if batch_size is None else batch_size


def balance(constants: Constants) -> float:
    """sqrt(m L), between the flattest and the steepest: 1 / balance is the default prox step.

    m is the smallest curvature of F at 0, L_F / conditioning, and not the min_k l_k of the worst
    case, which is 0 as soon as one client has few rows. It guides the rate only: any step is exact.
    """
    flattest = max(constants.l, constants.L_F / constants.conditioning, 1e-6 * constants.L)
    return math.sqrt(flattest * constants.L)


def prox_step(constants: Constants) -> float:
    """Default step of a prox: 1 / balance; 0.45 / L where f_k need not be convex, so that the
    objective of the prox is strongly convex and 1 - 2 step L > 0."""
    return 1.0 / balance(constants) if constants.convex else 0.45 / constants.L


def stale_curvature(setting: Setting) -> float:
    """max_k age_k L_k / N, age_k the rounds since client k's gradient was last counted.

    On average age_k = (1 - p_k) max(1 / p_k, D), D the gap of fixed or correlated visits. A step
    below 1 / stale_curvature keeps methods stable that descend along remembered gradients; with
    one client per round drawn uniformly it is SAG's 1/L. A client that is alone is never stale:
    without it nothing moves.
    """
    if setting.n_clients == 1:
        return 0.0
    seen = setting.p > 0.0
    p, L_k = setting.p[seen], setting.constants.L_k[seen]
    age = (1.0 - p) * np.maximum(1.0 / p, setting.gap)
    return float(np.max(age * L_k, initial=0.0)) / setting.n_clients


def remembered_curvature(setting: Setting) -> float:
    """max(L_F, L_F D/2, stale curvature): steps below its inverse keep tracked gradients stable."""
    L_F, D = setting.constants.L_F, setting.gap
    return max(L_F, L_F * D / 2, stale_curvature(setting))


def exact_if_seen(setting: Setting, why: str) -> Exactness:
    """Exact, unless some client never takes part: then F is not what is minimised."""
    absent = np.flatnonzero(setting.p == 0.0)
    if absent.size == 0:
        return Exactness(True, why)
    names = ", ".join(setting.names[int(k)] for k in absent[:5]) + (
        ", ..." if absent.size > 5 else ""
    )
    return Exactness(False, f"never present: {names}; the target is not reached")


def exact_if_gradient_descent(
    setting: Setting, local_steps: int, batch_size: int | None, otherwise: str
) -> Exactness:
    """Averaged local steps: exact for one client or one local step with everybody present;
    `otherwise` says why not under other participation."""
    if batch_size is not None:
        return NOISE_BALL
    if setting.n_clients == 1:
        return exact_if_seen(setting, "one client: gradient descent")
    if local_steps > 1:
        return Exactness(False, f"client drift: local_steps = {local_steps} > 1")
    if setting.full:
        return Exactness(True, "one local step, everybody present: gradient descent")
    return Exactness(False, otherwise)


def mixed(setting: Setting) -> bool:
    """Whether the clients of the rounds meet each other, directly or through others.

    Of a table of rounds that is asked round by round; other patterns draw clients independently or
    without replacement, where all meet unless they come one at a time, q_k = p_k.
    """
    if setting.n_clients == 1:
        return True
    if not isinstance(setting.participation, Periodic):
        return bool(np.all(setting.q < (1.0 - 1e-9) * setting.p))
    group = np.arange(setting.n_clients)
    for present in setting.participation.table(setting.n_clients):
        if np.any(present):
            group[np.isin(group, group[present])] = np.min(group[present])
    return bool(np.all(group == group[0]))


# --- what guarantees assume -----------------------------------------------------------------------


def comes_back(setting: Setting) -> Assumption:
    """p_k > 0 for all k."""
    return Assumption("every client keeps coming back", bool(np.all(setting.p > 0.0)))


def everybody(setting: Setting) -> Assumption:
    """p_k = 1 for all k."""
    return Assumption("every client takes part in every round", setting.full)


def evenly(setting: Setting) -> Assumption:
    """q_k = 1/N for all k."""
    return Assumption("a mean over the participants weighs all clients alike", setting.even)


def smooth(setting: Setting) -> Assumption:
    """L_k < inf for all k."""
    return Assumption("every f_k is smooth everywhere", setting.constants.global_)


def convex(setting: Setting) -> Assumption:
    """F and all f_k are convex."""
    return Assumption("every f_k is convex", setting.constants.convex)


def strongly_convex(setting: Setting) -> Assumption:
    """l_k > 0 for all k."""
    return Assumption("every f_k is strongly convex", setting.constants.l > 0.0)
