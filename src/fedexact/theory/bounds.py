"""Published bounds on a run, with the numbers of a problem put in, to plot beside the run.

Each function checks the conditions of its theorem and raises InputError, saying which one fails,
where the bound does not hold.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedexact.algorithms import FedAvg, FedDR, FedSplit
from fedexact.core import Algorithm, Setting
from fedexact.errors import InputError, check_nonnegative, check_positive
from fedexact.oracles import RowOracle
from fedexact.participation import Full, Participation
from fedexact.problem import Problem
from fedexact.reference import reference
from fedexact.regularizers import Zero
from fedexact.solve import setting_of
from fedexact.theory.monotone import cayley_factor, gradients, stacked
from fedexact.theory.rounds import INDEPENDENT


class Bound(abc.ABC):
    """A bound on a run, as a function of the rounds done."""

    @property
    @abc.abstractmethod
    def words(self) -> str:
        """What is bounded, by what, and under which conditions."""

    @abc.abstractmethod
    def at(self, t: Any) -> np.ndarray:
        """The bound after t rounds; t a number or an array of them."""

    def curve(self, rounds: int) -> tuple[np.ndarray, np.ndarray]:
        """Rounds 1, ..., `rounds` and the bound after each, to plot over a run."""
        t = np.arange(1, rounds + 1)
        return t, self.at(t)


# --- FedSplit -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FedSplitBound(Bound):
    """|x_t - x*| <= factor^t initial + inexact, x_t the model after t rounds."""

    factor: float  # 1 - 2/(sqrt(kappa) + 1) for relax = 1 and step = 1/sqrt(l L)
    initial: float  # |z_0 - z*| / sqrt(N), z the stack of all z_k, z_k* = x* - s grad f_k(x*)
    inexact: float  # (sqrt(kappa) + 1) b for the same, b the largest prox error

    @property
    def words(self) -> str:
        error = f" + {self.inexact:.4g}" if self.inexact else ""
        return f"|x_t - x*| <= {self.factor:.6g}^t * {self.initial:.4g}{error}, everybody present"

    def at(self, t: Any) -> np.ndarray:
        return self.factor ** np.asarray(t, float) * self.initial + self.inexact


def fedsplit_bound(
    algorithm: FedSplit,
    problem: Problem,
    participation: Participation | None = None,
    x0: Any = None,
    prox_error: float = 0.0,
) -> FedSplitBound:
    """Pathak & Wainwright 2020, eq. (8), with the stacked z in the place of the paper's theta.

    Their case is relax = 1 and step = 1/sqrt(l L). For any other the Cayley operator of the
    stacked gradient has Lipschitz constant c = `cayley_factor`, that of the consensus is
    nonexpansive, and one round shrinks |z - z*| by 1 - tau + tau c, tau = relax <= 1; with
    per-client steps the norm weighs client k by 1/s_k. A prox error of at most `prox_error` = b
    per client and round adds 2 b/(1 - c) in all.

    Args:
        x0: (d,) start of the run, zeros if left out.
        prox_error: b, largest |u_k - P_k| of an inexact prox.

    Raises:
        InputError: if not everybody takes part, some f_k is not known to be strongly convex or has
            no global L_k, relax > 1, or the problem has a regulariser.
    """
    _check_kind(algorithm, FedSplit)
    check_nonnegative("prox_error", prox_error)
    setting = _setting(problem, participation)
    _everybody(setting, "FedSplit's bound")
    _no_regularizer(problem)
    c = setting.constants
    if not c.l > 0 or not c.convex:
        raise InputError("FedSplit's bound needs every f_k strongly convex: add l2 to the problem")
    if not c.global_:
        raise InputError("FedSplit's bound needs a global L; this loss has none")
    chosen = algorithm.resolve(setting)
    if chosen.relax > 1.0:
        raise InputError(f"FedSplit's bound needs relax <= 1, got {chosen.relax:g}")
    N = problem.n_clients
    steps = np.full(N, chosen.step) if chosen.scales is None else 1.0 / chosen.scales
    cayley = max(cayley_factor(*pair) for pair in zip(steps, c.l_k, c.L_k, strict=True))
    x_star = reference(problem)
    z_star = x_star[None, :] - steps[:, None] * gradients(problem)(stacked(x_star, N))
    z0 = stacked(_start(problem, x0), N)
    squares = np.sum((z0 - z_star) ** 2, axis=1)
    return FedSplitBound(
        factor=float(1.0 - chosen.relax + chosen.relax * cayley),
        initial=float(np.sqrt(np.average(squares, weights=1.0 / steps))),
        inexact=2.0 * prox_error / (1.0 - cayley),
    )


# --- FedDR ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FedDRBound(Bound):
    """(1/T) sum_{t=1}^T E |G_s(x_t)|^2 <= C1 gap / T, x_t the model after t rounds.

    G_s(x) = (x - prox_{s g}(x - s grad F(x))) / s with s the algorithm's step, N s/(N + 1) with
    the server block. It bounds the mean of the history's squared gradient_mapping as well where
    1/L_F, the step of that, is at least s: the mapping's norm does not grow with its step.
    """

    C1: float
    gap: float  # what the objective can fall by from the start, see `feddr_bound`
    step: float  # of the gradient mapping
    p: float  # the smallest inclusion probability

    @property
    def words(self) -> str:
        return (
            f"mean over rounds 1..T of E |G_s(x_t)|^2 <= {self.C1:.4g} * {self.gap:.4g} / T, "
            f"s = {self.step:.4g}, if everybody is in the first round and client k in each later "
            f"one with probability >= {self.p:g}, independently of the past; exact prox"
        )

    def at(self, t: Any) -> np.ndarray:
        return self.C1 * self.gap / np.asarray(t, float)

    def rounds(self, eps: float) -> int:
        """The number T of rounds after which a model drawn uniformly from x_1, ..., x_T is
        eps-stationary, E |G_s|^2 <= eps^2."""
        check_positive("eps", eps)
        return max(1, math.ceil(self.C1 * self.gap / eps**2))


def feddr_bound(
    algorithm: FedDR,
    problem: Problem,
    participation: Participation | None = None,
    x0: Any = None,
    smoothness: float | None = None,
    lowest: float | None = None,
) -> FedDRBound:
    """The O(1/T) bound of Tran-Dinh, Pham, Phan & Nguyen 2021 (arXiv 2103.03452), exact prox:

        C1 = (N + 1)/N * 2 (1 + s L)^3 / (alpha s p (2 - alpha - 2 s L)),

    alpha = relax, s = step, p = min_k p_k; the factor (N + 1)/N with the server block only. f_k
    need not be convex. The proof (docs/splitting.md) is the descent of the envelope

        V = g(x) + (1/N) sum_k f_k(x_k) + <h_k, x - x_k> + |x - x_k|^2/(2s),   h_k = grad f_k(x_k),

    from the state in which every client has taken its prox at x0. There V is at most
    F(x0) + g(x0) + (s/2)(1 + s L) mean_k |grad f_k(x0)|^2/(1 - s L)^2, and `gap` is this less the
    lowest value. Everybody has to be in round 0 for that, as the paper's initialisation has it;
    runs in which clients are first seen later are not covered by the proof.

    Args:
        x0: (d,) start of the run, zeros if left out.
        smoothness: L of all f_k <- N w_k f_k, for losses that are not known to be smooth everywhere
            (custom ones).
        lowest: a number that F + g never falls below; for convex problems the minimum if left out.

    Raises:
        InputError: if 2 - alpha - 2 s L <= 0, some client never takes part, the rounds are not
            independent draws (the proof needs p_k given the past), L or the lowest value is
            missing.
    """
    _check_kind(algorithm, FedDR)
    check_positive("smoothness", smoothness)
    participation = Full() if participation is None else participation
    if not isinstance(participation, INDEPENDENT):
        raise InputError(
            f"FedDR's bound needs rounds that are drawn independently, all by the same law: "
            f"{', '.join(kind.name for kind in INDEPENDENT)}; got {participation.name}"
        )
    setting = _setting(problem, participation)
    chosen, p = algorithm.resolve(setting), float(np.min(setting.p))
    if p <= 0.0:
        raise InputError("FedDR's bound needs p_k > 0 for every client")
    L = _smoothness(setting, smoothness)
    margin = 2.0 - chosen.relax - 2.0 * chosen.step * L
    if margin <= 0.0:
        raise InputError(
            f"FedDR's bound needs 2 - relax - 2 step L > 0, got {margin:.4g} with "
            f"relax = {chosen.relax:g}, step = {chosen.step:.4g}, L = {L:.4g}: lower step below "
            f"(2 - relax)/(2 L) and relax below 2"
        )
    s, N, x = chosen.step, problem.n_clients, _start(problem, x0)
    C1 = 2.0 * (1.0 + s * L) ** 3 / (chosen.relax * s * p * margin)
    block = (N + 1) / N if chosen.server_block else 1.0
    squares = float(problem.sum_over_clients(_squared_gradient, x)) / N
    start = problem.objective(x)
    fall = start - _lowest(problem, setting, lowest, start)
    if not 0.0 <= fall < np.inf:
        raise InputError(
            f"FedDR's bound needs lowest <= F(x0) + g(x0) < inf; their difference is {fall:g}"
        )
    gap = fall + 0.5 * s * (1.0 + s * L) * squares / (1.0 - s * L) ** 2
    return FedDRBound(C1=float(C1 * block), gap=float(gap), step=float(s / block), p=p)


def _smoothness(setting: Setting, given: float | None) -> float:
    if given is not None:
        return given
    if not setting.constants.global_:
        raise InputError("FedDR's bound needs an L for all x, which this loss has not: smoothness=")
    return setting.constants.L


def _lowest(problem: Problem, setting: Setting, given: float | None, start: float) -> float:
    if given is not None:
        return given
    if not setting.constants.convex:
        raise InputError(
            "FedDR's bound needs a number that the objective never falls below: lowest="
        )
    return min(start, problem.objective(reference(problem)))  # equal up to rounding at x0 = x*


def _squared_gradient(oracle: RowOracle, x: jax.Array) -> jax.Array:
    return jnp.sum(oracle.grad(x) ** 2)


# --- FedAvg ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FedAvgBound(Bound):
    """|x_t - x*| <= factor^t initial + (1 - factor^t) bias, x_t the model after t rounds."""

    factor: float
    initial: float  # |x_0 - x*|
    bias: float  # bound on the distance of the limit from x*
    first_order: np.ndarray  # (d,) the bias to first order in lr, an expansion and not a bound

    @property
    def words(self) -> str:
        return (
            f"|x_t - x*| <= {self.factor:.6g}^t * {self.initial:.4g} + "
            f"(1 - {self.factor:.6g}^t) * {self.bias:.4g}, everybody present; to first order in lr "
            f"the limit is at |x - x*| = {float(np.linalg.norm(self.first_order)):.4g}"
        )

    def at(self, t: Any) -> np.ndarray:
        power = self.factor ** np.asarray(t, float)
        return power * self.initial + (1.0 - power) * self.bias


def fedavg_bound(
    algorithm: FedAvg,
    problem: Problem,
    participation: Participation | None = None,
    x0: Any = None,
) -> FedAvgBound:
    """The drift of R = local_steps gradient steps, with everybody present and full gradients.

    One local step x - lr grad f_k shrinks distances by 1 - lr l_k if lr <= 2/(l_k + L_k), so one
    round by factor = 1 - b + b mean_k (1 - lr l_k)^R, b = lr_server <= 1. A round from x* itself
    moves by at most b lr^2 R (R - 1)/2 mean_k L_k |grad f_k(x*)|: the gradients of the local steps
    do not grow, the i-th differs from the first by at most L_k i lr |grad f_k(x*)|, and the first
    ones cancel. Summed over the rounds,

        bias = lr^2 R (R - 1)/2 mean_k L_k |grad f_k(x*)| / (1 - mean_k (1 - lr l_k)^R),

    which is lr (R - 1)/2 mean_k L_k |grad f_k(x*)| / mean_k l_k for small lr, beside
    first_order = lr (R - 1)/2 (sum_k H_k)^-1 sum_k H_k grad f_k(x*).

    Raises:
        InputError: if not everybody takes part, gradients are of mini-batches, lr > 2/(l_k + L_k)
            for some k, lr_server > 1, no f_k is known to be strongly convex, L_k is not global, or
            the problem has a regulariser.
    """
    _check_kind(algorithm, FedAvg)
    setting = _setting(problem, participation)
    _everybody(setting, "FedAvg's drift bound")
    _no_regularizer(problem)
    c, chosen = setting.constants, algorithm.resolve(setting)
    _check_drift(setting, chosen)
    R, lr = chosen.local_steps, float(chosen.lr)
    x_star = reference(problem)
    norms = np.linalg.norm(gradients(problem)(stacked(x_star, problem.n_clients)), axis=1)
    shrink = float(np.mean((1.0 - lr * c.l_k) ** R))
    drift = lr**2 * R * (R - 1) / 2.0 * float(np.mean(c.L_k * norms))
    tilt = problem.sum_over_clients(_tilt, x_star) / problem.n_clients
    first_order = lr * (R - 1) / 2.0 * np.linalg.solve(problem.hessian(x_star), tilt)
    return FedAvgBound(
        factor=float(1.0 - chosen.lr_server * (1.0 - shrink)),
        initial=float(np.linalg.norm(_start(problem, x0) - x_star)),
        bias=drift / (1.0 - shrink),
        first_order=first_order,
    )


def _check_drift(setting: Setting, chosen: FedAvg) -> None:
    c = setting.constants
    if chosen.batch_size is not None:
        raise InputError("FedAvg's drift bound is for full gradients: leave batch_size out")
    if not (c.convex and c.global_ and np.max(c.l_k) > 0.0):
        raise InputError(
            "FedAvg's drift bound needs convex f_k with a global L_k, one of them strongly convex: "
            "add l2 to the problem"
        )
    if chosen.lr_server > 1.0:
        raise InputError(f"FedAvg's drift bound needs lr_server <= 1, got {chosen.lr_server:g}")
    longest = float(np.min(2.0 / (c.l_k + c.L_k)))
    if chosen.lr > longest:
        raise InputError(
            f"FedAvg's drift bound needs lr <= 2/(l_k + L_k) = {longest:.4g}, got {chosen.lr:.4g}"
        )


def _tilt(oracle: RowOracle, x: jax.Array) -> jax.Array:
    return oracle.hessian(x) @ oracle.grad(x)


# --- conditions -----------------------------------------------------------------------------------


def _setting(problem: Problem, participation: Participation | None) -> Setting:
    participation = Full() if participation is None else participation
    participation.check(problem.n_clients, problem.names)
    return setting_of(problem, participation)


def _check_kind(algorithm: Algorithm, kind: type[Algorithm]) -> None:
    if not isinstance(algorithm, kind):
        raise InputError(f"this bound is {kind.name}'s, got {algorithm!r}")


def _everybody(setting: Setting, what: str) -> None:
    if not setting.full:
        rare: Sequence[int] = np.flatnonzero(setting.p < 1.0).tolist()
        raise InputError(
            f"{what} is for everybody in every round; {setting.names[rare[0]]!r} takes part with "
            f"probability {setting.p[rare[0]]:g}: see theory.rate"
        )


def _no_regularizer(problem: Problem) -> None:
    if not isinstance(problem.regularizer, Zero):
        raise InputError(f"this bound is for g = 0, got {problem.regularizer.describe()}")


def _start(problem: Problem, x0: Any) -> np.ndarray:
    return np.zeros(problem.dim) if x0 is None else problem.check_model(x0)
