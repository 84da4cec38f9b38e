"""FOCUS: gradient tracking by push-pull over arbitrary participation (Ying, Li & Yang 2025).

Solves       min_x F(x) = (1/N) sum_k f_k(x).

    local   x_k = x, y_k = 0;  tau times: (from the second on: x_k -= eta y_k);
            y_k += grad f_k(x_k) - g_k;  g_k = grad f_k(x_k);      upload y_k
    push    y += sum;   x -= eta y

g_k is the last gradient that client k has counted (0 at first). Invariant: y = sum_k g_k. One
vector down, one up, one running sum at the server; eta = lr / N. Exact for any participation in
which every client keeps coming back. lr: step on the mean objective, 1 / max(L_F, L_F D/2, stale
curvature, (tau - 1) L/N) if left out, D the rounds between two visits in a fixed or correlated
order; local_steps: tau, they damp the change a visit reports by (I - eta H_k)^(tau - 1).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self

import jax.numpy as jnp
from jax import Array, lax

from fedexact.algorithms.common import check, exact_if_seen, stale_curvature
from fedexact.core import Algorithm, Exactness, Oracle, Setting, record, static


class Server(NamedTuple):
    x: Array  # (d,)
    y: Array  # (d,) the sum of the g_k
    N: Array  # ()


class Client(NamedTuple):
    g: Array  # (d,)


class Pulled(NamedTuple):
    x: Array  # (d,)
    eta: Array  # () lr / N


@record
class FOCUS(Algorithm[Server, Client, Pulled, Array]):
    lr: Any = None
    local_steps: int = static(default=1)

    name: ClassVar[str] = "FOCUS"
    summary: ClassVar[str] = "push-pull gradient tracking under arbitrary participation; exact"
    reference: ClassVar[str] = "Ying, Li & Yang 2025, arXiv 2503.20117"
    requires: ClassVar[frozenset[str]] = frozenset({"grad"})
    lower: ClassVar[str] = "lr"

    def __post_init__(self) -> None:
        check(self)

    def resolve(self, setting: Setting) -> Self:
        c, D = setting.constants, setting.participation.gap(setting.n_clients)
        damping = (self.local_steps - 1) * c.L / setting.n_clients
        steepest = max(c.L_F, c.L_F * D / 2, stale_curvature(setting), damping)
        return replace(self, lr=1.0 / steepest if self.lr is None else self.lr)

    def exactness(self, setting: Setting) -> Exactness:
        return exact_if_seen(setting, "y tracks the sum of all gradients")

    def init_server(self, x0: Array, n_clients: int) -> Server:
        return Server(x0, jnp.zeros_like(x0), jnp.asarray(n_clients, x0.dtype))

    def init_client(self, x0: Array) -> Client:
        return Client(jnp.zeros_like(x0))

    def pull(self, server: Server, round: Array) -> Pulled:
        return Pulled(server.x, self.lr / server.N)

    def local(
        self, client: Client, pulled: Pulled, oracle: Oracle, key: Array
    ) -> tuple[Client, Array]:
        def descend(_: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            x, y, g = state
            return track(x - pulled.eta * y, y, g)

        def track(x: Array, y: Array, g: Array) -> tuple[Array, Array, Array]:
            grad = oracle.grad(x)
            return x, y + grad - g, grad

        first = track(pulled.x, jnp.zeros_like(pulled.x), client.g)
        _, y, g = lax.fori_loop(1, self.local_steps, descend, first)
        return Client(g), y

    def push(self, server: Server, total: Array, count: Array) -> Server:
        x, y, N = server
        y = y + total
        return Server(x - self.lr / N * y, y, N)

    def model(self, server: Server) -> Array:
        return server.x

    def invariant(self, server: Server, clients: Client) -> Array:
        return server.y - clients.g.sum(axis=0)
