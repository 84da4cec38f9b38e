"""Sums and maps over all clients, one client's rows (or one block of rows) at a time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh

from fedexact.devices import SPLIT, WHOLE, all_shards_sum, joined, on_device, over_shards
from fedexact.losses import Rows, curvatures
from fedexact.losses.design import Sparse
from fedexact.oracles import RowOracle, Stack

BLOCK = 1 << 15  # entries of X in a block of rows: they stay in cache between their products

# While all clients padded to the longest are at most so many times the rows, their curvatures are
# found by one program instead of one for each bucket: it compiles faster.
PADDING = 4
COPIED = 100_000  # rows of a shard at most that are copied to another device for its program

Of = Callable[..., Any]  # a function of an oracle and arrays


def stack_specs(stack: Stack) -> Stack:
    """Partition specs of a stack: rows and slots split, what clients share on every device."""
    specs = {
        field.name: jax.tree.map(
            lambda _, spec=WHOLE if field.name in Stack.SHARED else SPLIT: spec,
            getattr(stack, field.name),
        )
        for field in dataclasses.fields(stack)
        if not field.metadata.get("static")
    }
    return dataclasses.replace(stack, **specs)


@partial(jax.jit, static_argnums=(0, 1))
def sum_over_clients(fn: Of, mesh: Mesh | None, stack: Stack, first: Array, args: Any) -> Any:
    """sum_k fn(oracle_k, *args); `first` (shards, buckets + 1) as in Layout."""

    def shard(stack: Stack, first: Array, args: Any) -> Any:
        return all_shards_sum(_client_by_client(fn, stack, first, args), mesh)

    return over_shards(shard, mesh, (stack_specs(stack), SPLIT, WHOLE), WHOLE)(stack, first, args)


@partial(jax.jit, static_argnums=(0, 1))
def sum_over_rows(fn: Of, mesh: Mesh | None, stack: Stack, first: Array, args: Any) -> Any:
    """sum_k fn(oracle_k, *args) without the clients' ridges, for an fn that is a weighted sum over
    rows."""

    def shard(stack: Stack, first: Array, args: Any) -> Any:
        return all_shards_sum(over_own_rows(fn, stack, first, args), mesh)

    return over_shards(shard, mesh, (stack_specs(stack), SPLIT, WHOLE), WHOLE)(stack, first, args)


def over_own_rows(fn: Of, stack: Stack, first: Array, args: Any, times: Array | int = 1) -> Any:
    """This device's share of `sum_over_rows`: block after block, whoever owns the rows. `times` may
    be 0: then it is 0 and costs nothing."""
    if isinstance(stack.X, Sparse):
        return _client_by_client(_without_ridge(fn), stack, first * times, args)
    rows = max(1, min(stack.window, BLOCK // stack.X.shape[1]))

    def add(i: Array, total: Any) -> Any:
        done = i * rows
        block = stack.block(jnp.minimum(done, stack.window - rows), rows, done)
        return jax.tree.map(jnp.add, total, fn(block, *args))

    total = _zeros(lambda: fn(stack.block(0, rows, 0), *args))
    return lax.fori_loop(0, -(-stack.window // rows) * times, add, total)


def _client_by_client(fn: Of, stack: Stack, first: Array, args: Any) -> Any:
    total = _zeros(lambda: fn(stack.client(0, 0), *args))
    for b in range(len(stack.sizes)):

        def add(j: Array, total: Any, b: int = b) -> Any:
            return jax.tree.map(jnp.add, total, fn(stack.client(j, b), *args))

        total = lax.fori_loop(first[0, b], first[0, b + 1], add, total)
    return total


@partial(jax.jit, static_argnums=(0, 1))
def map_clients(
    fn: Of, mesh: Mesh | None, stack: Stack, first: Array, args: Any, shared: Any
) -> Any:
    """(slots, ...) fn(oracle_k, arg_k, ..., *shared) of every client; `args` (slots, ...); 0 in
    empty slots."""

    def shard(stack: Stack, first: Array, args: Any, shared: Any) -> Any:
        def of(j: Array | int, b: int) -> Any:
            return fn(stack.client(j, b), *jax.tree.map(lambda a: a[j], args), *shared)

        shapes = jax.eval_shape(lambda: of(0, 0))
        out = jax.tree.map(lambda s: jnp.zeros((stack.width, *s.shape), s.dtype), shapes)
        for b in range(len(stack.sizes)):

            def set_(j: Array, out: Any, b: int = b) -> Any:
                return jax.tree.map(lambda a, new: a.at[j].set(new), out, of(j, b))

            out = lax.fori_loop(first[0, b], first[0, b + 1], set_, out)
        return out

    specs = stack_specs(stack), SPLIT, SPLIT, WHOLE
    return over_shards(shard, mesh, specs, SPLIT)(stack, first, args, shared)


def curvatures_of_clients(
    mesh: Mesh | None, counts: tuple[int, ...], stack: Stack, first: np.ndarray
) -> tuple[Array, Array]:
    """(slots,) smoothness and strong convexity of every f_k, ridge included; `counts` are the most
    clients of each bucket in one shard.

    One shard after the other, small ones all on one device and so by one program: in jaxlib 0.10.2
    a program on several CPU devices can wait for itself forever where LAPACK gets a batch after a
    matrix product.
    """
    if mesh is None:
        return _curvatures(counts, stack, first)
    here = [
        (s, device)
        for s, device in enumerate(mesh.devices.flat)
        if device.process_index == jax.process_index()
    ]
    found = []
    for s, device in here:
        mine = jax.tree.map(lambda a, device=device: on_device(a, device), stack)
        mine = jax.device_put(mine, here[0][1] if stack.window <= COPIED else device)
        pair = jax.block_until_ready(_curvatures(counts, mine, first[s : s + 1]))
        found.append(jax.device_put(pair, device))
    L, l = (joined(column, mesh) for column in zip(*found, strict=True))  # noqa: E741
    return L, l


@partial(jax.jit, static_argnums=0)
def _curvatures(counts: tuple[int, ...], stack: Stack, first: Array) -> tuple[Array, Array]:
    L, l = jnp.zeros((2, stack.width))  # noqa: E741 - the papers' symbol
    buckets: list[tuple[int | None, int, Array, Array]] = [
        (b, count, first[0, b], first[0, b + 1]) for b, count in enumerate(counts)
    ]
    if sum(counts) * max(size.rows for size in stack.sizes) <= PADDING * stack.window:
        buckets = [(None, sum(counts), first[0, 0], first[0, -1])]
    for b, count, begin, end in buckets:

        def rows_of(j: Array, b: int | None = b) -> tuple[Rows, Array]:
            oracle = stack.client(j, b)
            return oracle.rows, oracle.weight

        slots = begin + jnp.arange(count)
        L_b, l_b = curvatures(stack.loss, jnp.minimum(slots, end - 1), rows_of, stack.ridge)
        place = jnp.where(slots < end, slots, stack.width)
        L = L.at[place].set(L_b, mode="drop")
        l = l.at[place].set(l_b, mode="drop")  # noqa: E741
    return L, l


@functools.cache
def _without_ridge(fn: Of) -> Of:
    """fn of an oracle whose ridge is left out; the same function for the same fn."""

    def without(oracle: RowOracle, *args: Any) -> Any:
        return fn(dataclasses.replace(oracle, ridge=jnp.zeros_like(oracle.ridge)), *args)

    return without


def _zeros(fn: Callable[[], Any]) -> Any:
    """Zeros of the shape of what fn returns."""
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(fn))
