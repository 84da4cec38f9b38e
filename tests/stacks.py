"""Stacks of equally many rows per client, made by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedexact.losses import Loss, Rows
from fedexact.oracles import RowOracle, Size, Stack


def even_stack(
    loss: Loss,
    ridge: Any,
    rows: Rows,
    weight: Any,
    n_rows: Any,
    smoothness: Any,
    strong_convexity: Any,
    prox_method: str = "newton",
) -> Stack:
    """N clients of m rows each: rows and weight (N, m, ...), the others (N,)."""
    N, m = weight.shape
    X, y = jnp.asarray(rows.X), jnp.asarray(rows.y)
    return Stack(
        loss=loss,
        ridge=ridge,
        X=X.reshape(N * m, -1),
        y=y.reshape(-1),
        weight=jnp.asarray(weight).reshape(-1),
        own=jnp.column_stack([jnp.arange(N) * m, jnp.asarray(n_rows, int)]),
        row_weight=jnp.asarray(weight)[:, 0],
        entry=jnp.zeros(N, int),
        n_entries=jnp.zeros(N, int),
        smoothness=jnp.asarray(smoothness),
        strong_convexity=jnp.asarray(strong_convexity),
        prox_method=prox_method,
        sizes=(Size(m, 1, even=True),),
        width=N,
        window=N * m,
    )


def stack_of(oracles: list[RowOracle]) -> Stack:
    """The stack of these clients of equally many rows."""

    def together(name: str) -> Any:
        return jax.tree.map(lambda *a: jnp.stack(a), *(getattr(o, name) for o in oracles))

    first = oracles[0]
    return even_stack(
        first.loss,
        first.ridge,
        together("rows"),
        together("weight"),
        together("n_rows"),
        together("smoothness"),
        together("strong_convexity"),
        first.prox_method,
    )
