"""Losses: squared, logistic, multinomial, poisson, huber, or a function of the user's own."""

from __future__ import annotations

from collections.abc import Callable

from jax import Array

from fedexact.errors import InputError, check_choice
from fedexact.losses.base import GramLoss, LinearLoss, Loss, Rows, curvatures
from fedexact.losses.custom import CustomLoss
from fedexact.losses.design import Sparse
from fedexact.losses.huber import Huber
from fedexact.losses.logistic import Logistic
from fedexact.losses.multinomial import Multinomial
from fedexact.losses.poisson import Poisson
from fedexact.losses.squared import Squared

__all__ = [
    "LOSSES",
    "CustomLoss",
    "GramLoss",
    "Huber",
    "LinearLoss",
    "Logistic",
    "Loss",
    "Multinomial",
    "Poisson",
    "Rows",
    "Sparse",
    "Squared",
    "curvatures",
    "make_loss",
]

LOSSES: dict[str, type[Loss]] = {
    loss.name: loss for loss in (Squared, Logistic, Multinomial, Poisson, Huber)
}


def make_loss(
    spec: str | Loss | Callable[[Array, Rows], Array], n_classes: int | None = None
) -> Loss:
    """The loss that `spec` names: a key of LOSSES, a Loss, or a function for CustomLoss.

    `n_classes` serves "multinomial" alone. InputError for anything else.
    """
    if isinstance(spec, Loss):
        return spec
    if isinstance(spec, str):
        check_choice("loss", spec, LOSSES)
        if spec == Multinomial.name:
            if n_classes is None:
                raise InputError("loss 'multinomial' needs n_classes: pass Multinomial(n_classes)")
            return Multinomial(n_classes)
        return LOSSES[spec]()
    if callable(spec) and not isinstance(spec, type):
        return CustomLoss(spec)
    raise InputError(
        f"loss must be one of {', '.join(LOSSES)}, a Loss such as Huber(delta=2.0), or a function "
        f"of (x, rows), got {spec!r}"
    )
