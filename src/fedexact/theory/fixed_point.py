"""Where an algorithm ends up, and how far that is from the pooled answer.

Exact ones end at the minimiser of F + g. FedAvg, FedProx, FedAU and MIFA add up the displacements
D_k(x) = T_k(x) - x of the clients, T_k their local steps or their prox, with weights a_k on
average, and end where

    sum_k a_k D_k(x) = 0,

a_k = q_k = E[1{k in S}/|S|] for FedAvg and FedProx, 1 for MIFA and p_k E[omega_k] for FedAU. For
quadratics D_k is affine and one Newton step is the closed form: for FedAvg D_k(x) = -lr M_k
(H_k x - b_k) with M_k = sum_{i<R} (I - lr H_k)^i, for FedProx the gradient of a Moreau envelope
times -s. To first order in lr, with x_a the minimiser of sum_k a_k f_k,

    x - x* = x_a - x* + lr (R - 1)/2 (sum_k a_k H_k)^-1 sum_k a_k H_k grad f_k(x_a),

for FedProx s in the place of lr (R - 1)/2. Where cohorts are random the model moves around that
point for ever: for quadratics and independent rounds the second moment of x - E x solves a linear
equation. What has no such form is run until it settles, or simulated.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse.linalg
from jax import Array

from fedexact.algorithms import MIFA, FedAU, FedAvg, FedProx
from fedexact.algorithms.common import descend
from fedexact.certificate import certify
from fedexact.core import Algorithm, Exactness, in_float64
from fedexact.errors import InputError, check_count
from fedexact.participation import Full, Participation
from fedexact.problem import Problem
from fedexact.reference import reference
from fedexact.solve import check_fit, setting_of
from fedexact.theory.rounds import INDEPENDENT, Differentiable, Law, Rounds, law
from fedexact.theory.settling import CHUNK, period_of, polished, settle, steady

MOMENTS = 4e8  # N d^3 up to which the second moments are solved for
NEWTON_STEPS = 50
REACHED = 1e-14  # a Newton step, relative to the size of x: done
ACCEPTED = 1e-9  # the last one, where rounding stops the progress
BATCHES = 20  # of a standard error
FEWEST = BATCHES * CHUNK  # rounds that are simulated
BUDGET = 2e10  # multiplications of a simulation, about
PRECISE = 0.01  # standard error relative to the spread: simulated long enough
HEAVY = 0.2  # standard error relative to the spread: not much of a standard error
ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True, eq=False)
class FixedPoint:
    """Where an algorithm ends up.

    Attributes:
        x: (d,) the limit point; where the model does not settle the mean of its stationary law.
        method: "pooled" (exact by theory), "closed form", "newton" (solved, or run until it
            settled) or "simulated" (averaged over a run, with a standard error).
        why: in words.
        bias: (d,) x minus the pooled answer; distance: its norm.
        bias_se: (d,) the bias in standard errors of the pooled answer, and distance_se the largest
            of them in modulus; None where there are no standard errors.
        first_order: (d,) the expansion of the bias to first order in the step; None where there is
            none.
        spread: root of E|x_t - x|^2 in the long run, 0 where the model settles at x, inf where
            runs move away from it.
        spread_error: its standard error where it is simulated, else 0.
        x_error: (d,) standard errors of x where it is simulated, else 0.
    """

    x: np.ndarray
    method: str
    why: str
    bias: np.ndarray
    distance: float
    bias_se: np.ndarray | None
    distance_se: float | None
    first_order: np.ndarray | None
    spread: float
    spread_error: float
    x_error: np.ndarray


@in_float64
def fixed_point(
    algorithm: Algorithm,
    problem: Problem,
    participation: Participation | None = None,
    x0: Any = None,
    rounds: int = 20_000,
    seed: int = 0,
) -> FixedPoint:
    """The limit of an algorithm, its bias, and how far it moves around it.

    The mean is exact for quadratics and independent rounds. Elsewhere, where cohorts or batches are
    random and the model does not settle, it is that of the averaged round, right to first order in
    the step ("newton"), or simulated where rounds depend on each other.

    Args:
        participation: everybody if left out.
        x0: (d,) start of what is run, zeros if left out.
        rounds: of what is simulated at most, a fifth of them thrown away; fewer where the standard
            error of the spread is below 1 % of it, or where a round is a lot of work.
        seed: of simulated cohorts and batches.

    Raises:
        InputError: the pooled answer does not exist or is not unique, a run diverges, or a value
            cannot be used.
        CapabilityError: the algorithm cannot handle the problem.
    """
    check_count("rounds", rounds, at_least=BATCHES * CHUNK)
    participation = Full() if participation is None else participation
    participation.check(problem.n_clients, problem.names)
    check_fit(problem, algorithm)
    setting = setting_of(problem, participation)
    verdict = algorithm.resolve(setting).exactness(setting)
    if verdict.exact:
        return _pooled(problem, verdict)
    return fixed_point_of(Rounds(problem, algorithm, participation, seed), rounds, x0)


def fixed_point_of(task: Rounds, rounds: int, x0: Any = None) -> FixedPoint:
    """`fixed_point` of these rounds."""
    verdict = task.algorithm.exactness(task.setting)
    if verdict.exact:
        return _pooled(task.problem, verdict)
    star = reference(task.problem)
    limit = _averaged(task, star, rounds)
    if limit is None:
        limit = _settled(task, x0, rounds)
    if limit is None:
        limit = _simulated(task, x0, rounds)
    if limit.spread_error > HEAVY * limit.spread:
        limit = limit._replace(
            why=f"{limit.why}; the spread is that of a heavy-tailed law, a guess"
        )
    return _report(task.problem, star, limit)


def _pooled(problem: Problem, verdict: Exactness) -> FixedPoint:
    star = reference(problem)
    return _report(problem, star, _Limit(star, "pooled", f"exact: {verdict.why}"))


class _Limit(NamedTuple):
    x: np.ndarray
    method: str
    why: str
    first_order: np.ndarray | None = None
    spread: float = 0.0
    spread_error: float = 0.0
    x_error: np.ndarray | None = None


def _report(problem: Problem, star: np.ndarray, limit: _Limit) -> FixedPoint:
    bias = limit.x - star
    se = certify(problem, star).standard_errors
    in_se = None if se is None else bias / se
    return FixedPoint(
        x=limit.x,
        method=limit.method,
        why=limit.why,
        bias=bias,
        distance=float(np.linalg.norm(bias)),
        bias_se=in_se,
        distance_se=None if in_se is None else float(np.max(np.abs(in_se))),
        first_order=limit.first_order,
        spread=limit.spread,
        spread_error=limit.spread_error,
        x_error=np.zeros_like(star) if limit.x_error is None else limit.x_error,
    )


# --- algorithms that add up displacements ---------------------------------------------------------


class _PerClient(NamedTuple):
    """A vector of each client, as a function of x."""

    task: Rounds
    one: Callable[..., Array]  # of algorithm, oracle and x

    def at(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(N, d) at x, and its (N, d, d) derivative."""
        task, k = self.task, jnp.arange(self.task.N)
        found = _every_client(self.one, task.algorithm, task.oracle, k, jnp.asarray(x))
        return np.asarray(found[0]), np.asarray(found[1])

    def root(self, a: np.ndarray, x: np.ndarray) -> np.ndarray | None:
        """(d,) where their sum weighted by a is 0, found from x by Newton steps; None if these do
        not converge."""
        length = np.inf
        for _ in range(NEWTON_STEPS):
            values, slopes = self.at(x)
            step = np.linalg.lstsq(np.tensordot(a, slopes, 1), a @ values, rcond=None)[0]
            x, length = x - step, float(np.linalg.norm(step))
            if not np.isfinite(length):
                return None
            if length <= REACHED * float(np.linalg.norm(x)):
                break
        return x if length <= ACCEPTED * max(float(np.linalg.norm(x)), 1.0) else None


class _Displacements(NamedTuple):
    """x += sum_k c_k(S) D_k(x); a_k = E c_k, up to a factor."""

    D: _PerClient
    a: np.ndarray  # (N,) sum 1
    half_drift: float  # D_k = -const (I - half_drift H_k) grad f_k to first order
    pace: float  # E c_k = pace a_k


def _displacements(task: Rounds) -> _Displacements | None:
    """Where the average round of the algorithm has this form."""
    algorithm, a = task.algorithm, _weights(task)
    if a is None or not np.any(a > 0.0):
        return None
    pace = _pace(task) * float(np.sum(a))
    a = a / np.sum(a)
    if not isinstance(algorithm, FedProx):
        lr, R = float(algorithm.lr), algorithm.local_steps  # pyright: ignore[reportAttributeAccessIssue]
        return _Displacements(_PerClient(task, _drift), a, lr * (R - 1) / 2.0, pace)
    if task.oracle.oracle.prox_method == "gradient":
        return None  # exact in the limit only, where it starts from its own result
    return _Displacements(_PerClient(task, _pull_back), a, float(algorithm.step), pace)


def _pace(task: Rounds) -> float:
    """E c_k over `_weights`."""
    algorithm: Any = task.algorithm
    if isinstance(algorithm, FedProx):
        return 1.0
    lr_server = float(algorithm.lr_server)
    return lr_server if isinstance(algorithm, FedAvg) else lr_server / task.N


def _weights(task: Rounds) -> np.ndarray | None:
    """(N,) the average weight of a client's displacement, up to a factor."""
    algorithm, p = task.algorithm, task.setting.p
    if isinstance(algorithm, MIFA):
        return (p > 0.0).astype(float)
    if not isinstance(task.participation, INDEPENDENT):
        return None
    if isinstance(algorithm, FedAvg | FedProx):
        return task.setting.q
    if isinstance(algorithm, FedAU):
        return 1.0 - (1.0 - p) ** algorithm.cutoff
    return None


@partial(jax.jit, static_argnums=0)
def _every_client(
    one: Callable[..., Array], algorithm: Algorithm, oracle: Differentiable, k: Array, x: Array
) -> tuple[Array, Array]:
    """(N, d) what `one` makes of every client k and x, and its (N, d, d) derivative."""

    def displaced(x: Array) -> Array:
        return jax.vmap(lambda j: one(algorithm, oracle.client(j), x))(k)

    return displaced(x), jax.jacfwd(displaced)(x)


def _drift(algorithm: Any, oracle: Differentiable, x: Array) -> Array:
    z = descend(oracle, x, algorithm.lr, algorithm.local_steps, jax.random.key(0), None)
    return z - x


def _pull_back(algorithm: Any, oracle: Differentiable, x: Array) -> Array:
    return oracle.prox(x, algorithm.step, x) - x


def _grad(algorithm: Any, oracle: Differentiable, x: Array) -> Array:
    return oracle.grad(x)


def _averaged(task: Rounds, star: np.ndarray, rounds: int) -> _Limit | None:
    """The limit of FedAvg, FedProx, MIFA and FedAU; None where the average round has another form
    or its equation is not solved."""
    form = _displacements(task)
    x = None if form is None else form.D.root(form.a, star)
    if form is None or x is None:
        return None
    quadratic = task.problem.loss.quadratic
    method, why = "closed form" if quadratic else "newton", _why(task, quadratic)
    first_order = _first_order(task, form, star)
    if _unstable(form, x):
        why += f", but runs move away from there: lower {task.algorithm.lower}"
        return _Limit(x, method, why, first_order, math.inf)
    return _Limit(x, method, why, first_order, *_spread(task, form, x, rounds))


def _unstable(form: _Displacements, x: np.ndarray) -> bool:
    """Whether the average round, x += pace sum_k a_k D_k(x), moves away from x."""
    slope = np.eye(len(x)) + form.pace * np.tensordot(form.a, form.D.at(x)[1], 1)
    return bool(np.max(np.abs(np.linalg.eigvals(slope))) > 1.0 + ROUNDING)


def _why(task: Rounds, quadratic: bool) -> str:
    what = "the weighted displacements of the clients cancel"
    noisy = getattr(task.algorithm, "batch_size", None) is not None
    settles = task.setting.full or isinstance(task.algorithm, MIFA)
    if noisy or not settles:
        what += " on average"
        if not quadratic:
            what += ", to first order in the step"
    return what


def _first_order(task: Rounds, form: _Displacements, star: np.ndarray) -> np.ndarray | None:
    gradients = _PerClient(task, _grad)
    x_a = gradients.root(form.a, star)
    if x_a is None:
        return None
    grads, H = gradients.at(x_a)
    drift = np.einsum("k,kij,kj->i", form.a, H, grads)
    solved = np.linalg.lstsq(np.tensordot(form.a, H, 1), drift, rcond=None)[0]
    return x_a - star + form.half_drift * solved


# --- the ball around the limit --------------------------------------------------------------------


def _spread(task: Rounds, form: _Displacements, x: np.ndarray, rounds: int) -> tuple[float, float]:
    """Root-mean-square distance from x in the long run, and its standard error."""
    batch = getattr(task.algorithm, "batch_size", None) is not None
    if not batch and (task.setting.full or isinstance(task.algorithm, MIFA)):
        return 0.0, 0.0
    cohorts = law(task.participation, task.N)
    work = task.N * task.problem.dim**3
    exact = not batch and task.problem.loss.quadratic and work <= MOMENTS
    if exact and cohorts is not None:
        return _moments(task, form, cohorts, x), 0.0
    found = _simulate(task, x, rounds, x)
    return found.spread, found.spread_error


def _moments(task: Rounds, form: _Displacements, cohorts: Law, m: np.ndarray) -> float:
    """The root of the trace of the covariance C of x_t, for affine D_k(x) = B_k (x - m) + D_k(m):
    e = x - m moves by e += sum_k c_k(S) (B_k e + D_k(m)), and S does not depend on e, hence

    C = C + sum_k E[c_k] (B_k C + C B_k') + sum_jk E[c_j c_k] (B_j C B_k' + D_j(m) D_k(m)').
    """
    c = _cohort_weights(task, cohorts)
    mean, moment = cohorts.probability @ c, np.einsum("s,sj,sk->jk", cohorts.probability, c, c)
    D, B = form.D.at(m)
    d, A = len(m), np.tensordot(mean, B, 1)
    noise = D.T @ moment @ D
    paired = np.tensordot(moment, B, 1)

    def change(C: np.ndarray) -> np.ndarray:
        C = C.reshape(d, d)
        right = np.swapaxes(B @ C.T, 1, 2)  # C B_k', C symmetric up to rounding
        pairs = np.tensordot(paired, right, axes=((0, 2), (0, 1)))
        return -(A @ C + C @ A.T + pairs).ravel()

    operator = scipy.sparse.linalg.LinearOperator((d * d, d * d), matvec=change, dtype=np.float64)  # pyright: ignore[reportCallIssue]
    C, failed = scipy.sparse.linalg.gmres(
        operator, noise.ravel(), rtol=1e-12, restart=min(d * d, 200), maxiter=50
    )
    C = C.reshape(d, d)
    settled = failed == 0 and np.min(np.linalg.eigvalsh(C + C.T)) >= -1e-9 * np.trace(C)
    return math.sqrt(max(float(np.trace(C)), 0.0)) if settled else math.inf


def _cohort_weights(task: Rounds, cohorts: Law) -> np.ndarray:
    """(M, N) the factor c_k(S) of client k's displacement in a round with each cohort."""
    algorithm, masks = task.algorithm, cohorts.masks.astype(float)
    if isinstance(algorithm, FedAU):
        p = task.setting.p
        omega = np.where(p > 0, (1.0 - (1.0 - p) ** algorithm.cutoff) / np.where(p > 0, p, 1.0), 0)
        return float(algorithm.lr_server) * masks * omega[None, :] / task.N
    relax = 1.0 if isinstance(algorithm, FedProx) else float(algorithm.lr_server)  # pyright: ignore[reportAttributeAccessIssue]
    return relax * masks / np.maximum(np.sum(masks, axis=1, keepdims=True), 1.0)


# --- by running -----------------------------------------------------------------------------------


def _settled(task: Rounds, x0: Any, rounds: int) -> _Limit | None:
    """Where the rounds, with the mean of mini-batch gradients, come to rest or repeat themselves;
    None if they do neither."""
    batch = getattr(task.algorithm, "batch_size", None) is not None
    mean = task
    if batch:
        mean = Rounds(task.problem, task.algorithm, task.participation, task.seed, mean=True)
    place = settle(mean, rounds // 5, x0)
    period = period_of(mean)
    if period is not None and not place.settled and steady(mean, place, period):
        place = polished(mean, place, period)
    if not place.settled:
        return None
    _, models = mean.run(place.state, place.round, place.round + (period or 1))
    x = models.mean(axis=0)
    spread, error = _rms(models - x[None, :]), 0.0
    why = "the rounds come to rest" if spread <= 1e-12 * np.linalg.norm(x) else "a cycle, its mean"
    if batch:
        why += ", with the mean of the mini-batch gradients"
        found = _simulate(task, x, rounds, x0)
        spread, error = found.spread, found.spread_error
    return _Limit(x, "newton", why, None, spread if batch or "cycle" in why else 0.0, error)


def _simulated(task: Rounds, x0: Any, rounds: int) -> _Limit:
    found = _simulate(task, None, rounds, x0)
    why = f"mean of {found.rounds} simulated rounds"
    return _Limit(found.x, "simulated", why, None, found.spread, found.spread_error, found.x_error)


class _Simulated(NamedTuple):
    """From one run, after a fifth of it; standard errors by batch means."""

    x: np.ndarray  # (d,) mean of the models
    spread: float  # root-mean-square distance from the center
    spread_error: float
    x_error: np.ndarray  # (d,)
    rounds: int


def _simulate(task: Rounds, center: np.ndarray | None, rounds: int, x0: Any) -> _Simulated:
    """Moments around `center`, the mean if None, of at most `rounds` rounds and about `BUDGET`
    work; fewer where the errors are small."""
    rounds = min(rounds, max(FEWEST, int(BUDGET / _work(task))))
    state, models, look = task.initial(x0), [], FEWEST
    for round in range(0, rounds, CHUNK):
        state, path = task.run(state, round, round + CHUNK)
        models.append(path)
        if not np.all(np.isfinite(path[-1])):
            raise InputError(
                f"{task.algorithm.name} diverges within {round + CHUNK} rounds: "
                f"lower {task.algorithm.lower}"
            )
        if round + CHUNK >= look:
            look *= 2
            found = _moments_of(models, center)
            if max(found.spread_error, np.max(found.x_error)) <= PRECISE * found.spread:
                return found
    return _moments_of(models, center)


def _work(task: Rounds) -> float:
    """About the multiplications of a round."""
    algorithm, rows = task.algorithm, int(task.problem.n_rows.max())
    inner = 10 * task.problem.dim if "prox" in algorithm.requires else 1
    return task.N * rows * task.problem.dim * getattr(algorithm, "local_steps", 1) * inner


def _moments_of(models: list[np.ndarray], center: np.ndarray | None) -> _Simulated:
    path = np.concatenate(models[len(models) // 5 :])
    length = len(path) // BATCHES
    means = path[: length * BATCHES].reshape(BATCHES, length, -1).mean(axis=1)
    x = means.mean(axis=0)
    error = means.std(axis=0, ddof=1) / math.sqrt(BATCHES)
    square = np.sum((path - (x if center is None else center)[None, :]) ** 2, axis=1)
    squares = square[: length * BATCHES].reshape(BATCHES, length).mean(axis=1)
    spread = math.sqrt(squares.mean())
    se = float(squares.std(ddof=1)) / math.sqrt(BATCHES)
    spread_error = se / (2.0 * spread) if spread > 0 else 0.0
    return _Simulated(x, spread, spread_error, error, len(models) * CHUNK)


def _rms(rows: np.ndarray) -> float:
    return math.sqrt(float(np.mean(np.sum(rows**2, axis=1))))
