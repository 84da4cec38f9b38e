"""Where rounds settle, their derivative there, and what they conserve."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.flatten_util import ravel_pytree

from fedexact.participation import Full
from fedexact.participation.periodic import Periodic
from fedexact.theory.rounds import Program, Rounds, State

DENSE = 1200  # the largest state whose Jacobian is formed
CHUNK = 256  # rounds between two looks at whether the state has settled
WINDOW = 64  # rounds in which a settled model must not move
SETTLED = 1e-13  # relative change of the model
LOOKS = 512  # rounds over which the derivative is compared with itself
SAME = 1e-3  # relative
NEWTON_STEPS = 20
NARROW = 200  # a state up to which columns of a Jacobian come from the program of `growth`
FARTHEST = 2**16  # rounds in which cohorts are looked for
FURTHER = 3  # cohorts compared beyond those through which all clients meet
ROUNDING = 1e-13  # relative, of a Jacobian's singular values
BLOWN_UP = 1e40  # an entry of the state of a run that diverges


# --- where the rounds settle ----------------------------------------------------------------------


class Place(NamedTuple):
    """A state of a run, and how it was reached."""

    state: State
    round: int  # the next one
    settled: bool  # the models repeat themselves, or do not move
    moved: np.ndarray  # (n,) the flat state minus that before round 0
    diverged: bool = False  # the run blows up; the state is an early one


def period_of(task: Rounds) -> int | None:
    """Rounds after which the cohorts repeat; None where they are random."""
    if isinstance(task.participation, Full):
        return 1
    if isinstance(task.participation, Periodic):
        return len(task.participation.table(task.N))
    return None


def settle(task: Rounds, rounds: int, x0: Any = None) -> Place:
    """The state after `rounds` rounds, or earlier where the models repeat themselves, or an
    early one of a run that diverges."""
    period = period_of(task) or 1
    state = start = task.initial(x0)
    round, settled, diverged = 0, False, False
    chunk = period * math.ceil(max(CHUNK, period + WINDOW) / period)
    advance = _advance(task, state)
    while round < rounds and not settled and not diverged:
        after, models = advance(state, round, round + chunk)
        diverged = not np.max(np.abs(np.asarray(task.flat(after)))) < BLOWN_UP
        if diverged:
            break
        state, round = after, round + chunk
        late = models[-period - WINDOW :]
        change = np.max(np.abs(late[period:] - late[:-period]))
        settled = bool(change <= SETTLED * np.max(np.abs(late), initial=1e-300))
    moved = np.asarray(task.flat(state) - task.flat(start))
    return Place(state, round, settled, moved, diverged)


def _advance(task: Rounds, like: State) -> Callable[[State, int, int], tuple[State, np.ndarray]]:
    """Runs rounds. Exact algorithms under random cohorts settle soon, and then `growth` is needed:
    its program runs them too, so that one is compiled and not two."""
    n = task.flat(like).size
    exact = task.algorithm.exactness(task.setting).exact
    if period_of(task) is not None or not exact or n > NARROW:
        return task.run
    nothing = widened(np.zeros((n, 0)))

    def advance(state: State, start: int, stop: int) -> tuple[State, np.ndarray]:
        found = grow(task, state, np.zeros(n), start, stop, nothing)
        return found.state, np.asarray(found.models)

    return advance


def steady(task: Rounds, place: Place, period: int) -> bool:
    """Whether the derivative of a period is the same every time: no random batches, no coins."""
    n = task.flat(place.state).size
    v = jnp.asarray(np.random.default_rng(0).normal(size=n))
    looks = period * max(2, LOOKS // period)
    masks = jnp.asarray(task.masks(place.round, place.round + looks))
    found = np.asarray(
        responses(task.program, place.state, v, masks, place.round, not place.diverged)
    )
    return alike(found.reshape(-1, period, n))


def alike(responses: np.ndarray) -> bool:
    """Whether the first axis makes no difference."""
    if not np.all(np.isfinite(responses)):
        return False
    return bool(np.max(np.abs(responses - responses[:1])) <= SAME * np.max(np.abs(responses)))


@partial(jax.jit, static_argnames="move")
def responses(
    program: Program, state: State, v: Array, masks: Array, start: Array, move: bool
) -> Array:
    """(T, n) derivatives along v of the rounds with these masks, along the run where `move`, else
    all at `state`."""

    def step(carry: tuple[Array, Array], mask: Array) -> tuple[tuple[Array, Array], Array]:
        z, round = carry
        after, response = jax.jvp(lambda z: program.flat_step(state, z, mask, round), (z,), (v,))
        return (after if move else z, round + 1), response

    start_flat = ravel_pytree(state)[0]
    return lax.scan(step, (start_flat, jnp.asarray(start)), masks)[1]


def polished(task: Rounds, place: Place, period: int) -> Place:
    """The same, where the run was too slow to settle after Newton steps on a period's map."""
    if place.settled or task.flat(place.state).size > DENSE:
        return place
    best = np.inf
    for _ in range(NEWTON_STEPS):
        flat, end, J = period_map(task, place, period)
        r = end - flat
        clock = np.isclose(r, period) & ~np.any(J, axis=1)  # notes the round, and does not settle
        r = np.where(clock, 0.0, r)
        size = float(np.linalg.norm(r))
        if not size < best:
            break
        best = size
        if size <= SETTLED * np.linalg.norm(flat):
            return place._replace(settled=True)
        Q = reachable(J[None])
        rest = np.linalg.solve(np.eye(Q.shape[1]) - Q.T @ J @ Q, Q.T @ r)
        state = task.unflat(place.state, jnp.asarray(end + J @ (Q @ rest)))
        place = place._replace(state=state, round=place.round + period)
    return place


def period_map(
    task: Rounds, place: Place, period: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The flat state, that after a period, and the Jacobian."""
    masks = jnp.asarray(task.masks(place.round, place.round + period))
    end, J = jacobian(task.program, place.state, masks, jnp.asarray(place.round))
    return np.asarray(task.flat(place.state)), np.asarray(end), np.asarray(J)


# --- what is conserved ----------------------------------------------------------------------------


def conserved(jacobians: np.ndarray) -> np.ndarray:
    """(n, c) orthonormal basis of the functionals w with w'J = w' for all (M, n, n) Jacobians, on
    states that agree in the constant entries."""
    n = jacobians.shape[1]
    constant = np.all(jacobians == np.eye(n)[None], axis=(0, 2))
    others = np.flatnonzero(~constant)
    basis = np.eye(n)[:, constant]
    if others.size == 0:
        return basis
    within = jacobians[:, others][:, :, others]
    stack = np.concatenate([J.T - np.eye(len(others)) for J in within])
    _, sizes, directions = np.linalg.svd(stack, full_matrices=False)
    small = sizes <= ROUNDING * max(1.0, float(sizes[0]))
    rest = np.zeros((n, int(small.sum())))
    rest[others] = directions[small].T
    return np.concatenate([basis, rest], axis=1)


def reachable(jacobians: np.ndarray) -> np.ndarray:
    """(n, n - c) orthonormal basis of the directions along which nothing conserved changes."""
    W = conserved(jacobians)
    return np.linalg.qr(W, mode="complete")[0][:, W.shape[1] :]


def declared(task: Rounds, place: Place) -> np.ndarray:
    """(n, c) orthonormal basis of the constant entries of the state and the invariant."""
    _, unflat = ravel_pytree(place.state)
    flat = task.flat(place.state)
    invariant = jax.jacrev(lambda z: task.algorithm.invariant(*unflat(z)))(flat)
    constant = np.eye(flat.size)[:, place.moved == 0.0]
    columns = np.concatenate([constant, np.asarray(invariant).T], axis=1)
    U, sizes, _ = np.linalg.svd(columns, full_matrices=False)
    return U[:, sizes > 1e-12]


def conserved_here(task: Rounds, place: Place) -> np.ndarray:
    """(n, c) of the cohorts of this participation."""
    if task.flat(place.state).size > DENSE:
        return declared(task, place)
    few = telling(drawn(task, place.round))
    return conserved(np.array([cohort_jacobian(task, place, mask) for mask in few]))


def drawn(task: Rounds, start: int) -> np.ndarray:
    """(M, N) different cohorts of the coming rounds, of so many that all clients that take part
    are among them, if rounds enough tell."""
    span = LOOKS
    while True:
        masks = np.unique(task.masks(start, start + span), axis=0)
        if np.all(masks.any(axis=0) | (task.setting.p == 0.0)) or span >= FARTHEST:
            return masks
        span *= 4


def telling(masks: np.ndarray) -> np.ndarray:
    """A few of the (M, N) cohorts: large ones through which all clients meet that ever do, and
    `FURTHER` more. What these conserve all conserve."""
    group, seen = np.arange(masks.shape[1]), np.zeros(masks.shape[1], bool)
    chosen, others = [], []
    for mask in masks[np.argsort(-masks.sum(axis=1), kind="stable")]:
        met = np.unique(group[mask])
        if len(met) > 1 or np.any(mask & ~seen):
            chosen.append(mask)
            group[np.isin(group, met)] = met[0]
            seen |= mask
        else:
            others.append(mask)
    return np.array(chosen + others[:FURTHER])


# --- Jacobians ------------------------------------------------------------------------------------


@partial(jax.jit, static_argnames="batch")
def jacobian(
    program: Program, state: State, masks: Array, start: Array, batch: int = 64
) -> tuple[Array, Array]:
    """The flat state after rounds with the (T, N) masks, (n,), and its Jacobian, (n, n), a few
    columns at a time."""
    flat = ravel_pytree(state)[0]

    def several(z: Array) -> Array:
        def step(carry: tuple[Array, Array], mask: Array) -> tuple[tuple[Array, Array], None]:
            z, round = carry
            return (program.flat_step(state, z, mask, round), round + 1), None

        return lax.scan(step, (z, start), masks)[0][0]

    end, push_forward = jax.linearize(several, flat)
    columns = lax.map(push_forward, jnp.eye(flat.size, dtype=flat.dtype), batch_size=batch)
    return end, columns.T


class Growth(NamedTuple):
    """What `growth` finds; the arrays have one entry per mask, 0 for rounds that were not run."""

    state: State
    tangent: Array  # (n,) image under the last round of a direction of length 1
    sizes: Array  # (T,) by what each round stretches the direction
    seen: Array  # (T,) the part of its length that is in the model
    models: Array  # (T, d) after each round


@jax.jit
def growth(
    program: Program,
    state: State,
    tangent: Array,
    masks: Array,
    count: Array,
    start: Array,
    basis: Array,
) -> Growth:
    """Runs `count` rounds with the first of the (T, N) masks, and carries the direction `tangent`
    (n,) along. It is kept orthogonal to the (n, c) `basis`: the rounds conserve these functionals,
    and rounding must not bring them back."""
    flat, unflat = ravel_pytree(state)
    model = program.algorithm.model
    nothing = jnp.zeros(len(masks), flat.dtype)
    x0 = model(state[0])

    def step(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        z, e, sizes, seen, models = carry
        length = jnp.linalg.norm(e)
        e = e / jnp.where(length > 0.0, length, 1.0)
        round = program.flat_step
        z, e = jax.jvp(lambda z: round(state, z, masks[i], start + i), (z,), (e,))
        e = e - basis @ (basis.T @ e)
        size = jnp.linalg.norm(e)
        x, shown = jax.jvp(lambda z: model(unflat(z)[0]), (z,), (e,))
        part = jnp.linalg.norm(shown) / jnp.where(size > 0.0, size, 1.0)
        return z, e, sizes.at[i].set(size), seen.at[i].set(part), models.at[i].set(x)

    models = jnp.zeros((len(masks), x0.size), x0.dtype)
    flat, *found = lax.fori_loop(0, count, step, (flat, tangent, nothing, nothing, models))
    return Growth(unflat(flat), *found)


def grow(
    task: Rounds, state: State, tangent: np.ndarray, start: int, stop: int, basis: Array
) -> Growth:
    """`growth` in the rounds start, ..., stop - 1 of the task, at most `CHUNK`."""
    masks = task.masks(start, stop)
    return _padded(task, state, tangent, masks, start, basis)


def _padded(
    task: Rounds, state: State, tangent: np.ndarray, masks: np.ndarray, start: int, basis: Array
) -> Growth:
    """`growth` with room for `CHUNK` rounds, whatever the number of masks: one program."""
    room = np.zeros((CHUNK, task.N), bool)
    room[: len(masks)] = masks
    return growth(
        task.program, state, jnp.asarray(tangent), jnp.asarray(room),
        jnp.asarray(len(masks)), jnp.asarray(start), basis,
    )  # fmt: skip


def widened(basis: np.ndarray) -> Array:
    """Small ones with as many columns as rows, zeros: one program whatever their number."""
    n, c = basis.shape
    return jnp.asarray(np.pad(basis, ((0, 0), (0, n - c))) if n <= NARROW else basis)


def cohort_jacobian(task: Rounds, place: Place, mask: np.ndarray) -> np.ndarray:
    """(n, n) of a round with this cohort."""
    n, start = task.flat(place.state).size, jnp.asarray(place.round)
    if n > NARROW:
        return np.asarray(jacobian(task.program, place.state, jnp.asarray(mask[None]), start)[1])
    nothing = widened(np.zeros((n, 0)))
    columns = [
        _padded(task, place.state, e, mask[None], place.round, nothing).tangent for e in np.eye(n)
    ]
    return np.array(columns).T
