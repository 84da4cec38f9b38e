"""Experiments as TOML files: what may stand in them, and how they become objects.

    title = "..."; rounds = 1000; tol = 1e-10; seeds = [0]; record_every = 10
    [data]            bundled = | csv = | parquet = | libsvm = | folder =, client, missing, standardize
    [data.target]     column, above | equals            (or target = "column")
    [data.features]   columns, exclude, categorical, reference       (or features = [...])
    [data.partition]  name = "iid" | "dirichlet" | ..., its arguments
    [problem]         loss, regularizer, l2, weights, reduction, fit_intercept
    [participation]   name = "bernoulli" | ..., its arguments; per client: a list, or a table by name
    [[algorithms]]    name = "FOCUS" | ..., its hyperparameters, label

Names and arguments are those of the registries, which are the only place where they are listed.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import os
import tomllib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, TypeVar

import jax
import numpy as np
import tomli_w
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from fedexact import data
from fedexact.algorithms import ALGORITHMS
from fedexact.core import Algorithm
from fedexact.data import PARTITIONS, Features, Federation, Partition, Target
from fedexact.errors import InputError, check_choice
from fedexact.losses import LOSSES, Loss, make_loss
from fedexact.participation import PARTICIPATIONS, Participation
from fedexact.problem import Problem
from fedexact.regularizers import REGULARIZERS, Regularizer
from fedexact.result import Result

T = TypeVar("T")
Table = dict[str, Any]

# --- one table of a file to one object ------------------------------------------------------------

NUMBER, WHOLE, BOOL, TEXT, LIST, TABLE = (
    "a number", "a whole number", "true or false", "a text", "a list", "a table",
)  # fmt: skip


def kinds(hint: Any) -> set[str]:
    """What may stand in a file for a field of this type; empty for one that is not for files."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return set().union(*(kinds(part) for part in typing.get_args(hint)))
    simple = {
        Any: {NUMBER, LIST}, jax.Array: {NUMBER, LIST}, np.ndarray: {LIST},
        bool: {BOOL}, int: {WHOLE}, float: {NUMBER}, str: {TEXT},
    }  # fmt: skip
    if hint in simple:
        return simple[hint]
    origin = typing.get_origin(hint) or hint
    if isinstance(origin, type):
        if issubclass(origin, collections.abc.Mapping):
            return {TABLE}
        if issubclass(origin, collections.abc.Sequence):
            return {LIST}
    return set()


def fields_of(cls: type) -> dict[str, set[str]]:
    """The fields of a record that a file may set, and what may stand there."""
    hints = typing.get_type_hints(cls)
    fields = [f for f in dataclasses.fields(cls) if f.init and not f.metadata.get("derived")]
    allowed = {f.name: kinds(hints[f.name]) for f in fields}
    return {name: allow for name, allow in allowed.items() if allow}


def make(cls: Callable[..., T], table: Mapping[str, Any], where: str) -> T:
    """The record `cls` from a table. InputError names the key, its value and the choices."""
    assert isinstance(cls, type)
    allowed = fields_of(cls)
    check_keys(table, allowed, where)
    for name, value in table.items():
        _check_kind(value, allowed[name], f"{where}.{name}")
    needed = [f.name for f in dataclasses.fields(cls) if f.init and _required(f)]
    for name in needed:
        if name not in table:
            raise InputError(f"{where}: {name} is missing ({_one_of(allowed[name])})")
    try:
        return cls(**{name: _frozen(value) for name, value in table.items()})
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def make_named(registry: Mapping[str, type[T]], table: Mapping[str, Any], where: str) -> T:
    """The record that the table's `name` names in the registry, from its other keys."""
    rest = dict(table)
    if "name" not in rest:
        raise InputError(f"{where}: name is missing; choices: {', '.join(registry)}")
    name = rest.pop("name")
    check_choice(f"{where}.name", name, registry)
    return make(registry[name], rest, where)


def check_keys(table: Mapping[str, Any], known: Sequence[str] | Mapping[str, Any], where: str) -> None:
    """InputError for a key that is not known, with the nearest and all known ones."""
    for key in table:
        if key not in known:
            near = get_close_matches(key, list(known), n=1, cutoff=0.6)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            place = f"{where}.{key}" if where else key
            choices = ", ".join(known) or "none"
            raise InputError(f"{place}: unknown key{hint} (value {table[key]!r}; keys: {choices})")


def _required(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _check_kind(value: Any, allowed: set[str], where: str) -> None:
    tests: dict[str, tuple[type, ...]] = {
        BOOL: (bool,), WHOLE: (int,), NUMBER: (int, float), TEXT: (str,), LIST: (list, tuple),
        TABLE: (dict,),
    }  # fmt: skip
    is_bool = isinstance(value, bool)
    for kind in allowed:
        if isinstance(value, tests[kind]) and (kind == BOOL or not is_bool):
            return
    raise InputError(f"{where} must be {_one_of(allowed)}, got {value!r}")


def _one_of(allowed: set[str]) -> str:
    return " or ".join(sorted(allowed))


def _frozen(value: Any) -> Any:
    """Lists as tuples, all the way down: records are hashable."""
    return tuple(_frozen(v) for v in value) if isinstance(value, list | tuple) else value


def _record(cls: type) -> BeforeValidator:
    """A field given as a table, or as it is when it is a record already."""
    return BeforeValidator(lambda v: make(cls, v, "") if isinstance(v, dict) else v)
