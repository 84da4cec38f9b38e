"""Exact p_k and q_k of random cohorts, by quadratures that are exact to rounding."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scipy.optimize import brentq

_NODES, _NODE_WEIGHTS = (half / 2 for half in np.polynomial.legendre.leggauss(64))
_DECAY = 60.0  # exp(-60) is nothing next to 1 / (N + 1)
_TABLE = 2**22  # entries


def independent_aggregation(p: np.ndarray) -> np.ndarray:
    """(N,) q_k = E[1{k in S} / |S|] if the clients take part independently, with p (N,).

    q_k = p_k int_0^1 prod_{j != k} (1 - p_j s) ds. The integrand is an entire function of
    exponential type sum p, so 64 Gauss-Legendre nodes on the part of [0, 1] where it has not died
    out are exact to rounding for any N.
    """
    values, place, counts = np.unique(p, return_inverse=True, return_counts=True)
    others = max(float(np.sum(p)) - 1.0, 1.0)  # at least this many besides any one client
    length = min(1.0, _DECAY / others)
    s = length * (0.5 + _NODES)
    logs = np.log1p(-np.outer(s, values))  # (nodes, distinct values)
    product = np.exp((logs @ counts)[:, None] - logs)
    return (values * length * (_NODE_WEIGHTS @ product))[place]


def sequential_work(weights: np.ndarray, m: int) -> float:
    """Number of operations of `sequential_inclusion`."""
    return float(len(_times(weights, m)[0]) * len(weights) * m)


def sequential_inclusion(weights: np.ndarray, m: int) -> np.ndarray:
    """(N,) p_k if m < N clients are drawn one by one, each in proportion to its weight > 0.

    The m drawn are the first of independent exponential clocks with rates w, so
    p_k = int_0^inf w_k e^{-w_k t} P(at most m - 1 of the others rang before t) dt, the counts by
    dynamic programming over the clients before and those after k.
    """
    p = np.zeros(len(weights))
    for t, dt in _chunks(_times(weights, m), len(weights) * m):
        silent = np.exp(-np.outer(weights, t))  # (N, nodes)
        start = np.zeros((len(t), m))
        start[:, 0] = 1.0
        before = list(_counts(silent, start))
        after = _counts(silent[::-1], np.ones((len(t), m)))  # P(at most c rang)
        for k in range(len(weights) - 1, -1, -1):
            first = np.einsum("tc,tc->t", before[k], next(after)[:, ::-1])
            p[k] += weights[k] * np.sum(dt * silent[k] * first)
    return p


def _times(weights: np.ndarray, m: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes t and weights dt of the trapezoidal rule after t = c exp(y - exp(-y)), c the scale of
    the fastest clock or, if earlier, the time by which m are expected to have rung."""

    def rung(t: float) -> float:
        return float(np.sum(-np.expm1(-weights * t)))

    latest = np.log(40.0 / np.min(weights))
    earliest = np.log(m / np.sum(weights)) - 1e-9
    log_c = min(brentq(lambda y: rung(np.exp(y)) - m, earliest, latest), -np.log(np.max(weights)))
    h = 0.2 / np.sqrt(m)
    y = np.arange(-3.7, latest - log_c + 1.0, h)
    t = np.exp(log_c + y - np.exp(-y))
    mean = np.array([rung(time) for time in t]) - 1.0
    alive = (mean <= m) | ((mean - m) ** 2 < 80.0 * mean)  # P(at most m - 1 rang) > exp(-40)
    return t[alive], (h * t * (1.0 + np.exp(-y)))[alive]


def _chunks(
    nodes: tuple[np.ndarray, np.ndarray], width: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    size = max(1, _TABLE // width)
    for begin in range(0, len(nodes[0]), size):
        yield nodes[0][begin : begin + size], nodes[1][begin : begin + size]


def _counts(silent: np.ndarray, start: np.ndarray) -> Iterator[np.ndarray]:
    """For k = 0, ..., N - 1: (nodes, m) the law of how many of the clients before k rang, up to
    m - 1, if `start` is its form for nobody."""
    count = start
    for quiet in silent:
        yield count
        moved = (1.0 - quiet)[:, None] * count[:, :-1]
        count = quiet[:, None] * count
        count[:, 1:] += moved


def largest_gap(table: np.ndarray) -> float:
    """The most rounds from one visit of a client to its next, the (P, N) table being repeated.

    Clients that never appear do not count; 1 if there is no other.
    """
    client, visit = np.nonzero(table.T)
    if len(client) == 0:
        return 1.0
    first = np.append(True, client[1:] != client[:-1])
    last = np.append(first[1:], True)
    following = np.roll(visit, -1)
    following[last] = visit[first] + len(table)
    return float(np.max(following - visit))
