"""What FOCUS and its mini-batch forms share: the server's sum and the steps of a visit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedexact.algorithms.common import check, comes_back, remembered_curvature, smooth
from fedexact.core import Algorithm, Assumption, Setting


class Server(NamedTuple):
    x: Array  # (d,)
    y: Array  # (d,) the sum of the g_k
    N: Array  # ()


class Pulled(NamedTuple):
    x: Array  # (d,)
    eta: Array  # () lr / N


class Tracked(Protocol):
    """The state of a client whose gradient g is counted in y."""

    @property
    def g(self) -> Array: ...  # (d,)


C = TypeVar("C", bound=Tracked)


class Tracking(Algorithm[Server, C, Pulled, Array], Generic[C]):
    """y = sum_k g_k at the server, x -= (lr / N) y: FOCUS, whatever gradient its clients use."""

    lr: Any
    local_steps: int
    batch_size: Any = None  # rows per gradient, all of them if None

    def __post_init__(self) -> None:
        check(self)

    def resolve(self, setting: Setting) -> Self:
        usual = 1.0 / steepest(setting, self.local_steps, self.batch_size)
        return replace(self, lr=usual if self.lr is None else self.lr)

    def assumptions(self, setting: Setting) -> tuple[Assumption, ...]:
        return smooth(setting), comes_back(setting)

    def init_server(self, x0: Array, n_clients: int) -> Server:
        return Server(x0, jnp.zeros_like(x0), jnp.asarray(n_clients, x0.dtype))

    def pull(self, server: Server, round: Array) -> Pulled:
        return Pulled(server.x, self.lr / server.N)

    def push(self, server: Server, total: Array, count: Array) -> Server:
        x, y, N = server
        y = y + total
        return Server(x - self.lr / N * y, y, N)

    def model(self, server: Server) -> Array:
        return server.x

    def invariant(self, server: Server, clients: C) -> Array:
        return server.y - clients.g.sum(axis=0)


def track(
    pulled: Pulled, g: Array, local_steps: int, grad: Callable[[Array | int, Array], Array]
) -> tuple[Array, Array]:
    """(d,), (d,) the upload y_k of a visit, and the gradient counted last; `g` the one before.

    `grad(i, x)` is the client's gradient at x in local step i = 0, ..., local_steps - 1.
    """

    def step(i: Array | int, x: Array, y: Array, g: Array) -> tuple[Array, Array, Array]:
        new = grad(i, x)
        return x, y + new - g, new

    def descend(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        x, y, g = state
        return step(i, x - pulled.eta * y, y, g)

    first = step(0, pulled.x, jnp.zeros_like(g), g)
    _, y, g = lax.fori_loop(1, local_steps, descend, first)
    return y, g


def steepest(setting: Setting, local_steps: int, batch_size: int | None = None) -> float:
    """Steps below its inverse keep FOCUS stable on full gradients, or on those of B rows.

    A batch may consist of the steepest row alone: its curvature is up to L_k + row_L_k/B. That
    noise enters the mean of N, and stays there until the client comes again.
    """
    c, N, seen = setting.constants, setting.n_clients, setting.p > 0.0
    noise = 0.0 * c.L_k if batch_size is None else c.row_L_k / batch_size
    stay = np.maximum(1.0 / setting.p[seen], setting.gap)
    noisy = float(np.max(stay * noise[seen], initial=0.0)) / N
    damping = (local_steps - 1) * float(np.max(c.L_k + noise)) / N
    return max(remembered_curvature(setting) + noisy, damping)
