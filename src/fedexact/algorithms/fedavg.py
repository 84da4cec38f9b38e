"""FedAvg / FedGD: local gradient steps, averaged (McMahan et al. 2017).

Aims at      min_x F(x) = (1/N) sum_k f_k(x)      and misses it (biased).

    local   z = x;  z -= lr grad f_k(z), R times;  upload z - x
    push    x += lr_server mean_S(z - x)

Fixed points under full participation: sum_k sum_{i<R} grad f_k(G_k^i(x)) = 0 with
G_k(x) = x - lr grad f_k(x); for quadratics f_k = x'H_k x / 2 - b_k'x this is
sum_k M_k (H_k x - b_k) = 0, M_k = sum_{i<R} (I - lr H_k)^i. To first order in lr the bias is
lr (R - 1)/2 (sum_k H_k)^-1 sum_k H_k grad f_k(x*). Uneven participation biases further, towards
the q_k-weighted objective, also with R = 1. R = 1 with everybody is gradient descent.

lr: gradient step on the mean objective (default 1/L); local_steps: R; lr_server: relaxation of the
server's step; batch_size: rows per local gradient (default: all).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self

from jax import Array

from fedexact.algorithms.common import (
    check,
    comes_back,
    descend,
    evenly,
    exact_if_gradient_descent,
    rows_per_gradient,
    smooth,
)
from fedexact.core import Algorithm, Assumption, Exactness, Oracle, Setting, record, static


class Server(NamedTuple):
    x: Array  # (d,)


@record
class FedAvg(Algorithm[Server, tuple[()], Array, Array]):
    lr: Any = None
    local_steps: int = static(default=5)
    lr_server: Any = 1.0
    batch_size: int | None = static(default=None)

    name: ClassVar[str] = "FedAvg"
    summary: ClassVar[str] = "local gradient steps, averaged; biased by client drift"
    reference: ClassVar[str] = "McMahan et al. 2017"
    requires: ClassVar[frozenset[str]] = frozenset({"grad"})
    participation: ClassVar[str] = "any; uneven participation biases further"
    rate: ClassVar[str] = "linear to a biased point (strongly convex)"
    lower: ClassVar[str] = "lr"

    def __post_init__(self) -> None:
        check(self)

    def resolve(self, setting: Setting) -> Self:
        lr = 1.0 / setting.constants.L if self.lr is None else self.lr
        return replace(self, lr=lr)

    def exactness(self, setting: Setting) -> Exactness:
        partial = "uneven participation: aims at the q_k-weighted objective"
        if setting.even:
            partial = "right on average only: the cohort's mean gradient is noisy"
        return exact_if_gradient_descent(setting, self.local_steps, self.batch_size, partial)

    def assumptions(self, setting: Setting) -> tuple[Assumption, ...]:
        return smooth(setting), comes_back(setting), evenly(setting)

    def init_server(self, x0: Array, n_clients: int) -> Server:
        return Server(x0)

    def init_client(self, x0: Array) -> tuple[()]:
        return ()

    def pull(self, server: Server, round: Array) -> Array:
        return server.x

    def local(
        self, client: tuple[()], pulled: Array, oracle: Oracle, key: Array
    ) -> tuple[tuple[()], Array]:
        z = descend(oracle, pulled, self.lr, self.local_steps, key, self.batch_size)
        return client, z - pulled

    def row_gradients(
        self, client: tuple[()], pulled: Array, oracle: Oracle, key: Array
    ) -> Array | int:
        return self.local_steps * rows_per_gradient(oracle, self.batch_size)

    def push(self, server: Server, total: Array, count: Array) -> Server:
        return Server(server.x + self.lr_server * total / count)

    def model(self, server: Server) -> Array:
        return server.x
