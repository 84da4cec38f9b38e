"""ProxSkip (Scaffnew): local gradient steps with control variates, a coin when to communicate
(Mishchenko, Malinovsky, Stich & Richtarik 2022).

Solves       min_x F(x) = (1/N) sum_k f_k(x),      f_k strongly convex, everybody present.

    pull    x and the steps until the coin of probability p first says "communicate": Geometric(p)
    local   x_k = x;  that many times: x_k -= gamma (grad f_k(x_k) - h_k);   upload x_k
    push    x = mean_S x_k
    receive h_k += (p / gamma) (x - x_k)

A round is a communication; the coin belongs to the server and is the same for all. Invariant:
sum_k h_k = 0, since the mean is over the participants; fixed point h_k = grad f_k(x*). With
everybody present the error falls in mean square by 1 - min(gamma l, p^2) per local step. Clients
that only ever meet each other conserve the sum of their h_k: blocks that never mix, or one client
at a time, do not find x*. lr: gamma (default 1/L); probability: p (default sqrt(m/L), at least
0.02, m the smallest curvature of F at 0 or l); coin_seed: of the coin (default: the run's seed).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedexact.algorithms.common import (
    balance,
    check,
    comes_back,
    everybody,
    exact_if_seen,
    mixed,
    smooth,
    strongly_convex,
)
from fedexact.core import Algorithm, Assumption, Exactness, Oracle, Setting, record


class Server(NamedTuple):
    x: Array  # (d,)


class Client(NamedTuple):
    x: Array  # (d,) where its local steps ended
    h: Array  # (d,) its control variate


class Pulled(NamedTuple):
    x: Array  # (d,)
    steps: Array  # () integer >= 1


@record
class ProxSkip(Algorithm[Server, Client, Pulled, Array]):
    lr: Any = None
    probability: Any = None
    coin_seed: Any = None

    name: ClassVar[str] = "ProxSkip"
    summary: ClassVar[str] = "gradient steps with control variates, communication by a coin; exact"
    reference: ClassVar[str] = "Mishchenko et al. 2022, arXiv 2202.09357"
    requires: ClassVar[frozenset[str]] = frozenset({"grad", "n_rows"})
    participation: ClassVar[str] = "everybody; partial cohorts that mix work, without a proof"
    rate: ClassVar[str] = "linear, sqrt(kappa) rounds (strongly convex, everybody present)"
    receives: ClassVar[bool] = True
    lower: ClassVar[str] = "lr"

    def __post_init__(self) -> None:
        check(self)

    def resolve(self, setting: Setting) -> Self:
        c = setting.constants
        p = min(max(balance(c) / c.L, 0.02), 1.0) if self.probability is None else self.probability
        seed = setting.seed if self.coin_seed is None else self.coin_seed
        return replace(self, lr=self.lr or 1.0 / c.L, probability=p, coin_seed=seed)

    def exactness(self, setting: Setting) -> Exactness:
        verdict = exact_if_seen(setting, "h_k remembers grad f_k(x*): control variates")
        if verdict.exact and not mixed(setting):
            return Exactness(False, "cohorts do not mix: sum h_k is conserved in each group")
        return verdict

    def assumptions(self, setting: Setting) -> tuple[Assumption, ...]:
        return smooth(setting), strongly_convex(setting), everybody(setting), comes_back(setting)

    def init_server(self, x0: Array, n_clients: int) -> Server:
        return Server(x0)

    def init_client(self, x0: Array) -> Client:
        return Client(x0, jnp.zeros_like(x0))

    def pull(self, server: Server, round: Array) -> Pulled:
        key = jax.random.fold_in(jax.random.key(self.coin_seed), round)
        u = 1.0 - jax.random.uniform(key, (), server.x.dtype)  # (0, 1]: at most 37 / p steps
        steps = jnp.ceil(jnp.log(u) / jnp.log1p(-self.probability))
        return Pulled(server.x, jnp.maximum(steps, 1.0).astype(int))

    def local(
        self, client: Client, pulled: Pulled, oracle: Oracle, key: Array
    ) -> tuple[Client, Array]:
        def descend(_: Array, x: Array) -> Array:
            return x - self.lr * (oracle.grad(x) - client.h)

        x = lax.fori_loop(0, pulled.steps, descend, pulled.x)
        return client._replace(x=x), x

    def row_gradients(self, client: Client, pulled: Pulled, oracle: Oracle, key: Array) -> Array:
        return pulled.steps * oracle.n_rows

    def push(self, server: Server, total: Array, count: Array) -> Server:
        return Server(total / count)

    def receive(self, client: Client, model: Array) -> Client:
        return client._replace(h=client.h + self.probability / self.lr * (model - client.x))

    def model(self, server: Server) -> Array:
        return server.x

    def local_models(self, clients: Client) -> Array:
        return clients.x

    def invariant(self, server: Server, clients: Client) -> Array:
        return clients.h.mean(axis=0)
