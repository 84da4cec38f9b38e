"""asyncFedDR: FedDR whose clients work on models that are out of date (Tran-Dinh et al. 2021).

Solves       min_x (1/N) sum_k f_k(x) + g(x),      f_k smooth (also nonconvex), g any with a prox.

    pull    the xbar of `age` pushes ago, age uniform on 0..delay
    local   y_k += alpha (xbar - x_k);  x_k = P_k(y_k);  upload the change of xhat_k = 2 x_k - y_k
    push    xtilde += sum / N;  xbar = prox_g(xtilde, s)

A round is one tick of the server; with Uniform(1) it answers one client per tick, as in the paper.
The age is drawn anew in every round, the same for all of its participants. Invariant and fixed
points are those of FedDR, which it is for delay = 0. step: s (default as FedDR); relax: alpha, by
default 1, which is stable and near the fastest with delays, 1.8 without; delay: the largest age
(10), the server keeps so many models; delay_seed: of the ages (default: the run's seed).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array

from fedexact.algorithms import feddr
from fedexact.algorithms.common import check
from fedexact.core import Algorithm, Assumption, Exactness, Oracle, Prox, Setting, record, static


class Server(NamedTuple):
    now: feddr.Server
    past: Array  # (delay + 1, d) the models, newest first


@record
class AsyncFedDR(Algorithm[Server, feddr.Client, Array, Array]):
    step: Any = None
    relax: Any = None
    delay: int = static(default=10)
    delay_seed: Any = None
    g: Prox | None = None  # the regulariser, filled in by `resolve`

    name: ClassVar[str] = "AsyncFedDR"
    summary: ClassVar[str] = "FedDR with models out of date by a random delay; exact"
    reference: ClassVar[str] = "Tran-Dinh, Pham, Phan & Nguyen 2021, arXiv 2103.03452"
    requires: ClassVar[frozenset[str]] = feddr.FedDR.requires
    composite: ClassVar[bool] = True
    participation: ClassVar[str] = "any; meant for one client at a time"
    rate: ClassVar[str] = "O(1/T) (nonconvex)"
    lower: ClassVar[str] = "relax"

    def __post_init__(self) -> None:
        check(self)

    @property
    def synchronous(self) -> feddr.FedDR:
        """FedDR with the same hyperparameters."""
        return feddr.FedDR(step=self.step, relax=self.relax, g=self.g)

    def resolve(self, setting: Setting) -> Self:
        relax = 1.0 if self.relax is None and self.delay > 0 else self.relax
        chosen = replace(self.synchronous, relax=relax).resolve(setting)
        seed = setting.seed if self.delay_seed is None else self.delay_seed
        return replace(self, step=chosen.step, relax=chosen.relax, g=chosen.g, delay_seed=seed)

    def exactness(self, setting: Setting) -> Exactness:
        return self.synchronous.exactness(setting)

    def assumptions(self, setting: Setting) -> tuple[Assumption, ...]:
        return self.synchronous.assumptions(setting)

    def init_server(self, x0: Array, n_clients: int) -> Server:
        past = jnp.broadcast_to(x0[None, :], (self.delay + 1, x0.size))
        return Server(self.synchronous.init_server(x0, n_clients), past)

    def init_client(self, x0: Array) -> feddr.Client:
        return self.synchronous.init_client(x0)

    def pull(self, server: Server, round: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(self.delay_seed), round)
        return server.past[jax.random.randint(key, (), 0, self.delay + 1)]

    def local(
        self, client: feddr.Client, pulled: Array, oracle: Oracle, key: Array
    ) -> tuple[feddr.Client, Array]:
        return self.synchronous.local(client, pulled, oracle, key)

    def push(self, server: Server, total: Array, count: Array) -> Server:
        now = self.synchronous.push(server.now, total, count)
        return Server(now, jnp.concatenate([now.x_bar[None, :], server.past[:-1]]))

    def model(self, server: Server) -> Array:
        return server.now.x_bar

    def local_models(self, clients: feddr.Client) -> Array:
        return self.synchronous.local_models(clients)

    def invariant(self, server: Server, clients: feddr.Client) -> Array:
        return self.synchronous.invariant(server.now, clients)
