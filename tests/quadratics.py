"""Least-squares problems in closed form: the golden example, H_k and b_k, weighted solutions."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

import fedexact as fx
from problems import least_squares


def two_clients() -> fx.Problem:
    """y = m x with rows (0, 2), (1, 2) and (2, 0), (2, 1); sums of squares, clients alike."""
    rows = [([[0.0], [1.0]], [2.0, 2.0]), ([[2.0], [2.0]], [0.0, 1.0])]
    return fx.Problem(rows, loss="squared", weights="clients", reduction="sum")


def quadratics(seed: int, N: int = 4, d: int = 3) -> tuple[fx.Problem, np.ndarray, np.ndarray]:
    """A problem whose client k is x'H_k x / 2 - b_k'x + const, with H (N, d, d) and b (N, d)."""
    problem = least_squares(seed, (8,) * N, d, weights="clients", reduction="sum")
    return problem, *hessians(problem)


def hessians(problem: fx.Problem) -> tuple[np.ndarray, np.ndarray]:
    oracle = problem.oracles
    clients = [oracle.client(k) for k in range(problem.n_clients)]
    zero = jnp.zeros(problem.dim)
    H = np.array([client.hessian(zero) for client in clients])
    return H, -np.array([client.grad(zero) for client in clients])


def solution(H: np.ndarray, b: np.ndarray) -> np.ndarray:
    """x* of the mean of the quadratics; with weights M_k H_k, M_k b_k for biased fixed points."""
    return np.linalg.solve(H.sum(axis=0), b.sum(axis=0))


def geometric(H: np.ndarray, lr: float, R: int) -> np.ndarray:
    """(N, d, d) M_k = sum_{i<R} (I - lr H_k)^i."""
    one = np.eye(H.shape[-1])[None]
    return sum((np.linalg.matrix_power(one - lr * H, i) for i in range(R)), np.zeros_like(H))


def relative(x: np.ndarray, reference: np.ndarray) -> float:
    return float(np.linalg.norm(x - reference) / np.linalg.norm(reference))
