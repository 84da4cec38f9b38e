"""Extreme eigenvalues of weighted Gram matrices and of operators given by products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedexact.losses.design import Design, combine, gram, outer_gram, predictor

DENSE = 500  # up to this side a Gram matrix is formed and its eigenvalues are exact
STEPS = 100  # Lanczos steps beyond
MARGIN = 0.01  # relative; makes the Lanczos value an upper bound, see largest_eigenvalue
HALVINGS = 54  # of an interval of at most three times the largest eigenvalue
BLOCK = 256  # matrices whose eigenvalues are found together, and their entries at most:
BLOCK_ENTRIES = 2**17


def largest_eigenvalue(
    matvec: Callable[[Array], Array], dim: int, steps: int = STEPS, margin: float = MARGIN
) -> Array:
    """Upper bound on the largest modulus of an eigenvalue of a symmetric operator on R^dim.

    Lanczos with full reorthogonalisation from a fixed random vector, 100 steps, plus 1 %. For a
    positive semidefinite operator the bound holds up to a set of starts of probability
    1.648 sqrt(dim) exp(-0.1 (2 * 100 - 1)), 4e-7 at dim = 10,000 (Kuczynski and Wozniakowski 1992,
    Theorem 4.2). With dim <= `steps` the eigenvalues are exact and nothing is added.
    """
    steps = min(dim, steps)
    first = jax.random.normal(jax.random.key(0), (dim,))
    first = first / jnp.linalg.norm(first)

    def step(j: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        basis, tridiagonal = carry
        w = matvec(basis[j])
        size = jnp.linalg.norm(w)
        alpha = basis[j] @ w
        for _ in range(2):  # twice is enough (Kahan, Parlett)
            w = w - (basis @ w) @ basis
        beta = jnp.linalg.norm(w)
        exhausted = beta <= 1e-14 * size  # the Krylov space is invariant: go on with zeros
        beta = jnp.where(exhausted, 0.0, beta)
        w = jnp.where(exhausted, 0.0, w / jnp.where(exhausted, 1.0, beta))
        tridiagonal = tridiagonal.at[j, j].set(alpha)
        tridiagonal = tridiagonal.at[j, j + 1].set(beta).at[j + 1, j].set(beta)
        return basis.at[j + 1].set(w), tridiagonal

    basis = jnp.zeros((steps + 1, dim)).at[0].set(first)
    tridiagonal = jnp.zeros((steps + 1, steps + 1))
    _, tridiagonal = jax.lax.fori_loop(0, steps, step, (basis, tridiagonal))
    ritz = jnp.linalg.eigvalsh(tridiagonal[:steps, :steps])
    top = jnp.max(jnp.abs(ritz))
    return top if steps == dim else (1.0 + margin) * top


def spectral_norm(M: np.ndarray) -> float:
    """Largest modulus of an eigenvalue of a symmetric M; faster than by singular values."""
    return float(np.max(np.abs(np.linalg.eigvalsh(M))))


def extreme_eigenvalues(A: Array) -> tuple[Array, Array]:
    """(...,) smallest and largest eigenvalue of positive semidefinite A (..., n, n).

    Householder's tridiagonal form, then bisection on the signs of the pivots of x I - T, for all
    matrices together: exact to rounding, n eps times the largest, on the outer side.
    """
    n = A.shape[-1]
    _, diagonal, off, _ = jax.lax.linalg.tridiagonal(A.reshape(-1, n, n), lower=True)
    before, after = (jnp.pad(jnp.abs(off), ((0, 0), side)) for side in ((1, 0), (0, 1)))
    unit = jnp.max(diagonal + before + after, axis=1, keepdims=True)  # at most 3 times the largest
    safe = jnp.where(unit > 0.0, unit, 1.0)
    ends = _outermost((diagonal / safe).T, ((before / safe) ** 2).T)
    smallest, largest = (unit[:, 0] * jnp.abs(end) for end in ends)
    return smallest.reshape(A.shape[:-2]), largest.reshape(A.shape[:-2])


def _outermost(d: Array, squares: Array) -> Array:
    """(2, B) largest eigenvalues of -T and of T, from above, for B tridiagonal T of spectrum in
    [0, 1]: d (n, B) the diagonals, squares (n, B) of the entries before them (0 first)."""
    sign = jnp.broadcast_to(jnp.asarray([[-1.0], [1.0]]), (2, d.shape[1]))

    def beyond(x: Array) -> Array:
        def pivot(carry: tuple[Array, Array], row: tuple[Array, Array]) -> tuple[Any, None]:
            last, positive = carry
            new = x - sign * row[0][None, :] - row[1][None, :] / last
            return (new, positive & (new > 0)), None

        start = jnp.ones_like(x), jnp.ones_like(x, dtype=bool)
        return jax.lax.scan(pivot, start, (d, squares))[0][1]

    def halve(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        middle = 0.5 * (ends[0] + ends[1])
        above = beyond(middle)
        return jnp.where(above, ends[0], middle), jnp.where(above, middle, ends[1])

    ends = jnp.minimum(sign, 0.0), jnp.maximum(sign, 0.0)
    return jax.lax.fori_loop(0, HALVINGS, halve, ends)[1]


def extremes_of_each(matrix: Callable[[Any], Array], items: Any) -> tuple[Array, Array]:
    """(N,) smallest and largest eigenvalue of the positive semidefinite matrix (n, n) of each item.

    `items` is a pytree with leading axis N >= 1. The matrices are made one after the other, their
    eigenvalues found a block at a time: one by one the calls of LAPACK take most of the time.
    """
    count = jax.tree.leaves(items)[0].shape[0]
    side = jax.eval_shape(matrix, jax.tree.map(lambda leaf: leaf[0], items)).shape[0]
    block = max(1, min(count, BLOCK, BLOCK_ENTRIES // side**2))
    blocks = -(-count // block)
    index = jnp.minimum(jnp.arange(blocks * block), count - 1).reshape(blocks, block)

    def of_block(index: Array) -> tuple[Array, Array]:
        def of_item(j: Array) -> Array:
            return matrix(jax.tree.map(lambda leaf: leaf[j], items))

        return extreme_eigenvalues(jax.lax.map(of_item, index))

    smallest, largest = jax.lax.map(of_block, index)
    return smallest.ravel()[:count], largest.ravel()[:count]


def small_gram(X: Design, scale: Array) -> Array:
    """(n, n) with the nonzero eigenvalues of X' diag(scale) X, n = min(m, p); scale (m,) >= 0."""
    m, p = X.shape
    if p <= m:
        return gram(X, scale)
    root = jnp.sqrt(scale)
    return root[:, None] * outer_gram(X, jnp.ones(p, X.dtype)) * root[None, :]


def gram_largest(X: Design, scale: Array) -> Array:
    """lambda_max(X' diag(scale) X) for X (m, p) and scale (m,) >= 0; see DENSE for large ones."""
    m, p = X.shape
    if min(m, p) <= DENSE:
        return extreme_eigenvalues(small_gram(X, scale))[1]
    if p <= m:
        return largest_eigenvalue(lambda v: combine(scale * predictor(X, v), X), p)
    root = jnp.sqrt(scale)
    return largest_eigenvalue(lambda u: root * predictor(X, combine(root * u, X)), m)


def gram_smallest(X: Design, scale: Array) -> Array:
    """Lower bound on lambda_min(X' diag(scale) X): exact to rounding, or 0 if p > DENSE."""
    m, p = X.shape
    if m < p or p > DENSE:
        return jnp.zeros(())
    smallest, largest = extreme_eigenvalues(gram(X, scale))
    rounding = m * jnp.finfo(X.dtype).eps * largest
    full = jnp.sum(scale > 0) >= p  # fewer rows, the others being padding, leave a null space
    return jnp.where(full, jnp.maximum(smallest - rounding, 0.0), 0.0)
