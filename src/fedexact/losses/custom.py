"""A loss of the user's own, written in JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from scipy.sparse import issparse

from fedexact.core import in_float64, record, static
from fedexact.errors import CapabilityError, InputError, check_count
from fedexact.losses.base import Loss, Rows
from fedexact.losses.design import Sparse
from fedexact.losses.spectrum import STEPS as EXACT
from fedexact.losses.spectrum import largest_eigenvalue

CHECKED_ROWS = 32
# Beyond EXACT parameters `curvature`, a guide, takes fewer steps and a wider margin: the mean
# relative error is at most 0.103 (log(d (k - 1)^4) / (k - 1))^2 after k steps, 0.12 for d = 5000
# (Kuczynski and Wozniakowski 1992, Theorem 3.2).
GUIDE_STEPS, GUIDE_MARGIN = 20, 0.15
STEPS = (1e-4, 1e-5, 1e-6)  # of the central differences: the best is taken, scales differ


@record
class CustomLoss(Loss):
    """`fn(x, rows)` gives the (m,) losses of the rows at x (size,), in JAX, row by row.

    `size` is the length of x, by default the number of features. Nothing is assumed convex: the
    prox takes gradient steps, and `curvature` is that of x = 0, to within a few per cent where x
    has more than 100 entries: a guide for steps, no bound.
    """

    fn: Callable[[Array, Rows], Array] = static()
    size: int | None = static(default=None)

    name: ClassVar[str] = "custom"
    summary: ClassVar[str] = "a JAX function of (x, rows) that gives the loss of each row"
    newton: ClassVar[bool] = False
    global_smooth: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.size is not None:
            check_count("CustomLoss: size", self.size)

    def dim(self, n_features: int) -> int:
        return n_features if self.size is None else self.size

    def values(self, x: Array, rows: Rows) -> Array:
        return self.fn(x, rows)

    def curvature(self, rows: Rows, weight: Array) -> Array:
        origin = jnp.zeros(self.dim(rows.X.shape[1]))

        def product(v: Array) -> Array:
            return jax.jvp(lambda x: self.grad(x, rows, weight), (origin,), (v,))[1]

        d = origin.shape[0]
        if d <= EXACT:
            return largest_eigenvalue(product, d)
        return largest_eigenvalue(product, d, GUIDE_STEPS, GUIDE_MARGIN)

    @in_float64
    def check(self, rows: Rows, where: str) -> None:
        """Raises InputError, naming `where`, if `fn` is no loss of independent rows.

        At a random point and on at most 32 rows: shape, finite values, the same loss of a row
        whatever the other rows, and JAX's gradient against central differences (1e-5 relative).
        CapabilityError if X is sparse: `fn` is written for arrays.
        """
        if isinstance(rows.X, Sparse) or issparse(rows.X):
            raise CapabilityError(
                f"{where}: a custom loss takes dense rows, and X is sparse; take one of the losses "
                "of the linear predictor (squared, logistic, multinomial, poisson, huber), or "
                "X.toarray() if it fits into memory"
            )
        rows = Rows(*(np.asarray(part[:CHECKED_ROWS], float) for part in rows))
        rng = np.random.default_rng(0)
        d = self.dim(rows.X.shape[1])
        x, v = rng.normal(size=(2, d)) / np.sqrt(d)
        problem = self._check_values(x, rows) or self._check_gradient(x, v, rows)
        if problem:
            called = getattr(self.fn, "__name__", type(self.fn).__name__)
            raise InputError(f"{where}: the custom loss {called!r} {problem}")

    def _check_values(self, x: np.ndarray, rows: Rows) -> str:
        """What is wrong with the values, among these rows and when some are left out or repeated;
        empty if nothing is."""
        m = len(rows.y)
        everything = np.arange(m)
        first: np.ndarray | None = None
        half = np.resize(everything[::2], m)
        # of two lengths only, because each is compiled
        for index in (everything, half, np.append(everything, 0)):
            values = self._values_or_problem(x, Rows(rows.X[index], rows.y[index]))
            if isinstance(values, str):
                return values
            first = values if first is None else first
            off = np.abs(values - first[index]) > 1e-9 * np.max(np.abs(first))
            if np.any(off):
                i = int(np.argmax(off))
                return (
                    f"couples rows: row {index[i]} has loss {first[index[i]]:.6g} among {m} rows "
                    f"and {values[i]:.6g} among {len(index)}; each row's loss may depend on x and "
                    "that row only"
                )
        return ""

    def _values_or_problem(self, x: np.ndarray, rows: Rows) -> np.ndarray | str:
        """(m,) finite values, or what is wrong with them."""
        m, p = rows.X.shape
        try:
            values = np.asarray(jax.jit(self.fn)(x, rows))
        except Exception as error:
            return f"fails on {m} rows with {p} features: {type(error).__name__}: {error}"
        if values.shape != (m,):
            return (
                f"must return one loss per row, shape ({m},), got shape {values.shape}; do not sum "
                "or average over the rows"
            )
        if not np.all(np.isfinite(values)):
            row = int(np.argmin(np.isfinite(values)))
            return f"is {values[row]} in row {row} at the random point x = {x}"
        return values

    def _check_gradient(self, x: np.ndarray, v: np.ndarray, rows: Rows) -> str:
        """What is wrong with the derivative of the rows' losses along v, JAX against central
        differences; empty if nothing is."""

        def values(x: np.ndarray) -> np.ndarray:
            return np.asarray(jax.jit(self.fn)(x, rows))

        along = np.asarray(jax.jit(jax.jacrev(self.fn))(x, rows)) @ v
        differences = np.stack([(values(x + h * v) - values(x - h * v)) / (2 * h) for h in STEPS])
        error = np.min(np.abs(differences - along[None, :]), axis=0)
        rounding = 1e-9 * np.max(np.abs(values(x)))
        bad = ~(error <= 1e-5 * np.abs(along) + rounding)
        if not np.any(bad):
            return ""
        row = int(np.argmax(bad))
        return (
            f"has a wrong gradient in row {row}: {along[row]:.8g} along a random direction by JAX, "
            f"{differences[1, row]:.8g} by central differences; check custom_jvp, custom_vjp and "
            "stop_gradient"
        )
