"""FedPD: primal-dual proximal steps (Zhang, Hong, Dhople, Yin & Liu 2021).

Solves       min_x F(x) = (1/N) sum_k f_k(x),      f_k smooth (also nonconvex).

    local   x0_k = x;  R times:
            x_k = argmin_u f_k(u) + <lam_k, u - x0_k> + |u - x0_k|^2 / (2 eta)
                = P_k(x0_k - eta lam_k);
            lam_k += (x_k - x0_k) / eta;   x0_k = x_k + eta lam_k;
            upload the change of x0_k since the last visit
    push    x += sum / N

P_k: prox of f_k with step eta; lam_k = -grad f_k(x_k). Invariant: x = (1/N) sum_k x0_k, over all
N clients, which keeps partial participation exact. R = 1 is FedDR with relax 1. R replaces the
paper's coin that skips communications, and R > 1 is biased: the steps after the first are x_k =
P_k(x_k), on f_k alone. For quadratics with local minimisers m_k and Q_k = (I + eta H_k)^-1 the
fixed point solves sum_k (I - Q_k^R)(I - eta H_k Q_k^R)^-1 (x - m_k) = 0. step: eta, by default
1/sqrt(m L), m the smallest curvature of F at 0 or l, and 0.45/L where f_k need not be convex;
local_steps: R.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self

import jax.numpy as jnp
from jax import Array

from fedexact.algorithms.common import check, comes_back, exact_if_seen, prox_step, smooth
from fedexact.core import Algorithm, Assumption, Exactness, Oracle, Setting, record, static


class Server(NamedTuple):
    x: Array  # (d,) mean of the x0_k
    N: Array  # ()


class Client(NamedTuple):
    x: Array  # (d,) its last prox, where the next one starts
    lam: Array  # (d,) its dual variable
    x0: Array  # (d,) its copy of the model


@record
class FedPD(Algorithm[Server, Client, Array, Array]):
    step: Any = None
    local_steps: int = static(default=1)

    name: ClassVar[str] = "FedPD"
    summary: ClassVar[str] = "primal-dual proximal steps; exact with one local step"
    reference: ClassVar[str] = "Zhang et al. 2021, arXiv 2005.11418"
    requires: ClassVar[frozenset[str]] = frozenset({"prox"})
    participation: ClassVar[str] = "any (everybody in the paper)"
    rate: ClassVar[str] = "linear (strongly convex), O(1/T) (convex or nonconvex); one local step"
    lower: ClassVar[str] = "step"

    def __post_init__(self) -> None:
        check(self)

    def resolve(self, setting: Setting) -> Self:
        return replace(self, step=prox_step(setting.constants) if self.step is None else self.step)

    def exactness(self, setting: Setting) -> Exactness:
        if self.local_steps > 1 and setting.n_clients > 1:
            return Exactness(False, f"client drift: local_steps = {self.local_steps} > 1")
        return exact_if_seen(setting, "lam_k remembers -grad f_k(x*): primal-dual")

    def assumptions(self, setting: Setting) -> tuple[Assumption, ...]:
        one = Assumption("one local step", self.local_steps == 1)
        return smooth(setting), one, comes_back(setting)

    def init_server(self, x0: Array, n_clients: int) -> Server:
        return Server(x0, jnp.asarray(n_clients, x0.dtype))

    def init_client(self, x0: Array) -> Client:
        return Client(x0, jnp.zeros_like(x0), x0)

    def pull(self, server: Server, round: Array) -> Array:
        return server.x

    def local(
        self, client: Client, pulled: Array, oracle: Oracle, key: Array
    ) -> tuple[Client, Array]:
        x, lam, x0 = client.x, client.lam, pulled
        for _ in range(self.local_steps):
            x = oracle.prox(x0 - self.step * lam, self.step, x)
            lam = lam + (x - x0) / self.step
            x0 = x + self.step * lam
        return Client(x, lam, x0), x0 - client.x0

    def push(self, server: Server, total: Array, count: Array) -> Server:
        return server._replace(x=server.x + total / server.N)

    def model(self, server: Server) -> Array:
        return server.x

    def local_models(self, clients: Client) -> Array:
        return clients.x

    def invariant(self, server: Server, clients: Client) -> Array:
        return server.x - clients.x0.mean(axis=0)
