"""VR-FOCUS: FOCUS with variance-reduced mini-batch gradients (L-SVRG, Kovalev et al. 2020).

Solves       min_x F(x) = (1/N) sum_k f_k(x).

    local   with probability tau B/n_k, and at the first visit: w_k = x, h_k = grad f_k(x);
            x_k = x, y_k = 0;  tau times: (from the second on: x_k -= eta y_k);
            g = grad at x_k - grad at w_k, from the same B rows, + h_k;
            y_k += g - g_k;  g_k = g;                                 upload y_k
    push    y += sum;   x -= eta y

The B rows are drawn anew, with replacement, in every local step. Invariant: y = sum_k g_k. As x
and the snapshots w_k meet at x* the noise dies out: exact at a constant lr, under any
participation, for 3 tau B row gradients per visit on average. eta = lr / N. Between two snapshots
a client is visited n_k/(tau B) times on average: B near n_k/50 is cheap, a small B takes rounds.

lr: as in SGFOCUS; local_steps: tau; batch_size: B. tau B >= n_k and tau = 1 is FOCUS.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedexact.algorithms.common import exact_if_seen
from fedexact.algorithms.tracking import Pulled, Tracking, track
from fedexact.core import Exactness, Oracle, Setting, record, static


class Client(NamedTuple):
    g: Array  # (d,) the gradient it counted last
    w: Array  # (d,) its snapshot of the model
    h: Array  # (d,) its full gradient there
    seen: Array  # () 0 before the first visit, then 1


@record
class VRFOCUS(Tracking[Client]):
    lr: Any = None
    local_steps: int = static(default=1)
    batch_size: int = static(default=32)

    name: ClassVar[str] = "VRFOCUS"
    summary: ClassVar[str] = "FOCUS with variance-reduced mini-batch gradients; exact"
    reference: ClassVar[str] = "this library, after Ying, Li & Yang 2025 and Kovalev et al. 2020"
    requires: ClassVar[frozenset[str]] = frozenset({"grad", "stochastic_grad", "n_rows"})
    participation: ClassVar[str] = "any"
    rate: ClassVar[str] = "linear (strongly convex), observed: no proof"
    lower: ClassVar[str] = "lr"

    def exactness(self, setting: Setting) -> Exactness:
        return exact_if_seen(setting, "y tracks gradients whose noise dies out")

    def init_client(self, x0: Array) -> Client:
        zero = jnp.zeros_like(x0)
        return Client(zero, x0, zero, jnp.zeros((), x0.dtype))

    def refreshes(self, client: Client, oracle: Oracle, key: Array) -> Array:
        """() bool: whether this visit takes a new snapshot."""
        coin = jax.random.uniform(jax.random.fold_in(key, self.local_steps))
        return (client.seen == 0.0) | (coin * oracle.n_rows < self.local_steps * self.batch_size)

    def local(
        self, client: Client, pulled: Pulled, oracle: Oracle, key: Array
    ) -> tuple[Client, Array]:
        w, h = lax.cond(
            self.refreshes(client, oracle, key),
            lambda: (pulled.x, oracle.grad(pulled.x)),
            lambda: (client.w, client.h),
        )

        def grad(i: Array | int, x: Array) -> Array:
            rows = jax.random.fold_in(key, i), self.batch_size
            return oracle.stochastic_grad(x, *rows) - oracle.stochastic_grad(w, *rows) + h

        y, g = track(pulled, client.g, self.local_steps, grad)
        return Client(g, w, h, jnp.ones_like(client.seen)), y

    def row_gradients(
        self, client: Client, pulled: Pulled, oracle: Oracle, key: Array
    ) -> Array | int:
        full = jnp.where(self.refreshes(client, oracle, key), oracle.n_rows, 0)
        return 2 * self.local_steps * self.batch_size + full
