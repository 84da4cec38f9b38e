"""FedDR: randomised Douglas-Rachford splitting (Tran-Dinh, Pham, Phan & Nguyen 2021).

Solves       min_x (1/N) sum_k f_k(x) + g(x),      f_k smooth (also nonconvex), g any with a prox.

    local   y_k += alpha (xbar - x_k);  x_k = P_k(y_k);  upload the change of xhat_k = 2 x_k - y_k
    push    xtilde += sum / N;  xbar = prox_g(xtilde, s)

P_k is the prox of f_k with step s. Invariant: xtilde = (1/N) sum_k xhat_k, over all N clients:
dividing by |S| is biased or blows up, and so is a start other than x0 for x_k, y_k and xhat_k.
alpha = 1 is Douglas-Rachford, 2 Peaceman-Rachford; alpha > 2 can diverge. `server_block` adds the
paper's server variable w, a client with f = 0; its prox of g needs exactly s' = N s/(N + 1):

    push    xtilde += sum / N;  w += alpha (xbar - w);  xbar = prox_g((N xtilde + w)/(N + 1), s')

step: s (default 1/sqrt(m L), m the smallest curvature of F at 0); relax: alpha (default 1.8).
Where f_k need not be convex the defaults are relax 1 and step 0.9 (2 - relax)/(2 L).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self

import jax.numpy as jnp
from jax import Array

from fedexact.algorithms.common import (
    balance,
    check,
    comes_back,
    convex,
    exact_if_seen,
    smooth,
    strongly_convex,
)
from fedexact.core import Algorithm, Assumption, Exactness, Oracle, Prox, Setting, record, static


class Server(NamedTuple):
    x_bar: Array  # (d,) the model
    x_tilde: Array  # (d,) mean of the x_hat_k
    w: Array  # (d,) the server's own block; stays x0 without one
    N: Array  # ()


class Client(NamedTuple):
    x: Array  # (d,) its last prox, where the next one starts
    y: Array  # (d,)
    x_hat: Array  # (d,) what the server holds of it


@record
class FedDR(Algorithm[Server, Client, Array, Array]):
    step: Any = None
    relax: Any = None
    server_block: bool = static(default=False)
    g: Prox | None = None  # the regulariser, filled in by `resolve`

    name: ClassVar[str] = "FedDR"
    summary: ClassVar[str] = "randomised Douglas-Rachford splitting with any regulariser; exact"
    reference: ClassVar[str] = "Tran-Dinh, Pham, Phan & Nguyen 2021, arXiv 2103.03452"
    requires: ClassVar[frozenset[str]] = frozenset({"prox"})
    composite: ClassVar[bool] = True
    participation: ClassVar[str] = "any"
    rate: ClassVar[str] = "linear (strongly convex), O(1/T) (convex or nonconvex)"
    lower: ClassVar[str] = "relax"

    def __post_init__(self) -> None:
        check(self)

    def resolve(self, setting: Setting) -> Self:
        c = setting.constants
        relax = (1.8 if c.convex else 1.0) if self.relax is None else self.relax
        usual = 1.0 / balance(c) if c.convex else 0.9 * (2.0 - relax) / (2.0 * c.L)
        step = usual if self.step is None else self.step
        return replace(self, step=step, relax=relax, g=setting.regularizer)

    def exactness(self, setting: Setting) -> Exactness:
        if self.relax > 2.0 or (self.relax == 2.0 and setting.constants.l <= 0):
            return Exactness(False, "relax < 2 needs convexity, relax = 2 every l_k > 0")
        return exact_if_seen(setting, "y_k remembers s grad f_k(x*): operator splitting")

    def assumptions(self, setting: Setting) -> tuple[Assumption, ...]:
        c = setting.constants
        if not c.convex:
            bound = Assumption("2 - relax - 2 step L > 0", 2 - self.relax - 2 * self.step * c.L > 0)
            return smooth(setting), bound, comes_back(setting)
        return (convex if self.relax < 2 else strongly_convex)(setting), comes_back(setting)

    def init_server(self, x0: Array, n_clients: int) -> Server:
        return Server(x_bar=x0, x_tilde=x0, w=x0, N=jnp.asarray(n_clients, x0.dtype))

    def init_client(self, x0: Array) -> Client:
        return Client(x=x0, y=x0, x_hat=x0)

    def pull(self, server: Server, round: Array) -> Array:
        return server.x_bar

    def local(
        self, client: Client, pulled: Array, oracle: Oracle, key: Array
    ) -> tuple[Client, Array]:
        y = client.y + self.relax * (pulled - client.x)
        x = oracle.prox(y, self.step, client.x)
        return Client(x, y, 2 * x - y), 2 * x - y - client.x_hat

    def push(self, server: Server, total: Array, count: Array) -> Server:
        x_bar, x_tilde, w, N = server._replace(x_tilde=server.x_tilde + total / server.N)
        v, step = x_tilde, self.step
        if self.server_block:
            w = w + self.relax * (x_bar - w)
            v, step = (N * x_tilde + w) / (N + 1), N * step / (N + 1)
        return Server(v if self.g is None else self.g.prox(v, step), x_tilde, w, N)

    def model(self, server: Server) -> Array:
        return server.x_bar

    def local_models(self, clients: Client) -> Array:
        return clients.x

    def invariant(self, server: Server, clients: Client) -> Array:
        return server.x_tilde - clients.x_hat.mean(axis=0)
