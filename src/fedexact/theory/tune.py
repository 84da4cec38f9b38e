"""Hyperparameters that minimise the predicted cost to a tolerance; the algorithm is never run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from scipy.optimize import minimize_scalar

from fedexact.core import Algorithm, Setting, in_float64
from fedexact.errors import FedexactError, InputError, check_choice, check_positive
from fedexact.participation import Full, Participation
from fedexact.problem import Problem
from fedexact.solve import check_fit, setting_of
from fedexact.theory.cost import cost
from fedexact.theory.rate import Rate, rate

BUDGETS = ("rounds", "bytes", "gradients")
SPAN = 30.0  # a hyperparameter is looked for within default / SPAN ... default * SPAN
GRID = 9  # points of the first look along a hyperparameter
FINE, COARSE = 3e-4, 0.03  # in log units; coarse where the rate is a Monte-Carlo estimate
SWEEPS = 3  # over all hyperparameters, at most
GAIN = 1e-3  # of log cost, below which another sweep is not worth it
LARGEST = {  # beyond which a value is none, or nothing is proven
    ("ProxSkip", "probability"): 1.0,
    ("FedSplit", "relax"): 1.0,
    ("FedDR", "relax"): 2.0,
    ("AsyncFedDR", "relax"): 2.0,
}

Range = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What `tune` found.

    Attributes:
        algorithm: with the best hyperparameters found.
        hyperparameters: those that were searched, by name.
        prediction: its rate; default: that of the algorithm as it was given, None if it has none.
        budget: what was minimised.
        tol: the tolerance.
        rounds, bytes, gradients: predicted to shrink the error by `tol`; inf where it never does.
            bytes up and down; gradients of rows.
        tried: one row per point: the hyperparameters, `per_round`, null where nothing can be
            predicted, and `cost` in the budget's unit, inf there and where it does not converge.
        note: why the hyperparameters are those of the default, "" where they are not.
    """

    algorithm: Algorithm
    hyperparameters: dict[str, Any]
    prediction: Rate
    default: Rate | None
    budget: str
    tol: float
    rounds: float
    bytes: float
    gradients: float
    tried: pa.Table
    note: str = ""

    def __str__(self) -> str:
        chosen = ", ".join(f"{name} = {v:.6g}" for name, v in self.hyperparameters.items())
        note = f"; {self.note}" if self.note else ""
        if self.prediction.per_round == 0.0:
            return f"{self.algorithm.name}: {chosen}{note or '; superlinear'}"
        before = f" (default {self.default.per_round:.6g})" if self.default and not note else ""
        rounds = f"{self.rounds:.0f} round" + ("" if self.rounds == 1 else "s")
        return (
            f"{self.algorithm.name}: {chosen}; error x {self.prediction.per_round:.6g} a round"
            f"{before}; to {self.tol:g}: {rounds}, "
            f"{self.bytes / 1e6:.3g} MB, {self.gradients:.3g} row gradients{note}"
        )


@in_float64
def tune(
    algorithm: Algorithm,
    problem: Problem,
    participation: Participation | None = None,
    budget: str = "rounds",
    tol: float = 1e-8,
    over: Mapping[str, Range] | None = None,
) -> Tuned:
    """The hyperparameters that reach `tol` with the least rounds, bytes or row gradients.

    Predicted by `rate`, not run. Searched one after the other on a log scale, by a grid around the
    default and then golden sections, until a sweep over all of them gains no more than 0.1 %. An
    algorithm that is exact stays exact. For a biased one the error is that to its own limit, which
    moves with the hyperparameters: `fixed_point` tells where to. Where nothing beats the default,
    as for superlinear algorithms, whose rate is 0 with any value, the default comes back and `note`
    says why.

    Args:
        tol: the factor by which the error is to shrink, below 1.
        over: what is searched: name -> (lowest, highest). Left out: every number that the algorithm
            would choose itself, within a factor 30 of that choice, a probability up to 1 and relax
            up to the end of its theory. Counts such as local_steps only where named.

    Raises:
        InputError: nothing to search, an unknown name, limits that are no positive range; a client
            that never takes part; or nothing in the range converges.
    """
    participation = Full() if participation is None else participation
    check_choice("budget", budget, BUDGETS)
    check_positive("tol", tol)
    if tol >= 1.0:
        raise InputError(f"tol is the factor by which the error shrinks, below 1, got {tol:g}")
    check_fit(problem, algorithm)
    setting = setting_of(problem, participation)
    start = algorithm.resolve(setting)
    search = _Search(algorithm, problem, participation, setting, budget, tol)
    ranges = _ranges(algorithm, start, over)
    given = {name: getattr(start, name) for name in ranges}
    first = search.at({name: _within(given[name], r) for name, r in ranges.items()})
    default = first.rate if first.values == given else search.rate_of(start)
    if first.rate is not None and first.rate.per_round == 0.0:
        note = "superlinear: at an asymptotic rate of 0 there is nothing to tune"
        return search.tuned(first, default, note)
    best = first
    for sweep in range(SWEEPS if len(ranges) > 1 else 1):
        before = best.cost
        for name, limits in ranges.items():
            best = search.along(name, limits, best, first=sweep == 0)
        if not math.isfinite(best.cost) or math.log(before / best.cost) < GAIN:
            break
    if not math.isfinite(best.cost):
        raise InputError(f"tune {algorithm.name}: {search.failure(ranges)}")
    note = f"no other {' and '.join(ranges)} tried is better" if best.values == given else ""
    return search.tuned(best, default, note)


class _Point(NamedTuple):
    values: dict[str, Any]
    algorithm: Algorithm | None  # None where the values are refused
    rate: Rate | None
    cost: float  # in the unit of the budget, as if rounds were real numbers
    rounds: float


@dataclasses.dataclass
class _Search:
    """The predicted cost as a function of hyperparameters, and what has been tried."""

    given: Algorithm
    problem: Problem
    participation: Participation
    setting: Setting
    budget: str
    tol: float
    tried: list[_Point] = dataclasses.field(default_factory=list)
    refusal: str = ""  # why nothing can be predicted at the last point where that is so

    def at(self, values: Mapping[str, Any]) -> _Point:
        """The point with these values of the hyperparameters; infinitely expensive where they are
        refused or nothing can be predicted."""
        point = _Point(dict(values), None, None, math.inf, math.inf)
        try:
            algorithm = dataclasses.replace(self.given, **values).resolve(self.setting)
        except FedexactError as error:
            self.refusal = str(error)
        else:
            point = point._replace(algorithm=algorithm, rate=self.rate_of(algorithm))
            if point.rate is not None and math.isfinite(rounds := _rounds(point.rate, self.tol)):
                per_round = 1.0 if self.budget == "rounds" else self._cost(algorithm)
                point = point._replace(cost=rounds * per_round, rounds=rounds)
        self.tried.append(point)
        return point

    def along(self, name: str, limits: Range, best: _Point, first: bool) -> _Point:
        """The best point along one hyperparameter through `best`."""
        if isinstance(best.values[name], int):
            return min(
                (best, *(self._moved(best, name, v) for v in counts(*map(int, limits)))),
                key=_cost_of,
            )
        low, high = np.log(limits)
        spacing = (high - low) / (GRID - 1)
        if first:
            for v in np.linspace(low, high, GRID):
                best = min(best, self._moved(best, name, math.exp(v)), key=_cost_of)
        here = math.log(best.values[name])
        noisy = best.rate is None or best.rate.error > 0
        minimize_scalar(
            lambda v: _log_cost(self._moved(best, name, math.exp(v))),
            bounds=(max(low, here - spacing), min(high, here + spacing)),
            method="bounded",
            options={"xatol": COARSE if noisy else FINE},
        )
        return min((best, *self.tried), key=_cost_of)

    def failure(self, names: Iterable[str]) -> str:
        """Why nothing was found."""
        if self.refusal and all(point.rate is None for point in self.tried):
            return self.refusal
        return f"no value of {', '.join(names)} in the range converges here"

    def tuned(self, best: _Point, default: Rate | None, note: str) -> Tuned:
        assert best.algorithm is not None
        assert best.rate is not None
        spent = cost(best.algorithm, self.problem, self.participation)
        rounds = math.ceil(best.rounds - 1e-9)
        return Tuned(
            algorithm=best.algorithm,
            hyperparameters=best.values,
            prediction=best.rate,
            default=default,
            budget=self.budget,
            tol=self.tol,
            rounds=rounds,
            bytes=rounds * (spent.bytes_up + spent.bytes_down),
            gradients=rounds * spent.gradients,
            tried=pa.Table.from_pylist(
                [
                    {**p.values, "per_round": p.rate and p.rate.per_round, "cost": p.cost}
                    for p in self.tried
                ]
            ),
            note=note,
        )

    def _moved(self, point: _Point, name: str, value: Any) -> _Point:
        return self.at({**point.values, name: value})

    def rate_of(self, algorithm: Algorithm) -> Rate | None:
        """The predicted rate; None where there is none, or where exactness would be lost."""
        exact = self.given.resolve(self.setting).exactness(self.setting).exact
        if exact and not algorithm.exactness(self.setting).exact:
            return None
        with np.errstate(all="ignore"):  # far too long steps overflow
            try:
                return rate(algorithm, self.problem, self.participation)
            except FedexactError as error:
                self.refusal = str(error)
            except np.linalg.LinAlgError:
                pass
        return None

    def _cost(self, algorithm: Algorithm) -> float:
        spent = cost(algorithm, self.problem, self.participation)
        return spent.gradients if self.budget == "gradients" else spent.bytes_up + spent.bytes_down


def counts(low: int, high: int) -> list[int]:
    """Whole numbers from low to high, the next about one and a half times the last."""
    found = [low]
    while found[-1] < high:
        found.append(min(high, max(found[-1] + 1, found[-1] * 3 // 2)))
    return found


def _rounds(found: Rate, tol: float) -> float:
    """Real number of rounds that shrink the error by tol; inf where it does not shrink."""
    rates = [r for r in (found.per_round, found.mean_square) if r is not None]
    if not all(r < 1.0 for r in rates):
        return math.inf
    if found.per_round == 0.0:
        return found.rounds(tol)
    return max(1.0, math.log(tol) / math.log(found.per_round))


def _within(value: Any, limits: Range) -> Any:
    """The value, or the nearest one within the limits."""
    return min(max(value, limits[0]), limits[1])


def _log_cost(point: _Point) -> float:
    return min(math.log(point.cost), 1e3)  # finite for the line search


def _cost_of(point: _Point) -> float:
    return point.cost


def _ranges(
    given: Algorithm, start: Algorithm, over: Mapping[str, Range] | None
) -> dict[str, Range]:
    """What is searched, and where."""
    values = {f.name: getattr(start, f.name) for f in dataclasses.fields(start)}
    numbers = {name: v for name, v in values.items() if _is_number(v)}
    if over is None:
        free = [n for n in numbers if getattr(given, n) is None]
        chosen = [n for n in free if not isinstance(numbers[n], int)]  # no seeds and counts
        over = {n: _around(given.name, n, numbers[n]) for n in chosen}
    if not isinstance(over, Mapping):
        raise InputError(
            f"tune {given.name}: over maps what to search to its limits, name -> (lowest, "
            f"highest), got {over!r}"
        )
    if not over:
        raise InputError(
            f"tune {given.name}: nothing is left out to be chosen; name what to search in `over`"
        )
    for name, limits in over.items():
        check_choice(f"tune {given.name}: over", name, numbers)
        whole = isinstance(numbers[name], int)
        if not _is_range(limits, whole):
            kind = "whole numbers" if whole else "numbers"
            raise InputError(
                f"tune {given.name}: over {name} must be two {kind} 0 < lowest < highest, "
                f"got {limits!r}"
            )
    return dict(over)


def _around(algorithm: str, name: str, value: float) -> Range:
    """Within a factor SPAN of the value, as far as the hyperparameter goes."""
    return value / SPAN, min(value * SPAN, LARGEST.get((algorithm, name), math.inf))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_range(limits: Any, whole: bool) -> bool:
    kind = int if whole else (int | float)
    pair = isinstance(limits, tuple | list) and len(limits) == 2
    return pair and all(isinstance(v, kind) for v in limits) and 0 < limits[0] < limits[1] < np.inf
