"""The target: which clients, which rows, which weights, which regulariser.

    F(x) + g(x),   F(x) = sum_k w_k f_k(x) + (l2 / 2) |x|^2   (the intercept is not penalised)

A client's objective is scaled once, f_k <- N w_k f_k, so that F = (1/N) sum_k f_k and every
algorithm is written in the unweighted form.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, cast

import jax
import numpy as np

from fedexact.ahead import compile_ahead, wait_for
from fedexact.clients import Clients
from fedexact.core import in_float64
from fedexact.devices import fetch
from fedexact.errors import InputError
from fedexact.layout import Layout, clients_layout
from fedexact.losses import CustomLoss, Loss, Rows, make_loss
from fedexact.objective import Objective, Weights, check_settings
from fedexact.oracles import Stack
from fedexact.parts import Part, Parts, mapped
from fedexact.regularizers import Regularizer
from fedexact.streams import sum_over_clients, sum_over_rows


class Problem(Objective):
    """Clients, loss, weights and regulariser: what "the pooled answer" means.

    Args:
        clients: sequence of (X, y), one per client; X (n_k, p) array-like or scipy.sparse,
            y (n_k,). Sizes may differ, n_k >= 1. Or a `Clients`, all rows in one array.
        loss: "squared", "logistic", "multinomial", "poisson", "huber", a Loss, or a JAX function
            of (x, rows) that returns the loss of each row.
        regularizer: g, for example `fx.L1(0.1)`; acts on all coefficients but the intercept.
        l2: ridge added to F, (l2 / 2) |x|^2, intercept excluded.
        weights: what counts alike. "rows" (default): the pooled problem, w_k = n_k / n.
            "clients": w_k = 1 / N. Or a sequence of N positive numbers w_k.
        reduction: whether f_k is the "mean" or the "sum" over the client's rows.

            =========  =========  ================================
            weights    reduction  F(x), without l2
            =========  =========  ================================
            rows       mean       (1/n) sum_i loss_i
            rows       sum        sum_i loss_i
            clients    mean       (1/N) sum_k (1/n_k) sum_i loss_i
            clients    sum        (1/N) sum_k sum_i loss_i
            =========  =========  ================================
        fit_intercept: puts a column of ones first; its coefficient is never penalised.
        names: client names, used in every message.
        feature_names: names of the columns of X; the attribute names the d coefficients.
        shards: over how many JAX devices the clients are spread; chosen by size if left out.
        in_memory: whether the rows are kept in memory. If left out they are, but for a memory map
            larger than half of the machine's memory: then only the rows of a stretch of rounds'
            participants are read, one stretch after the other, and sums go through all rows.

    Raises:
        InputError: naming the client, the column and the value.
    """

    @in_float64
    def __init__(
        self,
        clients: Sequence[tuple[Any, Any]] | Clients,
        loss: str | Loss | Callable[..., Any] = "squared",
        regularizer: Regularizer | str | None = None,
        l2: float = 0.0,
        weights: Weights = "rows",
        reduction: str = "mean",
        fit_intercept: bool = False,
        names: Sequence[str] | None = None,
        feature_names: Sequence[str] | None = None,
        shards: int | None = None,
        in_memory: bool | None = None,
    ) -> None:
        check_settings(l2, reduction)
        data = Clients.of(clients, names, feature_names)
        if fit_intercept:
            data = data.with_intercept()
        loss = make_loss(loss, n_classes=int(np.max(data.y)) + 1)
        self.data = data.with_targets(_check_targets(loss, data))
        if isinstance(loss, CustomLoss):
            X, y = next(self.data.pairs())
            loss.check(Rows(X, cast(Any, y)), f"client {data.names[0]!r}")
        self._define(
            loss, data.names, data.feature_names, data.n_rows, regularizer=regularizer, l2=l2,
            weights=weights, reduction=reduction, fit_intercept=fit_intercept,
        )  # fmt: skip

        self.in_memory = in_memory = _fits(self.data) if in_memory is None else in_memory
        if self.data.sparse and not in_memory:
            raise InputError("in_memory=False: a sparse X cannot stay on the disk; leave it out")
        if in_memory:
            self.data = self.data.in_memory()
        layout = clients_layout(self.data, self.dim, shards if in_memory else 1)
        self._parts = Parts(self.data, layout, self.loss, self.ridge, self.row_weight, in_memory)

    @cached_property
    def fingerprint(self) -> str:
        """Tells these rows, in this order and with these client weights, from any others."""
        return self.data.fingerprint(self.w)

    # --- the clients' oracles on the devices ----------------------------------------------------

    @property
    def layout(self) -> Layout:
        """Where the clients lie."""
        return self._parts.layout

    @property
    def oracles(self) -> Stack:
        """The oracles of all clients."""
        return self.part().oracles

    def part(self, ids: np.ndarray | None = None, prox: bool = False, single: bool = False) -> Part:
        """The oracles of the clients `ids`, or more, on the devices; of everybody if left out.
        Ready for proxes where `prox`; in float32 where `single`.

        Raises InputError for everybody where the rows stay on the disk.
        """
        return self._parts.part(ids, prox, single)

    def alone(self, k: int, prox: bool = False) -> Part:
        """Client k by itself, as a site of a real federation holds it; ready for proxes where
        `prox`."""
        return self._parts.alone(k, prox)

    # --- sums over the clients, streaming -------------------------------------------------------

    @in_float64
    def sum_over_clients(self, fn: Callable[..., Any], *args: Any) -> Any:
        return self._sum(sum_over_clients, fn, args)

    @in_float64
    def map_clients(
        self, fn: Callable[..., Any], *args: Any, shared: tuple[Any, ...] = (), prox: bool = False
    ) -> Any:
        found = [
            jax.tree.map(
                lambda a, part=part: part.layout.in_client_order(fetch(a)),
                mapped(part, fn, tuple(part.of(np.asarray(a)) for a in args), shared),
            )
            for part in self._parts.each(prox)
        ]
        return jax.tree.map(lambda *parts: np.concatenate(parts), *found)

    @in_float64
    def sum_over_rows(self, fn: Callable[..., Any], *args: Any) -> Any:
        return self._sum(sum_over_rows, fn, args)

    def compile_sums(self, fns: Iterable[Callable[..., Any]], *args: Any) -> None:
        """Begins to compile what `sum_over_rows` of these functions runs, on another core."""
        if self.in_memory:
            layout = self.layout
            for fn in fns:
                shared = self.oracles, layout.first, args
                compile_ahead(sum_over_rows, (fn, layout.mesh), shared)

    def smoothness(self) -> tuple[np.ndarray, np.ndarray]:
        return self._parts.L_k, self._parts.l_k

    def _sum(self, over: Callable[..., Any], fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        def total(part: Part) -> Any:
            static, shared = (fn, part.layout.mesh), (part.oracles, part.layout.first, args)
            wait_for(over, static, shared)
            return over(*static, *shared)

        totals = map(total, self._parts.each())
        return functools.reduce(
            lambda a, b: jax.tree.map(np.add, a, b),
            (jax.tree.map(np.asarray, total) for total in totals),
        )

    def pooled(self) -> tuple[Rows, np.ndarray]:
        """All rows stacked in client order, and weights (n,) such that
        F(x) = sum_i weight_i loss_i(x) + 1/2 sum_j ridge_j x_j^2."""
        X = self.data.X.toarray() if self.data.sparse else self.data.block(0, None)
        return Rows(X, cast(Any, self.data.y)), self._pooled_weight()

    def blocks(self, most: int = 65_536) -> Iterator[tuple[Any, np.ndarray, np.ndarray]]:
        """X, y and weights as in `pooled`, at most so many rows at a time; X dense, or CSR where
        the clients' is sparse."""
        weight = self._pooled_weight()
        for begin in range(0, len(weight), most):
            mine = slice(begin, begin + most)
            yield self.data.block(begin, begin + most), self.data.y[mine], weight[mine]

    def _pooled_weight(self) -> np.ndarray:
        return np.repeat(self.row_weight / self.n_clients, self.n_rows)


# --- construction ---------------------------------------------------------------------------------


def _fits(data: Clients) -> bool:
    """Whether rows are to be kept in memory."""
    if not data.on_disk:
        return True
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return data.X.shape[0] * data.n_features * 8 <= memory / 2


def _check_targets(loss: Loss, data: Clients) -> np.ndarray:
    """(n,) targets as the loss takes them; InputError naming the client of one it does not."""
    try:
        return loss.check_targets(data.y, "all clients")
    except InputError:
        for name, (_, y) in zip(data.names, data.pairs(), strict=True):
            loss.check_targets(y, f"client {name!r}")
        raise
