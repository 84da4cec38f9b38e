"""SG-FOCUS: FOCUS with mini-batch gradients (Ying, Li & Yang 2025).

Aims at      min_x F(x) = (1/N) sum_k f_k(x)      up to a noise ball.

    local   x_k = x, y_k = 0;  tau times: (from the second on: x_k -= eta y_k);
            g = grad of f_k at x_k from B rows;  y_k += g - g_k;  g_k = g;   upload y_k
    push    y += sum;   x -= eta y

The B rows are drawn anew, with replacement, in every local step. Invariant: y = sum_k g_k. Exact
on average under any participation, but at a constant lr E|x - x*|^2 is proportional to lr:
VRFOCUS does without it. eta = lr / N.

lr: step on the mean objective, 1/max(a + max_k max(1/p_k, D) b_k/N, (tau - 1) max_k (L_k + b_k)/N)
with a = max(L_F, L_F D/2, stale curvature) as in FOCUS and b_k = (n_k/B) max_i L_ki if left out,
L_ki the smoothness of row i; local_steps: tau; batch_size: B.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedexact.algorithms.common import NOISE_BALL
from fedexact.algorithms.tracking import Pulled, Tracking, track
from fedexact.core import Exactness, Oracle, Setting, record, static


class Client(NamedTuple):
    g: Array  # (d,) the gradient it counted last


@record
class SGFOCUS(Tracking[Client]):
    lr: Any = None
    local_steps: int = static(default=1)
    batch_size: int = static(default=32)

    name: ClassVar[str] = "SGFOCUS"
    summary: ClassVar[str] = "FOCUS with mini-batch gradients; a noise ball at a constant lr"
    reference: ClassVar[str] = "Ying, Li & Yang 2025, arXiv 2503.20117"
    requires: ClassVar[frozenset[str]] = frozenset({"stochastic_grad"})
    participation: ClassVar[str] = "any"
    rate: ClassVar[str] = "linear to a noise ball of radius ~ sqrt(lr) (strongly convex)"
    lower: ClassVar[str] = "lr"

    def exactness(self, setting: Setting) -> Exactness:
        return NOISE_BALL

    def init_client(self, x0: Array) -> Client:
        return Client(jnp.zeros_like(x0))

    def local(
        self, client: Client, pulled: Pulled, oracle: Oracle, key: Array
    ) -> tuple[Client, Array]:
        def grad(i: Array | int, x: Array) -> Array:
            return oracle.stochastic_grad(x, jax.random.fold_in(key, i), self.batch_size)

        y, g = track(pulled, client.g, self.local_steps, grad)
        return Client(g), y

    def row_gradients(
        self, client: Client, pulled: Pulled, oracle: Oracle, key: Array
    ) -> Array | int:
        return self.local_steps * self.batch_size
