"""Regularisers: closed convex functions g with a cheap prox."""

from __future__ import annotations

import dataclasses

from fedexact.errors import InputError, check_choice
from fedexact.regularizers.base import Regularizer
from fedexact.regularizers.box import Box, NonNegative
from fedexact.regularizers.coordinates import OnCoordinates
from fedexact.regularizers.elastic_net import ElasticNet
from fedexact.regularizers.group_lasso import GroupLasso
from fedexact.regularizers.l1 import L1
from fedexact.regularizers.l2_ball import L2Ball
from fedexact.regularizers.squared_l2 import SquaredL2
from fedexact.regularizers.zero import Zero

__all__ = [
    "L1",
    "REGULARIZERS",
    "Box",
    "ElasticNet",
    "GroupLasso",
    "L2Ball",
    "NonNegative",
    "OnCoordinates",
    "Regularizer",
    "SquaredL2",
    "Zero",
    "make_regularizer",
]

REGULARIZERS: dict[str, type[Regularizer]] = {
    g.name: g for g in (Zero, L1, ElasticNet, SquaredL2, Box, NonNegative, GroupLasso, L2Ball)
}


def make_regularizer(spec: str | Regularizer | None) -> Regularizer:
    """The regulariser that `spec` names: None, a Regularizer, or a key without parameters.

    InputError for anything else.
    """
    if spec is None:
        return Zero()
    if isinstance(spec, Regularizer):
        return spec
    if not isinstance(spec, str):
        raise InputError(
            f"regularizer must be None or a Regularizer such as L1(strength=0.1), got {spec!r}"
        )
    check_choice("regularizer", spec, REGULARIZERS)
    cls = REGULARIZERS[spec]
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType] - every one is a record
    needed = [field.name for field in fields if field.default is dataclasses.MISSING]
    if needed:
        example = ", ".join(f"{name}=..." for name in needed)
        raise InputError(f"regularizer {spec!r} needs parameters: pass {cls.__name__}({example})")
    return cls()
