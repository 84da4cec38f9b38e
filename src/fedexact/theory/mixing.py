"""Rounds as products with matrices over the rows 0, ..., N (Ying, Li & Yang 2025).

The matrices R(S), A(S), C(S) = R(S)^T and W(S) of one round are those of the matrix engine; here
are their expectations under a participation, a drawing of a round, and FedAvg and FOCUS written
with nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedexact.core import in_float64
from fedexact.engines.matrices import (
    average_matrix,
    check_size,
    check_stochastic,
    mixing_matrix,
    pull_matrix,
    push_matrix,
)
from fedexact.errors import InputError, check_count, check_positive
from fedexact.participation import Participation
from fedexact.problem import Problem
from fedexact.theory.monotone import gradients, stacked

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "MeanMatrices",
    "average_matrix",
    "check_stochastic",
    "draw_round",
    "fedavg",
    "focus",
    "mean_matrices",
    "mixing_matrix",
    "pull_matrix",
    "push_matrix",
    "simulated_matrices",
]

BATCHES = 50  # of consecutive rounds, whose means give the standard errors
DRAWN = 40  # clients at most in a drawing
PULL, PUSH, ABSENT = "#0072B2", "#D55E00", "#999999"


# --- expectations ---------------------------------------------------------------------------------


class MeanMatrices(NamedTuple):
    """E R(S), E A(S) and E C(S) = (E R(S))^T, the long-run means over the rounds."""

    p: np.ndarray  # (N,) p_k = P(k in S), row k of E R is p_k e_0 + (1 - p_k) e_k
    q: np.ndarray  # (N,) q_k = E[1{k in S} / |S|], row 0 of E A is (P(S empty), q_1, ..., q_N)
    p_error: np.ndarray  # (N,) standard errors; 0 where p is exact to rounding
    q_error: np.ndarray  # (N,)

    @property
    def empty(self) -> float:
        """P(S empty) = 1 - sum_k q_k."""
        return max(0.0, 1.0 - float(np.sum(self.q)))

    @property
    def pull(self) -> np.ndarray:
        """(N + 1, N + 1) E R(S), row-stochastic."""
        R = np.diag(np.concatenate([[1.0], 1.0 - self.p]))
        R[1:, 0] = self.p
        return R

    @property
    def average(self) -> np.ndarray:
        """(N + 1, N + 1) E A(S), row-stochastic; A(empty) is the identity."""
        A = np.eye(len(self.q) + 1)
        A[0] = np.concatenate([[self.empty], self.q])
        return A

    @property
    def push(self) -> np.ndarray:
        """(N + 1, N + 1) E C(S), column-stochastic."""
        return self.pull.T


def mean_matrices(participation: Participation, n_clients: int) -> MeanMatrices:
    """The expectations by the pattern's closed forms of p_k and q_k.

    A pattern that only estimates q_k says so by its `aggregation_error`, which is `q_error` here;
    of Categorical's estimate p_k = m q_k, so that p_k has the same relative error.
    """
    _check(participation, n_clients)
    p, q = participation.inclusion(n_clients), participation.aggregation(n_clients)
    q_error = participation.aggregation_error(n_clients)
    p_error = q_error * np.divide(p, q, out=np.zeros_like(p), where=q > 0.0)
    return MeanMatrices(p, q, p_error, q_error)


def simulated_matrices(
    participation: Participation, n_clients: int, rounds: int = 20_000, seed: int = 0
) -> MeanMatrices:
    """The expectations over simulated rounds, with standard errors from the means of 50 batches of
    consecutive rounds, which also hold for correlated rounds if a batch is long against their
    memory. Raises InputError for fewer than 100 rounds."""
    _check(participation, n_clients)
    check_count("rounds", rounds, at_least=2 * BATCHES)
    sums = []
    for batch in np.array_split(np.arange(rounds), BATCHES):
        mask = participation.mask(n_clients, int(batch[0]), int(batch[-1]) + 1, seed)
        share = mask / np.maximum(np.count_nonzero(mask, axis=1), 1)[:, None]
        sums.append([mask.mean(axis=0), share.mean(axis=0)])
    means = np.array(sums)  # (batches, 2, N)
    (p, q), (p_error, q_error) = means.mean(axis=0), means.std(axis=0, ddof=1) / np.sqrt(BATCHES)
    return MeanMatrices(p, q, p_error, q_error)


def _check(participation: Participation, n_clients: int) -> None:
    check_count("n_clients", n_clients)
    check_size(n_clients)
    participation.check(n_clients)


# --- two algorithms in matrices -------------------------------------------------------------------


@in_float64
def fedavg(problem: Problem, masks: Any, lr: float, local_steps: int, x0: Any = None) -> np.ndarray:
    """(T, d) FedAvg's models after each of the rounds whose participants are masks (T, N):

        X <- R(S) X;   X <- X - lr grad(X), `local_steps` times;   X <- A(S) X

    on X (N + 1, d), grad(X) = (0, grad f_1(X_1), ..., grad f_N(X_N)). Every client steps in every
    round: the rows of those outside S do not reach the server before R(S) overwrites them. They may
    overflow if lr is too large for some f_k alone.
    """
    check_positive("lr", lr)
    check_count("local_steps", local_steps)
    grad, X, models = _row_gradients(problem), _start(problem, x0), []
    for mask in masks:
        X = pull_matrix(mask) @ X
        for _ in range(local_steps):
            X = X - lr * grad(X)
        X = average_matrix(mask) @ X
        models.append(X[0])
    return np.array(models)


@in_float64
def focus(problem: Problem, masks: Any, lr: float, local_steps: int, x0: Any = None) -> np.ndarray:
    """(T, d) FOCUS's models after each of the rounds whose participants are masks (T, N):

        X <- R(S) X;   Y <- Y + grad(X) - G, G <- grad(X), and, `local_steps` - 1 times,
        X <- X - eta Y for the clients, Y <- Y + grad(X) - G, G <- grad(X);
        Y <- C(S) Y;   X_0 <- X_0 - eta Y_0

    on X, Y and G, (N + 1, d), eta = lr / N: push-pull gradient tracking, R pulls models, C pushes
    gradients. Every client works in every round: what those outside S add to their row of Y stays
    there, and the sums over all rows of Y and of G remain equal. The server's step is left out in a
    round with nobody, which by this package's convention changes no model.
    """
    check_positive("lr", lr)
    check_count("local_steps", local_steps)
    grad, X, models = _row_gradients(problem), _start(problem, x0), []
    Y, G, eta = np.zeros_like(X), np.zeros_like(X), lr / problem.n_clients
    for mask in masks:
        X = pull_matrix(mask) @ X
        for step in range(local_steps):
            if step > 0:
                X[1:] -= eta * Y[1:]
            new = grad(X)
            Y, G = Y + new - G, new
        Y = push_matrix(mask) @ Y
        if np.any(mask):
            X[0] -= eta * Y[0]
        models.append(X[0].copy())
    return np.array(models)


def _row_gradients(problem: Problem) -> Callable[[np.ndarray], np.ndarray]:
    """X (N + 1, d) -> (0, grad f_1(X_1), ..., grad f_N(X_N))."""
    check_size(problem.n_clients)
    of_clients = gradients(problem)
    return lambda X: np.concatenate([np.zeros_like(X[:1]), of_clients(X[1:])])


def _start(problem: Problem, x0: Any) -> np.ndarray:
    x0 = np.zeros(problem.dim) if x0 is None else problem.check_model(x0)
    return stacked(x0, problem.n_clients + 1)


# --- a drawing ------------------------------------------------------------------------------------


def draw_round(mask: Any, names: Sequence[str] | None = None, receives: bool = False) -> Figure:
    """One round as a graph: the server above the clients, an arrow for every off-diagonal entry of
    R(S) (pull, down) and C(S) (push, up); who is absent keeps its row.

    Args:
        mask: (N,) who takes part, N <= 40.
        names: of the clients, by default their numbers from 1 to N.
        receives: participants get the new model after the push, a second R(S).
    """
    from matplotlib.figure import Figure

    R, C = pull_matrix(mask), push_matrix(mask)
    N = len(R) - 1
    if N > DRAWN:
        raise InputError(f"a drawing shows at most {DRAWN} clients, got {N}")
    names = [str(k) for k in range(1, N + 1)] if names is None else names
    if len(names) != N:
        raise InputError(f"{len(names)} names for {N} clients; give one for each")
    figure = Figure(figsize=(max(4.5, 0.95 * N + 1.5), 3.4), layout="constrained")
    axes = figure.subplots()
    places = [((N - 1) / 2.0, 1.0), *((float(k), 0.0) for k in range(N))]
    down = "pull: R(S), and again the new model" if receives else "pull: R(S)"
    _arrows(axes, places, R, -0.07, PULL, down)
    _arrows(axes, places, C, 0.07, PUSH, "push: C(S)")
    _nodes(axes, places, ["server", *names], np.diag(R) == 0.0)
    axes.plot([], [], "o", color=ABSENT, label="absent: keeps its row")
    axes.set(xlim=(-0.6, N - 0.4), ylim=(-0.35, 1.25))
    axes.axis("off")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=3, frameon=False, fontsize=8)
    return figure


def _arrows(
    axes: Axes,
    places: Sequence[tuple[float, float]],
    M: np.ndarray,
    shift: float,
    color: str,
    label: str,
) -> None:
    """Row i takes from column j: an arrow from j to i."""
    for i, j in np.argwhere((M > 0.0) & ~np.eye(len(M), dtype=bool)):
        (x, y), (x0, y0) = places[i], places[j]
        axes.annotate(
            "",
            (x + shift, y),
            (x0 + shift, y0),
            arrowprops={"arrowstyle": "-|>", "color": color, "shrinkA": 15, "shrinkB": 15},
        )
    axes.plot([], [], color=color, label=label)


def _nodes(
    axes: Axes,
    places: Sequence[tuple[float, float]],
    names: Sequence[str],
    present: np.ndarray,
) -> None:
    for row, ((x, y), name) in enumerate(zip(places, names, strict=True)):
        color = "black" if row == 0 or present[row] else ABSENT
        axes.plot(x, y, "s" if row == 0 else "o", color=color, markersize=13, zorder=3)
        above = row == 0
        axes.text(
            x, y + (0.11 if above else -0.13), name, ha="center", va="bottom" if above else "top",
            color=color, fontsize=9, parse_math=False,
        )  # fmt: skip
