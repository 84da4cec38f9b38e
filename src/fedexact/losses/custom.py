"""A loss of the user's own, written in JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedexact.core import in_float64, record, static
from fedexact.errors import InputError, check_count
from fedexact.losses.base import Loss, Rows
from fedexact.losses.spectrum import largest_eigenvalue

CHECKED_ROWS = 32
STEPS = (1e-4, 1e-5, 1e-6)  # of the central differences: the best is taken, scales differ


@record
class CustomLoss(Loss):
    """`fn(x, rows)` gives the (m,) losses of the rows at x (size,), in JAX, row by row.

    `size` is the length of x, by default the number of features. Nothing is assumed convex: the
    prox takes gradient steps, and `curvature` is that of x = 0.
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

        return largest_eigenvalue(product, origin.shape[0])

    @in_float64
    def check(self, rows: Rows, where: str) -> None:
        """Raises InputError, naming `where`, if `fn` is no loss of independent rows.

        At a random point and on at most 32 rows: shape, finite values, the same loss of a row
        whatever the other rows, and JAX's gradient against central differences (1e-5 relative).
        """
        rows = Rows(*(jnp.asarray(part[:CHECKED_ROWS], float) for part in rows))
        rng = np.random.default_rng(0)
        d = self.dim(rows.X.shape[1])
        x, v = jnp.asarray(rng.normal(size=(2, d)) / np.sqrt(d))
        values = self._checked_values(x, rows, where)
        self._check_independence(x, rows, values, where)
        self._check_gradient(x, v, rows, where)

    def _checked_values(self, x: Array, rows: Rows, where: str) -> np.ndarray:
        """(m,) values, of the right shape and finite."""
        m = rows.X.shape[0]
        try:
            values = np.asarray(self.fn(x, rows))
        except Exception as error:
            raise InputError(
                f"{where}: the custom loss {self._called} fails on {m} rows with {rows.X.shape[1]} "
                f"features: {type(error).__name__}: {error}"
            ) from error
        if values.shape != (m,):
            raise InputError(
                f"{where}: the custom loss {self._called} must return one loss per row, shape "
                f"({m},), got shape {values.shape}; do not sum or average over the rows"
            )
        bad = ~np.isfinite(values)
        if np.any(bad):
            row = int(np.argmax(bad))
            raise InputError(
                f"{where}: the custom loss {self._called} is {values[row]} in row {row} at the "
                f"random point x = {np.asarray(x)}"
            )
        return values

    def _check_independence(self, x: Array, rows: Rows, values: np.ndarray, where: str) -> None:
        """Other rows left out or repeated must not change the loss of a row."""
        m = len(values)
        for index in (np.arange(0, m, 2), np.array([m - 1]), np.append(np.arange(m), 0)):
            subset = self._checked_values(x, Rows(rows.X[index], rows.y[index]), where)
            off = np.abs(subset - values[index]) > 1e-9 * np.max(np.abs(values))
            if np.any(off):
                row = int(np.argmax(off))
                raise InputError(
                    f"{where}: the custom loss {self._called} couples rows: row {index[row]} has "
                    f"loss {values[index[row]]:.6g} among {m} rows and {subset[row]:.6g} among "
                    f"{len(index)}; each row's loss may depend on x and that row only"
                )

    def _check_gradient(self, x: Array, v: Array, rows: Rows, where: str) -> None:
        """Derivative of every row's loss along v, JAX against central differences."""
        values = jax.jit(lambda x: self.fn(x, rows))
        along = np.asarray(jax.jacrev(values)(x) @ v)
        differences = np.stack([(values(x + h * v) - values(x - h * v)) / (2 * h) for h in STEPS])
        rounding = 1e-9 * np.max(np.abs(np.asarray(values(x))))
        error = np.min(np.abs(differences - along[None, :]), axis=0)
        bad = ~(error <= 1e-5 * np.abs(along) + rounding)
        if np.any(bad):
            row = int(np.argmax(bad))
            raise InputError(
                f"{where}: the gradient of the custom loss {self._called} is wrong in row {row}: "
                f"{along[row]:.8g} along a random direction by JAX, {differences[1, row]:.8g} by "
                "central differences; check custom_jvp, custom_vjp and stop_gradient"
            )

    @property
    def _called(self) -> str:
        return repr(getattr(self.fn, "__name__", type(self.fn).__name__))
