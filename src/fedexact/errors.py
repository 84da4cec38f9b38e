"""The errors that reach a user: what is wrong, where, and what to do."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

import jax
import numpy as np


class FedexactError(Exception):
    """Base of all errors raised on purpose."""


class InputError(FedexactError, ValueError):
    """A value that cannot be used: names the client, column or key, the value, and the remedy."""


class CapabilityError(FedexactError, TypeError):
    """An algorithm and a problem that do not fit together: names what is missing and what fits."""


class DivergenceWarning(UserWarning):
    """A run was stopped because it diverged; the last good state was kept."""


class IdleCoresWarning(UserWarning):
    """JAX was started with fewer CPU devices than there are cores: says how to use them all."""


def check_positive(what: str, value: Any) -> None:
    """Raises InputError unless `value` is a positive finite number.

    None (not chosen yet) and JAX's arrays and traced values pass.
    """
    _check_number(what, value, "a positive finite number", lambda v: 0 < v < np.inf)


def check_nonnegative(what: str, value: Any) -> None:
    """The same with 0 allowed."""
    _check_number(what, value, "a finite number >= 0", lambda v: 0 <= v < np.inf)


def _check_number(what: str, value: Any, kind: str, holds: Callable[[float], bool]) -> None:
    if value is None or isinstance(value, jax.Array):
        return
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not (number and holds(float(value))):
        raise InputError(f"{what} must be {kind}, got {value!r}")


def check_count(what: str, value: Any, at_least: int = 1) -> None:
    """Raises InputError unless `value` is an integer >= `at_least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < at_least:
        raise InputError(f"{what} must be an integer >= {at_least}, got {value!r}")


def check_seed(what: str, value: Any) -> None:
    """Raises InputError unless `value` is an integer that seeds JAX's and NumPy's generators."""
    check_count(what, value, at_least=0)
    if value >= 2**63:
        raise InputError(f"{what} must be less than 2**63, got {value}")


def check_choice(what: str, value: Any, choices: Iterable[str]) -> None:
    """Raises InputError unless `value` is one of `choices`; suggests the nearest."""
    choices = list(choices)
    if value not in choices:
        near = get_close_matches(str(value), choices, n=1, cutoff=0.6)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise InputError(f"{what}: unknown value {value!r}{hint} Choices: {', '.join(choices)}")
