"""One round as matrices over the rows 0, ..., N: row 0 the server, rows 1 to N the clients.

A round with the participants S multiplies a stack X, (N + 1, b), from the left (Ying, Li & Yang
2025, arXiv 2503.20117):

    R(S)   pull      row k becomes the server's for k in S                row-stochastic
    A(S)   average   the server's row becomes the mean over S             row-stochastic
    C(S)   push      R(S)^T: the server gains the rows of S, they become 0    column-stochastic
    W(S)   mixing    neighbours on the star average, Metropolis weights   doubly stochastic

A row-stochastic matrix leaves consensus alone, M 1 = 1; a column-stochastic one leaves sums alone,
1^T M = 1^T. All four are the identity if nobody takes part.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fedexact.errors import InputError, check_choice

LARGEST = 2000  # clients; beyond, one matrix of a round takes more than 32 MB
ROUNDING = 1e-12


def pull_matrix(mask: Any) -> np.ndarray:
    """R(S), (N + 1, N + 1): row k is e_0 for k in S, e_k otherwise. `mask` (N,): who is in S."""
    mask = _mask(mask)
    R = np.eye(len(mask) + 1)
    R[1:][mask] = 0.0
    R[1:, 0] = mask
    return R


def push_matrix(mask: Any) -> np.ndarray:
    """C(S) = R(S)^T, (N + 1, N + 1): sums the rows of S into row 0 and empties them."""
    return pull_matrix(mask).T


def average_matrix(mask: Any) -> np.ndarray:
    """A(S), (N + 1, N + 1): row 0 is 1/|S| on S, the other rows stay."""
    mask = _mask(mask)
    A = np.eye(len(mask) + 1)
    if np.any(mask):
        A[0, 0] = 0.0
        A[0, 1:] = mask / np.count_nonzero(mask)
    return A


def mixing_matrix(mask: Any) -> np.ndarray:
    """W(S), (N + 1, N + 1), symmetric: Metropolis weights on the star of the server and S.

    With m = |S| every edge, and the server's loop, has weight 1/(m + 1); the powers of W(S) tend to
    averaging over the server and S.
    """
    mask = _mask(mask)
    W = np.eye(len(mask) + 1)
    weight = mask / (np.count_nonzero(mask) + 1.0)
    W[0, 1:] = W[1:, 0] = weight
    W[np.diag_indices_from(W)] -= np.concatenate([[np.sum(weight)], weight])
    return W


def check_stochastic(M: Any, kind: str) -> None:
    """Raises InputError, naming the worst row or column, unless the square M is stochastic.

    `kind` is "row" (entries >= 0, every row sums to 1), "column", or "double" (both).
    """
    check_choice("kind", kind, ("row", "column", "double"))
    M = np.asarray(M, float)
    if M.ndim != 2 or M.shape[0] != M.shape[1]:
        raise InputError(f"a mixing matrix must be square, got shape {M.shape}")
    if not np.min(M) >= -ROUNDING:
        i, j = np.unravel_index(np.argmin(M), M.shape)
        raise InputError(f"entry ({i}, {j}) of the matrix is {M[i, j]:g}: it must be >= 0")
    for axis, line in ((1, "row"), (0, "column")):
        off = np.abs(M.sum(axis=axis) - 1.0)
        if kind in (line, "double") and not np.max(off) <= ROUNDING * len(M):
            worst = int(np.argmax(off))
            total = M.sum(axis=axis)[worst]
            raise InputError(f"{line} {worst} of the matrix sums to {total:.12g}, not to 1")


def _mask(mask: Any) -> np.ndarray:
    """(N,) bool; InputError for anything but a vector of 0 and 1, or for too many clients."""
    mask = np.asarray(mask)
    if mask.ndim != 1 or len(mask) == 0 or not np.all((mask == 0) | (mask == 1)):
        raise InputError(
            f"a round's participants must be a vector with 0 or 1 for each client, got {mask!r}"
        )
    check_size(len(mask))
    return mask.astype(bool)


def check_size(n_clients: int) -> None:
    """Raises InputError where the matrices of N clients would be too large."""
    if n_clients > LARGEST:
        raise InputError(
            f"matrices over rows 0 to N are for at most {LARGEST} clients, got {n_clients}: use "
            'engine="compiled"'
        )
