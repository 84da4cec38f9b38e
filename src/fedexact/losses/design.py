"""The rows X of a client, dense or sparse, and the products with them that losses are made of."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from fedexact.core import record, static


@record
class Sparse:
    """A sparse matrix (m, p) as its nonzero entries: X[row[e], columns[e]] = values[e].

    In any order, each place at most once; sorted by column, `predictor` takes half the time that it
    takes sorted by row, when each addition waits for the one before. An entry that pads has value
    0; its place is ignored and may lie beyond the matrix.
    """

    values: Array  # (nnz,)
    columns: Array  # (nnz,) int32
    row: Array  # (nnz,) int32, of this client, from 0
    shape: tuple[int, int] = static()

    @property
    def dtype(self) -> jnp.dtype:
        """Of the values."""
        return self.values.dtype


Design = Array | Sparse  # X (m, p)


def n_features(X: Design) -> int:
    """p."""
    return X.shape[1]


def predictor(X: Design, x: Array) -> Array:
    """X x: x (p,) gives (m,), x (p, K) gives (m, K)."""
    if not isinstance(X, Sparse):
        return X @ x
    return _scatter(X.values, x, X.columns, X.row, X.shape[0])


def combine(v: Array, X: Design) -> Array:
    """X' v: v (m,) gives (p,), v (m, K) gives (p, K)."""
    if isinstance(X, Sparse):
        return _scatter(X.values, v, X.row, X.columns, X.shape[1])
    return (v.T @ X).T  # in XLA on a CPU 3 to 6 times faster than X.T @ v


def gram(X: Design, scale: Array) -> Array:
    """(p, p) X' diag(scale) X, scale (m,)."""
    if not isinstance(X, Sparse):
        return X.T @ (scale[:, None] * X)

    def column(unit: Array) -> Array:
        return combine(scale * predictor(X, unit), X)

    return jax.lax.map(column, jnp.eye(X.shape[1], dtype=X.dtype))


def outer_gram(X: Design, scale: Array) -> Array:
    """(m, m) X diag(scale) X', scale (p,)."""
    if not isinstance(X, Sparse):
        return (X * scale[None, :]) @ X.T

    def row(unit: Array) -> Array:
        return predictor(X, scale * combine(unit, X))

    return jax.lax.map(row, jnp.eye(X.shape[0], dtype=X.dtype))


def row_squares(X: Design) -> Array:
    """(m,) squares of the Euclidean norms of the rows."""
    if not isinstance(X, Sparse):
        return jnp.sum(X**2, axis=1)
    return jnp.zeros(X.shape[0], X.dtype).at[X.row].add(X.values**2, mode="drop")


def _scatter(values: Array, source: Array, take: Array, put: Array, length: int) -> Array:
    """Sum of values[e] source[take[e]] at put[e], for each of `length` places."""
    taken = source.at[take].get(mode="clip")
    products = values.reshape(values.shape + (1,) * (source.ndim - 1)) * taken
    into = jnp.zeros((length, *source.shape[1:]), products.dtype)
    return into.at[put].add(products, mode="drop")
