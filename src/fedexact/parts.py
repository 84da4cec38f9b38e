"""The clients whose rows are on the devices: all of them, or those that are needed next."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from fedexact.clients import Clients
from fedexact.core import in_float64, narrowed
from fedexact.devices import SPLIT, fetch, put
from fedexact.errors import InputError
from fedexact.layout import Layout, at_least, entries_of, place
from fedexact.losses import Loss
from fedexact.oracles import Size, Stack, factor_of, largest, prox_method
from fedexact.streams import curvatures_of_clients, map_clients

CHUNK = 1 << 25  # entries of X that are read from a memory map at once: 256 MB
ROWS = 4096  # at least, in a part


class Part(NamedTuple):
    """Some clients, or all."""

    layout: Layout  # of these
    oracles: Stack
    ids: np.ndarray | None  # (n,) who they are, ascending; None for everybody

    def of(self, per_client: np.ndarray) -> np.ndarray:
        """(n, ...) those of the part from (N, ...)."""
        return per_client if self.ids is None else per_client[self.ids]


def lone_part(
    client: Clients,
    loss: Loss,
    ridge: np.ndarray,
    row_weight: float,
    constants: tuple[float, float],
    method: str,
    prox: bool = False,
) -> Part:
    """One client by itself, as a site of a real federation holds it: the same numbers there and
    here. The rows are a power of two, so that few programs are compiled.

    `constants` are its L_k and l_k, `method` how proxes are computed; ready for them where `prox`.
    """
    n = client.n_rows
    data = client.take(np.zeros(1, int), at_least(int(n[0]), 1))
    layout = Layout(n, entries_of(data))
    size = Size(len(data.y), layout.sizes[0].entries, bool(len(data.y) == n[0]))
    layout.sizes = (size,)
    stack = place(data, layout, loss, ridge, np.array([row_weight]))
    smoothness, convexity = (jax.numpy.asarray([constant]) for constant in constants)
    stack = dataclasses.replace(
        stack, smoothness=smoothness, strong_convexity=convexity, prox_method=method
    )
    part = Part(layout, stack, None)
    return _with_factors(part) if prox else part


class Parts:
    """The oracles of a problem's clients, put on the devices: once, where the rows are in memory,
    or part by part, where they stay on the disk.

    Attributes:
        layout: of everybody.
        L_k, l_k: (N,) smoothness and strong convexity of the clients' objectives, ridge included.
    """

    def __init__(
        self,
        data: Clients,
        layout: Layout,
        loss: Loss,
        ridge: np.ndarray,
        row_weight: np.ndarray,
        in_memory: bool,
    ) -> None:
        self._data, self.layout = data, layout
        self._loss, self._ridge, self._row_weight = loss, ridge, row_weight
        N, rows = len(data.n_rows), largest(layout.sizes).rows
        self._prox_method = prox_method(loss, len(ridge), rows, N)
        self._alone: dict[tuple[int, bool], Part] = {}
        self.L_k, self.l_k = np.zeros((2, N))
        self._everybody = self._placed(data, layout, None) if in_memory else None
        self.L_k, self.l_k = self._curvatures()
        if self._everybody is not None:
            self._everybody = self._with_constants(self._everybody)
        self._forms: dict[tuple[bool, bool], Part] = {}  # of everybody

    def part(self, ids: np.ndarray | None = None, prox: bool = False, single: bool = False) -> Part:
        """The clients `ids`, or more; everybody if left out. Ready for proxes where `prox`; in
        4-byte numbers where `single`.

        Raises InputError for everybody where the rows stay on the disk.
        """
        if self._everybody is not None:
            return self._of_everybody(self._everybody, prox, single)
        if ids is None:
            raise InputError(
                f"the {len(self._data.y)} rows stay on the disk and this needs all of them in "
                "memory: use fewer, or Problem(in_memory=True)"
            )
        ids = np.unique(ids)
        data = self._data.take(ids, at_least(int(self._data.n_rows[ids].sum()), ROWS))
        part = self._with_constants(self._placed(data, self.layout.only(ids), ids))
        part = _with_factors(part) if prox else part
        return _narrow(part) if single else part

    def _of_everybody(self, everybody: Part, prox: bool, single: bool) -> Part:
        """The rows in single precision, and the factors for proxes, are made once each."""
        if not (prox or single):
            return everybody
        if (prox, single) not in self._forms:
            self._forms[prox, single] = self._form(everybody, prox, single)
        return self._forms[prox, single]

    @in_float64
    def _form(self, everybody: Part, prox: bool, single: bool) -> Part:
        if not single:
            return _with_factors(everybody)
        if not prox:
            return _narrow(everybody)
        part, ready = self.part(single=True), self.part(prox=True)
        factor = narrowed(ready.oracles.factor)
        return part._replace(oracles=dataclasses.replace(part.oracles, factor=factor))

    def alone(self, k: int, prox: bool = False) -> Part:
        """Client k by itself."""
        if (k, prox) not in self._alone:
            client = self._data.take(np.array([k]), int(self._data.n_rows[k]))
            self._alone[k, prox] = lone_part(
                client, self._loss, self._ridge, float(self._row_weight[k]),
                (float(self.L_k[k]), float(self.l_k[k])), self._prox_method, prox,
            )  # fmt: skip
        return self._alone[k, prox]

    def each(self, prox: bool = False) -> Iterator[Part]:
        """Everybody, one part after the other, in client order."""
        if self._everybody is not None:
            yield self.part(None, prox)
            return
        for ids in chunks(self._data.n_rows, self._data.n_features):
            yield self.part(ids, prox)

    def _placed(self, data: Clients, layout: Layout, ids: np.ndarray | None) -> Part:
        weight = self._row_weight if ids is None else self._row_weight[ids]
        stack = place(data, layout, self._loss, self._ridge, weight)
        return Part(layout, stack, ids)

    def _with_constants(self, part: Part) -> Part:
        layout = part.layout
        smoothness, convexity = (
            put(layout.in_slots(part.of(a)), layout.mesh, SPLIT) for a in (self.L_k, self.l_k)
        )
        stack = dataclasses.replace(
            part.oracles,
            smoothness=smoothness,
            strong_convexity=convexity,
            prox_method=self._prox_method,
        )
        return part._replace(oracles=stack)

    def _curvatures(self) -> tuple[np.ndarray, np.ndarray]:
        found = []
        for part in self.each():
            layout = part.layout
            counts = tuple(np.diff(layout.first, axis=1).max(axis=0).tolist())
            slots = curvatures_of_clients(layout.mesh, counts, part.oracles, layout.first)
            found.append([layout.in_client_order(fetch(a)) for a in slots])
        L_k, l_k = (np.concatenate(column) for column in zip(*found, strict=True))
        return L_k, l_k


def mapped(part: Part, fn: Callable[..., Any], args: Any = (), shared: Any = ()) -> Any:
    """(slots, ...) fn(oracle_k, arg_k, ..., *shared) of the part's clients, `args` (n, ...)."""
    layout = part.layout
    slots = tuple(put(layout.in_slots(a), layout.mesh, SPLIT) for a in args)
    return map_clients(fn, layout.mesh, part.oracles, layout.first, slots, shared)


def _narrow(part: Part) -> Part:
    """The same in 4-byte numbers."""
    return part._replace(oracles=narrowed(part.oracles))


def _with_factors(part: Part) -> Part:
    """Ready for proxes: quadratics factored once per client."""
    if part.oracles.prox_method != "factored":
        return part
    return part._replace(oracles=dataclasses.replace(part.oracles, factor=mapped(part, factor_of)))


def chunks(n_rows: np.ndarray, n_features: int) -> list[np.ndarray]:
    """Consecutive clients, of about `CHUNK` entries together."""
    entries = np.cumsum(n_rows) * n_features
    chunk = (entries - n_rows * n_features) // CHUNK
    return np.split(np.arange(len(n_rows)), np.flatnonzero(np.diff(chunk)) + 1)
