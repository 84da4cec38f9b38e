"""FedProx: local proximal steps, averaged (Li et al. 2020).

Aims at      min_x F(x) = (1/N) sum_k f_k(x)      and misses it (biased unless N = 1).

    local   upload P_k(x) = argmin_u f_k(u) + |u - x|^2 / (2 s)
    push    x = mean_S P_k(x)

Fixed points under full participation: sum_k grad M_k(x) = 0 with M_k the Moreau envelope of f_k;
for quadratics sum_k (H_k + mu I)^-1 (H_k x - b_k) = 0, mu = 1/s the paper's penalty. A smaller s
is less biased and slower.

step: s (default 1/sqrt(m L), m the smallest curvature of F at 0).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self

from jax import Array

from fedexact.algorithms.common import balance, check, comes_back, convex, evenly, exact_if_seen
from fedexact.core import Algorithm, Assumption, Exactness, Oracle, Setting, record


class Server(NamedTuple):
    x: Array  # (d,)


class Client(NamedTuple):
    u: Array  # (d,) its last prox, where the next one starts


@record
class FedProx(Algorithm[Server, Client, Array, Array]):
    step: Any = None

    name: ClassVar[str] = "FedProx"
    summary: ClassVar[str] = "local proximal steps, averaged; biased, less so for a small step"
    reference: ClassVar[str] = "Li et al. 2020"
    requires: ClassVar[frozenset[str]] = frozenset({"prox"})
    participation: ClassVar[str] = "any; uneven participation biases further"
    rate: ClassVar[str] = "linear to a biased point (strongly convex)"
    lower: ClassVar[str] = "step"

    def __post_init__(self) -> None:
        check(self)

    def resolve(self, setting: Setting) -> Self:
        step = 1.0 / balance(setting.constants) if self.step is None else self.step
        return replace(self, step=step)

    def exactness(self, setting: Setting) -> Exactness:
        if setting.n_clients == 1:
            return exact_if_seen(setting, "one client: the proximal point method")
        return Exactness(False, "aims at the mean of the clients' Moreau envelopes")

    def assumptions(self, setting: Setting) -> tuple[Assumption, ...]:
        return convex(setting), comes_back(setting), evenly(setting)

    def init_server(self, x0: Array, n_clients: int) -> Server:
        return Server(x0)

    def init_client(self, x0: Array) -> Client:
        return Client(x0)

    def pull(self, server: Server, round: Array) -> Array:
        return server.x

    def local(
        self, client: Client, pulled: Array, oracle: Oracle, key: Array
    ) -> tuple[Client, Array]:
        u = oracle.prox(pulled, self.step, client.u)
        return Client(u), u

    def push(self, server: Server, total: Array, count: Array) -> Server:
        return Server(total / count)

    def model(self, server: Server) -> Array:
        return server.x
