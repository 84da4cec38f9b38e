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

from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array

from fedexact.algorithms.common import exact_if_seen
from fedexact.algorithms.tracking import Pulled, Tracking, track
from fedexact.core import Exactness, Oracle, Setting, record, static


class Client(NamedTuple):
    g: Array  # (d,) the gradient it counted last


@record
class FOCUS(Tracking[Client]):
    lr: Any = None
    local_steps: int = static(default=1)

    name: ClassVar[str] = "FOCUS"
    summary: ClassVar[str] = "push-pull gradient tracking under arbitrary participation; exact"
    reference: ClassVar[str] = "Ying, Li & Yang 2025, arXiv 2503.20117"
    requires: ClassVar[frozenset[str]] = frozenset({"grad"})
    participation: ClassVar[str] = "any"
    rate: ClassVar[str] = "linear (strongly convex or Polyak-Lojasiewicz), O(1/T) (nonconvex)"
    lower: ClassVar[str] = "lr"

    def exactness(self, setting: Setting) -> Exactness:
        return exact_if_seen(setting, "y tracks the sum of all gradients")

    def init_client(self, x0: Array) -> Client:
        return Client(jnp.zeros_like(x0))

    def local(
        self, client: Client, pulled: Pulled, oracle: Oracle, key: Array
    ) -> tuple[Client, Array]:
        y, g = track(pulled, client.g, self.local_steps, lambda _, x: oracle.grad(x))
        return Client(g), y

    def row_gradients(
        self, client: Client, pulled: Pulled, oracle: Oracle, key: Array
    ) -> Array | int:
        return self.local_steps * oracle.n_rows
