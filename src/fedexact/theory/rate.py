"""How fast the error contracts, without waiting for it: from the derivative of the round map.

With everybody present, or in a fixed cycle, the error is multiplied by one matrix per period, the
Jacobian of the rounds at the state where they settle; the rate is its spectral radius on the
states that can be reached and that the model feels. Reached are those orthogonal to what the rounds
conserve (the invariant, the number of clients, ...), whose eigenvalues are exactly 1.
With random cohorts S the error is
multiplied by a random product of matrices J_S. Its typical rate is exp(lim log|J_S ... J_S e| / T),
the Lyapunov exponent (almost every run contracts like that); its mean-square rate is the root of
the spectral radius of X -> E[J_S X J_S'] (the root-mean-square error over runs contracts like
that), which is larger, as rare unlucky runs dominate a mean.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse.linalg
from jax import Array, lax
from jax.flatten_util import ravel_pytree

from fedexact.core import Algorithm, in_float64
from fedexact.errors import InputError, check_count, check_positive
from fedexact.participation import Participation
from fedexact.problem import Problem
from fedexact.theory.rounds import Law, Program, Rounds, State, law, run
from fedexact.theory.settling import (
    BLOWN_UP,
    CHUNK,
    DENSE,
    FARTHEST,
    LOOKS,
    Place,
    alike,
    conserved_here,
    declared,
    grow,
    jacobian,
    period_map,
    period_of,
    polished,
    reachable,
    responses,
    settle,
    steady,
    widened,
)

SMALL = 64  # the largest state whose second moments are
WORK = 2e7  # entries of all Jacobians of a second-moment operator
SUPERLINEAR = 1e-4  # a rate below is 0 up to rounding: a nilpotent Jacobian
VANISHED = 1e-12  # so is a direction that one round shrinks like this, or a period twice
UNSEEN = 1e-10  # the part in the model of a direction of length 1 that the model does not feel
BATCHES = 20  # of a standard error
SEEDS = 101  # of a median over cohorts
WARM = 4  # further batches before them, while the direction turns to the slowest one


@dataclasses.dataclass(frozen=True)
class Rate:
    """How fast the error of a run contracts once it is small.

    Attributes:
        per_round: the factor of the error per round in almost every run; 0 for superlinear, 1 or
            more where it does not contract, inf where simulated runs diverge. Where the run ends in
            a noise ball: of the difference of two runs with the same cohorts and batches.
        error: its standard error, 0 where it is computed and not simulated.
        mean_square: the factor per round of the root-mean-square error over runs; None where it is
            not computed (rounds that depend on each other, random batches, large states).
        method: "spectral radius", "cycle", "Lyapunov" or "two runs".
        floor: the error at which contraction ends: 0.0, or None where it ends in a noise ball or at
            a biased point, which `fixed_point` describes.
        first: where per_round is 0, rounds before that can show: the median number after which
            every client has been seen, 0 with everybody present; else 0.
    """

    per_round: float
    error: float
    mean_square: float | None
    method: str
    floor: float | None
    first: float = 0.0

    def rounds(self, tol: float) -> float:
        """The number of rounds that shrink the error by the factor `tol` < 1; inf if none do.

        Raises InputError unless 0 < tol < 1.
        """
        check_positive("tol", tol)
        if tol >= 1.0:
            raise InputError(f"tol is the factor by which the error shrinks, below 1, got {tol:g}")
        if not self.per_round < 1.0:
            return math.inf
        if self.per_round == 0.0:
            return self.first + 1
        return max(1, math.ceil(math.log(tol) / math.log(self.per_round)))


@in_float64
def rate(
    algorithm: Algorithm,
    problem: Problem,
    participation: Participation | None = None,
    rounds: int = 4000,
    seed: int = 0,
    x0: Any = None,
) -> Rate:
    """The rate at which an algorithm converges, to wherever it converges.

    Args:
        participation: everybody if left out.
        rounds: at most so many find the state at which the rounds settle, and so many estimate a
            Lyapunov exponent where one is needed, both rounded up to the next multiple of 256.
        seed: of simulated cohorts and batches.
        x0: (d,) start, zeros if left out.

    Raises:
        InputError: a client that never takes part, or a value that cannot be used.
        CapabilityError: the algorithm cannot handle the problem.
    """
    check_count("rounds", rounds, at_least=BATCHES)
    return rate_of(Rounds(problem, algorithm, participation, seed), rounds, x0)


def rate_of(task: Rounds, rounds: int, x0: Any = None) -> Rate:
    """`rate` of these rounds."""
    _check_present(task)
    with np.errstate(over="ignore", invalid="ignore"):  # steps far too long overflow
        found = _rate_of(task, rounds, x0)
    if found.per_round > 0.0 or task.setting.full:
        return found
    return dataclasses.replace(found, first=_until_seen(task))


def _rate_of(task: Rounds, rounds: int, x0: Any) -> Rate:
    floor = 0.0 if task.algorithm.exactness(task.setting).exact else None
    if not _differentiable(task):
        per_round, error = _two_runs(task, rounds, x0)
        return Rate(per_round, error, None, "two runs", floor)
    place = settle(task, rounds, x0)
    period = period_of(task)
    if period is not None and steady(task, place, period):
        if not task.problem.loss.quadratic:
            place = polished(task, place, period)
        per_round = _or_zero(_radius(task, place, period) ** (1.0 / period))
        method = "spectral radius" if period == 1 else "cycle"
        return Rate(per_round, 0.0, per_round, method, floor)
    per_round, error = _lyapunov(task, place, rounds)
    return Rate(per_round, error, _mean_square(task, place), "Lyapunov", floor)


def _check_present(task: Rounds) -> None:
    absent = np.flatnonzero(task.setting.p == 0.0)
    if absent.size:
        name = task.setting.names[int(absent[0])]
        raise InputError(
            f"client {name!r} never takes part: the run does not reach the problem's solution; "
            f"leave the client out of the problem to get the rate of the others"
        )


def _differentiable(task: Rounds) -> bool:
    """Whether a round has a derivative where it settles; inexact proxes, which stop by a relative
    rule, and extrapolation from differences that vanish do not."""
    inexact = "prox" in task.algorithm.requires and task.oracle.oracle.prox_method == "gradient"
    return not inexact and task.algorithm.name != "Anderson"


def _overflows(J: np.ndarray) -> bool:
    """Whether the entries are too large for eigenvalues."""
    return not float(np.max(np.abs(J), initial=0.0)) < BLOWN_UP


def _or_zero(rate: float) -> float:
    return 0.0 if rate < SUPERLINEAR else rate


# --- periodic cohorts -----------------------------------------------------------------------------


def _radius(task: Rounds, place: Place, period: int) -> float:
    """The spectral radius of a period's map on the reachable states."""
    if task.flat(place.state).size > DENSE:
        return _arnoldi(task, place, period)
    J = period_map(task, place, period)[2]
    if _overflows(J):
        return math.inf
    Q = reachable(J[None])
    if Q.shape[1] == 0:
        return 0.0
    A = Q.T @ J @ Q
    if np.linalg.norm(A @ A) <= VANISHED * np.linalg.norm(A) ** 2:
        return 0.0  # its eigenvalues are roots of rounding errors
    values, modes = np.linalg.eig(A)
    seen = np.linalg.norm(model_jacobian(task, place) @ Q @ modes, axis=0) > UNSEEN
    return float(np.max(np.abs(values[seen]), initial=0.0))


def _arnoldi(task: Rounds, place: Place, period: int) -> float:
    """The same for large states, from derivatives along vectors."""
    W = declared(task, place)
    masks = jnp.asarray(task.masks(place.round, place.round + period))

    def apply(v: np.ndarray) -> np.ndarray:
        v = v - W @ (W.T @ v)
        out = np.asarray(_along(task.program, place.state, jnp.asarray(v), masks, place.round))
        return out - W @ (W.T @ out)

    n = len(place.moved)
    operator = scipy.sparse.linalg.LinearOperator((n, n), matvec=apply, dtype=np.float64)  # pyright: ignore[reportCallIssue]
    start = place.moved - W @ (W.T @ place.moved)
    found = scipy.sparse.linalg.eigs(
        operator,
        k=2,
        which="LM",
        v0=start,
        tol=cast(Any, 1e-8),
        ncv=min(n - 1, 60),
        return_eigenvectors=False,
    )
    return float(np.max(np.abs(found)))


@jax.jit
def _along(program: Program, state: State, v: Array, masks: Array, start: Array) -> Array:
    """(n,) the derivative of the rounds along v."""

    def several(z: Array) -> Array:
        def step(carry: tuple[Array, Array], mask: Array) -> tuple[tuple[Array, Array], None]:
            z, round = carry
            return (program.flat_step(state, z, mask, round), round + 1), None

        return lax.scan(step, (z, jnp.asarray(start)), masks)[0][0]

    return jax.jvp(several, (ravel_pytree(state)[0],), (v,))[1]


# --- random cohorts -------------------------------------------------------------------------------


def _lyapunov(task: Rounds, place: Place, rounds: int) -> tuple[float, float]:
    """The typical rate and its standard error, by batch means over one path."""
    if place.diverged:
        return math.inf, 0.0
    found = conserved_here(task, place)
    W, e = widened(found), _direction(place, found)
    round, state = place.round, place.state
    end = round + CHUNK * math.ceil((WARM + BATCHES) * (rounds // BATCHES) / CHUNK)
    stretches, parts = [], []
    while round < end:
        grown = grow(task, state, e, round, round + CHUNK, W)
        state, e = grown.state, np.asarray(grown.tangent)
        stretches.append(np.asarray(grown.sizes))
        parts.append(np.asarray(grown.seen))
        round += CHUNK
    sizes, seen = np.concatenate(stretches), np.concatenate(parts)
    warm = len(sizes) * WARM // (WARM + BATCHES)
    if not np.all(np.isfinite(sizes)):
        return math.inf, 0.0
    if np.min(sizes) < VANISHED or np.max(seen[warm:]) < UNSEEN:
        return 0.0, 0.0
    batches = np.array([b.mean() for b in np.array_split(np.log(sizes[warm:]), BATCHES)])
    per_round = float(np.exp(batches.mean()))
    return per_round, per_round * float(batches.std(ddof=1)) / math.sqrt(BATCHES)


def _direction(place: Place, W: np.ndarray) -> np.ndarray:
    """(n,) that of the way to here, or any where the run started here; orthogonal to W."""
    way = place.moved
    if not np.any(way):
        way = np.random.default_rng(0).normal(size=len(way))
    return way - W @ (W.T @ way)


def _until_seen(task: Rounds) -> float:
    """The median number of rounds after which every client has been seen, over `SEEDS` draws; inf
    where that takes more than `FARTHEST` rounds."""
    span = 64
    while span <= FARTHEST:
        first = []
        for seed in range(SEEDS):
            seen = task.participation.mask(task.N, 0, span, seed)
            first.append(np.max(np.where(seen.any(axis=0), seen.argmax(axis=0) + 1, np.inf)))
        if np.isfinite(np.median(first)):
            return float(np.median(first))
        span *= 4
    return math.inf


def _mean_square(task: Rounds, place: Place) -> float | None:
    """The mean-square rate where rounds are independent and the state is small."""
    n = task.flat(place.state).size
    cohorts = law(task.participation, task.N) if n <= SMALL else None
    linear = task.problem.loss.quadratic or task.algorithm.exactness(task.setting).exact
    if cohorts is None or not linear or len(cohorts.masks) * n**2 > WORK:
        return None
    everybody = jnp.ones((LOOKS, task.N), bool)
    v = jnp.asarray(np.random.default_rng(0).normal(size=n))
    looks = responses(task.program, place.state, v, everybody, jnp.asarray(place.round), False)
    if not alike(np.asarray(looks)):
        return None
    J = cohort_jacobians(task, place, cohorts)
    if _overflows(J):
        return math.inf
    used = relevant(J, model_jacobian(task, place))
    J = J[:, used][:, :, used]
    Q = reachable(J)
    return _or_zero(math.sqrt(second_moment_radius(Q.T @ J @ Q, cohorts.probability)))


def model_jacobian(task: Rounds, place: Place) -> np.ndarray:
    """(d, n) derivative of the server's model with respect to the flat state."""
    _, unflat = ravel_pytree(place.state)
    flat = task.flat(place.state)
    return np.asarray(jax.jacrev(lambda z: task.algorithm.model(unflat(z)[0]))(flat))


def relevant(jacobians: np.ndarray, model: np.ndarray) -> np.ndarray:
    """(n,) bool: the entries of the state that the model depends on, now or in later rounds."""
    used = np.any(model != 0.0, axis=0)
    depends = np.any(jacobians != 0.0, axis=0)
    while True:
        more = used | np.any(depends[used], axis=0)
        if np.array_equal(more, used):
            return used
        used = more


def cohort_jacobians(task: Rounds, place: Place, cohorts: Law) -> np.ndarray:
    """(M, n, n) of a round with each of the cohorts."""
    masks = jnp.asarray(cohorts.masks)
    return np.asarray(_jacobians(task.program, place.state, masks, jnp.asarray(place.round)))


@jax.jit
def _jacobians(program: Program, state: State, masks: Array, round: Array) -> Array:
    return lax.map(lambda mask: jacobian(program, state, mask[None], round)[1], masks)


def second_moment_radius(A: np.ndarray, probability: np.ndarray) -> float:
    """The spectral radius of X -> sum_s probability_s A_s X A_s' over the (M, r, r) matrices."""
    r = A.shape[1]

    def apply(x: np.ndarray) -> np.ndarray:
        X = x.reshape(r, r)
        return np.einsum("sij,skj,s->ik", A @ X, A, probability, optimize=True).ravel()

    if r <= 8:
        return float(np.max(np.abs(np.linalg.eigvals(second_moment_matrix(A, probability)))))
    operator = scipy.sparse.linalg.LinearOperator((r * r, r * r), matvec=apply, dtype=np.float64)  # pyright: ignore[reportCallIssue]
    found = scipy.sparse.linalg.eigs(
        operator,
        k=1,
        which="LM",
        v0=np.eye(r).ravel(),
        tol=cast(Any, 1e-10),
        return_eigenvectors=False,
    )
    return float(np.abs(found[0]))


def second_moment_matrix(A: np.ndarray, probability: np.ndarray) -> np.ndarray:
    """(r^2, r^2) the matrix of X -> sum_s probability_s A_s X A_s', X in row-major order."""
    r = A.shape[1]
    product = np.einsum("s,sij,skl->ikjl", probability, A, A, optimize=True)
    return product.reshape(r * r, r * r)


# --- maps without a derivative --------------------------------------------------------------------


def _two_runs(task: Rounds, rounds: int, x0: Any) -> tuple[float, float]:
    """The slope of the distance of two runs with the same cohorts and keys, and its standard
    error; over the last half of its fall to rounding."""
    here = np.zeros(task.problem.dim) if x0 is None else task.problem.check_model(x0)
    there = here + np.random.default_rng(0).normal(size=here.size) * (1.0 + np.abs(here))
    masks = jnp.asarray(task.masks(0, rounds))
    paths = [
        np.asarray(run(task.program, task.initial(start), masks, jnp.asarray(0))[1])
        for start in (here, there)
    ]
    distance = np.linalg.norm(paths[0] - paths[1], axis=1)
    floor = 1e-11 * max(float(np.max(np.abs(paths[0][-1]))), 1e-300)
    fall = np.flatnonzero(distance <= floor)
    stop = int(fall[0]) if fall.size else rounds
    if not np.all(np.isfinite(distance[:stop])):
        return math.inf, 0.0
    if stop < 4:
        return 0.0, 0.0
    half = math.sqrt(distance[0] * max(distance[stop - 1], floor))
    late = np.flatnonzero(distance[:stop] <= half)
    begin = min(int(late[0]) if late.size else stop // 2, stop - 3)
    steps = np.diff(np.log(distance[begin:stop]))
    parts = np.array_split(steps, min(BATCHES, len(steps)))
    means = np.array([part.mean() for part in parts])
    per_round = float(np.exp(steps.mean()))
    return per_round, per_round * float(means.std(ddof=1)) / math.sqrt(len(means))
