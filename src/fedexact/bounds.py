"""How far a point x can be from the minimiser x* of Phi = F + g: bounds and their derivations.

The point. With g = 0, y = x and v = grad F(x). Otherwise y = prox_{b g}(x - b grad F(x)), one step
of the proximal gradient method, and v = grad F(y) + (x - b grad F(x) - y) / b. Either way v is a
subgradient of Phi at y, known exactly; x* is where 0 is one. Every bound is one on y - x* by the
size of v; |x - y| is added in the end.

Strong convexity. If Phi is Q-strongly convex (Q from the ridge and from g), monotonicity gives
|y - x*|_Q^2 <= <v, y - x*>, so |y - x*|_Q <= |v|_{Q^-1}, and Phi(y) - Phi* <= |v|^2_{Q^-1} / 2. For
a quadratic F the Hessian may stand for Q.

Self-concordance. Let H be the Hessian of F at y, plus the curvature of g, kappa such that the third
derivative of F along s is at most kappa |s|_H times the second (rows a_i of a generalised linear
model: kappa = max_i |a_i|_{H^-1}), lam = |v|_{H^-1} and c = kappa lam. Along the segment from y to
z the second derivative is at least exp(-kappa r t) r^2, r = |z - y|_H, t in [0, 1]. Integrated
twice, with v a subgradient (g is convex),

    Phi(z) >= Phi(y) - lam r + (exp(-kappa r) + kappa r - 1) / kappa^2 ,

which is above Phi(y) for all r large enough if c < 1: a minimiser exists. The lower bound is least
at r = -log(1 - c) / kappa, so Phi(y) - Phi* <= (c + (1 - c) log(1 - c)) / kappa^2
<= lam^2 / 2 (1 + c / (3 (1 - c))). Integrated once, from y to x*: lam r >= <v, y - x*>
>= r (1 - exp(-kappa r)) / kappa, so

    |y - x*|_H <= -log(1 - c) / kappa      for c < 1.

At c <= 1/2 this implies the 4 lam of Bach (2010, Self-concordant analysis for logistic regression,
Proposition 2); as lam -> 0 it is sharp. With g = 0, x* - x = -H^-1 (v + e) with
|e|_{H^-1} <= r (exp(t) - 1 - t) / t <= r t exp(t) / 2, t = kappa r: the Newton step is the error
up to second order, coefficient by coefficient.

Rounding. Gradients carry a bound on their rounding error in every coordinate, Hessians one on the
rounding error of their entries relative to the diagonal; both are added to every bound.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import xlog1py, xlogy

from fedexact.losses import (
    Huber,
    LinearLoss,
    Logistic,
    Loss,
    Multinomial,
    Poisson,
    Rows,
    Squared,
)
from fedexact.losses.design import Design, combine, n_features, predictor
from fedexact.losses.spectrum import spectral_norm
from fedexact.objective import Objective, summable
from fedexact.oracles import RowOracle
from fedexact.regularizers import (
    L1,
    Box,
    ElasticNet,
    L2Ball,
    OnCoordinates,
    Regularizer,
    SquaredL2,
    Zero,
)

EPS = float(np.finfo(float).eps)
OVERFLOW = 1e150  # of a gradient: its square is still finite
DENSE_LIMIT = 2000  # the largest d for which a (d, d) Hessian is formed and decomposed

TOO_FAR = (
    "x is too far from a minimiser for a bound, or there is none at a finite point (separation, "
    "rank deficiency): run longer, or add l2"
)
SETTLED_WITHOUT_BOUND = (
    "the gradient at x is below its own rounding error, and yet no bound follows: the problem is "
    "too badly conditioned, or there is no minimiser at a finite point (separation, rank "
    "deficiency); standardise the columns, or add l2"
)


# --- one pass over the rows -----------------------------------------------------------------------


class Pass(NamedTuple):
    """F at a point, with bounds on the rounding errors."""

    value: float
    value_rounding: float
    grad: np.ndarray  # (d,)
    rounding: np.ndarray  # (d,) bound on the rounding error of each entry of grad

    @property
    def finite(self) -> bool:
        sizes = np.abs(self.grad) + self.rounding
        return bool(np.isfinite(self.value) and np.all(sizes < OVERFLOW))


def rounding_factor(problem: Objective) -> float:
    """Rounding error of a sum over all rows, relative to the sum of the absolute terms.

    The worst case grows like the number of terms, the observed error like its square root at most
    (Higham and Mary 2019, A new approach to probabilistic rounding error analysis); 2 sqrt(n) eps
    is four of their standard deviations.
    """
    return (8.0 + 2.0 * float(np.sqrt(problem.n_rows.sum() + problem.n_features))) * EPS


def one_pass(problem: Objective, x: np.ndarray) -> Pass:
    """F, its gradient, and bounds on their rounding errors; zeros where nothing is known to be
    convex, since no bound on a distance follows there."""
    if not problem.loss.newton:
        value, grad = problem.value_and_grad(x)
        return Pass(value, 0.0, grad, np.zeros_like(grad))
    value, size, grad, terms = problem.sum_over_rows(_sums, problem.check_model(x))
    value, grad = problem.with_ridge(x, value, grad)
    size, terms = problem.with_ridge(np.abs(x), size, terms)
    unit = rounding_factor(problem)
    with np.errstate(over="ignore", invalid="ignore"):  # the caller asks whether all is finite
        rounding = unit * (terms + np.abs(grad))
        value_rounding = unit * size + float(rounding @ np.abs(x))
    return Pass(value, value_rounding, grad, rounding)


@summable
def _sums(oracle: RowOracle, x: Array) -> tuple[Array, Array, Array, Array]:
    """Value, sum of absolute values, gradient, sum of the sizes of what the gradient adds up."""
    loss, rows, weight = oracle.loss, oracle.rows, oracle.weight
    values = loss.values(x, rows)
    terms = _gradient_terms(loss, x, rows, weight)
    return weight @ values, weight @ jnp.abs(values), loss.grad(x, rows, weight), terms


def point_sums(problem: Objective) -> list[Callable[..., Any]]:
    """The functions whose sums over all rows the bounds at a point begin with."""
    if not problem.loss.newton:
        return []
    return [RowOracle.hessian, _sums] if problem.dim <= DENSE_LIMIT else [_sums]


def _gradient_terms(loss: Loss, x: Array, rows: Rows, weight: Array) -> Array:
    """(d,) sum_i weight_i e_i |a_i|, with e_i the size of what rounds in row i's derivative: the
    derivative, the target it is the difference to, and the terms of the linear predictor."""
    sizes = _sizes(rows.X)
    if isinstance(loss, LinearLoss):
        eta = predictor(rows.X, x)
        slope = jnp.maximum(loss.d2(eta, rows.y), loss.d2_bound(rows.y))
        own = jnp.abs(loss.d1(eta, rows.y)) + jnp.abs(rows.y)
        return combine(weight * (own + slope * predictor(sizes, jnp.abs(x))), sizes)
    if isinstance(loss, Multinomial):
        predictors = predictor(sizes, jnp.abs(x.reshape(n_features(sizes), -1)))
        scale = weight * (1.0 + jnp.max(predictors, axis=1))
        return jnp.repeat(combine(scale, sizes), predictors.shape[1])
    return weight @ jnp.abs(jax.jacrev(loss.values)(x, rows))


def _sizes(X: Design) -> Design:
    """|X|, entry by entry; the places of a sparse one are not negative."""
    return jax.tree.map(jnp.abs, X)


# --- the point y and its subgradient v ------------------------------------------------------------


class Point(NamedTuple):
    """x, y, the subgradient v of Phi at y, and what rounding may have done to them."""

    x: np.ndarray  # (d,)
    y: np.ndarray  # (d,)
    offset: np.ndarray  # (d,) bound on |x - y|
    v: np.ndarray  # (d,)
    noise: np.ndarray  # (d,) bound on the error of v
    fall: float  # bound on Phi(x) - Phi(y), inf where x is outside the domain
    smooth: bool  # g = 0
    settled: bool  # v and x - y are within their rounding errors: a better x cannot be told


def gradient_mapping(problem: Objective, x: np.ndarray, here: Pass, step: float) -> np.ndarray:
    """(d,) G = (x - prox_{step g}(x - step grad F(x))) / step, without a regulariser grad F(x)."""
    if isinstance(problem.regularizer, Zero):
        return here.grad
    return (x - problem.prox(x - step * here.grad, step)) / step


def point(problem: Objective, x: np.ndarray, here: Pass, step: float) -> Point | None:
    """y and v at x, None if the loss overflows on the way; with a regulariser this takes two more
    passes."""
    g = problem.regularizer
    if isinstance(g, Zero):
        settled = bool(np.all(np.abs(here.grad) <= here.rounding))
        return Point(x, x, np.zeros_like(x), here.grad, here.rounding, 0.0, True, settled)
    # The first step finds the kinks and active bounds of g near x; from there on the subgradient
    # of the second is not one of moving onto them.
    first = problem.prox(x - step * here.grad, step)
    between = one_pass(problem, first)
    if not between.finite:
        return None
    u = first - step * between.grad
    y = problem.prox(u, step)
    there = one_pass(problem, y)
    if not there.finite:
        return None
    # u may be any point, y must be its prox: only the rounding in the prox counts
    slip = (8.0 + np.sqrt(problem.dim)) * EPS * (np.abs(u) + np.abs(y))
    noise = there.rounding + (slip + 2.0 * np.linalg.norm(slip)) / step
    offset, pull = np.abs(x - y) + slip, (u - y) / step
    fall = _fall(problem, x, y, here) + float((np.abs(here.grad) + np.abs(pull)) @ slip)
    v = there.grad + pull
    settled = bool(np.all(np.abs(v) <= noise) and np.all(np.abs(x - y) <= step * noise))
    return Point(x, y, offset, v, noise, fall, False, settled)


def _fall(problem: Objective, x: np.ndarray, y: np.ndarray, here: Pass) -> float:
    """Bound on Phi(x) - Phi(y): F(x) - F(y) <= <grad F(x), x - y> by convexity."""
    g_x, g_y = problem.penalty(x), problem.penalty(y)
    if not np.isfinite(g_x):
        return np.inf
    rounding = float(here.rounding @ np.abs(x - y)) + rounding_factor(problem) * (g_x + g_y)
    return float(here.grad @ (x - y)) + g_x - g_y + rounding


# --- positive definite matrices and their norms ---------------------------------------------------


class Metric(NamedTuple):
    """The norm |s|_M of a positive definite M, known up to rounding: true M >= trust * M."""

    matrix: np.ndarray  # (d, d) M
    root: np.ndarray  # (d, d) T with T T' = M^-1
    trust: float

    def dual_norm(self, v: np.ndarray, noise: np.ndarray) -> float:
        """Bound on |v|_{M^-1} for all v within `noise` of the given one."""
        return float(np.linalg.norm(self.root.T @ v)) + self.noise_norm(noise)

    def noise_norm(self, noise: np.ndarray) -> float:
        return float(np.linalg.norm(np.abs(self.root).T @ noise))

    def norm(self, s: np.ndarray) -> float:
        """Bound on |s|_M for all s with these absolute values."""
        return float(np.sqrt(s @ np.abs(self.matrix) @ s))

    @property
    def widths(self) -> np.ndarray:
        """(d,) largest |s_j| where |s|_M = 1."""
        return np.linalg.norm(self.root, axis=1)

    @property
    def width(self) -> float:
        """Largest |s|_2 where |s|_M = 1."""
        return float(np.sqrt(spectral_norm(self.root.T @ self.root)))


def metric(M: np.ndarray, unit: float) -> Metric | None:
    """None if M is singular as far as rounding can tell; `unit` is the rounding error of its
    entries relative to the diagonal."""
    diagonal = np.diag(M)
    if not (np.all(np.isfinite(M)) and np.all(diagonal > 0)):
        return None
    scale = 1.0 / np.sqrt(diagonal)
    eigenvalues, V = np.linalg.eigh(M * scale[:, None] * scale[None, :])
    error = 4.0 * len(M) * unit
    if eigenvalues[0] <= 2.0 * error:
        return None
    root = scale[:, None] * V / np.sqrt(eigenvalues)[None, :]
    return Metric(M, root, 1.0 - error / float(eigenvalues[0]))


# --- constants of F and g -------------------------------------------------------------------------


def self_concordance(problem: Objective, transform: np.ndarray | None = None) -> float | None:
    """R over all rows, in the coordinates x' in which the rows are X transform; None if there is
    none."""
    found: list[Any] = []
    some_row = Rows(np.zeros((1, problem.n_features)), np.zeros(1))
    jax.eval_shape(lambda rows: found.append(problem.loss.self_concordance(rows)), some_row)
    constant = found[0]  # traced, not computed
    if constant is None or isinstance(constant, float):
        return constant  # does not depend on the rows
    if transform is None and problem.n_features <= DENSE_LIMIT:
        transform = np.eye(problem.n_features)  # so that there is one program
    shared = () if transform is None else (jnp.asarray(transform),)
    return float(np.max(problem.map_clients(_constant, shared=shared)))


@summable
def _constant(oracle: RowOracle, transform: Array | None = None) -> Any:
    X, y = oracle.rows
    moved = X if transform is None else predictor(X, transform)
    return oracle.loss.self_concordance(Rows(moved, y))


def concordance(problem: Objective, M: Metric) -> float | None:
    """kappa with |third derivative along s| <= kappa |s|_M * second; None if there is none.

    The loss is a function of X x, x (n_features, outputs): with T T' = B^-1 for any positive
    definite B on the features, the coordinates x' = T^-1 x have rows X T and the constant R of the
    loss for these rows, and |x'|_2 <= |s|_M times the largest eigenvalue below.
    """
    p, outputs = problem.n_features, problem.dim // problem.n_features
    if problem.loss.quadratic:
        return 0.0
    if outputs == 1:
        return self_concordance(problem, M.root)
    B = np.einsum("ikjk->ij", M.matrix.reshape(p, outputs, p, outputs)) / outputs
    features = metric(B, 0.0)
    if features is None:
        return None
    R = self_concordance(problem, features.root)
    spread = M.root.T @ np.kron(B, np.eye(outputs)) @ M.root
    return None if R is None else R * float(np.sqrt(spectral_norm(spread)))


def curvature(g: Regularizer, dim: int) -> np.ndarray:
    """(d,) c such that g - 1/2 sum_j c_j x_j^2 is convex."""
    if isinstance(g, OnCoordinates):
        return scatter(g, curvature(g.g, len(g.index)), np.zeros(dim))
    return np.full(dim, float(g.strong_convexity))


def scatter(g: OnCoordinates, values: np.ndarray, outside: np.ndarray) -> np.ndarray:
    """(d,) `values` on the coordinates of g, `outside` elsewhere."""
    out = outside.copy()
    out[np.asarray(g.index, int)] = values
    return out


def model_size(problem: Objective, x: np.ndarray) -> float:
    """max(|x|, |grad F(0)| / L_F), what a distance of x is relative to; takes a pass.

    It scales with the unit of x. Without g it is at most max(|x|, |x*|) where L_F is global,
    because |grad F(0)| <= L_F |x*|. Where grad F(0) is all rounding, the sizes of the terms that
    cancel in it take its place.
    """
    origin = one_pass(problem, np.zeros_like(x))
    grad, L = origin.grad, problem.constants().L_F
    if np.all(np.abs(grad) <= origin.rounding):
        grad = origin.rounding / rounding_factor(problem)
    return max(float(np.linalg.norm(x)), float(np.linalg.norm(grad)) / L if L > 0 else 0.0)


# --- balls around x in which x* lies --------------------------------------------------------------


class Ball(NamedTuple):
    """Where x* is, seen from x."""

    coefficients: np.ndarray  # (d,) bounds on |x_j - x*_j|
    distance: float  # bound on |x - x*|_2
    drift: float  # the Hessians of the loss at x and x* differ by a factor of exp(drift) at most
    gap: float  # bound on Phi(y) - Phi*


def ridge_ball(problem: Objective, at: Point) -> Ball | None:
    """From the strong convexity of the ridge and of g; None unless it reaches all coordinates."""
    q = problem.ridge + curvature(problem.regularizer, problem.dim)
    if not (problem.loss.newton and np.all(q > 0)):
        return None
    lam = float(np.linalg.norm((np.abs(at.v) + at.noise) / np.sqrt(q)))
    distance = float(np.linalg.norm(at.offset)) + lam / float(np.sqrt(q.min()))
    R = self_concordance(problem)
    drift = np.inf if R is None else R * distance
    return Ball(at.offset + lam / np.sqrt(q), distance, drift, 0.5 * lam**2)


class Local(NamedTuple):
    """What the Hessian at y tells."""

    ball: Ball | None
    why_not: str  # why there is no ball
    least: float = 0.0  # lower bound on |x - x*|_2 for every minimiser x*


def hessian_ball(problem: Objective, at: Point) -> Local:
    """The ball from the Hessian at y."""
    bend = curvature(problem.regularizer, problem.dim)
    M = metric(problem.hessian(at.y) + np.diag(bend), rounding_factor(problem))
    if M is None:
        return Local(
            None,
            "the Hessian at x is singular up to rounding, so the minimiser need not be unique: "
            "add l2, or standardise badly conditioned columns",
        )
    if isinstance(problem.loss, Huber):
        return _huber_ball(problem, at, M, bend)
    kappa = concordance(problem, M)
    if kappa is None:
        return Local(
            None, f"the {problem.loss.name} loss has no bound on how its Hessian changes: add l2"
        )
    lam = M.dual_norm(at.v, at.noise)
    least = _least(at, M, kappa) if at.smooth else 0.0
    if lam * kappa / M.trust >= 1.0:
        return Local(None, SETTLED_WITHOUT_BOUND if at.settled else TOO_FAR, least)
    return Local(_ball(at, M, lam, kappa, newton=at.smooth), "", least)


def _least(at: Point, M: Metric, kappa: float) -> float:
    """Without g, |v|_{H^-1} <= (exp(t) - 1) / t r from the other side of self-concordance, t =
    kappa r: every minimiser has r >= log(1 + kappa lam) / kappa."""
    lam = (M.dual_norm(at.v, np.zeros_like(at.v)) - M.noise_norm(at.noise)) / (2.0 - M.trust)
    radius = max(lam, 0.0) if kappa == 0 else float(np.log1p(kappa * max(lam, 0.0))) / kappa
    return radius / float(np.sqrt(spectral_norm(M.matrix)))


def _ball(at: Point, M: Metric, lam: float, kappa: float, newton: bool) -> Ball:
    """The ball of the metric M, with all its constants as computed and M.trust to account for."""
    c = lam * kappa / M.trust
    radius = lam / M.trust * (-float(np.log1p(-c)) / c if c > 0 else 1.0)
    drift = kappa * (radius + M.norm(at.offset)) / np.sqrt(M.trust)
    coefficients = at.offset + radius * M.widths
    distance = float(np.linalg.norm(at.offset)) + radius * M.width
    gap = 0.5 * lam**2 / M.trust * (1.0 + c / (3.0 * (1.0 - c)))
    if newton and drift < 1.0:  # beyond, the second-order term exceeds the radius itself
        step = M.root @ (M.root.T @ at.v)
        slack = radius * (1.0 - M.trust + drift * np.exp(drift)) + M.noise_norm(at.noise)
        coefficients = np.minimum(coefficients, np.abs(step) + slack * M.widths)
        distance = min(distance, float(np.linalg.norm(step)) + slack * M.width)
    return Ball(coefficients, distance, float(drift), gap)


def _huber_ball(problem: Objective, at: Point, M: Metric, bend: np.ndarray) -> Local:
    """In a ball |s|_M <= r around y the Hessian is at least that of the rows that stay in the
    quadratic part all over the ball, A. If |s|_M <= a |s|_A and a |v|_{A^-1} < r, a minimiser
    beyond the ball is impossible (on the way out Phi would have to fall and cannot), and
    |y - x*|_A <= |v|_{A^-1}."""
    reach = 4.0 * M.dual_norm(at.v, at.noise)
    total = problem.sum_over_clients(_staying_hessian, at.y, M.root, np.asarray(reach))
    A = metric(total / problem.n_clients + np.diag(bend), rounding_factor(problem))
    far = (
        "rows pass between the quadratic and the linear part of the Huber loss too near x for a "
        f"bound: {'' if at.settled else 'run longer, or '}add l2"
    )
    if A is None:
        return Local(None, far)
    lam = A.dual_norm(at.v, at.noise)
    widening = float(np.sqrt(spectral_norm(A.root.T @ M.matrix @ A.root)))
    if widening * lam / A.trust >= reach:
        return Local(None, far)
    return Local(_ball(at, A, lam, 0.0, newton=False), "")


@summable
def _staying_hessian(oracle: RowOracle, y: Array, root: Array, reach: Array) -> Array:
    """Hessian at y of the rows that stay in the quadratic part where |x - y|_M <= reach."""
    loss, rows = oracle.loss, oracle.rows
    assert isinstance(loss, Huber)
    rounding = 64.0 * EPS * (predictor(_sizes(rows.X), jnp.abs(y)) + jnp.abs(rows.y))
    residual = jnp.abs(predictor(rows.X, y) - rows.y)
    furthest = residual + reach * jnp.linalg.norm(predictor(rows.X, root), axis=1)
    stays = furthest + rounding <= loss.delta
    return loss.hessian(y, rows, jnp.where(stays, oracle.weight, 0.0)) + jnp.diag(oracle.ridge)


def least_distance(problem: Objective, here: Pass, mapping: float, step: float) -> float:
    """A lower bound on the distance of x to any minimiser from global smoothness, 0 without it.

    The proximal gradient map T is nonexpansive for step <= 1/L and leaves minimisers alone, so
    |x - T x| <= 2 |x - x*|, and without g the gradient is L-Lipschitz.
    """
    if not (problem.loss.global_smooth and problem.loss.newton):
        return 0.0
    reached = max(mapping - float(np.linalg.norm(here.rounding)), 0.0) * step
    return reached if isinstance(problem.regularizer, Zero) else 0.5 * reached


# --- bounds on the objective gap ------------------------------------------------------------------


def bounded_gap(g: Regularizer, at: Point) -> float:
    """Phi(y) - Phi* <= <v, y - x*> on a bounded domain; inf on others."""
    if isinstance(g, L2Ball):
        return float(np.linalg.norm(np.abs(at.v) + at.noise)) * 2.0 * float(g.radius)
    size = np.abs(at.v) + at.noise
    return float(np.sum(size[size > 0] * _reach(g, at.y)[size > 0]))


def _reach(g: Regularizer, y: np.ndarray) -> np.ndarray:
    """(d,) how far another point of the domain of g can be from y, by coordinate."""
    everywhere = np.full(len(y), np.inf)
    if isinstance(g, OnCoordinates):
        return scatter(g, _reach(g.g, y[np.asarray(g.index, int)]), everywhere)
    if isinstance(g, Box):
        return np.maximum(y - np.asarray(g.lower), np.asarray(g.upper) - y)
    return everywhere


def dual_gap(problem: Objective, x: np.ndarray, here: Pass) -> float:
    """Phi(x) - D(theta) for a feasible dual point theta; inf where none is at hand.

    Phi(x) = sum_i w_i phi_i(a_i'x) + h(x) with h separable, and
    D(theta) = -sum_i w_i phi_i*(theta_i) - h*(-sum_i w_i theta_i a_i) <= Phi*. theta starts from
    the derivatives phi_i'(a_i'x); a Newton step in the coefficients without any penalty makes it
    orthogonal to their columns, and a factor <= 1 brings it below the L1 thresholds (El Ghaoui,
    Viallon and Rabbani 2012; Ndiaye et al. 2017).
    """
    penalties = _l1_and_l2(problem.regularizer, problem.dim)
    if penalties is None or type(problem.loss) not in CONJUGATES:
        return np.inf
    l1, l2 = penalties[0], penalties[1] + problem.ridge
    free = np.flatnonzero((l1 == 0) & (l2 == 0))
    correlation = here.grad - problem.ridge * x
    shift = np.zeros(problem.dim)
    if len(free):
        if problem.dim > DENSE_LIMIT:
            return np.inf
        H = problem.hessian(x) - np.diag(problem.ridge)
        block = metric(H[np.ix_(free, free)], rounding_factor(problem))
        if block is None:
            return np.inf
        shift[free] = block.root @ (block.root.T @ correlation[free])
        correlation = correlation - H @ shift
    correlation[free] = 0.0
    tight = (l1 > 0) & (l2 == 0)
    excess = np.max(np.abs(correlation[tight]) / l1[tight], initial=0.0)
    scale = 1.0 / max(1.0, excess)
    conjugate, size = (
        float(a) / problem.n_clients
        for a in problem.sum_over_clients(_conjugate_sum, x, shift, np.asarray(scale))
    )
    smooth = l2 > 0
    above = np.maximum(np.abs(scale * correlation) - l1, 0.0)
    h_conjugate = float(np.sum(above[smooth] ** 2 / (2.0 * l2[smooth])))
    g = problem.penalty(x)
    rounding = here.value_rounding + rounding_factor(problem) * (size + g + h_conjugate)
    rounding += float(here.rounding @ np.abs(x))  # of the constraints on theta
    gap = here.value + g + conjugate + h_conjugate
    return max(gap, 0.0) + rounding if np.isfinite(gap) else np.inf


def _l1_and_l2(g: Regularizer, dim: int) -> tuple[np.ndarray, np.ndarray] | None:
    """(d,) l1 and l2 of g(x) = sum_j l1_j |x_j| + l2_j x_j^2 / 2; None if g is another function."""
    if isinstance(g, OnCoordinates):
        inner = _l1_and_l2(g.g, len(g.index))
        if inner is None:
            return None
        l1, l2 = (scatter(g, a, np.zeros(dim)) for a in inner)
        return l1, l2
    if not isinstance(g, Zero | L1 | ElasticNet | SquaredL2):
        return None
    l1 = 0.0
    if isinstance(g, L1 | ElasticNet):
        l1 = float(g.strength) * (float(g.l1_ratio) if isinstance(g, ElasticNet) else 1.0)
    return np.full(dim, l1), np.full(dim, float(g.strong_convexity))


@summable
def _conjugate_sum(oracle: RowOracle, x: Array, shift: Array, scale: Array) -> tuple[Array, Array]:
    """sum_i weight_i phi_i*(theta_i) and the sum of the absolute values."""
    loss, rows = oracle.loss, oracle.rows
    assert isinstance(loss, LinearLoss)
    eta, along = predictor(rows.X, x), predictor(rows.X, shift)
    theta = scale * (loss.d1(eta, rows.y) - loss.d2(eta, rows.y) * along)
    conjugates = CONJUGATES[type(loss)](loss, theta, rows.y)
    return oracle.weight @ conjugates, oracle.weight @ jnp.abs(conjugates)


def _squared_conjugate(loss: Squared, theta: Array, y: Array) -> Array:
    return theta * (0.5 * theta + y)


def _huber_conjugate(loss: Huber, theta: Array, y: Array) -> Array:
    return jnp.where(jnp.abs(theta) <= loss.delta, theta * (0.5 * theta + y), jnp.inf)


def _logistic_conjugate(loss: Logistic, theta: Array, y: Array) -> Array:
    p = (1.0 - 2.0 * y) * theta  # probability of the other label
    inside = (p >= 0.0) & (p <= 1.0)
    p = jnp.clip(p, 0.0, 1.0)
    return jnp.where(inside, xlogy(p, p) + xlog1py(1.0 - p, -p), jnp.inf)


def _poisson_conjugate(loss: Poisson, theta: Array, y: Array) -> Array:
    mean = y + theta
    return jnp.where(mean >= 0.0, xlogy(mean, jnp.maximum(mean, 0.0)) - mean, jnp.inf)


# phi*(theta) = sup_eta theta eta - phi(eta), row by row
CONJUGATES: dict[type[Loss], Callable[[Any, Array, Array], Array]] = {
    Squared: _squared_conjugate,
    Huber: _huber_conjugate,
    Logistic: _logistic_conjugate,
    Poisson: _poisson_conjugate,
}
