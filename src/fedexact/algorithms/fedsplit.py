"""FedSplit: Peaceman-Rachford splitting of the consensus (Pathak & Wainwright 2020).

Solves       min_x F(x) = (1/N) sum_k f_k(x),      f_k convex.

    local   z_k+ = z_k + 2 tau (P_k(2x - z_k) - x);   upload z_k+ - z_k
    push    x += sum / N                                                       (x = mean of all z_k)

P_k is the prox of f_k with step s. The z_k are kept across rounds: replacing them by x in every
round gives FedProx's bias. Invariant: x = (1/N) sum_k z_k. Fixed point z_k = x* - s grad f_k(x*).
tau = 1 is Peaceman-Rachford (f_k strongly convex and smooth): with s = 1/sqrt(l L) and everybody
present |x_t - x*| <= (1 - 2/(sqrt(kappa) + 1))^t |z_1 - z*| / sqrt(N), z stacked. tau = 1/2 is
Douglas-Rachford (f_k convex). `per_client`: s_k = 1/sqrt(l_k L_k), known to client k alone; uploads
are scaled by 1/s_k, x is the mean of the z_k weighted by 1/s_k, max_k kappa_k replaces kappa.

step: s (default 1/sqrt(l L)); relax: tau (default 1 where l > 0, else 1/2).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from jax import Array

from fedexact.algorithms.common import balance, check, exact_if_seen
from fedexact.core import Algorithm, Exactness, Oracle, Setting, record, static
from fedexact.errors import InputError


class Server(NamedTuple):
    x: Array  # (d,) mean of the z_k
    W: Array  # () N, or sum_k 1/s_k with per-client steps


class Client(NamedTuple):
    z: Array  # (d,)
    u: Array  # (d,) its last prox, where the next one starts


@record
class FedSplit(Algorithm[Server, Client, Array, Array]):
    step: Any = None
    relax: Any = None
    per_client: bool = static(default=False)
    scales: Any = None  # (N,) the 1/s_k, filled in by `resolve` where per_client

    name: ClassVar[str] = "FedSplit"
    summary: ClassVar[str] = "Peaceman-Rachford (or Douglas-Rachford) splitting; exact"
    reference: ClassVar[str] = "Pathak & Wainwright 2020, arXiv 2005.05238"
    requires: ClassVar[frozenset[str]] = frozenset({"prox"})
    lower: ClassVar[str] = "relax"

    def __post_init__(self) -> None:
        check(self)
        if self.per_client and self.step is not None:
            raise InputError(f"FedSplit: per_client=True chooses the steps; drop step={self.step}")

    def resolve(self, setting: Setting) -> Self:
        c = setting.constants
        relax = (1.0 if c.l > 0 else 0.5) if self.relax is None else self.relax
        if not self.per_client:
            step = 1.0 / balance(c) if self.step is None else self.step
            return dataclasses.replace(self, step=step, relax=relax)
        for k in np.flatnonzero(c.l_k <= 0):
            raise InputError(
                f"FedSplit(per_client=True) needs l_k > 0 at every client, but client {k} has "
                f"l_k = {c.l_k[k]}; add a ridge, l2 > 0, or leave per_client out"
            )
        return dataclasses.replace(self, relax=relax, scales=np.sqrt(c.l_k * c.L_k))

    def exactness(self, setting: Setting) -> Exactness:
        if self.relax > 1.0:
            return Exactness(False, f"relax = {self.relax} > 1 over-relaxes and may diverge")
        if self.relax == 1.0 and setting.constants.l <= 0:
            return Exactness(False, "relax = 1 needs every l_k > 0; relax = 1/2 only convexity")
        return exact_if_seen(setting, "z_k remembers s grad f_k(x*): operator splitting")

    def init_server(self, x0: Array, n_clients: int) -> Server:
        W = n_clients if self.scales is None else jnp.sum(self.scales)
        return Server(x0, jnp.asarray(W, x0.dtype))

    def init_client(self, x0: Array) -> Client:
        return Client(z=x0, u=x0)

    def pull(self, server: Server, round: Array) -> Array:
        return server.x

    def local(
        self, client: Client, pulled: Array, oracle: Oracle, key: Array
    ) -> tuple[Client, Array]:
        scale = jnp.sqrt(oracle.smoothness * oracle.strong_convexity) if self.per_client else 1.0
        step = 1.0 / scale if self.per_client else self.step
        u = oracle.prox(2 * pulled - client.z, step, client.u)
        z = client.z + 2 * self.relax * (u - pulled)
        return Client(z, u), scale * (z - client.z)

    def push(self, server: Server, total: Array, count: Array) -> Server:
        return server._replace(x=server.x + total / server.W)

    def model(self, server: Server) -> Array:
        return server.x

    def invariant(self, server: Server, clients: Client) -> Array:
        n = clients.z.shape[0]
        scales = jnp.ones(n) if self.scales is None else jnp.asarray(self.scales)
        return server.x - scales @ clients.z / server.W
