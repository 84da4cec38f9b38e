"""FedADMM: the alternating direction method of multipliers with clients that come and go
(Wang, Marella & Anderson 2022; Gong, Li & Freris 2022).

Solves       min_x (1/N) sum_k f_k(x) + g(x),      f_k smooth (also nonconvex), g any with a prox.

    local   x_k = argmin f_k + <z_k, x_k - x> + rho/2 |x_k - x|^2 = P_k(x - s z_k);
            z_k += rho (x_k - x);   upload the change of u_k = x_k + s z_k
    push    u += sum / N;   x = prox_g(u, s)

P_k: prox of f_k with step s = 1/rho; z_k = -grad f_k(x_k) is the dual variable of x_k = x.
Invariant: u = (1/N) sum_k u_k, over all N clients (the server step |S|/N of Gong et al.). It is
FedDR with relax 1, y_k = x - s z_k, in the variables of ADMM and with one vector less at the
client. step: s, by default 1/sqrt(m L), m the smallest curvature of F at 0 or l, and 0.45/L where
f_k need not be convex.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self

import jax.numpy as jnp
from jax import Array

from fedexact.algorithms.common import check, comes_back, exact_if_seen, prox_step, smooth
from fedexact.core import Algorithm, Assumption, Exactness, Oracle, Prox, Setting, record


class Server(NamedTuple):
    x: Array  # (d,) the model
    u: Array  # (d,) mean of the u_k
    N: Array  # ()


class Client(NamedTuple):
    x: Array  # (d,) its last prox, where the next one starts
    z: Array  # (d,) its dual variable


@record
class FedADMM(Algorithm[Server, Client, Array, Array]):
    step: Any = None
    g: Prox | None = None  # the regulariser, filled in by `resolve`

    name: ClassVar[str] = "FedADMM"
    summary: ClassVar[str] = "consensus ADMM with any regulariser; exact"
    reference: ClassVar[str] = "Wang, Marella & Anderson 2022, arXiv 2203.15104"
    requires: ClassVar[frozenset[str]] = frozenset({"prox"})
    composite: ClassVar[bool] = True
    participation: ClassVar[str] = "any"
    rate: ClassVar[str] = "linear (strongly convex), O(1/T) (convex or nonconvex)"
    lower: ClassVar[str] = "step"

    def __post_init__(self) -> None:
        check(self)

    def resolve(self, setting: Setting) -> Self:
        step = prox_step(setting.constants) if self.step is None else self.step
        return replace(self, step=step, g=setting.regularizer)

    def exactness(self, setting: Setting) -> Exactness:
        return exact_if_seen(setting, "z_k remembers -grad f_k(x*): consensus ADMM")

    def assumptions(self, setting: Setting) -> tuple[Assumption, ...]:
        return smooth(setting), comes_back(setting)

    def init_server(self, x0: Array, n_clients: int) -> Server:
        return Server(x0, x0, jnp.asarray(n_clients, x0.dtype))

    def init_client(self, x0: Array) -> Client:
        return Client(x0, jnp.zeros_like(x0))

    def pull(self, server: Server, round: Array) -> Array:
        return server.x

    def local(
        self, client: Client, pulled: Array, oracle: Oracle, key: Array
    ) -> tuple[Client, Array]:
        x = oracle.prox(pulled - self.step * client.z, self.step, client.x)
        z = client.z + (x - pulled) / self.step
        return Client(x, z), x - client.x + self.step * (z - client.z)

    def push(self, server: Server, total: Array, count: Array) -> Server:
        u = server.u + total / server.N
        return Server(u if self.g is None else self.g.prox(u, self.step), u, server.N)

    def model(self, server: Server) -> Array:
        return server.x

    def local_models(self, clients: Client) -> Array:
        return clients.x

    def invariant(self, server: Server, clients: Client) -> Array:
        return server.u - (clients.x + self.step * clients.z).mean(axis=0)
