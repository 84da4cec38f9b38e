"""PushNewton: incremental Newton, only sums travel (Rodomanov & Kropotov 2016 as pull, push).

Solves       min_x (1/N) sum_k f_k(x) + g(x),      f_k convex with Hessians, g any with a prox.

    local   A_k = hess f_k(x) + m_k D_k;  v_k = A_k x - grad f_k(x);  upload the changes of both
    push    B += sum;  u += sum;  x = argmin_x 1/2 x^T B x - u^T x + N g(x)

(A_k, v_k) is client k's quadratic model, tangent to f_k at its last visit; A_k travels as a packed
triangle, d (d + 1)/2 + d numbers up. With everybody present and m_k = 0 this is Newton's method.
Safeguard, local too: m_k is the damping and D_k the diagonal of the largest Hessian met, at least
L_k/100 (L_k if the first one is nearly 0). A client that finds f_k(x) above what its model said, by
more than half the model's quadratic term, does not move the model there but keeps it, with 10 times
the damping and at least 1. Otherwise m_k /= 4. So a model moves only to where it has been an upper
bound, nearly, as in incremental majorisation (Mairal 2015); near the solution no damping is left. A
client not seen yet has the model damping/2 |x - x0|^2: until then the others do not run away.
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
    B: Array  # (d (d + 1) / 2,) sum of the A_k, packed
    u: Array  # (d,) sum of the v_k
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
        N, model = jnp.asarray(n_clients, x0.dtype), sums(self.init_client(x0))
        return Server(x0, N * model.A, N * model.v, N)

    def init_client(self, x0: Array) -> TangentModel:
        return unseen(x0, self.damping)

    def pull(self, server: Server, round: Array) -> Array:
        return server.x

    def local(
        self, client: TangentModel, pulled: Array, oracle: Oracle, key: Array
    ) -> tuple[TangentModel, Sums]:
        new = visited(client, pulled, oracle)
        return new, jax.tree.map(jnp.subtract, sums(new), sums(client))

    def push(self, server: Server, total: Sums, count: Array) -> Server:
        B, u, (x, *_, N) = server.B + total.A, server.u + total.v, server
        x = minimise(unpack(B, x.size), u, x, N * self.damping, self.g, N)
        return Server(x, B, u, N)

    def model(self, server: Server) -> Array:
        return server.x

    def row_gradients(
        self, client: TangentModel, pulled: Array, oracle: Oracle, key: Array
    ) -> Array | int:
        return oracle.n_rows

    def invariant(self, server: Server, clients: TangentModel) -> Array:
        A, v = jax.vmap(sums)(clients)
        B = unpack(server.B - A.sum(axis=0), server.x.size)
        return server.u - v.sum(axis=0) - B @ server.x
