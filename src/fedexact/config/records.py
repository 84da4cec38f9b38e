"""Records (algorithms, losses, regularisers, participations, partitions) from tables of a file.

What a table may hold is read off the record's fields and their types, so that nothing is listed
twice. Values per client or per column may be given by name and are put in order here.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import os
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

import jax
import numpy as np

from fedexact.core import Algorithm
from fedexact.errors import InputError, check_choice

T = TypeVar("T")

NUMBER = "a number"
WHOLE = "a whole number"
BOOL = "true or false"
TEXT = "a text"
PATH = "a path"
LIST = "a list"
TEXTS = "a list of texts"
TABLE = "a table"
INNER = "a table with a name"
_PYTHON = {
    NUMBER: (int, float), WHOLE: (int,), BOOL: (bool,), TEXT: (str,), PATH: (str,),
    LIST: (list, tuple), TEXTS: (list, tuple), TABLE: (dict,), INNER: (Algorithm,),
}  # fmt: skip
_SIMPLE = {
    Any: {NUMBER}, jax.Array: {NUMBER}, np.ndarray: set(),
    bool: {BOOL}, int: {WHOLE}, float: {NUMBER}, str: {TEXT},
}  # fmt: skip


def record_fields(cls: type) -> dict[str, set[str]]:
    """The fields of a record that a file may set, and what may stand there.

    Fields of a type that no file can hold are left out; so are pure arrays, which are results.
    Without a type (Any) a leaf is a number and a static field a list, as groups of coordinates are.
    """
    hints = typing.get_type_hints(cls)
    allowed = {}
    for field in dataclasses.fields(cls):
        if field.init:
            groups = hints[field.name] is Any and field.metadata.get("static", False)
            allowed[field.name] = {LIST} if groups else _kinds(hints[field.name])
    return {name: allow for name, allow in allowed.items() if allow}


def check_record(cls: type, table: Mapping[str, Any], where: str) -> None:
    """InputError if the table's keys or the kinds of its values do not suit the record; values by
    name may stand where a list may."""
    allowed = record_fields(cls)
    check_keys(table, allowed, where)
    for name, value in table.items():
        if not (isinstance(value, dict) and LIST in allowed[name]):
            _check_kind(value, allowed[name], _join(where, name))
    for field in dataclasses.fields(cls):
        if field.name in allowed and field.name not in table and _required(field):
            what = _one_of(allowed[field.name])
            raise InputError(f"{_join(where, field.name)} is missing: give {what}")


def make_record(cls: type[T], table: Mapping[str, Any], where: str) -> T:
    """The record from a table. InputError names the key, its value and the choices."""
    check_record(cls, table, where)
    try:
        return cls(**{name: _frozen(value) for name, value in table.items()})
    except InputError as error:
        raise InputError(f"{where}: {error}" if where else str(error)) from None


def find(registry: Mapping[str, type[T]], table: Mapping[str, Any]) -> tuple[type[T], str]:
    """The class that the table's `name` names, and the name, for messages."""
    if "name" not in table:
        raise InputError(f"name is missing; choices: {', '.join(registry)}")
    check_choice("name", table["name"], registry)
    return registry[table["name"]], str(table["name"])


def arguments_of(table: Mapping[str, Any]) -> dict[str, Any]:
    """A named table without its name and label."""
    return {key: value for key, value in table.items() if key not in ("name", "label")}


def make_named(
    registry: Mapping[str, type[T]], table: Mapping[str, Any], where: str, names: Sequence[str] = ()
) -> T:
    """The record that a table names; values by name are put in the order of `names`."""
    cls, name = find(registry, table)
    where = f"{where} ({name})"
    arguments = with_inner(registry, cls, arguments_of(table), where)
    ordered = {k: _in_order(k, v, names, _join(where, k)) for k, v in arguments.items()}
    return make_record(cls, ordered, where)


def with_inner(
    registry: Mapping[str, type[T]], cls: type[T], table: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """The table with the records that it holds made: a name, or a named table, each."""
    inner = {name for name, allowed in record_fields(cls).items() if INNER in allowed}
    return {
        key: make_named(registry, as_table(value), _join(where, key))
        if key in inner and isinstance(value, str | dict)
        else value
        for key, value in table.items()
    }


def as_table(value: Any) -> Any:
    """A named table; a name alone stands for one without arguments."""
    return {"name": value} if isinstance(value, str) else value


def has_names(table: Mapping[str, Any]) -> bool:
    """Whether some value is given by names that have to be put in order."""
    return any(isinstance(v, dict) or _nested_texts(v) for v in table.values())


def by_name(
    values: Mapping[str, Any], names: Sequence[str], where: str, default: Any = None
) -> tuple[Any, ...]:
    """The values in the order of `names`; InputError for a name that is unknown or left out."""
    for name in values:
        check_choice(where, name, names)
    if default is None:
        for name in names:
            if name not in values:
                raise InputError(f"{where}: there is no value for {name!r}")
    return tuple(values.get(name, default) for name in names)


def check_keys(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """InputError for a key that is not known, with the nearest one and all of them."""
    known = list(known)
    for key, value in table.items():
        if key not in known:
            near = get_close_matches(key, known, n=1, cutoff=0.6)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            choices = f"Keys: {', '.join(known)}" if known else "It takes no arguments"
            raise InputError(f"{_join(where, key)} = {value!r}: unknown key{hint} {choices}")


# --- details --------------------------------------------------------------------------------------


def _kinds(hint: Any) -> set[str]:
    """What may stand in a file for a field of this type; empty if nothing may."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return set().union(*(_kinds(part) for part in typing.get_args(hint)))
    if hint in _SIMPLE:
        return _SIMPLE[hint]
    origin = typing.get_origin(hint) or hint
    if not isinstance(origin, type):
        return set()
    if origin is os.PathLike:
        return {PATH}
    if issubclass(origin, Algorithm):
        return {INNER}
    if issubclass(origin, collections.abc.Mapping):
        return {TABLE}
    if issubclass(origin, collections.abc.Sequence):
        return {TEXTS} if typing.get_args(hint)[:1] == (str,) else {LIST}
    return set()


def _required(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _check_kind(value: Any, allowed: set[str], where: str) -> None:
    for kind in allowed:
        if not isinstance(value, _PYTHON[kind]) or isinstance(value, bool) != (kind == BOOL):
            continue
        if kind == TEXTS and not all(isinstance(entry, str) for entry in value):
            continue
        return
    raise InputError(f"{where} must be {_one_of(allowed)}, got {value!r}")


def _one_of(allowed: set[str]) -> str:
    return " or ".join(sorted(allowed - {TEXT} if PATH in allowed else allowed))


def _join(where: str, key: str) -> str:
    return f"{where}: {key}" if where else key


def _frozen(value: Any) -> Any:
    """Lists as tuples, all the way down: records are hashable."""
    return tuple(_frozen(v) for v in value) if isinstance(value, list | tuple) else value


def _nested_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(
        isinstance(part, list | tuple) and any(isinstance(entry, str) for entry in part)
        for part in value
    )


def _in_order(key: str, value: Any, names: Sequence[str], where: str) -> Any:
    """Values by name as a list in the order of the names; names in lists of lists as positions."""
    if isinstance(value, dict):
        free = {"lower": -np.inf, "upper": np.inf}  # a bound that is not given does not bind
        return by_name(value, names, where, free.get(key))
    if not _nested_texts(value):
        return value
    for name in (entry for part in value for entry in part if isinstance(entry, str)):
        check_choice(where, name, names)
    index = {name: k for k, name in enumerate(names)}
    return tuple(tuple(index[e] if isinstance(e, str) else e for e in part) for part in value)
