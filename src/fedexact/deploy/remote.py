"""The pooled objective whose rows are at the sites: its sums are query rounds.

`certify` and everything else that takes an objective works on it unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from fedexact.bounds import point_sums
from fedexact.core import Pooled
from fedexact.errors import FedexactError
from fedexact.losses import CustomLoss, Loss
from fedexact.objective import Objective
from fedexact.oracles import RowOracle

Arrays = Mapping[str, np.ndarray]


class FederationError(FedexactError):
    """The run cannot go on; what has been done is kept in its checkpoint."""


class UnansweredError(FederationError):
    """A sum over all clients is incomplete: somebody did not answer."""


class Call(NamedTuple):
    """A function of an oracle, to be summed (over "sum_over_rows" or "sum_over_clients") or
    collected ("map_clients")."""

    fn: Callable[..., Any]
    over: str
    args: tuple[np.ndarray, ...]

    def key(self) -> tuple[Any, ...]:
        """Two calls with the same key have the same outcome."""
        args = tuple((a.shape, a.dtype.str, a.tobytes()) for a in self.args)
        return self.fn.__qualname__, self.over, args


class Ask(Protocol):
    """Asks all clients: (N, ...) per client for "map_clients", else the sums, call by call."""

    def __call__(self, calls: Sequence[Call]) -> list[Any]: ...


class RemoteObjective(Objective):
    """The objective that the members agreed on.

    Args:
        ask: carries calls to all members; UnansweredError where one is silent.
        smoothness: (N,) L_k and l_k.
        settings: regularizer, l2, weights, reduction, fit_intercept.
    """

    def __init__(
        self,
        ask: Ask,
        loss: Loss,
        names: Sequence[str],
        columns: Sequence[str],
        n_rows: np.ndarray,
        **settings: Any,
    ) -> None:
        self._define(loss, names, columns, n_rows, **settings)
        self._ask = ask
        self._known: dict[tuple[Any, ...], Any] = {}
        self._smoothness = np.zeros(len(names)), np.zeros(len(names))

    def with_smoothness(self, L_k: np.ndarray, l_k: np.ndarray) -> RemoteObjective:
        """Takes the clients' constants, once they are known."""
        self._smoothness = L_k, l_k
        return self

    def smoothness(self) -> tuple[np.ndarray, np.ndarray]:
        return self._smoothness

    def sum_over_rows(self, fn: Callable[..., Any], *args: Any) -> Any:
        return self._call(fn, "sum_over_rows", args)

    def sum_over_clients(self, fn: Callable[..., Any], *args: Any) -> Any:
        return self._call(fn, "sum_over_clients", args)

    def map_clients(
        self, fn: Callable[..., Any], *args: Any, shared: tuple[Any, ...] = (), prox: bool = False
    ) -> Any:
        assert not args, "values per client are not sent"
        assert not prox, "proxes are not sent"
        return self._call(fn, "map_clients", shared)

    def _pooled_constants(self) -> Pooled:
        if isinstance(self.loss, CustomLoss):  # objects at the sites: no curvature to ask for
            L, l = (float(np.mean(each)) for each in self._smoothness)  # noqa: E741
            return Pooled(L or 1.0, l, 100.0)
        return super()._pooled_constants()

    def prepare(self, x: np.ndarray) -> None:
        """Asks at once for the sums that a certificate of x begins with: fewer rounds."""
        sums = point_sums(self)
        fns = [*sums, RowOracle.value_and_grad] if sums else []
        calls = [Call(fn, "sum_over_rows", (np.asarray(x, float),)) for fn in fns]
        calls = [call for call in calls if call.key() not in self._known]
        for call, found in zip(calls, self._ask(calls) if calls else (), strict=True):
            self._known[call.key()] = found

    def _call(self, fn: Callable[..., Any], over: str, args: Sequence[Any]) -> Any:
        call = Call(fn, over, tuple(np.asarray(arg) for arg in args))
        if call.key() not in self._known:
            self._known[call.key()] = self._ask([call])[0]
        return self._known[call.key()]


def collected(over: str, found: Sequence[Any]) -> Any:
    """The outcome of a call from those of the clients, in client order."""
    if over == "map_clients":
        return jax.tree.map(lambda *parts: np.concatenate(parts), *found)
    return functools.reduce(lambda a, b: jax.tree.map(np.add, a, b), found)
