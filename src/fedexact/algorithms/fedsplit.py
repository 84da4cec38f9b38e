"""FedSplit: Peaceman-Rachford splitting of the consensus (Pathak & Wainwright 2020).

Solves       min_x F(x) = (1/N) sum_k f_k(x),      f_k convex.

    local   z_k+ = z_k + 2 tau (P_k(2x - z_k) - x);  upload z_k+ - z_k
    push    x += sum / N

P_k: prox of f_k with step s. The z_k are kept (replaced by x, they give FedProx's bias); invariant
x = (1/N) sum_k z_k; fixed point z_k = x* - s grad f_k(x*). tau = 1/2 is Douglas-Rachford (f_k
convex), tau = 1 Peaceman-Rachford (strongly convex): with s = 1/sqrt(l L) and everybody present
|x_t - x*| <= (1 - 2/(sqrt(kappa) + 1))^t |z_0 - z*| / sqrt(N), z stacked. step: s, by default
1/sqrt(m L), m the smallest curvature of F at 0; relax: tau (0.9); per_client: s_k =
1/sqrt(l_k L_k), uploads and mean weighted by 1/s_k, max_k kappa_k in the place of kappa.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from jax import Array

from fedexact.algorithms.common import (
    balance,
    check,
    comes_back,
    convex,
    exact_if_seen,
    strongly_convex,
)
from fedexact.core import Algorithm, Assumption, Exactness, Oracle, Setting, record, static
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
    scales: np.ndarray | None = None  # (N,) the 1/s_k, filled in by `resolve` where per_client

    name: ClassVar[str] = "FedSplit"
    summary: ClassVar[str] = "Peaceman-Rachford (or Douglas-Rachford) splitting; exact"
    reference: ClassVar[str] = "Pathak & Wainwright 2020, arXiv 2005.05238"
    requires: ClassVar[frozenset[str]] = frozenset({"prox"})
    participation: ClassVar[str] = "any"
    rate: ClassVar[str] = "linear (strongly convex), O(1/T) (convex, relax < 1)"
    lower: ClassVar[str] = "relax"

    def __post_init__(self) -> None:
        check(self)
        if self.per_client and self.step is not None:
            raise InputError(f"FedSplit: per_client=True chooses the steps; drop step={self.step}")

    def resolve(self, setting: Setting) -> Self:
        c = setting.constants
        new = replace(self, relax=0.9 if self.relax is None else self.relax)
        if not self.per_client:
            return replace(new, step=1.0 / balance(c) if self.step is None else self.step)
        if c.l <= 0:
            at = f"not {c.l:g} as at client {setting.names[int(c.l_k.argmin())]!r}"
            raise InputError(
                f"FedSplit per_client needs l_k > 0, {at}: add l2 (no use to an intercept)"
            )
        return replace(new, scales=(c.l_k * c.L_k) ** 0.5)

    def exactness(self, setting: Setting) -> Exactness:
        if self.relax > 1 or (self.relax == 1 and setting.constants.l <= 0):
            return Exactness(False, "relax < 1 needs convexity, relax = 1 every l_k > 0")
        return exact_if_seen(setting, "z_k remembers s grad f_k(x*): operator splitting")

    def assumptions(self, setting: Setting) -> tuple[Assumption, ...]:
        curved = convex(setting) if self.relax < 1 else strongly_convex(setting)
        return curved, comes_back(setting)

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

    def local_models(self, clients: Client) -> Array:
        return clients.u

    def invariant(self, server: Server, clients: Client) -> Array:
        scales = 1.0 if self.scales is None else jnp.asarray(self.scales)[:, None]
        return server.x - jnp.sum(scales * clients.z, axis=0) / server.W
