"""Cohorts of many clients drawn at the cost of the participants, without a table of all clients.

All are functions of (seed, round): round r takes its numbers from its own counters of the streams
0, 1, ..., as many streams as it needs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fedexact.participation.base import Cohorts, joined, round_blocks, uniforms

MANY = 4096  # clients; a table of no more is as fast and needs no second look
_LEAST_WIDTH = 16  # numbers of a round per stream


def distinct(
    pick: Callable[[np.ndarray], np.ndarray], m: int, n: int, start: int, stop: int, seed: int
) -> Cohorts:
    """m distinct clients of n in each round: clients are drawn with `pick`, which turns uniform
    numbers into clients, until m different ones have come; repetitions are passed over.

    This is the law of drawing one by one without replacement. It is fast where most draws are new.
    """
    blocks = round_blocks(start, stop, m)
    return joined(_distinct(pick, m, n, begin, end, seed) for begin, end in blocks)


def _distinct(
    pick: Callable[[np.ndarray], np.ndarray], m: int, n: int, start: int, stop: int, seed: int
) -> Cohorts:
    T, width = stop - start, m
    keys, lacking = np.empty(0, np.int64), np.full(T, m)  # a key is row * n + client
    stream = 0
    while np.any(lacking):
        u = uniforms(seed, start, stop, width, stream)
        wanted = np.arange(width)[None, :] < lacking[:, None]  # never more than are lacking
        fresh = pick(u[wanted]) + n * np.nonzero(wanted)[0]
        keys = np.sort(np.concatenate([keys, np.sort(fresh)]), kind="stable")  # merges two runs
        keys = keys[np.append(True, keys[1:] != keys[:-1])]
        lacking = m - np.diff(_offsets(keys, n, T))
        width, stream = max(_LEAST_WIDTH, width // 2), stream + 1
    return _cohorts(keys, n, T)


def independent(
    p: Callable[[int, int], np.ndarray], most: float, n: int, start: int, stop: int, seed: int
) -> Cohorts:
    """Each of n clients on its own, in round r with the probability p_r < 1 that all share.

    `p(begin, end)` gives the (end - begin,) probabilities of a range of rounds, `most` is at least
    all of them. From one participant to the next it is a geometric number of clients.
    """
    width = int(np.ceil(n * most + 4.0 * np.sqrt(n * most))) + _LEAST_WIDTH
    blocks = round_blocks(start, stop, width)
    return joined(_skipping(p(begin, end), width, n, begin, end, seed) for begin, end in blocks)


def _skipping(p: np.ndarray, width: int, n: int, start: int, stop: int, seed: int) -> Cohorts:
    T = stop - start
    logs = np.log1p(-np.where(p > 0.0, p, 0.5))[:, None]
    last = np.where(p > 0.0, -1, n)  # the client reached so far; nobody in a round with p = 0
    row = n * np.arange(T)[:, None]
    keys, stream = [np.empty(0, np.int64)], 0
    while np.any(last < n):
        absent = np.log1p(-uniforms(seed, start, stop, width, stream)) / logs
        steps = np.minimum(absent, n).astype(np.int64) + 1
        at = last[:, None] + np.cumsum(steps, axis=1)
        keys.append((row + at)[at < n])
        last, stream = at[:, -1], stream + 1
    return _cohorts(np.sort(np.concatenate(keys)), n, T)


def as_mask(cohorts: Cohorts, n: int) -> np.ndarray:
    """(T, N) bool from the T cohorts."""
    mask = np.zeros((cohorts.rounds, n), bool)
    mask[np.repeat(np.arange(len(mask)), cohorts.counts), cohorts.ids] = True
    return mask


def _cohorts(keys: np.ndarray, n: int, T: int) -> Cohorts:
    offsets = _offsets(keys, n, T)
    row = np.repeat(np.arange(T), np.diff(offsets))
    return Cohorts((keys - n * row).astype(np.int32), offsets)


def _offsets(keys: np.ndarray, n: int, T: int) -> np.ndarray:
    return np.searchsorted(keys, n * np.arange(T + 1)).astype(np.int64)
