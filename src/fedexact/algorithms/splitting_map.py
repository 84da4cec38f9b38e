"""FedSplit and FedDR as one map of the stacked z_k: z_k + 2 tau (P_k(2x - z_k) - x), x = prox_g of
the mean z."""

from __future__ import annotations

from typing import Any

from jax import Array

from fedexact.algorithms.feddr import FedDR
from fedexact.algorithms.fedsplit import FedSplit
from fedexact.core import Oracle, Setting
from fedexact.errors import CapabilityError, InputError
from fedexact.regularizers import Zero

Splitting = FedSplit | FedDR


def check_splitting(inner: Any) -> None:
    """Raises InputError unless `inner` is a FedSplit, a FedDR or None, with one step for all."""
    if not isinstance(inner, FedSplit | FedDR | None):
        raise InputError(f"Anderson inner must be FedSplit() or FedDR(), got {inner!r}")
    for option in ("per_client", "server_block"):
        if getattr(inner, option, False):
            raise InputError(f"Anderson inner: leave {option}=True out, it is not accelerated")


def resolved(inner: Splitting | None, setting: Setting) -> Splitting:
    """With its hyperparameters chosen; FedDR where there is a regulariser and none is given.

    Raises CapabilityError for FedSplit with a regulariser.
    """
    smooth = isinstance(setting.regularizer, Zero)
    if inner is None:
        inner = FedSplit() if smooth else FedDR()
    if not (inner.composite or smooth):
        raise CapabilityError(
            f"Anderson: {inner.name} has no prox step for a regulariser, and the problem has one: "
            "use inner=FedDR()"
        )
    return inner.resolve(setting)


def model(inner: Splitting | None, z: Array) -> Array:
    """(d,) x of the mean z."""
    return inner.g.prox(z, inner.step) if isinstance(inner, FedDR) and inner.g else z


def residual(
    inner: Splitting | None, x: Array, z: Array, oracle: Oracle, start: Array
) -> tuple[Array, Array]:
    """(d,) client k's prox P_k(2x - z_k) and its part of the step of the map."""
    assert inner is not None
    tau = inner.relax / 2 if isinstance(inner, FedDR) else inner.relax
    u = oracle.prox(2 * x - z, inner.step, start)
    return u, 2 * tau * (u - x)
