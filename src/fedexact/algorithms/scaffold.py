"""SCAFFOLD: local gradient steps with control variates (Karimireddy et al. 2020).

Solves       min_x F(x) = (1/N) sum_k f_k(x).

    local   z = x;  z -= lr (grad f_k(z) - c_k + c), R times;  upload (z - x, c_k+ - c_k), where
            c_k+ = grad f_k(x) (option 1) or c_k - c + (x - z)/(R lr) (option 2)
    push    x += lr_server mean_S(z - x);   c += sum(c_k+ - c_k) / N

The mean of z - x is over the participants, that of the c_k over all N: invariant c = mean c_k. lr:
step on the mean objective, 1 / max(L, R lr_server max(L_F, L_F D/4, stale curvature)) if left out,
D as in FOCUS; local_steps: R; batch_size: rows per gradient (default: all), makes it a noise ball.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self

import jax.numpy as jnp
from jax import Array, lax

from fedexact.algorithms.common import (
    NOISE_BALL,
    check,
    comes_back,
    exact_if_seen,
    local_grad,
    rows_per_gradient,
    smooth,
    stale_curvature,
)
from fedexact.core import Algorithm, Assumption, Exactness, Oracle, Setting, record, static


class Server(NamedTuple):
    x: Array  # (d,)
    c: Array  # (d,) mean of the c_k
    N: Array  # ()


class Client(NamedTuple):
    c: Array  # (d,) its control variate


class Message(NamedTuple):
    x: Array  # (d,) down: the model; up: its change
    c: Array  # (d,) down: the mean control variate; up: the change of the client's own


@record
class SCAFFOLD(Algorithm[Server, Client, Message, Message]):
    lr: Any = None
    local_steps: int = static(default=5)
    lr_server: Any = 1.0
    option: int = static(default=2)
    batch_size: int | None = static(default=None)

    name: ClassVar[str] = "SCAFFOLD"
    summary: ClassVar[str] = "local gradient steps corrected by control variates; exact"
    reference: ClassVar[str] = "Karimireddy et al. 2020"
    requires: ClassVar[frozenset[str]] = frozenset({"grad"})
    participation: ClassVar[str] = "any"
    rate: ClassVar[str] = "linear (strongly convex), O(1/T) (nonconvex)"
    lower: ClassVar[str] = "lr"

    def __post_init__(self) -> None:
        check(self)

    def resolve(self, setting: Setting) -> Self:
        c, D = setting.constants, setting.gap
        per_round = self.lr_server * max(c.L_F, c.L_F * D / 4, stale_curvature(setting))
        steepest = max(c.L, self.local_steps * per_round)
        return replace(self, lr=1.0 / steepest if self.lr is None else self.lr)

    def exactness(self, setting: Setting) -> Exactness:
        if self.batch_size is not None:
            return NOISE_BALL
        return exact_if_seen(setting, "c_k remembers grad f_k(x*): control variates")

    def assumptions(self, setting: Setting) -> tuple[Assumption, ...]:
        return smooth(setting), comes_back(setting)

    def init_server(self, x0: Array, n_clients: int) -> Server:
        return Server(x0, jnp.zeros_like(x0), jnp.asarray(n_clients, x0.dtype))

    def init_client(self, x0: Array) -> Client:
        return Client(jnp.zeros_like(x0))

    def pull(self, server: Server, round: Array) -> Message:
        return Message(server.x, server.c)

    def local(
        self, client: Client, pulled: Message, oracle: Oracle, key: Array
    ) -> tuple[Client, Message]:
        (x, c), R = pulled, self.local_steps

        def grad(i: Array | int, z: Array) -> Array:
            return local_grad(oracle, z, key, i, self.batch_size)

        z = lax.fori_loop(0, R, lambda i, z: z - self.lr * (grad(i, z) - client.c + c), x)
        new = grad(R, x) if self.option == 1 else client.c - c + (x - z) / (R * self.lr)
        return Client(new), Message(z - x, new - client.c)

    def row_gradients(
        self, client: Client, pulled: Message, oracle: Oracle, key: Array
    ) -> Array | int:
        gradients = self.local_steps + (self.option == 1)
        return gradients * rows_per_gradient(oracle, self.batch_size)

    def push(self, server: Server, total: Message, count: Array) -> Server:
        x = server.x + self.lr_server * total.x / count
        return Server(x, server.c + total.c / server.N, server.N)

    def model(self, server: Server) -> Array:
        return server.x

    def invariant(self, server: Server, clients: Client) -> Array:
        return server.c - clients.c.mean(axis=0)
