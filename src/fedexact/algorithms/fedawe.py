"""FedAWE: every client walks on from its own model (Xiang, Ioannidis, Yeh, Joe-Wong & Su 2024).

Aims at      min_x F(x) = (1/N) sum_k f_k(x)      and misses it (drift, and a noise ball).

    local    z = x_k;  z -= lr grad f_k(z), R times;  G_k = x_k - z;
             x_k -= lr_server (r - tau_k) G_k;  tau_k = r;    upload x_k
    push     x = sum / |S|
    receive  x_k = x

tau_k is the last round in which client k took part, -1 at first: the factor makes up for the
rounds missed, and the averages over the cohorts mix the models of all (implicit gossip), if every
client meets others. The server hands out the round number and, after the push, the average: a
second message. With everybody present this is FedAvg. Otherwise it circles at a distance ~ lr.

lr: step on the mean objective, 1 / (R lr_server max_k L_k max(1/p_k, D)) if left out, at most 1/L,
D the rounds between two visits in a fixed or correlated order; local_steps: R; lr_server;
batch_size: rows per local gradient (default: all).
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
    mixed,
    rows_per_gradient,
    smooth,
)
from fedexact.core import Algorithm, Assumption, Exactness, Oracle, Setting, record, static


class Server(NamedTuple):
    x: Array  # (d,) the last average


class Client(NamedTuple):
    x: Array  # (d,) its own model
    tau: Array  # () the last round in which it took part


@record
class FedAWE(Algorithm[Server, Client, Array, Array]):
    lr: Any = None
    local_steps: int = static(default=5)
    lr_server: Any = 1.0
    batch_size: int | None = static(default=None)

    name: ClassVar[str] = "FedAWE"
    summary: ClassVar[str] = "own models, steps scaled by the gap; drift and a noise ball"
    reference: ClassVar[str] = "Xiang et al. 2024, arXiv 2409.17446"
    requires: ClassVar[frozenset[str]] = frozenset({"grad"})
    participation: ClassVar[str] = "independent clients, p_k may change with time"
    rate: ClassVar[str] = "O(1/sqrt(T)) with lr ~ 1/sqrt(T) (nonconvex); noise ball at a fixed lr"
    receives: ClassVar[bool] = True
    lower: ClassVar[str] = "lr"

    def __post_init__(self) -> None:
        check(self)

    def resolve(self, setting: Setting) -> Self:
        if self.lr is not None:
            return self
        c, D, seen = setting.constants, setting.gap, setting.p > 0
        echo = np.max(c.L_k[seen] * np.maximum(1.0 / setting.p[seen], D), initial=0.0)
        return replace(self, lr=1.0 / max(c.L, self.local_steps * self.lr_server * float(echo)))

    def exactness(self, setting: Setting) -> Exactness:
        noise = "right on average only: the models of a cohort differ"
        return exact_if_gradient_descent(setting, self.local_steps, self.batch_size, noise)

    def assumptions(self, setting: Setting) -> tuple[Assumption, ...]:
        mix = Assumption("the cohorts mix all clients", mixed(setting))
        return smooth(setting), comes_back(setting), mix

    def init_server(self, x0: Array, n_clients: int) -> Server:
        return Server(x0)

    def init_client(self, x0: Array) -> Client:
        return Client(x0, jnp.full((), -1.0, x0.dtype))

    def pull(self, server: Server, round: Array) -> Array:
        return jnp.asarray(round, server.x.dtype)

    def local(
        self, client: Client, pulled: Array, oracle: Oracle, key: Array
    ) -> tuple[Client, Array]:
        z = descend(oracle, client.x, self.lr, self.local_steps, key, self.batch_size)
        x = client.x + self.lr_server * (pulled - client.tau) * (z - client.x)
        return Client(x, pulled), x

    def receive(self, client: Client, model: Array) -> Client:
        return client._replace(x=model)

    def row_gradients(
        self, client: Client, pulled: Array, oracle: Oracle, key: Array
    ) -> Array | int:
        return self.local_steps * rows_per_gradient(oracle, self.batch_size)

    def push(self, server: Server, total: Array, count: Array) -> Server:
        return Server(total / count)

    def model(self, server: Server) -> Array:
        return server.x

    def local_models(self, clients: Client) -> Array:
        return clients.x
