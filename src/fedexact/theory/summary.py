"""What theory says of an algorithm on a problem before it runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

from fedexact.core import Algorithm, Assumption, Exactness, in_float64
from fedexact.errors import FedexactError, check_positive
from fedexact.participation import Participation
from fedexact.problem import Problem
from fedexact.theory.cost import Cost, cost_of
from fedexact.theory.fixed_point import FixedPoint, fixed_point_of
from fedexact.theory.rate import Rate, rate_of
from fedexact.theory.rounds import Rounds

RATE_ROUNDS, LIMIT_ROUNDS = 2000, 8000  # that are simulated, where any are
ROUNDING = 1e-6  # of a rate 1

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What `predict` says.

    Attributes:
        algorithm: with all hyperparameters.
        exactness: exact or biased by theory, and why.
        assumptions: what the guarantee needs, and whether it holds here.
        limit: where it ends up; None if that cannot be said.
        rate: how fast; None if that cannot be said.
        cost: of one round on average.
        tol: the tolerance of `rounds`.
        unknown: why the limit or the rate cannot be said, in words.
    """

    algorithm: Algorithm
    exactness: Exactness
    assumptions: tuple[Assumption, ...]
    limit: FixedPoint | None
    rate: Rate | None
    cost: Cost
    tol: float
    unknown: tuple[str, ...]

    @property
    def rounds(self) -> float | None:
        """Rounds that shrink the error to the limit by `tol`; inf where it does not shrink or goes
        on moving around the limit; None where the rate is unknown."""
        if self.rate is None:
            return None
        if not self.settles or not self.rate.per_round < 1.0:
            return math.inf
        return float(self.rate.rounds(self.tol))

    @property
    def settles(self) -> bool:
        """Whether it comes to rest, and does not move around its limit for ever."""
        return self.limit is None or self.limit.spread == 0.0

    @property
    def violated(self) -> tuple[str, ...]:
        """The assumptions that do not hold here."""
        return tuple(a.what for a in self.assumptions if not a.met)

    def total(self, per_round: float) -> float | None:
        """What `rounds` rounds cost in all, at so much per round."""
        return None if self.rounds is None else self.rounds * per_round

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and lists."""
        limit, pace = self.limit, self.rate
        return {
            "algorithm": self.algorithm.name,
            "exact_by_theory": self.exactness.exact,
            "why": self.exactness.why,
            "assumptions": [{"what": a.what, "met": bool(a.met)} for a in self.assumptions],
            "limit": None if limit is None else limit.x.tolist(),
            "limit_method": None if limit is None else limit.method,
            "distance": None if limit is None else limit.distance,
            "distance_se": None if limit is None else limit.distance_se,
            "spread": None if limit is None else limit.spread,
            "per_round": None if pace is None else pace.per_round,
            "per_round_error": None if pace is None else pace.error,
            "mean_square": None if pace is None else pace.mean_square,
            "rate_method": None if pace is None else pace.method,
            "tol": self.tol,
            "rounds": self.rounds,
            "bytes_up": self.total(self.cost.bytes_up),
            "bytes_down": self.total(self.cost.bytes_down),
            "gradient_evaluations": self.total(self.cost.gradients),
            "unknown": list(self.unknown),
        }


@in_float64
def predict(
    algorithm: Algorithm,
    problem: Problem,
    participation: Participation | None = None,
    tol: float = 1e-8,
) -> Prediction:
    """Limit point, rate, cost to `tol` and assumptions, without running the algorithm.

    What `fixed_point` and `rate` simulate is shorter here than by their defaults. There is no limit
    where the error grows.

    Raises:
        InputError: a value that cannot be used.
        CapabilityError: the algorithm cannot handle the problem.
    """
    check_positive("tol", tol)
    task = Rounds(problem, algorithm, participation)
    resolved, setting = task.algorithm, task.setting
    unknown: list[str] = []
    pace = _known(lambda: rate_of(task, RATE_ROUNDS), "rate", unknown)
    if pace is not None and diverges(pace):
        limit = None
        unknown.append(f"diverges: lower {resolved.lower}")
    else:
        limit = _known(lambda: fixed_point_of(task, LIMIT_ROUNDS), "limit", unknown)
    x = None if limit is None else limit.x
    return Prediction(
        algorithm=resolved,
        exactness=resolved.exactness(setting),
        assumptions=resolved.assumptions(setting),
        limit=limit,
        rate=pace,
        cost=cost_of(problem, resolved, setting, task.oracle.oracle, x),
        tol=float(tol),
        unknown=tuple(unknown),
    )


def diverges(pace: Rate) -> bool:
    """Whether the error grows, beyond the error of the rate."""
    return pace.per_round > 1.0 + 4.0 * pace.error + ROUNDING


def _known(find: Callable[[], T], what: str, unknown: list[str]) -> T | None:
    """What is found, or None with the reason added to `unknown`."""
    try:
        return find()
    except FedexactError as error:
        unknown.append(f"{what} unknown: {error}")
        return None
