"""Exact p_k and q_k of random cohorts, by quadratures that are exact to rounding."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

_NODES, _NODE_WEIGHTS = (half / 2 for half in np.polynomial.legendre.leggauss(64))
_DECAY = 60.0  # exp(-60) is nothing next to 1 / (N + 1)
_TABLE = 2**22  # entries
_STEP = 0.2  # of the trapezoidal rule, for one client a round
_LOG_ROUNDING = -40.0  # exp(-40) is nothing next to 1


def independent_aggregation(p: np.ndarray) -> np.ndarray:
    """(N,) q_k = E[1{k in S} / |S|] if the clients take part independently, with p (N,).

    q_k = p_k int_0^1 prod_{j != k} (1 - p_j s) ds. The integrand is an entire function of
    exponential type sum p, so 64 Gauss-Legendre nodes on the part [0, c] of [0, 1] where it has not
    died out are exact to rounding for any N. Where p_k c <= 1/2, which is all but some hundred of
    the clients, log(1 - p_k s) and 1 / (1 - p_k s) are power series: O(N) altogether.
    """
    others = max(float(np.sum(p)) - 1.0, 1.0)  # at least this many besides any one client
    length = min(1.0, _DECAY / others)
    s = length * (0.5 + _NODES)
    frequent = p * length > 0.5
    rare, few = p[~frequent], np.log1p(-np.outer(s, p[frequent]))
    largest = length * float(np.max(rare, initial=0.0))
    terms = 2 + int(np.ceil(_LOG_ROUNDING / np.log(largest))) if largest > 0.0 else 1
    orders = np.arange(1, terms + 1)
    scaled, power, moments = length * rare, np.ones(len(rare)), []
    for _ in orders:
        power *= scaled
        moments.append(np.sum(power))
    powers = (s / length)[:, None] ** orders[None, :]
    logs = np.sum(few, axis=1) - powers @ (np.array(moments) / orders)
    product = length * _NODE_WEIGHTS * np.exp(logs)
    mean = np.empty(len(p))
    mean[frequent] = product @ np.exp(-few)
    mean[~frequent] = np.polynomial.polynomial.polyval(
        scaled, np.append(np.sum(product), product @ powers)
    )
    return p * mean


def alike_aggregation(p: np.ndarray, n: int) -> np.ndarray:
    """q of each of n clients that take part independently with the same probability p, any shape:
    P(S is not empty) / n."""
    with np.errstate(divide="ignore"):  # log(0) = -inf is right
        return -np.expm1(n * np.log1p(-p)) / n


def is_sequential_work_below(limit: float, weights: np.ndarray, m: int) -> bool:
    """Whether `sequential_inclusion` takes fewer operations; decided without counting where the
    nodes up to the scale c, 3.7 / h of them, are too many already."""
    per_node = float(len(weights) * m)
    if per_node * 3.7 * np.sqrt(m) / _STEP > limit:
        return False
    return per_node * len(_times(weights, m)[0]) <= limit


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

    from scipy.optimize import brentq  # imported here, where it is rarely needed: it takes long

    def rung(t: float) -> float:
        return float(np.sum(-np.expm1(-weights * t)))

    latest = np.log(40.0 / np.min(weights))
    earliest = np.log(m / np.sum(weights)) - 1e-9
    log_c = min(brentq(lambda y: rung(np.exp(y)) - m, earliest, latest), -np.log(np.max(weights)))
    h = _STEP / np.sqrt(m)
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


def largest_gap(client: np.ndarray, visit: np.ndarray, period: int) -> float:
    """The most rounds from one visit of a client to its next, `period` rounds being repeated.

    `client` (V,) and `visit` (V,), its round, of all visits of a period, ordered by both. Clients
    that never appear do not count; 1 if there is no other.
    """
    if len(client) == 0:
        return 1.0
    first = np.append(True, client[1:] != client[:-1])
    last = np.append(first[1:], True)
    following = np.roll(visit, -1)
    following[last] = visit[first] + period
    return float(np.max(following - visit))
