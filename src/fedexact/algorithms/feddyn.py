"""FedDyn: proximal steps with a linear term that aligns the clients (Acar et al. 2021).

Solves       min_x F(x) = (1/N) sum_k f_k(x),      f_k smooth (also nonconvex).

    local   theta_k = argmin f_k - <g_k, theta> + mu/2 |theta - x|^2 = P_k(x + s g_k);
            g_k -= mu (theta_k - x);   upload theta_k - x
    push    h -= (mu / N) sum;   x += mean_S(theta_k - x) - s h

P_k: prox of f_k with step s = 1/mu; g_k = grad f_k(theta_k). The mean is over the participants, h
counts them over all N clients: invariant h = (1/N) sum_k g_k. With everybody present it is FedDR
with relax 1 (x is its xtilde, x - s g_k its y_k), otherwise it moves further per visit and wants a
shorter step. step: s, by default 1/(3 sqrt(m L)), m the smallest curvature of F at 0 or l, and
0.15/L where f_k need not be convex.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self

import jax.numpy as jnp
from jax import Array

from fedexact.algorithms.common import (
    check,
    comes_back,
    evenly,
    exact_if_seen,
    prox_step,
    smooth,
)
from fedexact.core import Algorithm, Assumption, Exactness, Oracle, Setting, record


class Server(NamedTuple):
    x: Array  # (d,)
    h: Array  # (d,) mean of the g_k
    N: Array  # ()


class Client(NamedTuple):
    theta: Array  # (d,) its last prox, where the next one starts
    g: Array  # (d,) gradient of f_k there


@record
class FedDyn(Algorithm[Server, Client, Array, Array]):
    step: Any = None

    name: ClassVar[str] = "FedDyn"
    summary: ClassVar[str] = "proximal steps with a dynamic linear term; exact"
    reference: ClassVar[str] = "Acar et al. 2021, arXiv 2111.04263"
    requires: ClassVar[frozenset[str]] = frozenset({"prox"})
    participation: ClassVar[str] = "random cohorts that weigh all clients alike"
    rate: ClassVar[str] = "linear (strongly convex), O(1/T) (convex or nonconvex)"
    lower: ClassVar[str] = "step"

    def __post_init__(self) -> None:
        check(self)

    def resolve(self, setting: Setting) -> Self:
        step = prox_step(setting.constants) / 3.0 if self.step is None else self.step
        return replace(self, step=step)

    def exactness(self, setting: Setting) -> Exactness:
        return exact_if_seen(setting, "g_k remembers grad f_k(x*): h is their mean")

    def assumptions(self, setting: Setting) -> tuple[Assumption, ...]:
        return smooth(setting), evenly(setting), comes_back(setting)

    def init_server(self, x0: Array, n_clients: int) -> Server:
        return Server(x0, jnp.zeros_like(x0), jnp.asarray(n_clients, x0.dtype))

    def init_client(self, x0: Array) -> Client:
        return Client(x0, jnp.zeros_like(x0))

    def pull(self, server: Server, round: Array) -> Array:
        return server.x

    def local(
        self, client: Client, pulled: Array, oracle: Oracle, key: Array
    ) -> tuple[Client, Array]:
        theta = oracle.prox(pulled + self.step * client.g, self.step, client.theta)
        return Client(theta, client.g - (theta - pulled) / self.step), theta - pulled

    def push(self, server: Server, total: Array, count: Array) -> Server:
        x, h, N = server
        h = h - total / (self.step * N)
        return Server(x + total / count - self.step * h, h, N)

    def model(self, server: Server) -> Array:
        return server.x

    def local_models(self, clients: Client) -> Array:
        return clients.theta

    def invariant(self, server: Server, clients: Client) -> Array:
        return server.h - clients.g.mean(axis=0)
