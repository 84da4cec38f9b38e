"""Anderson: extrapolation of the fixed-point map of FedSplit or FedDR; only sums travel.

Solves       min_x (1/N) sum_k f_k(x) + g(x), f_k convex;  inner=FedSplit() takes g = 0.

    local   z_k = sum_j alpha_j T_kj;  r_k = 2 tau (P_k(2x - z_k) - x);  keep T_k = z_k + r_k, r_k
            upload r_k, T_k and the products <r_k, r_kj>, j one of the last m + 1 iterations
    push    G, zbar_j: sums of the products, of T_k;  alpha from G;  zbar = sum_j alpha_j zbar_j;
            x = prox_g(zbar, s);  with somebody missing zbar += sum r_k / N

P_k: prox of f_k with step s. T is FedSplit with relax tau; with x = prox_g(zbar) it is Douglas-
Rachford with g taken first, FedDR with alpha = 2 tau in another order: in the printed order the
residual needs the new x, one more message. z is never sent: G, the Gram matrix of the stacked
residuals, is a sum of m + 1 numbers per client and round, and every client combines its own last
images with the same coefficients, minimising |sum_j alpha_j r_j|, sum_j alpha_j = 1. `decide` is
the safeguard. A round in which somebody is missing is a plain one, exact as FedSplit is, and
clients make up for a combination they have missed. Invariant: zbar = mean of the z_k.
inner: its step and relax; memory: m (5); safeguard: largest residual at which extrapolation starts,
relative to the first (10).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array

from fedexact.algorithms import extrapolation, splitting_map
from fedexact.algorithms.common import check, comes_back, convex, everybody
from fedexact.algorithms.extrapolation import Past, Pulled, Upload, Window
from fedexact.algorithms.splitting_map import Splitting, check_splitting
from fedexact.core import Algorithm, Assumption, Exactness, Oracle, Setting, record, static


class Server(NamedTuple):
    z: Array  # (d,) mean of the z_k
    images: Array  # (m + 1, d) means of the T_kj
    alpha: Array
    version: Array
    window: Window
    N: Array  # ()


@record
class Anderson(Algorithm[Server, Past, Pulled, Upload]):
    inner: Splitting | None = None
    memory: int = static(default=5)
    safeguard: Any = None

    name: ClassVar[str] = "Anderson"
    summary: ClassVar[str] = "Anderson acceleration of FedSplit or FedDR, safeguarded; exact"
    reference: ClassVar[str] = "Zhang, O'Donoghue & Boyd 2020, arXiv 1808.03971; A2DR, 1908.11482"
    requires: ClassVar[frozenset[str]] = frozenset({"prox"})
    participation: ClassVar[str] = "everybody; plain rounds where somebody is missing"
    rate: ClassVar[str] = "that of the inner algorithm, up to a constant factor of rounds"
    composite: ClassVar[bool] = True
    lower: ClassVar[str] = "safeguard"

    def __post_init__(self) -> None:
        check(self)
        check_splitting(self.inner)

    def resolve(self, setting: Setting) -> Self:
        return replace(
            self,
            inner=splitting_map.resolved(self.inner, setting),
            safeguard=10.0 if self.safeguard is None else self.safeguard,
        )

    def exactness(self, setting: Setting) -> Exactness:
        return splitting_map.resolved(self.inner, setting).exactness(setting)

    def assumptions(self, setting: Setting) -> tuple[Assumption, ...]:
        return convex(setting), everybody(setting), comes_back(setting)

    def init_server(self, x0: Array, n_clients: int) -> Server:
        past, N = extrapolation.no_past(self.memory, x0), jnp.asarray(n_clients, x0.dtype)
        alpha = jnp.zeros_like(past.images[:, 0])
        return Server(x0, past.images, alpha, past.version, extrapolation.empty(self.memory, x0), N)

    def init_client(self, x0: Array) -> Past:
        return extrapolation.no_past(self.memory, x0)

    def pull(self, server: Server, round: Array) -> Pulled:
        return Pulled(self.model(server), server.alpha, server.version, server.window.slot)

    def local(
        self, client: Past, pulled: Pulled, oracle: Oracle, key: Array
    ) -> tuple[Past, Upload]:
        z = extrapolation.iterate(client, pulled.alpha, pulled.version)
        u, r = splitting_map.residual(self.inner, pulled.x, z, oracle, client.u)
        client = extrapolation.remember(client, pulled, z + r, r, u)
        return client, Upload(r, client.z, client.residuals @ r)

    def push(self, server: Server, total: Upload, count: Array) -> Server:
        z, window, N = server.z + total.change / server.N, server.window, server.N
        plain = server._replace(z=z, window=extrapolation.interrupted(window))
        images = server.images.at[window.slot.astype(int)].set(total.image / N)
        window, alpha = extrapolation.decide(window, total.products, self.safeguard)
        full = Server(alpha @ images, images, alpha, server.version + 1, window, N)
        return jax.tree.map(lambda a, b: jnp.where(count == N, a, b), full, plain)

    def model(self, server: Server) -> Array:
        return splitting_map.model(self.inner, server.z)

    def invariant(self, server: Server, clients: Past) -> Array:
        z = jax.vmap(extrapolation.iterate, (0, None, None))(clients, server.alpha, server.version)
        return server.z - z.mean(axis=0)
