"""MIFA: the last update of every client, absent ones too (Gu, Huang, Zhang & Huang 2021).

Aims at      min_x F(x) = (1/N) sum_k f_k(x)      and, with R > 1, misses it by the drift alone.

    local   z = x;  z -= lr grad f_k(z), R times;  G_k+ = x - z;   upload G_k+ - G_k
    push    G += sum;   x -= lr_server G / N

Client-memory form: client k keeps its last update G_k (0 at first), the server only their sum, so
one vector each way. Invariant: G = sum_k G_k. Whoever takes part, all clients weigh alike: the
fixed points are those of FedAvg with everybody present, sum_k sum_{i<R} grad f_k(G_k^i(x)) = 0.
R = 1 is exact: FOCUS with one local step, and SAG where one client comes at a time.

lr: step on the mean objective, 1 / max(L, R lr_server a) with a = max(L_F, L_F D/2, stale
curvature) as in FOCUS if left out (without the L for R = 1); local_steps: R; lr_server: relaxation
of the server's step; batch_size: rows per local gradient (default: all), makes it a noise ball.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self

import jax.numpy as jnp
from jax import Array

from fedexact.algorithms.common import (
    NOISE_BALL,
    check,
    comes_back,
    descend,
    exact_if_seen,
    remembered_curvature,
    rows_per_gradient,
    smooth,
)
from fedexact.core import Algorithm, Assumption, Exactness, Oracle, Setting, record, static


class Server(NamedTuple):
    x: Array  # (d,)
    G: Array  # (d,) the sum of the G_k
    N: Array  # ()


class Client(NamedTuple):
    G: Array  # (d,) its last update


@record
class MIFA(Algorithm[Server, Client, Array, Array]):
    lr: Any = None
    local_steps: int = static(default=5)
    lr_server: Any = 1.0
    batch_size: int | None = static(default=None)

    name: ClassVar[str] = "MIFA"
    summary: ClassVar[str] = "FedAvg that remembers absent clients; biased by client drift alone"
    reference: ClassVar[str] = "Gu, Huang, Zhang & Huang 2021, arXiv 2106.04159"
    requires: ClassVar[frozenset[str]] = frozenset({"grad"})
    participation: ClassVar[str] = "any"
    rate: ClassVar[str] = "linear to FedAvg's point of full participation (strongly convex)"
    lower: ClassVar[str] = "lr"

    def __post_init__(self) -> None:
        check(self)

    def resolve(self, setting: Setting) -> Self:
        R, lr = self.local_steps, self.lr
        if lr is None:
            local = setting.constants.L if R > 1 else 0.0
            lr = 1.0 / max(local, R * self.lr_server * remembered_curvature(setting))
        return replace(self, lr=lr)

    def exactness(self, setting: Setting) -> Exactness:
        if self.batch_size is not None:
            return NOISE_BALL
        if self.local_steps > 1 and setting.n_clients > 1:
            return Exactness(False, f"client drift: local_steps = {self.local_steps} > 1")
        return exact_if_seen(setting, "G sums the last gradient of every client")

    def assumptions(self, setting: Setting) -> tuple[Assumption, ...]:
        return smooth(setting), comes_back(setting)

    def init_server(self, x0: Array, n_clients: int) -> Server:
        return Server(x0, jnp.zeros_like(x0), jnp.asarray(n_clients, x0.dtype))

    def init_client(self, x0: Array) -> Client:
        return Client(jnp.zeros_like(x0))

    def pull(self, server: Server, round: Array) -> Array:
        return server.x

    def local(
        self, client: Client, pulled: Array, oracle: Oracle, key: Array
    ) -> tuple[Client, Array]:
        z = descend(oracle, pulled, self.lr, self.local_steps, key, self.batch_size)
        return Client(pulled - z), pulled - z - client.G

    def row_gradients(
        self, client: Client, pulled: Array, oracle: Oracle, key: Array
    ) -> Array | int:
        return self.local_steps * rows_per_gradient(oracle, self.batch_size)

    def push(self, server: Server, total: Array, count: Array) -> Server:
        x, G, N = server
        G = G + total
        return Server(x - self.lr_server / N * G, G, N)

    def model(self, server: Server) -> Array:
        return server.x

    def invariant(self, server: Server, clients: Client) -> Array:
        return server.G - clients.G.sum(axis=0)
