"""Is x the pooled answer? Bounds from one or two full passes, and a verdict.

The pass is an extra round in which every client uploads a few sums, its gradient among them; the
bounds are derived in `bounds`. A small step is never taken for convergence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedexact.bounds import (
    DENSE_LIMIT,
    OVERFLOW,
    Ball,
    Local,
    Point,
    bounded_gap,
    dual_gap,
    gradient_mapping,
    hessian_ball,
    least_distance,
    metric,
    model_size,
    one_pass,
    point,
    ridge_ball,
    rounding_factor,
)
from fedexact.core import in_float64
from fedexact.errors import InputError, check_positive
from fedexact.losses import Squared
from fedexact.losses.spectrum import spectral_norm
from fedexact.objective import Objective

CERTIFIED, NOT_CERTIFIED, CANNOT_CERTIFY = "certified", "not certified", "cannot certify"
SHOWN = 8  # client names in the printed form
RUN_LONGER = ": run longer or with an exact algorithm"
SETTLED = (
    ", but the gradient at x is below its own rounding error: conditioned like this, no more can "
    "be proven; standardise the columns, add l2, or allow a larger tol"
)


@dataclasses.dataclass(frozen=True, eq=False)
class Certificate:
    """How far x can be from x*, the minimiser of the target. None: no bound is known.

    Attributes:
        verdict: "certified", "not certified" or "cannot certify".
        reason: why, and what to do.
        gradient_mapping: |G|_2, G = (x - prox_{step g}(x - step grad F(x))) / step; without a
            regulariser |grad F(x)|_2.
        step: 1 / L_F; where F has no global L_F, 1 / the norm of its Hessian at x.
        distance_bound: bound on |x - x*|_2.
        standard_errors: (d,) of the unpenalised fit at x: from the inverse of the unweighted sum of
            the row Hessians, times the residual variance for least squares.
        coefficient_bounds_se: (d,) bounds on |x_j - x*_j| in standard errors at x*.
        distance_bound_se: the largest of them.
        objective_gap_bound: bound on F(x) + g(x) - (F(x*) + g(x*)).
        target: what is minimised, in words.
        clients: the clients whose share is reached; absent: those whose share is not.
        rows: number of rows of `clients`.
        tol: the tolerance of the verdict.
    """

    verdict: str
    reason: str
    gradient_mapping: float
    step: float
    distance_bound: float | None
    standard_errors: np.ndarray | None
    coefficient_bounds_se: np.ndarray | None
    distance_bound_se: float | None
    objective_gap_bound: float | None
    target: str
    clients: tuple[str, ...]
    absent: tuple[str, ...]
    rows: int
    tol: float

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and lists, fit for JSON; an infinite gradient mapping is None."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Certificate:
        """What `to_dict` was made from."""
        values = dict(values)
        for name in ("standard_errors", "coefficient_bounds_se"):
            values[name] = None if values[name] is None else np.asarray(values[name], float)
        for name in ("clients", "absent"):
            values[name] = tuple(values[name])
        if values["gradient_mapping"] is None:
            values["gradient_mapping"] = np.inf
        return Certificate(**values)

    def __str__(self) -> str:
        lines = [
            f"{self.verdict}: {self.reason}",
            f"  target            {self.target}",
            f"  clients           {_names(self.clients)} ({self.rows} rows)",
        ]
        if self.absent:
            lines.append(f"  absent            {_names(self.absent)}")
        lines.append(f"  gradient mapping  {self.gradient_mapping:.3g} (step {self.step:.3g})")
        bounds = (
            ("|x - x*|         ", self.distance_bound),
            ("in standard errors", self.distance_bound_se),
            ("objective gap    ", self.objective_gap_bound),
        )
        return "\n".join(lines + [f"  {name} {_at_most(bound)}" for name, bound in bounds])


@in_float64
def certify(
    problem: Objective, x: Any, tol: float = 1e-6, absent: Iterable[str] = ()
) -> Certificate:
    """Bounds the distance of x to the pooled answer and judges it.

    Certified: |x - x*| is bounded by `tol`, in standard errors where they exist, else relative,
    |x - x*| <= tol max(|x|, |grad F(0)| / L_F); and nobody is absent. Not certified: the bound is
    larger, or every minimiser is demonstrably farther away, or, where nothing bounds the distance,
    the gap of the objective exceeds tol max(F + g, F(0)). Cannot certify: nothing bounds the
    distance; a small gap of the objective does not.

    With more than 2000 coefficients no Hessian is formed: there are no standard errors, and the
    distance is bounded by the gradient over the strong convexity of l2 (or of g), where it reaches
    all coefficients: without an intercept.

    Args:
        x: (d,) the model.
        tol: the tolerance.
        absent: names of clients of the problem that never took part. The numbers are those of the
            whole problem, their rows included.

    Raises:
        InputError: x of the wrong length or not finite, an unknown name, tol <= 0.
    """
    x = problem.check_model(x)
    check_positive("tol", tol)
    absent = _check_absent(problem, absent)
    evidence = _gather(problem, x)
    verdict, reason = _judge(problem, x, evidence, tol, absent)
    clients, rows = _present(problem, absent)
    ball, units = evidence.ball, evidence.units
    bounds_se = units.bounds if units else None
    return Certificate(
        verdict=verdict,
        reason=reason,
        gradient_mapping=evidence.mapping,
        step=evidence.step,
        distance_bound=None if ball is None else ball.distance,
        standard_errors=units.se if units else None,
        coefficient_bounds_se=bounds_se,
        distance_bound_se=None if bounds_se is None else float(bounds_se.max()),
        objective_gap_bound=_or_none(evidence.gap),
        target=problem.target(),
        clients=clients,
        absent=absent,
        rows=rows,
        tol=float(tol),
    )


# --- evidence -------------------------------------------------------------------------------------


class _Units(NamedTuple):
    se: np.ndarray  # (d,) standard errors at x
    bounds: np.ndarray | None  # (d,) bounds on |x_j - x*_j| in standard errors at x*


class _Evidence(NamedTuple):
    mapping: float  # norm of the gradient mapping
    step: float
    ball: Ball | None
    why_not: str  # why there is no ball
    settled: bool  # the gradient is all rounding
    least: float  # lower bound on the distance to any minimiser
    units: _Units | None
    gap: float  # bound on the objective gap, inf if none


def _gather(problem: Objective, x: np.ndarray) -> _Evidence:
    here, step = one_pass(problem, x), _step(problem, x)
    at = point(problem, x, here, step) if here.finite else None
    if at is None:
        why = "the loss or its gradient overflows near x: start nearer to 0, or scale the features"
        return _Evidence(np.inf, step, None, why, False, 0.0, None, np.inf)
    mapping = float(np.linalg.norm(gradient_mapping(problem, x, here, step)))
    ball, why_not, least = _local(problem, at)
    least = max(least, least_distance(problem, here, mapping, step))
    gap = np.inf
    if problem.loss.newton:
        behind = min(ball.gap if ball else np.inf, bounded_gap(problem.regularizer, at))
        gap = at.fall + behind if np.isfinite(behind) else np.inf
        if not at.smooth:
            gap = min(gap, dual_gap(problem, x, here))
    units = _units(problem, x, ball)
    return _Evidence(mapping, step, ball, why_not, at.settled, least, units, gap)


def _step(problem: Objective, x: np.ndarray) -> float:
    """The step of the gradient mapping, 1 / L_F."""
    L = problem.constants().L_F
    if not problem.loss.global_smooth and problem.dim <= DENSE_LIMIT:
        H = problem.hessian(x)
        L = spectral_norm(H) if np.all(np.abs(H) < OVERFLOW) else L
    return 1.0 / L if L > 1.0 / OVERFLOW else 1.0


def _local(problem: Objective, at: Point) -> Local:
    """The best of what the Hessian and strong convexity give, or why there is nothing."""
    if not problem.loss.newton:
        why_not = (
            f"the {problem.loss.name} loss is not known to be convex, so that x can at most be "
            "shown to be stationary: compare with a reference solution"
        )
        return Local(None, why_not)
    if problem.dim <= DENSE_LIMIT:
        local = hessian_ball(problem, at)
    else:
        why_not = (
            f"over {DENSE_LIMIT} coefficients are too many for a Hessian, and only a ridge on all "
            "of them bounds the distance: add l2, without an intercept"
        )
        local = Local(None, why_not)
    balls = [ball for ball in (local.ball, ridge_ball(problem, at)) if ball is not None]
    if not balls:
        return local
    coefficients, *numbers = zip(*balls, strict=True)
    best = Ball(np.min(coefficients, axis=0), *(min(values) for values in numbers))
    return local._replace(ball=best)


def _units(problem: Objective, x: np.ndarray, ball: Ball | None) -> _Units | None:
    """Standard errors at x, and bounds in terms of those at x*, which differ: the information
    changes by a factor exp(drift) at most, the root of the residual sum of squares by |x - x*| in
    the norm of the information."""
    n, d = int(problem.n_rows.sum()), problem.dim
    squared = isinstance(problem.loss, Squared)
    if not problem.loss.likelihood or d > DENSE_LIMIT or (squared and n <= d):
        return None
    information = problem.information(x)
    inverse = metric(information, rounding_factor(problem))
    if inverse is None:
        return None
    rss = 2.0 * problem.loss_sum(x) if squared else 0.0
    se = inverse.widths * (np.sqrt(rss / (n - d)) if squared else 1.0)
    if not np.all(se > 0):
        return None
    if ball is None:
        return _Units(se, None)
    if squared:
        shift = float(ball.coefficients @ np.sqrt(np.diag(information)))
        shrinkage = 1.0 - shift / np.sqrt(rss)
    else:
        shrinkage = float(np.exp(-0.5 * ball.drift))
    return _Units(se, ball.coefficients / (se * shrinkage) if shrinkage > 1e-3 else None)


# --- judgement ------------------------------------------------------------------------------------


def _judge(
    problem: Objective, x: np.ndarray, evidence: _Evidence, tol: float, absent: tuple[str, ...]
) -> tuple[str, str]:
    if absent:
        was = "client {} was" if len(absent) == 1 else "clients {} were"
        named = _names(tuple(repr(name) for name in absent))
        return CANNOT_CERTIFY, was.format(named) + " never present: the target is not reached"
    advice = SETTLED if evidence.settled else RUN_LONGER
    bound, unit = _distance(problem, x, evidence)
    if bound is not None and bound <= tol:
        return CERTIFIED, f"within {bound:.2g} {unit} of the pooled answer, tol {tol:.2g}"
    if bound is not None:
        far = f"x may be {bound:.2g} {unit} from the pooled answer, tol {tol:.2g}"
        return NOT_CERTIFIED, far + advice
    least = _relative(problem, x, evidence.least)
    if least > tol:
        far = f"every minimiser is at least {least:.2g} (relative) from x, tol {tol:.2g}"
        return NOT_CERTIFIED, far + RUN_LONGER
    if not np.isfinite(evidence.gap):
        return CANNOT_CERTIFY, evidence.why_not
    scale = max(abs(problem.objective(x)), problem.value(np.zeros(problem.dim)))
    gap = evidence.gap / scale if scale > 0 else 0.0
    if gap > tol:
        far = f"the objective may be {gap:.2g} (relative) above its minimum, tol {tol:.2g}"
        return NOT_CERTIFIED, far + advice
    return CANNOT_CERTIFY, (
        f"the objective is within {gap:.2g} (relative) of its minimum, but nothing bounds the "
        f"distance of the coefficients; {evidence.why_not}"
    )


def _distance(problem: Objective, x: np.ndarray, evidence: _Evidence) -> tuple[float | None, str]:
    """The bound on the distance that decides, and its unit."""
    if evidence.units is not None and evidence.units.bounds is not None:
        return float(evidence.units.bounds.max()), "standard errors"
    if evidence.ball is None:
        return None, ""
    return _relative(problem, x, evidence.ball.distance), "(relative distance)"


def _relative(problem: Objective, x: np.ndarray, distance: float) -> float:
    if distance == 0.0:
        return 0.0
    size = model_size(problem, x)
    return distance / size if size > 0 else np.inf


def _check_absent(problem: Objective, absent: Iterable[str]) -> tuple[str, ...]:
    absent, known = tuple(absent), set(problem.names)
    for name in absent:
        if name not in known:
            raise InputError(
                f"absent: no client is called {name!r}; clients: {_names(tuple(problem.names))}"
            )
    return absent


def _present(problem: Objective, absent: tuple[str, ...]) -> tuple[tuple[str, ...], int]:
    """The names of the clients that took part, and their number of rows."""
    if not absent:
        return tuple(problem.names), int(problem.n_rows.sum())
    left_out = set(absent)
    present = np.array([name not in left_out for name in problem.names])
    clients = tuple(name for name in problem.names if name not in left_out)
    return clients, int(problem.n_rows[present].sum())


# --- printing -------------------------------------------------------------------------------------


def _or_none(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return list(value) if isinstance(value, tuple) else value


def _names(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"


def _at_most(bound: float | None) -> str:
    return "no bound" if bound is None else f"<= {bound:.3g}"
