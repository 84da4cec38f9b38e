"""Algorithms, losses and regularisers as plain JSON, and back without a changed bit."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax
import numpy as np

from fedexact.algorithms import ALGORITHMS
from fedexact.errors import InputError
from fedexact.losses import LOSSES
from fedexact.regularizers import REGULARIZERS, OnCoordinates

RECORDS: dict[str, type] = {
    cls.__name__: cls
    for cls in (*ALGORITHMS.values(), *LOSSES.values(), *REGULARIZERS.values(), OnCoordinates)
}


def to_meta(value: Any) -> Any:
    """A record as a table of its fields, those that are records or arrays likewise."""
    if RECORDS.get(type(value).__name__) is type(value):
        fields = (field.name for field in dataclasses.fields(value))
        return {"record": type(value).__name__} | {n: to_meta(getattr(value, n)) for n in fields}
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        return {"array": array.tolist(), "dtype": array.dtype.name}
    if isinstance(value, tuple | list):
        return [to_meta(part) for part in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise InputError(
        f"{value!r} cannot be sent to the sites: only the library's own algorithms, losses and "
        "regularisers can"
    )


def from_meta(meta: Any) -> Any:
    """What `to_meta` was made from. InputError for a record of another version."""
    if isinstance(meta, list):
        return tuple(from_meta(part) for part in meta)
    if not isinstance(meta, dict):
        return meta
    if "array" in meta:
        return np.asarray(meta["array"], meta["dtype"])
    fields = {name: from_meta(part) for name, part in meta.items() if name != "record"}
    try:
        return cast(Any, RECORDS[meta["record"]])(**fields)
    except (KeyError, TypeError):
        raise InputError(
            f"the server names {meta.get('record')!r}, which this version of fedexact does not "
            "have in this form: install the same version everywhere"
        ) from None
