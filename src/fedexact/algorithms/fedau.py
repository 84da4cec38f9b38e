"""FedAU: updates weighted by the mean gap between two visits (Wang & Ji 2024).

Aims at      min_x F(x) = (1/N) sum_k f_k(x)      and misses it (drift, and a noise ball).

    local   z = x;  z -= lr grad f_k(z), R times;   upload omega_k (z - x)
    push    x += lr_server sum / N

omega_k estimates 1/p_k by the running mean of the client's intervals: the rounds from one visit
to its next, the visit included, and the first from round 0 on; an interval that reaches K rounds
is closed there and a new one begins (`cutoff`). 1 before an interval is known. A client cannot
act while it is away, so on a visit in round r it first closes the floor((r - start)/K) intervals
of length K that have passed. The intervals cover the rounds 0, ..., start - 1 without a break,
hence omega_k = start / intervals: the client keeps these two numbers, and is told r.

With everybody present this is FedAvg. Otherwise E[p_k omega_k] is 1, cut off 1 - (1 - p_k)^K for
independent rounds, so that the clients weigh alike on average, up to noise of radius ~ sqrt(lr).

lr: step on the mean objective, 1 / max(L, R lr_server max(L_F, L_F D/2, w)) if left out, D as in
FOCUS, w = max_k max(1/p_k, D) L_k/N; local_steps: R; lr_server; cutoff: K; batch_size: rows per
local gradient.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from jax import Array

from fedexact.algorithms.common import (
    check,
    comes_back,
    descend,
    exact_if_gradient_descent,
    remembered_curvature,
    rows_per_gradient,
    smooth,
)
from fedexact.core import Algorithm, Assumption, Exactness, Oracle, Setting, record, static


class Server(NamedTuple):
    x: Array  # (d,)
    N: Array  # ()


class Client(NamedTuple):
    start: Array  # () the round in which the open interval began
    intervals: Array  # () closed before it


class Pulled(NamedTuple):
    x: Array  # (d,)
    round: Array  # ()


@record
class FedAU(Algorithm[Server, Client, Pulled, Array]):
    lr: Any = None
    local_steps: int = static(default=5)
    lr_server: Any = 1.0
    cutoff: int = static(default=50)
    batch_size: int | None = static(default=None)

    name: ClassVar[str] = "FedAU"
    summary: ClassVar[str] = "FedAvg weighted by the clients' mean gaps; drift and a noise ball"
    reference: ClassVar[str] = "Wang & Ji 2024, arXiv 2306.03401"
    requires: ClassVar[frozenset[str]] = frozenset({"grad"})
    participation: ClassVar[str] = "independent rounds with fixed, unknown p_k"
    rate: ClassVar[str] = "O(1/sqrt(T)) with lr ~ 1/sqrt(T) (nonconvex); noise ball at a fixed lr"
    lower: ClassVar[str] = "lr"

    def __post_init__(self) -> None:
        check(self)

    def resolve(self, setting: Setting) -> Self:
        if self.lr is not None:
            return self
        c, seen = setting.constants, setting.p > 0.0
        omega = np.maximum(1.0 / setting.p[seen], setting.participation.gap(setting.n_clients))
        weighted = float(np.max(omega * c.L_k[seen], initial=0.0)) / setting.n_clients
        steepest = max(remembered_curvature(setting), weighted)
        return replace(self, lr=1.0 / max(c.L, self.local_steps * self.lr_server * steepest))

    def exactness(self, setting: Setting) -> Exactness:
        noise = "right on average only: the weighted sum over the cohort is noisy"
        return exact_if_gradient_descent(setting, self.local_steps, self.batch_size, noise)

    def assumptions(self, setting: Setting) -> tuple[Assumption, ...]:
        rare = Assumption(
            "the cut-off is rarely reached", bool((setting.p * self.cutoff > 3).all())
        )
        return smooth(setting), comes_back(setting), rare

    def init_server(self, x0: Array, n_clients: int) -> Server:
        return Server(x0, jnp.asarray(n_clients, x0.dtype))

    def init_client(self, x0: Array) -> Client:
        return Client(jnp.zeros((), x0.dtype), jnp.zeros((), x0.dtype))

    def pull(self, server: Server, round: Array) -> Pulled:
        return Pulled(server.x, jnp.asarray(round, server.x.dtype))

    def local(
        self, client: Client, pulled: Pulled, oracle: Oracle, key: Array
    ) -> tuple[Client, Array]:
        cut = jnp.floor((pulled.round - client.start) / self.cutoff)
        start, intervals = client.start + cut * self.cutoff, client.intervals + cut
        omega = jnp.where(intervals > 0, start / jnp.maximum(intervals, 1.0), 1.0)
        z = descend(oracle, pulled.x, self.lr, self.local_steps, key, self.batch_size)
        return Client(pulled.round + 1.0, intervals + 1.0), omega * (z - pulled.x)

    def row_gradients(
        self, client: Client, pulled: Pulled, oracle: Oracle, key: Array
    ) -> Array | int:
        return self.local_steps * rows_per_gradient(oracle, self.batch_size)

    def push(self, server: Server, total: Array, count: Array) -> Server:
        return server._replace(x=server.x + self.lr_server / server.N * total)

    def model(self, server: Server) -> Array:
        return server.x
