"""What several algorithms share: checks, the gradient of a local step, guides for defaults."""

from __future__ import annotations

import dataclasses
import math

import jax
import numpy as np
from jax import Array

from fedexact.core import Algorithm, Constants, Exactness, Oracle, Setting
from fedexact.errors import InputError, check_count, check_positive


def check(algorithm: Algorithm) -> None:
    """Raises InputError for a step that is not positive, a count or an option that is not one."""
    for field in dataclasses.fields(algorithm):  # pyright: ignore[reportArgumentType]
        what, value = f"{algorithm.name} {field.name}", getattr(algorithm, field.name)
        if field.name in ("lr", "lr_server", "step", "relax"):
            check_positive(what, value)
        elif field.name in ("local_steps", "batch_size") and value is not None:
            check_count(what, value)
        elif field.name == "option" and value not in (1, 2):
            raise InputError(f"{what} must be 1 or 2, got {value!r}")


def local_grad(
    oracle: Oracle, x: Array, key: Array, i: Array | int, batch_size: int | None
) -> Array:
    """(d,) full gradient, or that of a mini-batch drawn with the subkey of local step i."""
    if batch_size is None:
        return oracle.grad(x)
    return oracle.stochastic_grad(x, jax.random.fold_in(key, i), batch_size)


def balance(constants: Constants) -> float:
    """sqrt(m L), between the flattest and the steepest: 1 / balance is the default prox step.

    m is the smallest curvature of F at 0, L_F / conditioning, and not the min_k l_k of the worst
    case, which is 0 as soon as one client has few rows. It guides the rate only: any step is exact.
    """
    flattest = max(constants.l, constants.L_F / constants.conditioning, 1e-6 * constants.L)
    return math.sqrt(flattest * constants.L)


def stale_curvature(setting: Setting) -> float:
    """max_k age_k L_k / N, age_k the rounds since client k's gradient was last counted.

    On average age_k = (1 - p_k) max(1 / p_k, D), D the gap of fixed or correlated visits. A step
    below 1 / stale_curvature keeps methods stable that descend along remembered gradients; with
    one client per round drawn uniformly it is SAG's 1/L.
    """
    seen = setting.p > 0.0
    p, L_k = setting.p[seen], setting.constants.L_k[seen]
    age = (1.0 - p) * np.maximum(1.0 / p, setting.participation.gap(setting.n_clients))
    return float(np.max(age * L_k, initial=0.0)) / setting.n_clients


def exact_if_seen(setting: Setting, why: str) -> Exactness:
    """Exact, unless some client never takes part: then F is not what is minimised."""
    absent = np.flatnonzero(setting.p == 0.0)
    if absent.size == 0:
        return Exactness(True, why)
    names = ", ".join(setting.names[int(k)] for k in absent[:5]) + (
        ", ..." if absent.size > 5 else ""
    )
    return Exactness(False, f"never present: {names}; the target is not reached")
