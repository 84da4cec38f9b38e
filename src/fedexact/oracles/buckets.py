"""Clients of unequal sizes in a few stacks of equal shape."""

from __future__ import annotations

import numpy as np

_GRID = 1.01  # ratio of neighbouring padded sizes that are told apart when there are many
_MANY = 400  # distinct sizes


def bucket_sizes(
    n_rows: np.ndarray, max_buckets: int = 14, slack: float = 1.25
) -> list[tuple[int, np.ndarray]]:
    """Partitions clients by size, each bucket padded to its largest client.

    The fewest buckets, at most `max_buckets`, whose padded rows are at most `slack` times the rows;
    if there is no such partition, the `max_buckets` buckets with the fewest padded rows. Found by
    dynamic programming over the sorted distinct sizes, on a grid of 1 % when these are many.

    Args:
        n_rows: (N,) positive numbers of rows.

    Returns:
        (padded size, ascending client indices) of every bucket, sizes ascending.
    """
    n_rows = np.asarray(n_rows)
    sizes = _candidates(np.unique(n_rows))
    place = np.searchsorted(sizes, n_rows)  # the smallest candidate that holds the client
    counts = np.bincount(place, minlength=len(sizes))
    last = _best_partition(sizes, counts, slack * float(np.sum(n_rows)), max_buckets)
    bucket = np.searchsorted(last, place)
    return [(int(sizes[end]), np.flatnonzero(bucket == b)) for b, end in enumerate(last)]


def _candidates(sizes: np.ndarray) -> np.ndarray:
    """The sizes a bucket may have: all, or the largest one of every cell of a geometric grid."""
    if len(sizes) <= _MANY:
        return sizes
    cell = np.floor(np.log(sizes) / np.log(_GRID)).astype(np.int64)
    return sizes[np.append(cell[1:] != cell[:-1], True)]


def _best_partition(
    sizes: np.ndarray, counts: np.ndarray, allowed: float, max_buckets: int
) -> np.ndarray:
    """Index of the largest size of each bucket, ascending; `allowed` rows with the padding."""
    # total[j]: least padded rows for the clients of sizes[:j]; before[b][j]: where its last of b
    # buckets starts
    clients = np.concatenate([[0], np.cumsum(counts)])
    total = np.full(len(sizes) + 1, np.inf)
    total[0] = 0.0
    before: list[np.ndarray] = []
    while len(before) < min(max_buckets, len(sizes)):
        cost = total[:, None] + np.append(0, sizes)[None, :] * (clients[None, :] - clients[:, None])
        cost[np.tril_indices(len(total))] = np.inf  # a bucket holds at least one size
        before.append(np.argmin(cost, axis=0))
        total = np.min(cost, axis=0)
        if total[-1] <= allowed:
            break
    ends, j = [], len(sizes)
    for start in reversed(before):
        ends.append(j - 1)
        j = int(start[j])
    return np.array(ends[::-1])
