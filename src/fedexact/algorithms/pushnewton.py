"""PushNewton: incremental Newton, only sums travel (Rodomanov & Kropotov 2016 as pull, push).

Solves       min_x (1/N) sum_k f_k(x) + g(x),      f_k convex with Hessians, g any with a prox.

    local   A_k = hess f_k(x) + m_k D_k;  v_k = A_k x - grad f_k(x);  upload the changes of both
    push    B += sum;  u += sum;  n += clients seen for the first time
            x = argmin_x 1/2 x^T B x - u^T x + (N - n) damping/2 |x - x0|^2 + N g(x)

(A_k, v_k) is client k's quadratic model, tangent to f_k where it was last, at first at x0; A_k
travels as a packed triangle, d (d + 1)/2 + d + 1 numbers up. With everybody present and m_k = 0
this is Newton's method.
Safeguard, local too: m_k is the damping and D_k the diagonal of the largest Hessian met (L_k/100
where that is 0; scaled to the mean L_k, and m_k = 1, if the first one is nearly 0). A client that
finds f_k(x) above what its model said, by more than half the model's quadratic term, does not move
the model there but keeps it, with 10 times the damping and at least 1. Otherwise m_k /= 4. So a
model moves only to where it has been an upper bound, nearly, as in incremental majorisation (Mairal
2015); near the solution no damping is left. The server stands in for clients not seen yet: until
then the others do not run away.
Invariant: B = sum_k A_k, u = sum_k v_k. damping: default L.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array

from fedexact.algorithms.common import check, comes_back, convex, exact_if_seen
from fedexact.algorithms.quadratic_model import minimise, unpack
from fedexact.algorithms.tangent_model import Sums, TangentModel, sums, unseen, visited
from fedexact.core import Algorithm, Assumption, Exactness, Oracle, Prox, Setting, record
from fedexact.regularizers import Zero


class Server(NamedTuple):
    x: Array  # (d,)
    sums: Sums  # of the A_k, packed, the v_k, and how many were seen
    peak: Array  # (d,) largest diagonal of B so far: the size of its roundings
    x0: Array  # (d,)
    N: Array  # ()


@record
class PushNewton(Algorithm[Server, TangentModel, Array, Sums]):
    damping: Any = None
    g: Prox | None = None  # the regulariser, filled in by `resolve` where there is one

    name: ClassVar[str] = "PushNewton"
    summary: ClassVar[str] = "incremental Newton under any participation; exact, superlinear"
    reference: ClassVar[str] = "after Rodomanov & Kropotov 2016, ICML (NIM)"
    requires: ClassVar[frozenset[str]] = frozenset({"value", "grad", "hessian"})
    participation: ClassVar[str] = "any"
    rate: ClassVar[str] = "superlinear near a minimiser with positive curvature"
    composite: ClassVar[bool] = True
    recovers: ClassVar[bool] = True
    lower: ClassVar[str] = "damping"

    def __post_init__(self) -> None:
        check(self)

    def resolve(self, setting: Setting) -> Self:
        g = None if isinstance(setting.regularizer, Zero) else setting.regularizer
        damping = setting.constants.L if self.damping is None else self.damping
        return replace(self, damping=damping, g=g)

    def exactness(self, setting: Setting) -> Exactness:
        return exact_if_seen(setting, "the sum of the models has the gradient of F where they meet")

    def assumptions(self, setting: Setting) -> tuple[Assumption, ...]:
        return convex(setting), comes_back(setting)

    def init_server(self, x0: Array, n_clients: int) -> Server:
        none = sums(self.init_client(x0))
        return Server(x0, none, jnp.zeros_like(x0), x0, jnp.asarray(n_clients, x0.dtype))

    def init_client(self, x0: Array) -> TangentModel:
        return unseen(x0)

    def pull(self, server: Server, round: Array) -> Array:
        return server.x

    def local(
        self, client: TangentModel, pulled: Array, oracle: Oracle, key: Array
    ) -> tuple[TangentModel, Sums]:
        new = visited(client, pulled, oracle)
        return new, jax.tree.map(jnp.subtract, sums(new), sums(client))

    def push(self, server: Server, total: Sums, count: Array) -> Server:
        now, N, x0 = jax.tree.map(jnp.add, server.sums, total), server.N, server.x0
        B, anchor = unpack(now.A, x0.size), (N - now.seen) * self.damping
        peak = jnp.maximum(server.peak, jnp.diag(B))
        anchored = B + anchor * jnp.eye(x0.size, dtype=x0.dtype)
        x = minimise(anchored, now.v + anchor * x0, server.x, peak, self.g, N)
        return Server(x, now, peak, x0, N)

    def model(self, server: Server) -> Array:
        return server.x

    def remedy(self) -> str:
        return "standardise the columns or start nearer to 0 (the sums overflowed)"

    def row_gradients(
        self, client: TangentModel, pulled: Array, oracle: Oracle, key: Array
    ) -> Array | int:
        return oracle.n_rows

    def invariant(self, server: Server, clients: TangentModel) -> Array:
        """All that is summed: (d (d + 1) / 2 + d + 1,)."""
        apart = jax.tree.map(lambda s, c: s - c.sum(axis=0), server.sums, jax.vmap(sums)(clients))
        return jnp.concatenate([apart.A, apart.v, apart.seen[None]])
